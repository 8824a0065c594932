"""What a Slurm job runs on its node: it starts the training process and decides what its end means.

The training process (rl/launchers/frozen_job.py) saves and leaves when Slurm warns it. Whether the job then
goes back into the queue is decided here:

    exit 0               complete
    SIGUSR2              the time limit is near: back into the queue
    SIGTERM              pre-empted or cancelled: Slurm itself requeues a pre-empted job
    killed               started again at once, from its last checkpoint
    any other exit code  failed, and Slurm shows it as such
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from rl.launchers.frozen_job import slurm_job
from rl.launchers.ledger import Job, State
from rl.launchers.sweep import Sweep

HANDLED = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGCONT)
NOTE_SECONDS = 60.0  # after which a job no longer waits for its submitter to note it


def supervise(sweep: str, number: int, last_attempt: int) -> None:
    """Run job `number` of the sweep in folder `sweep` until it has ended or this Slurm job has to.

    Args:
        last_attempt: the attempt of the job, counted from 1 over all its submissions, after which it has
            failed.

    Raises:
        SystemExit: the job is not complete; the code is 1 where it failed, 128 + the signal's number where
            one stopped it.
    """
    if os.environ.get("SLURM_PROCID", "0") != "0":
        return  # one process trains, also on several nodes
    folder = Sweep(Path(sweep))
    with Forwarding() as forwarding:
        job = _noted(folder, number)
        while forwarding.first is None:
            job = folder.jobs()[number]
            if job.state in ("completed", "pruned", "cancelled"):
                print(f"job {number} is {job.state}")
                return
            if job.attempt >= last_attempt:
                _give_up(folder, job)
            code = forwarding.run(command(folder, number))
            print(f"attempt {folder.jobs()[number].attempt} ended with exit code {code}", flush=True)
            if code == 0:
                return
            if code > 0 and forwarding.first is None and code - 128 not in HANDLED:
                _note_silent_end(folder, job, "failed", f"its process ended with exit code {code}")
                raise SystemExit(1)
            if forwarding.first is None and code > 128:  # the child alone was told
                forwarding.first = signal.Signals(code - 128)
            if forwarding.first is None:
                why = f"its process was ended by {signal.Signals(-code).name}"
                _note_silent_end(folder, job, "killed", why)
        _note_silent_end(folder, job, "preempted", None)
        if forwarding.first is signal.SIGUSR2:
            if folder.jobs()[number].attempt >= last_attempt:
                _give_up(folder, folder.jobs()[number])
            _requeue(folder, number)
        raise SystemExit(128 + forwarding.first)


def command(sweep: Sweep, number: int) -> list[str]:
    """The command that trains a job, and ends with this process."""
    words = [sys.executable, "-m", "rl.launchers.frozen_job", str(sweep.folder), str(number)]
    return [*words, "--with-parent", str(os.getpid())]


class Forwarding:
    """While active, the first signal is kept in `first`, and passed to the process that `run` started.

    Slurm signals all processes of a job, or one of them; either will do. SIGCONT comes before SIGTERM.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Forwarding:
        for number in HANDLED:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, words: list[str]) -> int:
        """Run a command to its end; its exit code, or minus the signal that killed it."""
        self._child = subprocess.Popen(words, stdin=subprocess.DEVNULL)
        if self.first is not None:  # it came while the process was being started
            self._child.send_signal(self.first)
        return self._child.wait()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGCONT or self.first is not None:
            return
        self.first = signal.Signals(number)
        if self._child is not None:
            self._child.send_signal(number)


def _noted(sweep: Sweep, number: int) -> Job:
    """The job, once its submitter has noted this Slurm job: that line is to come before the lines of the
    job."""
    end = time.monotonic() + NOTE_SECONDS
    name = slurm_job()
    while True:
        job = sweep.jobs()[number]
        if job.slurm_job == name or time.monotonic() >= end:
            return job
        time.sleep(0.2)


def _note_silent_end(sweep: Sweep, before: Job, state: State, error: str | None) -> None:
    """Put in the ledger how a process ended that could not do so itself.

    It counts as an attempt also where it ended too early to count itself: a job whose start alone takes
    longer than its time limit allows must not go round for ever.

    Args:
        before: the job as it stood when the process was started.
    """
    job = sweep.jobs()[before.number]
    silent = job.state in ("submitted", "running", "killed")
    uncounted = job.state == "preempted" and job.attempt == before.attempt
    if silent or uncounted:
        attempt = max(job.attempt, before.attempt + 1)
        sweep.ledger.append(job.number, state, error=error, attempt=attempt)


def _give_up(sweep: Sweep, job: Job) -> None:
    """Fail a job that has used up its attempts. Raises SystemExit."""
    sweep.ledger.append(job.number, "failed", error=f"gave up after {job.attempt} attempts")
    raise SystemExit(1)


def _requeue(sweep: Sweep, number: int) -> None:
    """Ask Slurm to run this job once more; what it says against that goes into the ledger."""
    # An element by its array's name: the number of one element is also the whole array's.
    name = str(slurm_job())
    done = subprocess.run(["scontrol", "requeue", name], capture_output=True, text=True, check=False)
    if done.returncode:
        why = f"scontrol requeue {name}: {' '.join(done.stderr.split())}"
        sweep.ledger.append(number, "killed", error=why)
