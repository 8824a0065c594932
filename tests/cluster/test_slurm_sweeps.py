"""Sweeps on a real Slurm: detached, failing, pre-empted, out of time, killed, cancelled, continued."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rl import rundir
from rl.launchers import slurm
from rl.launchers.sweep import Sweep
from tests.cluster.conftest import Cluster, wait_until
from tests.conftest import assert_same, episodes, final_state, launch, lines
from tests.sweeps import PACED, history, states

pytestmark = pytest.mark.slurm

TINY = (
    "algo=ppo",
    "total_timesteps=1024",
    "env.num_envs=1",
    "algo.num_steps=32",
    "torch_threads=1",
    "logger=none",
    "eval.episodes=1",
    "eval.every=0",
    "checkpoint.every=64",
)
SLOW, FAST = "0.02", "0"


def submit(cluster: Cluster, cwd: Path, *arguments: str, env: dict[str, str] | None = None) -> Sweep:
    """The sweep of a command line, after it has submitted its jobs and left."""
    done = launch("hydra/launcher=slurm", *arguments, cwd=cwd, env={**cluster.env, **(env or {})})
    assert done.returncode == 0, done.stderr
    (folder,) = cwd.glob("multirun/*/*")
    sweep = Sweep(folder)
    answer_for(cluster, sweep)
    assert all(job.slurm_job for job in sweep.jobs().values())
    assert f"rl status {folder}" in done.stdout
    return sweep


def answer_for(cluster: Cluster, sweep: Sweep) -> None:
    cluster.submitted.extend(job.slurm_job for job in sweep.jobs().values() if job.slurm_job)


def all_are(sweep: Sweep, state: str) -> Callable[[], bool]:
    def ended() -> bool:
        failed = [job for job in sweep.jobs().values() if job.state == "failed"]
        assert not failed, [(job.error, (job.path / "output.txt").read_text()) for job in failed]
        return set(states(sweep)) == {state}

    return ended


def has_trained(sweep: Sweep, attempt: int = 1, number: int = 0) -> Callable[[], bool]:
    """Whether this attempt of the job runs and has written metrics of its own."""

    def trained() -> bool:
        job = sweep.jobs()[number]
        metrics = job.path / "metrics.jsonl"
        return (
            job.state == "running"
            and job.attempt == attempt
            and metrics.exists()
            and metrics.stat().st_mtime > max(e["time"] for e in sweep.ledger.events() if e["job"] == number)
        )

    return trained


def limits_hit(sweep: Sweep, number: int, count: int) -> Callable[[], bool]:
    """Whether the job has been stopped `count` times."""
    return lambda: history(sweep, number).count("preempted") >= count


def assert_undisturbed(run: Path, alone: Path, arguments: tuple[str, ...], env: dict[str, str]) -> None:
    """Fail unless `run` is what these arguments give in one go on this machine."""
    done = launch(*arguments, f"hydra.run.dir={alone}", cwd=alone.parent, env=env)
    assert done.returncode == 0, done.stderr
    assert lines(run) == lines(alone)
    assert episodes(run) == episodes(alone)
    assert_same(final_state(run), final_state(alone))


def test_a_detached_sweep_completes(cluster: Cluster, tmp_path: Path) -> None:
    sweep = submit(cluster, tmp_path, "-m", *TINY, "seed=range(4)", "hydra.launcher.array_parallelism=2")
    wait_until(all_are(sweep, "completed"), "all four complete")
    jobs = sweep.jobs()
    assert [history(sweep, n) for n in jobs] == [["pending", "submitted", "running", "completed"]] * 4
    assert len({str(job.slurm_job).split("_")[0] for job in jobs.values()}) == 1  # one array
    assert all(job.objective is not None and job.attempt == 1 for job in jobs.values())
    for job in jobs.values():
        cluster.wait(str(job.slurm_job), "COMPLETED")


def test_a_failing_job_leaves_the_others_and_is_shown_at_the_end(
    cluster: Cluster, tmp_path: Path, paced: dict[str, str]
) -> None:
    arguments = (*TINY, "env.id=paced:Paced-v0", "env.kwargs.bad=false,true", "seed=1,2")
    done = launch(
        "-m",
        "hydra/launcher=slurm",
        "hydra.launcher.wait=true",
        *arguments,
        cwd=tmp_path,
        env={**cluster.env, **paced},
    )
    sweep = Sweep(next(tmp_path.glob("multirun/*/*")))
    answer_for(cluster, sweep)
    assert done.returncode == 1, done.stderr
    assert states(sweep) == ["completed", "completed", "failed", "failed"]
    assert "the pole broke" in str(sweep.jobs()[2].error)
    assert "failed" in done.stdout  # the table
    assert cluster.wait(str(sweep.jobs()[2].slurm_job), ("FAILED", "COMPLETED")) == "FAILED"


@pytest.mark.slow
@pytest.mark.parametrize("envs", [(), ("env.backend=async", "env.num_envs=2")], ids=["sync", "async"])
def test_a_preempted_job_comes_back_and_ends_as_if_nothing_had_happened(
    cluster: Cluster, alone: None, tmp_path: Path, paced: dict[str, str], envs: tuple[str, ...]
) -> None:
    pace = tmp_path / "pace"
    rundir.replace_text(pace, SLOW)
    # Slurm signals every process of a job, those of the envs too.
    arguments = (*TINY, "env.id=paced:Paced-v0", f"env.kwargs.pace={pace}", *envs)
    sweep = submit(cluster, tmp_path, "-m", *arguments, env=paced)
    wait_until(has_trained(sweep), "the job trains")
    high = cluster.submit("#!/bin/sh\ntrue\n", "--ntasks=4", "--partition=high")
    cluster.wait(high, "COMPLETED")
    wait_until(lambda: sweep.jobs()[0].attempt == 2, "the job starts again")
    rundir.replace_text(pace, FAST)
    wait_until(all_are(sweep, "completed"), "the job completes")
    assert history(sweep) == ["pending", "submitted", "running", "preempted", "running", "completed"]
    assert_undisturbed(sweep.jobs()[0].path, tmp_path / "alone", arguments, paced)


@pytest.mark.slow
def test_a_job_that_hits_its_time_limit_twice_completes(
    cluster: Cluster, tmp_path: Path, paced: dict[str, str]
) -> None:
    pace = tmp_path / "pace"
    rundir.replace_text(pace, SLOW)
    arguments = (*TINY, "total_timesteps=8192", "env.id=paced:Paced-v0", f"env.kwargs.pace={pace}")
    limit = ("hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=20")
    sweep = submit(cluster, tmp_path, "-m", *arguments, *limit, "seed=1,2", env=paced)
    for number in (0, 1):  # the elements come back one by one, not all of them for each
        wait_until(limits_hit(sweep, number, 2), "its second limit", 240)
    rundir.replace_text(pace, FAST)
    wait_until(all_are(sweep, "completed"), "the jobs complete")
    for number, job in sweep.jobs().items():
        assert history(sweep, number).count("preempted") == job.attempt - 1
    assert_undisturbed(sweep.jobs()[0].path, tmp_path / "alone", (*arguments, "seed=1"), paced)


@pytest.mark.slow
def test_a_sweep_goes_on_after_half_of_it_was_cancelled(
    cluster: Cluster, tmp_path: Path, paced: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    rundir.replace_text(fast, FAST)
    rundir.replace_text(slow, "0.05")
    arguments = (*TINY, "env.id=paced:Paced-v0", f"env.kwargs.pace={fast},{slow}", "seed=1,2")
    sweep = submit(cluster, tmp_path, "-m", *arguments, "hydra.launcher.array_parallelism=3", env=paced)
    wait_until(lambda: states(sweep)[:2] == ["completed"] * 2, "the fast half completes")
    wait_until(has_trained(sweep, number=2), "a slow one trains")
    half = [str(job.slurm_job) for job in sweep.jobs().values() if job.number >= 2]
    assert slurm.settle(sweep) is not None and "cancelled" not in states(sweep)  # all is as the ledger has it
    slurm.cancel(half)
    wait_until(
        lambda: (now := slurm.in_line(os.getuid())) is not None and not set(half) & now.keys(),
        "they leave the queue",
    )
    slurm.settle(sweep)
    assert states(sweep) == ["completed", "completed", "cancelled", "cancelled"]
    before = sweep.jobs()

    rundir.replace_text(slow, FAST)
    done = launch(f"resume={sweep.folder}", cwd=tmp_path, env={**cluster.env, **paced})
    assert done.returncode == 0, done.stderr
    assert "submitted 2 jobs" in done.stdout
    answer_for(cluster, sweep)
    wait_until(all_are(sweep, "completed"), "the other half completes")
    after = sweep.jobs()
    assert [after[n] for n in (0, 1)] == [before[n] for n in (0, 1)]
    assert after[2].attempt == before[2].attempt + 1 and after[2].slurm_job != before[2].slurm_job


def test_conf_edited_while_the_job_is_in_line_changes_nothing(
    cluster: Cluster, alone: None, tmp_path: Path
) -> None:
    mine = tmp_path / "mine" / "experiment" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("# @package _global_\nalgo:\n  gamma: 0.5\n")
    full = cluster.submit("#!/bin/sh\nsleep 600\n", "--ntasks=4", "--partition=high")
    cluster.wait(full, "RUNNING")
    sweep = submit(cluster, tmp_path, "-m", "--config-dir", str(mine.parent.parent), *TINY, "experiment=mine")
    assert states(sweep) == ["submitted"]
    mine.write_text("# @package _global_\nalgo:\n  gamma: 0.9\n")
    cluster.cancel(full)
    wait_until(all_are(sweep, "completed"), "the job completes")
    run = sweep.jobs()[0].path
    assert "gamma: 0.5" in (run / ".hydra" / "config.yaml").read_text()
    assert rundir.read(run)["status"] == "completed"


@pytest.mark.slow
def test_a_single_job_is_submitted_too_and_a_killed_process_is_started_again(
    cluster: Cluster, tmp_path: Path, paced: dict[str, str]
) -> None:
    pace = tmp_path / "pace"
    rundir.replace_text(pace, SLOW)
    arguments = (*TINY, "env.id=paced:Paced-v0", f"env.kwargs.pace={pace}")
    sweep = submit(cluster, tmp_path, *arguments, env=paced)
    checkpoints = sweep.jobs()[0].path / "checkpoints"
    wait_until(lambda: len(list(checkpoints.glob("step_*"))) > 1, "the job has saved")
    name, pid = sweep.jobs()[0].slurm_job, sweep.jobs()[0].pid
    assert name is not None and "_" not in name and pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(has_trained(sweep, attempt=2), "it trains again")
    rundir.replace_text(pace, FAST)
    wait_until(all_are(sweep, "completed"), "the job completes")
    assert history(sweep) == ["pending", "submitted", "running", "killed", "running", "completed"]
    assert_undisturbed(sweep.jobs()[0].path, tmp_path / "alone", arguments, paced)


def test_a_job_that_is_killed_each_time_is_given_up(
    cluster: Cluster, tmp_path: Path, paced: dict[str, str]
) -> None:
    deadly = PACED.replace("self.count += 1", "os.kill(os.getpid(), 9)").replace("import time", "import os")
    (tmp_path / "modules" / "paced.py").write_text(deadly)
    sweep = submit(
        cluster, tmp_path, "-m", *TINY, "env.id=paced:Paced-v0", "hydra.launcher.max_attempts=3", env=paced
    )
    wait_until(lambda: states(sweep) == ["failed"], "the job is given up")
    assert sweep.jobs()[0].error == "gave up after 3 attempts"
    assert history(sweep) == ["pending", "submitted", *["running", "killed"] * 3, "failed"]
    cluster.wait(str(sweep.jobs()[0].slurm_job), "FAILED")


@pytest.mark.slow
def test_a_job_whose_supervisor_is_killed_saves_and_can_be_continued(
    cluster: Cluster, tmp_path: Path, paced: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    pace = tmp_path / "pace"
    rundir.replace_text(pace, SLOW)
    arguments = (*TINY, "env.id=paced:Paced-v0", f"env.kwargs.pace={pace}")
    sweep = submit(cluster, tmp_path, "-m", *arguments, env=paced)
    wait_until(has_trained(sweep), "the job trains")
    process = psutil.Process(sweep.jobs()[0].pid)
    supervisor = process.parent()
    assert supervisor is not None and "submitit" in " ".join(supervisor.cmdline())
    supervisor.kill()
    cluster.wait(str(sweep.jobs()[0].slurm_job), "FAILED")
    wait_until(lambda: states(sweep) == ["preempted"], "the training process saves and ends")
    slurm.settle(sweep)
    assert states(sweep) == ["cancelled"]
    rundir.replace_text(pace, FAST)
    done = launch(f"resume={sweep.folder}", cwd=tmp_path, env={**cluster.env, **paced})
    assert done.returncode == 0, done.stderr
    answer_for(cluster, sweep)
    wait_until(all_are(sweep, "completed"), "the job completes")
    assert_undisturbed(sweep.jobs()[0].path, tmp_path / "alone", arguments, paced)
    again = launch(f"resume={sweep.folder}", cwd=tmp_path, env={**cluster.env, **paced})
    assert again.returncode == 0 and "nothing to submit" in again.stdout, again.stderr


def test_a_job_that_went_back_in_line_without_a_word_is_seen_there(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    later = "hydra.launcher.additional_parameters={begin: now+1hour}"
    sweep = submit(cluster, tmp_path, "-m", *TINY, later)
    sweep.ledger.append(0, "running", attempt=1)  # as a node leaves it that then fails
    sweep.settle()
    assert history(sweep) == ["pending", "submitted", "running", "submitted"]
    sweep.settle()
    assert states(sweep) == ["submitted"] and len(history(sweep)) == 4
    cluster.cancel(str(sweep.jobs()[0].slurm_job))

    def cancelled() -> bool:
        sweep.settle()
        return states(sweep) == ["cancelled"]

    wait_until(cancelled, "the ledger has it as cancelled")


def test_a_job_that_cannot_begin_has_failed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    sweep = submit(cluster, tmp_path, "-m", *TINY, "hydra.launcher.setup=[exit 7]")
    cluster.wait(str(sweep.jobs()[0].slurm_job), "FAILED")
    sweep.settle()
    assert states(sweep) == ["failed"] and "FAILED" in str(sweep.jobs()[0].error)


class TestRefusals:
    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("hydra.launcher.cpus_per_task=0", "hydra.launcher.cpus_per_task=0: must be a whole number"),
            ("hydra.launcher.signal_delay_s=3561", "must be 40 s or more below timeout_min, 3600 s"),
            ("hydra.launcher.partition=none_such", "sbatch refuses"),
        ],
    )
    def test_is_one_line(self, cluster: Cluster, tmp_path: Path, override: str, words: str) -> None:
        done = launch("-m", *TINY, "hydra/launcher=slurm", override, cwd=tmp_path, env=cluster.env)
        assert done.returncode == 2
        assert words in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr

    def test_without_slurm(self, tmp_path: Path) -> None:
        env = {"PATH": str(tmp_path)}
        done = launch("-m", *TINY, "hydra/launcher=slurm", cwd=tmp_path, env=env)
        assert done.returncode == 2
        assert "no sbatch on PATH" in done.stderr and len(done.stderr.strip().splitlines()) == 1
