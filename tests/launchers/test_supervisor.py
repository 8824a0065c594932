"""What a Slurm job notes of a training process that could not say itself how it ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rl.launchers import supervisor
from rl.launchers.sweep import Sweep
from tests.sweeps import history, states

NAME = "7_0"
NO_WORD = {
    "its time limit": ("kill -USR2 $PPID; sleep 30", "preempted", 128 + signal.SIGUSR2),
    "pre-emption": ("kill -TERM $PPID; sleep 30", "preempted", 128 + signal.SIGTERM),
    "a failure": ("exit 3", "failed", 1),
}


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """A sweep with one submitted job, this process being its Slurm job."""
    for variable in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("SLURM_JOB_ID", NAME)
    sweep = Sweep(tmp_path)
    sweep.ledger.append(0, "pending")
    sweep.ledger.append(0, "submitted", slurm_job=NAME)
    return sweep


def start(
    sweep: Sweep, script: str, monkeypatch: pytest.MonkeyPatch, last_attempt: int = 20
) -> tuple[int, list[int]]:
    """Start the job once, a shell script in place of its training: the exit code, the jobs requeued."""
    requeued: list[int] = []
    monkeypatch.setattr(supervisor, "command", lambda sweep, number: ["sh", "-c", script])
    monkeypatch.setattr(supervisor, "_requeue", lambda sweep, number: requeued.append(number))
    with pytest.raises(SystemExit) as left:
        supervisor.supervise(str(sweep.folder), 0, last_attempt)
    return int(left.value.code or 0), requeued


@pytest.mark.parametrize("how", NO_WORD)
def test_a_start_that_ends_before_its_process_could_say_a_word_counts(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    script, state, code = NO_WORD[how]
    assert start(sweep, script, monkeypatch) == (code, [0] if "USR2" in script else [])
    assert history(sweep) == ["pending", "submitted", state]
    assert sweep.jobs()[0].attempt == 1


def test_a_job_whose_start_alone_takes_longer_than_its_time_limit_is_given_up(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = NO_WORD["its time limit"][0]
    for attempt in (1, 2):
        assert start(sweep, script, monkeypatch, last_attempt=3)[1] == [0]
        assert sweep.jobs()[0].attempt == attempt
    assert start(sweep, script, monkeypatch, last_attempt=3) == (1, [])
    assert states(sweep) == ["failed"]
    assert sweep.jobs()[0].error == "gave up after 3 attempts"


def test_an_attempt_that_the_process_counted_is_not_counted_again(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = '{"job": 0, "state": "running", "time": 1.0, "attempt": 1}'
    script = f"echo '{line}' >> {sweep.folder}/ledger.jsonl; kill -USR2 $PPID; sleep 30"
    start(sweep, script, monkeypatch)
    assert history(sweep) == ["pending", "submitted", "running", "preempted"]
    assert sweep.jobs()[0].attempt == 1
