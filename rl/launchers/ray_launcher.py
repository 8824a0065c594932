"""Jobs of a sweep on a Ray cluster, or on a Ray instance of this machine: an actor holds a job's cores and
GPUs on its node, and starts the process that trains there.

The configuration is that of the plugin hydra-ray-launcher, `ray.init` and `ray.remote`. That plugin trains in
Ray's own worker with what it pickled, has no way to tell a running job to save, and returns nothing where one
job fails; so Ray is used here directly. The nodes must see the sweep's folder under the same path.
"""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from rl import rundir
from rl.errors import ConfigError, one_line
from rl.launchers.ledger import Job
from rl.launchers.sweep_launcher import SweepLauncher, module_path

POLL_SECONDS = 0.5
CLOSING_SECONDS = 60.0  # for what runs to save when this process fails
ANSWER_SECONDS = 30.0  # for a node to say whether a process runs there
PATIENCE = 2  # signals of the user's after which what still runs is killed


class JobProcess:
    """The actor of one job, on its node: starts the process, waits for it, signals it. (Ray sends the class
    by value: a node's worker need not be able to import this module.)"""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False
        self.lock = threading.Lock()

    def placed(self) -> bool:
        """Answers as soon as the actor has its cores and GPUs."""
        return True

    def run(self, folder: str, arguments: list[str], environment: dict[str, str], cwd: str) -> int | None:
        """Run `python <arguments>` to its end, printing to `output.txt` in `folder`.

        Returns:
            Its exit code, or minus the signal that ended it; None where it was stopped before it began.

        Raises:
            FileNotFoundError: this node does not see the folder.
        """
        # The training process reads its threads from its configuration, and OMP_NUM_THREADS is Ray's guess.
        merged = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        merged.update(environment)
        command = [sys.executable, *arguments, "--with-parent", str(os.getpid())]
        with self.lock:
            if self.stopped:
                return None
            # Ray blocks SIGINT in its workers, and a process inherits that.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            with open(os.path.join(folder, "output.txt"), "ab") as output:
                self.process = subprocess.Popen(
                    command,
                    env=merged,
                    cwd=cwd if os.path.isdir(cwd) else folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        return self.process.wait()

    def send(self, number: int) -> None:
        """Send the process a signal; one that has not begun then never does."""
        with self.lock:
            if self.process is None:
                self.stopped = True
            else:
                self.process.send_signal(number)


@dataclass
class Held:
    """A job that Ray has in line or runs."""

    job: Job
    actor: Any
    answer: Any
    """Ray's reference to the answer of `placed`, then of `run`."""
    begun: bool = False
    signals: int = 0


class RayLauncher(SweepLauncher):
    """Hands the jobs of a sweep to Ray, which starts each as soon as a node has room, and follows them.

    Args:
        ray: `init`, the arguments of `ray.init`, and `remote`, the resources and other options of the actor
            that holds a job. What is null is left to Ray.
    """

    def __init__(self, ray: Mapping[str, Any]) -> None:
        self.settings = ray
        self._held: dict[int, Held] = {}
        self._connected = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra offers, and connect to Ray.

        Raises:
            ConfigError: a setting cannot be, Ray is not installed, or there is no such cluster.
        """
        self.init, self.remote = options(self.settings, str(config.device))
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("hydra/launcher=ray: needs ray: pip install -e '.[ray]'")
        self._connect()

    @property
    def slots(self) -> int:
        """How many jobs can run at a time on the nodes that the cluster has now; at least 1."""
        import ray

        return room(ray.cluster_resources(), self.remote)

    def settle(self) -> None:
        """Note what became of the jobs of earlier commands, also where Ray ran them on other machines: gone
        are those whose node says so, or has left the cluster. (Ray ends the workers of a command that has
        gone itself.)"""
        super().settle()
        by_ray = {
            e["job"]: e.get("ray", False) for e in self.sweep.ledger.events() if e["state"] == "pending"
        }
        for job in self.sweep.jobs().values():
            foreign = job.state == "running" and rundir.process_exists(vars(job)) is None
            if foreign and job.slurm_job is None and by_ray.get(job.number) and not runs(job):
                why = f"its process on {job.host} is gone"
                self.sweep.ledger.append(job.number, "killed", only_if=job, error=why)

    def start(self, jobs: Sequence[Job]) -> None:
        """Put jobs in Ray's line."""
        self._connect()
        for job in jobs:
            # In line they stay pending: Ray forgets them with this process. The note is for a later command,
            # which may find them running on another machine.
            self.sweep.ledger.append(job.number, "pending", ray=True, error=None)
            actor = self._actor.remote()
            self._held[job.number] = Held(job, actor, actor.placed.remote())

    def poll(self) -> None:
        """Begin the jobs that Ray has placed, and take note of those that have ended."""
        import ray

        if not self._held:
            time.sleep(POLL_SECONDS)
            return
        answers = [held.answer for held in self._held.values()]
        answered, _ = ray.wait(answers, num_returns=len(answers), timeout=POLL_SECONDS)
        for held in [held for held in self._held.values() if held.answer in answered]:
            try:
                answer = ray.get(held.answer)
            except Exception as error:
                self._end(held, error)
                continue
            if held.begun:
                self._end(held, answer)
            elif self.sweep.jobs()[held.job.number].state == "cancelled":
                self._end(held, None)
            else:
                self._begin(held)

    def stop(self, jobs: Sequence[Job], number: signal.Signals = signal.SIGTERM) -> None:
        """Ask jobs to save and end, those in line not to start; who asks a third time has them killed."""
        import ray

        for held in [self._held[job.number] for job in jobs if job.number in self._held]:
            if held.begun:
                held.signals += 1
                held.actor.send.remote(int(signal.SIGKILL if held.signals > PATIENCE else number))
            else:
                del self._held[held.job.number]
                ray.kill(held.actor)

    def unfinished(self, jobs: Sequence[Job]) -> list[Job]:
        """Jobs in line and running."""
        return [job for job in jobs if job.number in self._held]

    def close(self) -> None:
        """Let what still runs save (only an error in this process leaves something), and leave Ray."""
        import ray

        if self._held and ray.is_initialized():
            self.stop([held.job for held in self._held.values()])
            answers = [held.answer for held in self._held.values()]
            if answers:
                ray.wait(answers, num_returns=len(answers), timeout=CLOSING_SECONDS)
        if self._connected:
            self._connected = False
            ray.shutdown()

    # --- one job ------------------------------------------------------------------------------------

    def _begin(self, held: Held) -> None:
        """Have a placed actor start its job's process."""
        arguments = ["-m", "rl.launchers.frozen_job", str(self.sweep.folder), str(held.job.number)]
        environment = {"PYTHONPATH": module_path(), "RL_CPUS": str(max(1, int(self.remote["num_cpus"])))}
        if not self.remote["num_gpus"]:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        held.answer = held.actor.run.remote(str(held.job.path), arguments, environment, os.getcwd())
        held.begun = True

    def _end(self, held: Held, answer: int | Exception | None) -> None:
        """Let the actor go, and put in the ledger what the job's process could not: a death by signal, or
        before it could write."""
        import ray
        from ray.exceptions import RayActorError, RuntimeEnvSetupError

        number = held.job.number
        del self._held[number]
        ray.kill(held.actor)  # one that is only out of reach must not train on
        if answer is None or self.has_said(number, held.job.attempt):
            return  # it never began, or has said itself how it ended
        note = self.sweep.ledger.append
        if isinstance(answer, RayActorError) and not isinstance(answer, RuntimeEnvSetupError):
            note(number, "killed", error=f"its Ray worker is gone: {one_line(answer)}")
        elif isinstance(answer, FileNotFoundError):
            why = f"its node does not see {held.job.path}; the sweep must be in a folder that all nodes share"
            note(number, "failed", error=why)
        elif isinstance(answer, Exception):
            note(number, "failed", error=f"Ray could not run it: {one_line(answer)}")
        else:
            self.note_end(number, held.job.attempt, answer)

    # --- Ray itself ---------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect to the cluster, or start an instance here, unless that is done."""
        import ray

        # Each of placed, run and send may be under way while another is.
        fixed = {"max_concurrency": 3, "max_restarts": 0, "max_task_retries": 0}
        remote: Any = ray.remote
        try:
            self._actor: Any = remote(**{**self.remote, **fixed})(JobProcess)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"hydra.launcher.ray.remote={self.remote}: {one_line(error)}") from None
        if not ray.is_initialized():
            before = signal.getsignal(signal.SIGTERM)
            try:
                ray.init(**self.init)
            except Exception as error:
                raise ConfigError(
                    f"hydra.launcher.ray.init={self.init}: {one_line(error)}; address=local starts an "
                    "instance on this machine"
                ) from None
            finally:
                signal.signal(signal.SIGTERM, before)  # Ray takes it for itself
            self._connected = True
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        ray.cloudpickle.register_pickle_by_value(rundir)


