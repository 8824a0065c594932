"""`rl status`, `logs`, `cancel` and `collect` for sweeps on a real Slurm."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl import rundir
from rl.launchers import slurm
from tests.cluster.conftest import Cluster, wait_until
from tests.cluster.test_slurm_sweeps import (
    FAST,
    SLOW,
    TINY,
    all_are,
    answer_for,
    has_trained,
    submit,
)
from tests.conftest import ROOT, launch
from tests.sweeps import history, states

pytestmark = pytest.mark.slurm


def rl(cluster: Cluster, *arguments: object) -> str:
    """What `rl <arguments>` prints on a login node of the cluster."""
    done = subprocess.run(
        [sys.executable, "-c", "from rl.cli import main; main()", *map(str, arguments)],
        env={**os.environ, **cluster.env, "PYTHONPATH": str(ROOT), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def test_a_sweep_is_followed_cancelled_continued_and_collected(
    cluster: Cluster, tmp_path: Path, paced: dict[str, str]
) -> None:
    pace = tmp_path / "pace"
    rundir.replace_text(pace, SLOW)
    arguments = (*TINY, "env.id=paced:Paced-v0", f"env.kwargs.pace={pace}", "algo.gamma=0.9,0.99", "seed=1,2")
    sweep = submit(cluster, tmp_path, "-m", *arguments, "hydra.launcher.array_parallelism=1", env=paced)
    wait_until(has_trained(sweep), "the first job trains")
    shown = rl(cluster, "status", sweep.folder)
    assert "1 running  3 submitted" in shown
    assert "jobs 1-3 submitted: PENDING (JobArrayTaskLimit)" in shown
    assert "continue with" not in shown  # all of it is with Slurm
    first, second = json.loads(rl(cluster, "status", sweep.folder, "--json"))["jobs"][:2]
    assert first["node"] == rundir.process_identity()["host"] and first["slurm_state"] == "RUNNING"
    assert first["seconds_left"] > 0 and 0 < first["env_steps"] < first["total_timesteps"] == 1024
    assert second["node"] is None and second["reason"] == "PENDING (JobArrayTaskLimit)"

    assert rl(cluster, "cancel", sweep.folder, 3).startswith("job 3 (algo.gamma=0.99,seed=2) cancelled\n")
    assert states(sweep) == ["running", "submitted", "submitted", "cancelled"]
    assert "cancelled" not in history(sweep, 0)
    cancelled = rl(cluster, "cancel", sweep.folder)
    assert cancelled.count(" cancelled\n") == 3
    assert states(sweep) == ["cancelled"] * 4
    assert history(sweep)[-2:] == ["preempted", "cancelled"]  # it has saved
    assert "SIGTERM: saving" in rl(cluster, "logs", sweep.folder, 0)
    assert rl(cluster, "cancel", sweep.folder) == "nothing to cancel: no job is in line or runs\n"
    assert f"continue with: python launch.py resume={sweep.folder}" in rl(cluster, "status", sweep.folder)

    rundir.replace_text(pace, FAST)
    done = launch(
        f"resume={sweep.folder}", "hydra.launcher.array_parallelism=4", cwd=tmp_path,
        env={**cluster.env, **paced},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer_for(cluster, sweep)
    wait_until(all_are(sweep, "completed"), "all complete")
    table = rl(cluster, "collect", sweep.folder)
    assert table.count("2 of 2") == 2
    rows = list(csv.DictReader((sweep.folder / "collected.csv").read_text().splitlines()))
    assert [row["algo.gamma"] for row in rows] == ["0.9", "0.9", "0.99", "0.99"]
    assert [float(row["objective"]) for row in rows] == [job.objective for job in sweep.jobs().values()]
    assert [row["attempt"] for row in rows] == ["2", "1", "1", "1"]


def test_a_job_that_fails_before_it_prints_has_the_log_of_slurm(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    setup = "hydra.launcher.setup=['echo no such module >&2','exit 1']"
    sweep = submit(cluster, tmp_path, "-m", *TINY, setup)
    name = str(sweep.jobs()[0].slurm_job)
    wait_until(
        lambda: (now := slurm.in_line(os.getuid())) is not None and name not in now, "it leaves the queue"
    )
    shown = rl(cluster, "logs", sweep.folder, 0)
    assert shown.startswith("==> job 0 ") and shown.endswith("log.err <==\nno such module\n")
    assert f"job 0 failed: Slurm's job {name}: FAILED" in rl(cluster, "status", sweep.folder)
