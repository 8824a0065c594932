"""Sweeps on Ray: an instance of this machine, which each command starts and ends."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from omegaconf import OmegaConf

from rl import rundir
from rl.errors import ConfigError
from rl.launchers import ray_launcher
from rl.launchers.ledger import Job
from rl.launchers.ray_launcher import RayLauncher, options, room, runs
from rl.launchers.sweep import Sweep
from rl.machine import cpus
from tests.conftest import assert_same, episodes, final_state, launch, lines, train
from tests.launchers.test_sweeps import QUICK, all_trained, start, wait_until
from tests.sweeps import only_sweep, states

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install -e '.[ray]'"
)
ON_RAY = (
    "hydra/launcher=ray",
    "hydra.launcher.ray.init.address=local",
    "hydra.launcher.ray.init.num_cpus=2",
)
SAVING = (
    "algo=ppo",
    "total_timesteps=20480",
    "logger=none",
    "eval.episodes=1",
    "eval.every=0",
    "checkpoint.every=2048",
)
SETTINGS = {"init": {"address": "local"}, "remote": {"num_cpus": 1}}


@needs_ray
class TestSweep:
    def test_a_bad_job_spoils_nothing_and_the_others_train_as_locally(self, tmp_path: Path) -> None:
        (tmp_path / "fragile.py").write_text(
            "import os\n"
            "import gymnasium as gym\n"
            "from gymnasium.envs.classic_control import CartPoleEnv\n"
            "class Fragile(CartPoleEnv):\n"
            "    def step(self, action):\n"
            "        cores, gpus = os.environ['RL_CPUS'], os.environ['CUDA_VISIBLE_DEVICES']\n"
            "        raise RuntimeError(f'broke in {os.getcwd()}, cores {cores}, GPUs {gpus!r}')\n"
            "gym.register('Fragile-v0', Fragile)\n"
        )
        swept = "env.id=CartPole-v1,fragile:Fragile-v0,Acrobot-v1"
        done = launch("-m", *QUICK, *ON_RAY, swept, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
        sweep = only_sweep(tmp_path)
        assert done.returncode == 1, done.stderr
        assert states(sweep) == ["completed", "failed", "completed"]
        jobs = sweep.jobs()
        error = f"RuntimeError: broke in {tmp_path}, cores 1, GPUs ''"
        assert jobs[1].error == error
        assert "Traceback" in (jobs[1].path / "output.txt").read_text()
        assert error in done.stderr
        local = tmp_path / "local"
        same = ("hydra/launcher=local", "env.id=CartPole-v1", f"hydra.sweep.dir={local}")
        assert launch("-m", *QUICK, *same, cwd=tmp_path).returncode == 0
        here = Sweep(local).jobs()[0]
        assert (jobs[0].objective, jobs[0].config_hash) == (here.objective, here.config_hash)
        assert lines(jobs[0].path) == lines(here.path)
        assert_same(final_state(jobs[0].path), final_state(here.path))

    def test_a_signal_saves_all_and_the_sweep_goes_on_bit_for_bit(self, tmp_path: Path) -> None:
        sweep = Sweep(tmp_path / "sweep")
        where = f"hydra.sweep.dir={sweep.folder}"
        one = "hydra.launcher.ray.init.num_cpus=1"
        running = start("-m", *SAVING, *ON_RAY, one, "seed=1,2", where, cwd=tmp_path)
        try:
            wait_until(all_trained(sweep.folder, 1))
            running.send_signal(signal.SIGTERM)
            output, _ = running.communicate(timeout=60)
        finally:
            running.kill()
        assert running.returncode == 128 + signal.SIGTERM, output
        assert f"resume={sweep.folder}" in output
        assert sorted(states(sweep)) == ["pending", "preempted"]  # Ray chooses the order
        stopped, waiting = (
            next(job for job in sweep.jobs().values() if job.state == state)
            for state in ("preempted", "pending")
        )
        # As if a machine had gone together with the command that had the job run there.
        lost: dict[str, Any] = {"host": "a-lost-node", "pid": 1, "process_started": 1.0}
        sweep.ledger.append(waiting.number, "running", attempt=1, **lost)
        resumed = launch(f"resume={sweep.folder}", cwd=tmp_path)
        assert resumed.returncode == 0, resumed.stderr
        assert states(sweep) == ["completed"] * 2
        assert [job.attempt for job in sweep.jobs().values()] == [2, 2]
        killed = [event for event in sweep.ledger.events() if event["state"] == "killed"]
        gone = (waiting.number, "its process on a-lost-node is gone")
        assert [(event["job"], event["error"]) for event in killed] == [gone]
        whole, job = tmp_path / "whole", stopped.path
        train(whole, *SAVING, f"seed={stopped.number + 1}")
        assert lines(job) == lines(whole) and episodes(job) == episodes(whole)
        assert_same(final_state(job), final_state(whole))

    def test_killed_jobs_and_killed_workers_are_noted(self, tmp_path: Path) -> None:
        sweep = Sweep(tmp_path / "sweep")
        endless = [*SAVING, "total_timesteps=1e8", f"hydra.sweep.dir={sweep.folder}"]
        running = start("-m", *endless, *ON_RAY, "seed=1,2", cwd=tmp_path)
        try:
            wait_until(all_trained(sweep.folder, 2))
            first, second = sweep.jobs().values()
            assert first.pid is not None and second.pid is not None
            os.kill(first.pid, signal.SIGKILL)
            wait_until(lambda: sweep.jobs()[0].state == "killed")
            assert sweep.jobs()[0].error == "its process was ended by SIGKILL"
            assert sweep.jobs()[1].state == "running"
            worker = psutil.Process(second.pid).parent()
            assert worker is not None and worker.pid != running.pid
            worker.kill()
            output, _ = running.communicate(timeout=60)
        finally:
            running.kill()
        assert running.returncode == 1, output
        # The training process saves when its worker is gone.
        wait_until(lambda: sweep.jobs()[1].state == "preempted", 20)
        told = [event["error"] for event in sweep.ledger.events() if event["state"] == "killed"]
        assert len(told) == 2 and told[1].startswith("its Ray worker is gone: ")


@needs_ray
class TestNodes:
    @pytest.fixture
    def instance(self) -> Iterator[None]:
        ray = pytest.importorskip("ray")
        before = signal.getsignal(signal.SIGTERM)
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        ray.cloudpickle.register_pickle_by_value(rundir)
        yield
        ray.cloudpickle.unregister_pickle_by_value(rundir)
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)

    def test_a_node_is_asked_whether_a_process_runs_there(self, instance: None, tmp_path: Path) -> None:
        alive = Job(0, tmp_path, **rundir.process_identity())
        assert alive.host == socket.gethostname() and runs(alive)
        other_start = Job(0, tmp_path, host=alive.host, pid=alive.pid, process_started=1.0)
        assert not runs(other_start)
        assert not runs(Job(0, tmp_path, host="a-lost-node", pid=alive.pid, process_started=1.0))


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "device", "message"),
        [
            ({"init": {}, "remote": {"num_cpus": 0}}, "cpu", "remote.num_cpus=0: must be above 0"),
            ({"init": {}, "remote": {}}, "cpu", "remote.num_cpus=None: must be above 0"),
            ({"init": {}, "remote": {"num_cpus": "two"}}, "cpu", "remote.num_cpus=two"),
            ({"init": {}, "remote": {"num_cpus": 1, "num_gpus": -1}}, "cpu", "num_gpus=-1: must be at least"),
            ({"init": {}, "remote": {"num_cpus": 1}}, "cuda:0", "num_gpus=0: device=cuda:0 needs a GPU"),
            ({"init": None, "remote": {"num_cpus": 1}}, "cpu", "init=None: must be a mapping"),
        ],
    )
    def test_what_cannot_be_is_named(self, settings: dict[str, Any], device: str, message: str) -> None:
        with pytest.raises(ConfigError, match=rf"hydra\.launcher\.ray\..*{message}"):
            options(settings, device)

    def test_what_is_null_is_left_to_ray(self) -> None:
        init, remote = options({"init": {"address": None}, "remote": {"num_cpus": 2, "memory": None}}, "auto")
        assert init == {} and remote == {"num_cpus": 2, "num_gpus": 0}

    def test_room_is_that_of_the_scarcest_resource(self) -> None:
        cluster = {"CPU": 16.0, "GPU": 3.0, "big": 1.0}
        assert room(cluster, {"num_cpus": 3, "num_gpus": 0}) == 5  # 16 / 3, rounded down
        assert room(cluster, {"num_cpus": 3, "num_gpus": 0.5}) == 5  # of GPUs there would be 6
        assert room(cluster, {"num_cpus": 1, "num_gpus": 1}) == 3
        assert room(cluster, {"num_cpus": 1, "num_gpus": 0, "resources": {"big": 1}}) == 1
        assert room(cluster, {"num_cpus": 32, "num_gpus": 0}) == 1

    def test_without_ray_one_line_says_how_to_get_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(ray_launcher.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
        config = OmegaConf.create({"device": "cpu", "logger": {}, "hydra": {"sweep": {"dir": str(tmp_path)}}})
        with pytest.raises(ConfigError, match=r"needs ray: pip install -e '\.\[ray\]'"):
            RayLauncher(SETTINGS).setup(hydra_context=None, task_function=None, config=config)  # type: ignore[arg-type]

    @needs_ray
    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("hydra.launcher.ray.init.address=auto", "hydra.launcher.ray.init={'address': 'auto'"),
            ("+hydra.launcher.ray.remote.colour=red", "Invalid option keyword colour"),
        ],
    )
    def test_what_ray_refuses_is_one_line(self, override: str, message: str, tmp_path: Path) -> None:
        done = launch(*QUICK, *ON_RAY, override, cwd=tmp_path, env={"RAY_ADDRESS": ""})
        assert done.returncode == 2, done.stderr
        error = done.stderr.strip().splitlines()[-1]
        assert message in error and "Traceback" not in done.stderr
        assert not list(tmp_path.glob("multirun/*/*/0*"))

    def test_the_cores_that_were_asked_for_are_those_of_the_job(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
        monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
        monkeypatch.setenv("RL_CPUS", "1")
        assert cpus() == 1
        monkeypatch.setenv("RL_CPUS", "100000")
        assert cpus() == (len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count())