def options(settings: Mapping[str, Any], device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `ray.init` and the options of the actors, without those that are null.

    Raises:
        ConfigError: they are no mappings, or the resources cannot be, or do not fit the job's `device`.
    """
    plain: Any = OmegaConf.to_container(OmegaConf.create(dict(settings)), resolve=True)
    for key in ("init", "remote"):
        if not isinstance(plain.get(key), dict):
            raise ConfigError(
                f"hydra.launcher.ray.{key}={plain.get(key)}: must be a mapping, such as {{num_cpus: 1}}"
            )
    init, remote = ({k: v for k, v in plain[key].items() if v is not None} for key in ("init", "remote"))
    cores, gpus = remote.get("num_cpus"), remote.setdefault("num_gpus", 0)
    # Without a number Ray would start any number of actors at a time on a node.
    if isinstance(cores, bool) or not isinstance(cores, int | float) or cores <= 0:
        raise ConfigError(f"hydra.launcher.ray.remote.num_cpus={cores}: must be above 0; 1 would work")
    if isinstance(gpus, bool) or not isinstance(gpus, int | float) or gpus < 0:
        raise ConfigError(f"hydra.launcher.ray.remote.num_gpus={gpus}: must be at least 0; 0 would work")
    if device.startswith("cuda") and not gpus:
        raise ConfigError(f"hydra.launcher.ray.remote.num_gpus=0: device={device} needs a GPU; 1 would work")
    return init, remote


def room(available: Mapping[str, float], remote: Mapping[str, Any]) -> int:
    """How many jobs with the options `remote` the resources `available`, by Ray's names, are enough for; at
    least 1."""
    asked = {"CPU": remote["num_cpus"], "GPU": remote["num_gpus"], "memory": remote.get("memory", 0)}
    asked.update(remote.get("resources", {}))
    shares = [available.get(name, 0.0) / amount for name, amount in asked.items() if amount]
    return max(1, math.floor(min(shares)))


def runs(job: Job) -> bool:
    """Whether the process of a job still runs, as its node in the Ray cluster says; a node that is not there
    runs nothing, and one that does not answer may."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote: Any = ray.remote
    identity = {key: getattr(job, key) for key in ("host", "pid", "process_started")}
    for node in ray.nodes():
        if node["Alive"] and node["NodeManagerHostname"] == job.host:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ask = remote(num_cpus=0, scheduling_strategy=there)(rundir.process_exists)
            try:
                if ray.get(ask.remote(identity), timeout=ANSWER_SECONDS) is not False:
                    return True
            except (GetTimeoutError, RayError):
                return True
    return False
