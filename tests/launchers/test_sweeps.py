"""Sweeps on this machine: the ledger, frozen jobs, failures, kills, going on later."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from omegaconf import OmegaConf

from rl import machine
from rl.checks import replay_bytes
from rl.launchers import local
from rl.launchers.ledger import Job, Ledger
from rl.launchers.sweep import Sweep, code_version
from tests.conftest import ROOT, assert_same, episodes, final_state, launch, lines
from tests.sweeps import history, only_sweep, states

QUICK = (
    "algo=ppo",
    "total_timesteps=2048",
    "algo.num_steps=128",
    "logger=none",
    "eval.episodes=1",
    "eval.every=0",
)
LONG = (
    "algo=ppo",
    "total_timesteps=1e8",
    "logger=none",
    "eval.episodes=1",
    "eval.every=0",
    "checkpoint.every=1024",
)


def wait_until(condition: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launch.py"), *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def all_trained(sweep: Path, count: int) -> Callable[[], bool]:
    """Whether `count` jobs run and each has a checkpoint beyond the start."""

    def ready() -> bool:
        folders = [path.parent for path in sweep.glob("*/checkpoints")]
        return sum(any(path.name != "step_000000000" for path in (folder / "checkpoints").glob("step_*"))
                   for folder in folders) >= count  # fmt: skip

    return ready


def test_ledger_folds_events_and_survives_a_torn_line(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append(0, "pending", folder="0000", overrides=["seed=1"])
    ledger.append(0, "running", attempt=1, pid=5)
    with ledger.path.open("a") as file:
        file.write('{"job": 0, "state": "comp')
    ledger.append(0, "completed", objective=3.5)
    job = ledger.jobs()[0]
    assert (job.state, job.attempt, job.objective, job.overrides) == ("completed", 1, 3.5, ["seed=1"])
    assert job.started is not None and job.ended is not None and job.created is not None


def test_unknown_states_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="finished"):
        Ledger(tmp_path).append(0, "finished")  # type: ignore[arg-type]


class TestSweep:
    def test_every_job_is_a_run_like_that_of_its_own_command(self, tmp_path: Path) -> None:
        done = launch("-m", *QUICK, "seed=1,2", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        sweep = only_sweep(tmp_path)
        jobs = list(sweep.jobs().values())
        assert [job.folder for job in jobs] == ["0000_seed=1", "0001_seed=2"]
        assert states(sweep) == ["completed", "completed"]
        assert jobs[0].config_hash != jobs[1].config_hash
        assert all(job.attempt == 1 and job.objective is not None and job.ended for job in jobs)
        assert "0000_seed=1" not in done.stdout and "completed" in done.stdout  # the table
        assert launch(*QUICK, "seed=2", f"hydra.run.dir={tmp_path}/alone", cwd=tmp_path).returncode == 0
        assert lines(jobs[1].path) == lines(tmp_path / "alone")
        assert_same(final_state(jobs[1].path), final_state(tmp_path / "alone"))
        record = json.loads((jobs[1].path / "run.json").read_text())
        assert record["result"]["objective"] == jobs[1].objective

    def test_more_values_run_only_the_new_ones(self, tmp_path: Path) -> None:
        assert launch("-m", *QUICK, "seed=1,2", cwd=tmp_path).returncode == 0
        sweep = only_sweep(tmp_path)
        before = sweep.jobs()
        done = launch(f"resume={sweep.folder}", "seed=1,2,3", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        after = sweep.jobs()
        assert {n: job for n, job in after.items() if n < 2} == before
        assert after[2].folder == "0002_seed=3" and after[2].state == "completed"
        assert launch(f"resume={sweep.folder}", cwd=tmp_path).returncode == 0
        assert sweep.jobs() == after
        # What the first command did not set is in the names of the jobs that have it.
        new = ("algo.gamma=0.9", "seed=1", "retry_failed=true")
        assert launch(f"resume={sweep.folder}", *new, cwd=tmp_path).returncode == 0
        assert sweep.jobs()[3].folder == "0003_algo.gamma=0.9,seed=1"

    def test_the_same_value_twice_is_one_job(self, tmp_path: Path) -> None:
        done = launch("-m", *QUICK, "algo.gamma=0.9,0.90", "hydra.launcher.n_jobs=2", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        sweep = only_sweep(tmp_path)
        assert history(sweep) == ["pending", "running", "completed"]
        assert len(sweep.jobs()) == 1
        # Its folder has signs in its name that mean something to Hydra; it is taken as it is printed.
        done = launch(f"resume={sweep.jobs()[0].path}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "is complete at step 2,048" in done.stdout

    def test_another_launcher_takes_none_of_the_settings(self, tmp_path: Path) -> None:
        sweep = Sweep(tmp_path)
        sweep.write(
            ["seed=1,2", "hydra/launcher=slurm", "hydra.launcher.partition=cpu", "fail_fast=true"], []
        )
        words, _ = sweep.continued(["hydra/launcher=local"])
        assert words == ["seed=1,2", "fail_fast=true", "hydra/launcher=local"]

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (
                ["hydra.launcher.n_jobs=two", "seed=1,2"],
                "hydra.launcher.n_jobs=two: must be a whole number of at least 1, or null",
            ),
            (["hydra/sweeper=optuna"], "hydra.sweeper.params: nothing to search"),
            (
                ["hydra/sweeper=optuna", "algo.gama=interval(0.9,1)"],
                "unknown key algo.gama; did you mean algo",
            ),
            (["hydra.launcher.partition=cpu"], "hydra.launcher.partition: a key of hydra/launcher=slurm"),
        ],
    )
    def test_a_mistake_leaves_nothing_behind(self, words: list[str], says: str, tmp_path: Path) -> None:
        done = launch("-m", *QUICK, *words, cwd=tmp_path)
        assert done.returncode == 2
        assert says in done.stderr, done.stderr
        assert not list(tmp_path.iterdir())

    def test_more_replay_buffers_at_a_time_than_memory_holds_are_refused(self, tmp_path: Path) -> None:
        available = machine.available_bytes()
        assert available is not None
        size = int(0.6 * available / replay_bytes(1, (4,), np.dtype(np.float32), 8))
        words = ("algo=dqn", f"algo.buffer_size={size}", "seed=1,2", "hydra.launcher.n_jobs=2")
        done = launch("-m", *words, "logger=none", cwd=tmp_path)
        assert done.returncode == 2
        assert "hydra.launcher.n_jobs=2: replay buffers of up to" in done.stderr, done.stderr
        assert "hydra.launcher.n_jobs=1 fits" in done.stderr
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("asked", "jobs", "words"),
        [
            (None, 9, ["hydra.launcher.n_jobs=3"]),
            (None, None, ["hydra.launcher.n_jobs=3"]),  # of a search nobody knows how many there will be
            (None, 3, []),
            (3, 9, []),
            (4, 3, []),
        ],
    )
    def test_a_pool_is_as_large_as_memory_allows(
        self, monkeypatch: pytest.MonkeyPatch, asked: int | None, jobs: int | None, words: list[str]
    ) -> None:
        monkeypatch.setattr(local, "usable_cores", lambda: list(range(8)))
        monkeypatch.setattr(machine, "available_bytes", lambda: 3 * 2**30)
        cfg = OmegaConf.create(
            {"device": "cpu", "torch_threads": 1, "hydra": {"launcher": {"n_jobs": asked}}}
        )
        assert local.fitting_pool(cfg, jobs, replay=2**30) == words

    def test_a_mistake_leaves_a_sweep_as_it_was(self, tmp_path: Path) -> None:
        assert launch("-m", *QUICK, "seed=1", cwd=tmp_path).returncode == 0
        sweep = only_sweep(tmp_path)
        before = (sweep.folder / "sweep.json").read_text()
        done = launch(f"resume={sweep.folder}", "hydra.launcher.n_jobs=two", cwd=tmp_path)
        assert done.returncode == 2
        assert (sweep.folder / "sweep.json").read_text() == before

    def test_changed_code_is_said_at_the_start(self, tmp_path: Path) -> None:
        sweep = Sweep(tmp_path)
        assert sweep.changed_code() is None
        now, _ = code_version()
        sweep.ledger.append(0, "completed", folder="0000", overrides=[], code=now)
        assert sweep.changed_code() is None
        sweep.ledger.append(1, "preempted", folder="0001", overrides=[], code={**now, "diff": "other"})
        line = sweep.changed_code()
        assert line is not None
        assert "not what it was when 1 of the jobs were frozen" in line
        assert "what they were frozen with" in line

    def test_more_steps_train_the_same_jobs_on(self, tmp_path: Path) -> None:
        arguments = (*QUICK, "algo.anneal_lr=false", "seed=1,2")
        assert launch("-m", *arguments, cwd=tmp_path).returncode == 0
        sweep = only_sweep(tmp_path)
        before = sweep.jobs()
        done = launch(f"resume={sweep.folder}", "eval.episodes=2", cwd=tmp_path)
        assert done.returncode == 0 and sweep.jobs() == before, done.stderr  # they are complete
        more = 2 * json.loads((before[0].path / "run.json").read_text())["total_timesteps"]
        done = launch(f"resume={sweep.folder}", "eval.episodes=1", f"total_timesteps={more}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        after = sweep.jobs()
        assert [job.folder for job in after.values()] == [job.folder for job in before.values()]
        assert all(job.state == "completed" and job.attempt == 2 for job in after.values())
        straight = launch(
            *arguments[:-1],
            "seed=2",
            f"total_timesteps={more}",
            f"hydra.run.dir={tmp_path}/alone",
            cwd=tmp_path,
        )
        assert straight.returncode == 0, straight.stderr
        assert_same(final_state(after[1].path), final_state(tmp_path / "alone"))

    def test_swept_steps_tell_jobs_apart(self, tmp_path: Path) -> None:
        assert launch("-m", *QUICK, "total_timesteps=512,1024", cwd=tmp_path).returncode == 0
        sweep = only_sweep(tmp_path)
        assert len(sweep.jobs()) == 2
        done = launch(f"resume={sweep.folder}", "total_timesteps=512,1024,1536", cwd=tmp_path)
        assert done.returncode == 0 and len(sweep.jobs()) == 3, done.stderr
        assert all(job.attempt == 1 for job in sweep.jobs().values())

    def test_a_bad_job_spoils_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "fragile.py").write_text(
            "import gymnasium as gym\n"
            "from gymnasium.envs.classic_control import CartPoleEnv\n"
            "class Fragile(CartPoleEnv):\n"
            "    def __init__(self, bad=False, **kwargs):\n"
            "        super().__init__(**kwargs)\n"
            "        self.bad, self.count = bad, 0\n"
            "    def step(self, action):\n"
            "        self.count += 1\n"
            "        if self.bad and self.count > 100:\n"
            "            raise RuntimeError('the pole broke')\n"
            "        return super().step(action)\n"
            "gym.register('Fragile-v0', Fragile)\n"
        )
        env = {"PYTHONPATH": str(tmp_path)}
        arguments = (*QUICK, "env.id=fragile:Fragile-v0", "env.kwargs.bad=false,true", "seed=1,2")
        done = launch("-m", *arguments, "hydra.launcher.n_jobs=2", cwd=tmp_path, env=env)
        sweep = only_sweep(tmp_path)
        assert done.returncode == 1
        assert sorted(states(sweep)) == ["completed", "completed", "failed", "failed"]
        for job in sweep.jobs().values():
            if job.state == "failed":
                assert "the pole broke" in str(job.error)
                assert "Traceback" in (job.path / "output.txt").read_text()
                assert "RuntimeError: the pole broke" in done.stderr
        # Failed ones are retried on request only, and once a request.
        for request, attempts in (((), 1), (("retry_failed=true",), 2), ((), 2)):
            assert launch(f"resume={sweep.folder}", *request, cwd=tmp_path, env=env).returncode == 1
            assert {job.attempt for job in sweep.jobs().values() if job.state == "failed"} == {attempts}
        done = launch(f"resume={sweep.folder}", "total_timesteps=4096", cwd=tmp_path, env=env)
        assert done.returncode == 1
        assert "retry_failed=true" in done.stdout
        counts = {state: {job.attempt for job in sweep.jobs().values() if job.state == state}
                  for state in states(sweep)}  # fmt: skip
        assert counts == {"completed": {2}, "failed": {2}}
        (tmp_path / "fragile.py").write_text(
            (tmp_path / "fragile.py").read_text().replace("> 100", "> 10**9")
        )
        assert launch(f"resume={sweep.folder}", "retry_failed=true", cwd=tmp_path, env=env).returncode == 0
        assert states(sweep) == ["completed"] * 4

    def test_fail_fast_stops_the_others(self, tmp_path: Path) -> None:
        (tmp_path / "broken.py").write_text(
            "import gymnasium as gym\n"
            "from gymnasium.envs.classic_control import CartPoleEnv\n"
            "class Broken(CartPoleEnv):\n"
            "    def step(self, action):\n"
            "        raise RuntimeError('at once')\n"
            "gym.register('Broken-v0', Broken)\n"
        )
        arguments = ("env.id=CartPole-v1,broken:Broken-v0", "fail_fast=true", "hydra.launcher.n_jobs=2")
        done = launch("-m", *LONG, *arguments, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
        assert done.returncode == 1
        assert states(only_sweep(tmp_path)) == ["preempted", "failed"]

    def test_what_runs_is_what_was_frozen(self, tmp_path: Path) -> None:
        """A job that waits its turn runs the configuration of its submission, whatever the file says now."""
        conf = tmp_path / "conf" / "experiment"
        conf.mkdir(parents=True)
        (conf / "mine.yaml").write_text("# @package _global_\nalgo:\n  ent_coef: 0.25\n")
        arguments = ("--config-dir", str(tmp_path / "conf"), "experiment=mine", "hydra.launcher.n_jobs=1")
        running = start("-m", *QUICK, *arguments, "seed=1,2", cwd=tmp_path)
        try:
            wait_until(lambda: bool(list(tmp_path.glob("multirun/*/*/0001*/job.yaml"))))
            (conf / "mine.yaml").write_text("# @package _global_\nalgo:\n  ent_coef: 0.75\n")
            output, _ = running.communicate(timeout=120)
            assert running.returncode == 0, output
        finally:
            running.kill()
        for job in only_sweep(tmp_path).jobs().values():
            assert "ent_coef: 0.25" in (job.path / "config.yaml").read_text()

    def test_long_and_odd_values_make_safe_folders(self, tmp_path: Path) -> None:
        swept = "run_name=" + ",".join(f"'{letter * 100}/x y'" for letter in "ab")
        assert launch("-m", *QUICK, "env.id=CartPole-v1", swept, cwd=tmp_path).returncode == 0
        folders = [job.folder for job in only_sweep(tmp_path).jobs().values()]
        assert len(set(folders)) == 2 and all(len(name) < 100 and "/" not in name for name in folders)


class TestInterruption:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_saves_all_and_the_sweep_goes_on_bit_for_bit(
        self, number: signal.Signals, tmp_path: Path
    ) -> None:
        quick = [word for word in LONG if not word.startswith("total")]
        sweep = tmp_path / "sweep"
        running = start("-m", *quick, "total_timesteps=40960", "seed=1,2,3", "hydra.launcher.n_jobs=2",
                        f"hydra.sweep.dir={sweep}", cwd=tmp_path)  # fmt: skip
        try:
            wait_until(all_trained(sweep, 2))
            running.send_signal(number)
            output, _ = running.communicate(timeout=60)
        finally:
            running.kill()
        assert running.returncode == 128 + number, output
        assert f"resume={sweep}" in output
        stopped = "interrupted" if number == signal.SIGINT else "preempted"
        assert states(Sweep(sweep)) == [stopped, stopped, "pending"]
        assert launch(f"resume={sweep}", cwd=tmp_path).returncode == 0
        assert states(Sweep(sweep)) == ["completed"] * 3
        assert [job.attempt for job in Sweep(sweep).jobs().values()] == [2, 2, 1]
        if number == signal.SIGTERM:
            whole = tmp_path / "whole"
            arguments = (*quick, "total_timesteps=40960", "seed=1", f"hydra.run.dir={whole}")
            assert launch(*arguments, cwd=tmp_path).returncode == 0
            resumed = Sweep(sweep).jobs()[0].path
            assert lines(resumed) == lines(whole) and episodes(resumed) == episodes(whole)
            assert_same(final_state(resumed), final_state(whole))

    def test_a_killed_job_and_a_killed_launcher_are_found_and_go_on(self, tmp_path: Path) -> None:
        sweep = tmp_path / "sweep"
        arguments = (*LONG, "seed=1,2", "hydra.launcher.n_jobs=2", f"hydra.sweep.dir={sweep}")
        running = start("-m", *arguments, cwd=tmp_path)
        try:
            wait_until(all_trained(sweep, 2))
            first, second = Sweep(sweep).jobs().values()
            assert first.pid is not None and second.pid is not None
            os.kill(first.pid, signal.SIGKILL)
            wait_until(lambda: Sweep(sweep).jobs()[0].state == "killed")
            assert "SIGKILL" in str(Sweep(sweep).jobs()[0].error)
            running.kill()
            running.wait()
            # The other still trains: nobody may train it a second time meanwhile.
            assert psutil.pid_exists(second.pid)
            os.kill(second.pid, signal.SIGKILL)
            wait_until(lambda: not psutil.pid_exists(second.pid or 0))
        finally:
            running.kill()
            for job in Sweep(sweep).jobs().values():
                if job.pid is not None and psutil.pid_exists(job.pid):
                    os.kill(job.pid, signal.SIGKILL)
        Sweep(sweep).settle()
        assert states(Sweep(sweep)) == ["killed", "killed"]


def test_the_state_of_a_job_is_a_dataclass_of_plain_values(tmp_path: Path) -> None:
    job = Job(3, tmp_path, folder="0003_seed=1")
    assert job.path == tmp_path / "0003_seed=1" and job.name == "seed=1"
