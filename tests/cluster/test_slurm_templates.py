"""The templates for Slurm, each in tiny form on a real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl import rundir
from rl.launchers.sweep import Sweep
from tests.cluster.conftest import Cluster, wait_until
from tests.cluster.test_slurm_sweeps import (
    FAST,
    SLOW,
    TINY,
    all_are,
    answer_for,
    has_trained,
)
from tests.conftest import ROOT, launch
from tests.sweeps import history, states

optuna = pytest.importorskip("optuna", reason="needs the extra optuna")
pytestmark = pytest.mark.slurm

HERE = ("hydra.launcher.timeout_min=5", "hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=1")
TWO_TRIALS = ("hydra.sweeper.n_trials=2", "hydra.sweeper.n_seeds=2", "hydra.sweeper.n_parallel=2")


def study_of(sweep: Sweep) -> Any:
    return optuna.load_study(study_name=sweep.folder.name, storage=f"sqlite:///{sweep.folder / 'optuna.db'}")


def test_an_array_of_seeds(cluster: Cluster, tmp_path: Path) -> None:
    done = launch(
        "multirun_templates=slurm_array", *TINY, *HERE, "seed=range(3)", cwd=tmp_path, env=cluster.env
    )
    assert done.returncode == 0, done.stderr
    sweep = Sweep(next(tmp_path.glob("multirun/*/*")))
    answer_for(cluster, sweep)
    wait_until(all_are(sweep, "completed"), "the three seeds complete")
    assert [job.name for job in sweep.jobs().values()] == ["seed=0", "seed=1", "seed=2"]
    assert len({str(job.slurm_job).split("_")[0] for job in sweep.jobs().values()}) == 1


def test_a_study_runs_its_trials_on_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    arguments = ("multirun_templates=slurm_optuna", *TINY, *HERE, *TWO_TRIALS)
    done = launch(*arguments, cwd=tmp_path, env=cluster.env)
    assert done.returncode == 0, done.stderr
    sweep = Sweep(next(tmp_path.glob("multirun/*/*")))
    answer_for(cluster, sweep)
    assert states(sweep) == ["completed"] * 4 and all(job.slurm_job for job in sweep.jobs().values())
    for trial in study_of(sweep).trials:
        objectives = [sweep.jobs()[number].objective for number in trial.user_attrs["jobs"]]
        assert trial.value == pytest.approx(sum(filter(None, objectives)) / 2)
    assert "best trial" in done.stdout and "train it with: python launch.py" in done.stdout


@pytest.mark.slow
def test_a_study_goes_on_after_a_pre_emption_and_after_its_end_by_ctrl_c(
    cluster: Cluster, alone: None, tmp_path: Path, paced: dict[str, str]
) -> None:
    pace = tmp_path / "pace"
    rundir.replace_text(pace, SLOW)
    arguments = (
        *(
            "multirun_templates=slurm_optuna",
            *TINY,
            *HERE,
            "env.id=paced:Paced-v0",
            f"env.kwargs.pace={pace}",
        ),
        *("hydra.sweeper.n_trials=1", "hydra.sweeper.n_seeds=2", "hydra.launcher.partition=low"),
    )
    env = {**cluster.env, **paced}
    words = [sys.executable, str(ROOT / "launch.py"), *arguments]
    process = subprocess.Popen(words, cwd=tmp_path, env={**os.environ, **env}, stderr=subprocess.DEVNULL)
    wait_until(lambda: list(tmp_path.glob("multirun/*/*/ledger.jsonl")), "the sweep begins")
    sweep = Sweep(next(tmp_path.glob("multirun/*/*")))
    wait_until(
        lambda: len(sweep.jobs()) == 2 and has_trained(sweep)() and has_trained(sweep, number=1)(),
        "both train",
    )
    answer_for(cluster, sweep)

    # Two cores of four are ours: a job of three pre-empts one of them, or both.
    other = cluster.submit("#!/bin/sh\nsleep 1\n", "--partition=high", "--cpus-per-task=3")
    wait_until(lambda: any("preempted" in history(sweep, n) for n in (0, 1)), "a job is pre-empted")
    cluster.wait(other, "COMPLETED")
    first = next(n for n in (0, 1) if "preempted" in history(sweep, n))
    wait_until(has_trained(sweep, attempt=2, number=first), "it trains again")
    assert process.poll() is None and study_of(sweep).trials[0].state.name == "RUNNING"

    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 128 + signal.SIGINT
    assert set(states(sweep)) <= {"cancelled", "preempted"}
    rundir.replace_text(pace, FAST)
    done = launch(f"resume={sweep.folder}", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    answer_for(cluster, sweep)
    (trial,) = study_of(sweep).trials
    assert trial.state.name == "COMPLETE" and states(sweep) == ["completed"] * 2
