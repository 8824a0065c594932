"""Jobs of a Slurm cluster: submitted as an array through submitit, each under a supervisor of its own.

The submitting process may leave at once. The ledger in the sweep's folder, which the nodes must see under the
same path, tells how the jobs stand; `settle` adds what they could not write themselves.
"""

from __future__ import annotations

import importlib.util
import io
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stderr
from typing import Any, NamedTuple

from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from rl.errors import ConfigError, one_line
from rl.launchers.ledger import STOPPED, Job, State
from rl.launchers.supervisor import supervise
from rl.launchers.sweep import Sweep
from rl.launchers.sweep_launcher import SweepLauncher, SweepSignals, check_whole, module_path

POLL_SECONDS = 1.0
SETTLE_SECONDS = 5.0
COMMAND_SECONDS = 60  # for an answer from Slurm
NEVER_BEGAN = ("FAILED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "NODE_FAIL")
"""States in which Slurm leaves a job that ended before its process could note anything."""
EARLY_SECONDS = 40
"""How long before `signal_delay_s` Slurm may warn a job, 30 s, and what a job's process takes to heed it: one
that is warned before that dies of it."""
LEAST = {
    "timeout_min": 1,
    "cpus_per_task": 1,
    "gpus_per_node": 0,
    "nodes": 1,
    "array_parallelism": 1,
    "signal_delay_s": 1,
    "max_attempts": 1,
}
"""The least value of each setting that is a whole number."""


class SlurmLauncher(SweepLauncher):
    """Submits the jobs of a sweep and, unless it is to wait, leaves them to the cluster.

    Args:
        partition: Slurm's partition; None: the default one. So with `account`, `qos` and `constraint`.
        timeout_min: minutes that a job may run before it saves and is put in line again.
        cpus_per_task: cores of a job.
        gpus_per_node: GPUs of a job on each node.
        mem_gb: memory of a job on each node, GiB; None: the cluster's default.
        nodes: nodes of a job; the training process runs on the first.
        array_parallelism: jobs that may run at a time.
        setup: shell lines before the job.
        additional_parameters: further options of sbatch, by name without dashes.
        signal_delay_s: seconds before the time limit at which a job is told to save.
        max_attempts: how often one submission may start a job.
        wait: whether to stay until every job has ended.
    """

    def __init__(
        self,
        partition: str | None = None,
        account: str | None = None,
        qos: str | None = None,
        timeout_min: int = 60,
        cpus_per_task: int = 1,
        gpus_per_node: int = 0,
        mem_gb: float | None = None,
        nodes: int = 1,
        array_parallelism: int = 256,
        constraint: str | None = None,
        setup: Sequence[str] | None = None,
        additional_parameters: Mapping[str, Any] | None = None,
        signal_delay_s: int = 120,
        max_attempts: int = 20,
        wait: bool = False,
    ) -> None:
        self.settings = {key: value for key, value in locals().items() if key != "self"}
        self.additional = {} if additional_parameters is None else plain(additional_parameters)
        self.setup_lines = [] if isinstance(setup, str) else [str(line) for line in setup or ()]
        self.array_parallelism, self.max_attempts, self.waits = array_parallelism, max_attempts, wait
        self.parameters = {
            "partition": partition,
            "account": account,
            "qos": qos,
            "constraint": constraint,
            "time": timeout_min,
            "nodes": nodes,
            "cpus_per_task": cpus_per_task,
            "gpus_per_node": gpus_per_node or None,
            "mem": f"{math.ceil(mem_gb * 1024)}M" if isinstance(mem_gb, int | float) else None,
            "signal_delay_s": signal_delay_s,
            "array_parallelism": array_parallelism,
            # Slurm 22.05 and later does not hand sbatch's --cpus-per-task on to srun.
            "srun_args": [f"--cpus-per-task={cpus_per_task}"],
        }
        self._queue: set[str] = set()
        """The jobs of ours that Slurm has in line or runs, as last seen."""
        self._settled = -math.inf
        self._told = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra offers.

        Raises:
            ConfigError: a setting cannot be, submitit or Slurm is not there, or the folder cannot be used.
        """
        check_settings(self.settings)
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        if importlib.util.find_spec("submitit") is None:
            raise ConfigError("hydra/launcher=slurm: needs submitit: pip install -e '.[slurm]'")
        for program in ("sbatch", "srun"):
            if shutil.which(program) is None:
                raise ConfigError(
                    f"hydra/launcher=slurm: no {program} on PATH; run it on a login node of the cluster, or "
                    "use hydra/launcher=local"
                )
        if config.fail_fast and not self.waits:
            print("fail_fast=true: nobody waits for jobs left to Slurm; hydra.launcher.wait=true would")
        if "%" in str(self.sweep.folder):
            raise ConfigError(
                f"hydra.sweep.dir={self.sweep.folder}: Slurm replaces what follows a %; use a path without"
            )

    def settle(self) -> None:
        """Note what became of the jobs of earlier commands, and which of them Slurm has.

        Raises:
            ConfigError: Slurm does not say.
        """
        rows = self.sweep.settle()
        if rows is None:
            raise ConfigError("hydra/launcher=slurm: squeue does not answer; try again when the cluster does")
        self._queue = set(rows)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Submit the jobs of these overrides that are due; how each stands or, after waiting, ended."""
        results = super().launch(job_overrides, initial_job_idx)
        if not self._told:
            print(f"nothing to submit; see: rl status {shlex.quote(str(self.sweep.folder))}")
        return results

    @property
    def slots(self) -> int:
        """How many jobs can run at a time, as far as we ask for them."""
        return self.array_parallelism

    def is_due(self, job: Job) -> bool:
        """Whether this command has to submit the job: not if Slurm will start it once more, or it is still
        being cancelled."""
        return super().is_due(job) and (job.state == "failed" or job.slurm_job not in self._queue)

    def start(self, jobs: Sequence[Job]) -> None:
        """Submit jobs, as one array where there are several.

        Raises:
            ConfigError: Slurm does not take them.
        """
        if not jobs:
            return
        most = largest_array()
        # Between sbatch's answer and our note of it, nothing ends this process.
        with SweepSignals() as signals:
            for first in range(0, len(jobs), most):
                self._submit(jobs[first : first + most])
        if signals.requested is not None:
            os.kill(os.getpid(), signals.requested)
        if not self._told:
            self._told = True
            print(follow_up(self.sweep, jobs[0].number), flush=True)

    def poll(self) -> None:
        """Let a second pass; every few, note what became of jobs that could not do so."""
        time.sleep(POLL_SECONDS)
        if time.monotonic() >= self._settled + SETTLE_SECONDS:
            rows = self.sweep.settle()
            self._queue = self._queue if rows is None else set(rows)
            self._settled = time.monotonic()

    def stop(self, jobs: Sequence[Job], number: signal.Signals = signal.SIGTERM) -> None:
        """Cancel jobs: Slurm sends SIGTERM to what runs, on which it saves, whatever `number` is."""
        cancel([job.slurm_job for job in jobs if job.slurm_job])

    def unfinished(self, jobs: Sequence[Job]) -> list[Job]:
        """Jobs in line and running, those included that Slurm will start once more."""
        return [
            job
            for job in jobs
            if job.state in ("submitted", "running")
            or (job.state in STOPPED and job.state != "cancelled" and job.slurm_job in self._queue)
        ]

    def _submit(self, jobs: Sequence[Job]) -> None:
        """Hand jobs to sbatch in one go, and note their ids."""
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        additional = {"requeue": True, **self.additional}
        # One flat folder: Slurm opens an element's log before submitit could make a folder of its own for it.
        executor = SlurmExecutor(self.sweep.folder / ".submitit")
        executor.update_parameters(
            **{key: value for key, value in self.parameters.items() if value is not None},
            job_name=f"rl-{self.sweep.folder.name}",
            setup=[f"export PYTHONPATH={shlex.quote(module_path())}", *self.setup_lines],
            additional_parameters={
                key: value for key, value in additional.items() if value is not None and value is not False
            },
        )
        last = [job.attempt + self.max_attempts for job in jobs]
        folders, numbers = [str(self.sweep.folder)] * len(jobs), [job.number for job in jobs]
        try:
            with redirect_stderr(io.StringIO()):  # where submitit prints what its error says
                submitted = executor.map_array(supervise, folders, numbers, last)
        except (FailedJobError, FailedSubmissionError) as error:
            raise ConfigError(
                f"hydra/launcher=slurm: sbatch refuses: {one_line(error)}; with the hydra.launcher.* key "
                "changed that it names (partition, additional_parameters, …) the same jobs are submitted by: "
                f"python launch.py resume={shlex.quote(str(self.sweep.folder))}"
            ) from None
        for job, handle in zip(jobs, submitted, strict=True):
            self._queue.add(handle.job_id)
            self.sweep.ledger.append(job.number, "submitted", slurm_job=handle.job_id, error=None)
        main = submitted[0].job_id.split("_")[0]
        which = f"{main}_0 to {main}_{len(jobs) - 1}" if len(jobs) > 1 else main
        print(f"submitted {len(jobs)} job{'s' * (len(jobs) > 1)} to Slurm: {which}", flush=True)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError where a setting of the launcher cannot be. (Not in its constructor: Hydra would wrap
    the error in one of its own.)"""
    for key, least in LEAST.items():
        check_whole(f"hydra.launcher.{key}", settings[key], least)
    memory, delay, lines = settings["mem_gb"], settings["signal_delay_s"], settings["setup"]
    if memory is not None and (not isinstance(memory, int | float) or memory <= 0):
        raise ConfigError(f"hydra.launcher.mem_gb={memory}: must be above 0, or null")
    limit = 60 * settings["timeout_min"]
    if delay > limit - EARLY_SECONDS:
        raise ConfigError(
            f"hydra.launcher.signal_delay_s={delay}: must be {EARLY_SECONDS} s or more below timeout_min, "
            f"{limit} s, so that a job has begun when it is told to save; "
            f"{(limit - EARLY_SECONDS) // 2} would work"
        )
    if isinstance(lines, str):
        raise ConfigError(
            f"hydra.launcher.setup={lines}: must be a list of lines, such as ['module load cuda']"
        )
    if not isinstance(settings["wait"], bool):
        raise ConfigError(f"hydra.launcher.wait={settings['wait']}: must be true or false")


def follow_up(sweep: Sweep, number: int) -> str:
    """Where the jobs of a sweep write, and the commands that look after them."""
    folder = shlex.quote(str(sweep.folder))
    return (
        f"output: {sweep.folder}/<job>/output.txt; Slurm's: {sweep.folder}/.submitit/\n"
        f"  rl status {folder}\n"
        f"  rl logs {folder} {number}\n"
        f"  rl cancel {folder}\n"
        f"  rl collect {folder}"
    )


def settle(sweep: Sweep) -> dict[str, InLine] | None:
    """Note what became of jobs that did not say so themselves. Of those that Slurm no longer has, one that
    was running was killed, one that Slurm could not start failed, others were cancelled; one that was
    pre-empted, or whose node failed, and is back in line is submitted. Of another user's sweep, nothing is
    noted.

    Returns:
        The jobs in Slurm of the sweep's owner; None where it does not answer, and nothing was noted.
    """
    before = [job for job in sweep.jobs().values() if expected(job)]
    owner = os.stat(sweep.folder).st_uid
    rows = in_line(owner)
    if rows is None or owner != os.getuid():
        return rows
    ends = ended({str(job.slurm_job) for job in before} - rows.keys())
    for job in before:
        row = rows.get(str(job.slurm_job))
        if row is None:
            end = ends.get(str(job.slurm_job), "it no longer has the job")
            never_began = job.state == "submitted" and end in NEVER_BEGAN
            state: State = "killed" if job.state == "running" else "failed" if never_began else "cancelled"
            error = f"Slurm's job {job.slurm_job}: {end}"
            sweep.ledger.append(job.number, state, only_if=job, error=error)
        elif row.state == "PENDING" and job.state != "submitted":
            sweep.ledger.append(job.number, "submitted", only_if=job)
    return rows


class InLine(NamedTuple):
    """How Slurm has a job: its state, such as "PENDING", why it waits, such as "Resources", and its nodes."""

    state: str
    reason: str
    nodes: str


def in_line(user: int) -> dict[str, InLine] | None:
    """The jobs of the user with this number that Slurm has in line or runs, by their names, `123` or `123_4`;
    None where Slurm does not answer."""
    return squeue(f"--user={user}")


def ended(names: Collection[str]) -> dict[str, str]:
    """How jobs of ours have ended, such as "OUT_OF_MEMORY", by their names; Slurm tells it without accounting
    for some minutes."""
    rows = squeue("--me", "--states=all") if names else None
    return {name: row.state for name, row in (rows or {}).items() if name in names}


def squeue(*options: str) -> dict[str, InLine] | None:
    """What squeue lists with these options, by the jobs' names; None where it does not answer."""
    told = answer("squeue", "--noheader", "--array", "--format=%i|%T|%r|%N", *options)
    if told is None:
        return None
    rows = [row.strip().split("|") for row in told.splitlines() if row.strip()]
    return {name: InLine(state, reason, nodes) for name, state, reason, nodes in rows}


def accounting(names: Collection[str]) -> dict[str, str]:
    """How jobs have ended by Slurm's accounting, such as "TIMEOUT, exit code 0:0", by their names; nothing
    where it keeps none."""
    columns = "--format=JobID,State,ExitCode"
    jobs = f"--jobs={','.join(names)}"
    told = answer("sacct", "--noheader", "--parsable2", "--allocations", columns, jobs) if names else None
    rows = [row.split("|") for row in (told or "").splitlines()]
    return {row[0]: f"{row[1]}, exit code {row[2]}" for row in rows if len(row) == 3}


def answer(*words: str) -> str | None:
    """What a command of Slurm's prints; None where it is not there, fails, or takes too long."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def cancel(names: Collection[str]) -> None:
    """Cancel Slurm jobs; those that have ended stay as they are. What Slurm says against it is printed."""
    if names:
        done = subprocess.run(["scancel", *names], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"scancel: {' '.join(done.stderr.split())}", file=sys.stderr)


def largest_array() -> int:
    """How many elements the cluster allows an array; 1000, by Slurm's default, where it does not say."""
    told = answer("scontrol", "show", "config") or ""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", told, re.MULTILINE)
    return max(1, int(found[1]) - 1) if found else 1000


def plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Options of sbatch as a plain mapping, named as submitit does, so that they win over its own."""
    values: Any = (
        OmegaConf.to_container(parameters) if isinstance(parameters, DictConfig) else dict(parameters)
    )
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def expected(job: Job) -> bool:
    """Whether, by the ledger, Slurm runs the job or will."""
    return job.slurm_job is not None and job.state in ("submitted", "running", "preempted")
