"""A sweep's ledger: what happened to each job, one line an event, appended and never rewritten.

    {"job": 3, "state": "pending", "time": 1796212800.1, "folder": "0003_seed=3", "overrides": ["seed=3"], …}
    {"job": 3, "state": "running", "time": 1796212801.9, "attempt": 1, "host": "node7", "pid": 4711, …}
    {"job": 3, "state": "completed", "time": 1796212925.0, "objective": 487.5}

How a job stands is the fold of its events. The submitting process and the jobs themselves all append, perhaps
from several machines: each line goes in one write under a lock.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

log = logging.getLogger(__name__)

State = Literal[
    "pending", "submitted", "running", "preempted", "interrupted", "killed", "completed", "failed", "pruned",
    "cancelled",
]  # fmt: skip
"""pending: frozen, not yet handed to anything. submitted: a cluster has it. running: a process trains it.
preempted (SIGTERM, SIGUSR2) and interrupted (Ctrl-C): saved and stopped. killed: gone without a word.
completed. failed: an error of its own. pruned: stopped by the sweeper. cancelled: by its user."""

STOPPED = ("preempted", "interrupted", "killed", "cancelled")
"""States from which a continued sweep goes on."""
ENDED = ("completed", "failed", "pruned", "cancelled")
"""States that no process leaves by itself."""


@dataclass
class Job:
    """How one job of a sweep stands. Times are Unix seconds."""

    number: int
    sweep: Path
    folder: str = ""
    overrides: list[str] = field(default_factory=list)
    config_hash: str = ""
    identity: str = ""
    """The hash without the keys that a resumed run may change."""
    code: dict[str, Any] = field(default_factory=dict)
    """`commit` and `diff`, the hash of what the working tree had beyond it, when the job was frozen."""
    state: State = "pending"
    attempt: int = 0
    objective: float | None = None
    error: str | None = None
    created: float | None = None
    submitted: float | None = None
    started: float | None = None
    """Of the first attempt."""
    ended: float | None = None
    host: str | None = None
    pid: int | None = None
    process_started: float | None = None
    slurm_job: str | None = None
    cancelling: bool = False
    """Whether its user has asked this attempt to save and end."""

    @property
    def path(self) -> Path:
        """The job's folder, which is also its run directory."""
        return self.sweep / self.folder

    @property
    def name(self) -> str:
        """The swept values, for people."""
        return self.folder.partition("_")[2] or "-"

    def apply(self, event: dict[str, Any]) -> None:
        """Take an event in."""
        for f in fields(self):
            if f.name in event and f.name not in ("number", "sweep"):
                setattr(self, f.name, event[f.name])
        when = event["time"]
        if self.state == "pending":
            self.created = self.created or when
        elif self.state == "submitted":
            self.submitted = when
        elif self.state == "running":
            self.started, self.ended, self.error = self.started or when, None, None
        else:
            self.ended = when


class Ledger:
    """The file `ledger.jsonl` of a sweep folder."""

    def __init__(self, sweep: Path) -> None:
        self.sweep = sweep
        self.path = sweep / "ledger.jsonl"

    @property
    def size(self) -> int:
        """Bytes written so far: the same as before where nothing was noted in between."""
        return self.path.stat().st_size if self.path.exists() else 0

    def append(self, job: int, state: State, *, only_if: Job | None = None, **facts: Any) -> bool:
        """Note that `job` is now in `state`; with `only_if`, only where it still stands as that says.

        Returns:
            Whether it was noted.

        Raises:
            OSError: the file cannot be written.
        """
        if state not in get_args(State):
            raise ValueError(f"state {state!r} is not one of {', '.join(get_args(State))}")
        line = json.dumps({"job": job, "state": state, "time": time.time(), **facts}) + "\n"
        with open(self.path, "a+b", buffering=0) as file:
            fcntl.lockf(file, fcntl.LOCK_EX)  # released when this process closes the file, however opened
            if only_if is not None:
                file.seek(0)
                if fold(events(file.read()), self.sweep).get(job) != only_if:
                    return False
            if file.seek(0, os.SEEK_END) and not self._ends_a_line(file):
                line = "\n" + line  # what a killed writer left stays a line of its own
            file.write(line.encode())
            os.fsync(file.fileno())
        return True

    @staticmethod
    def _ends_a_line(file: Any) -> bool:
        file.seek(-1, os.SEEK_END)
        return bool(file.read(1) == b"\n")

    def events(self) -> Iterator[dict[str, Any]]:
        """The events in order."""
        return events(self.path.read_bytes()) if self.path.exists() else iter(())

    def jobs(self) -> dict[int, Job]:
        """How each job stands, by number."""
        return fold(self.events(), self.sweep)


def events(text: bytes) -> Iterator[dict[str, Any]]:
    """The events of a ledger's text in order; a line that a killed process wrote only in part is passed
    over."""
    for line in text.decode("utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "job" in event:
            yield event


def fold(told: Iterable[dict[str, Any]], sweep: Path) -> dict[int, Job]:
    """How each job of `sweep` stands after these events, by number."""
    jobs: dict[int, Job] = {}
    for event in told:
        jobs.setdefault(event["job"], Job(event["job"], sweep)).apply(event)
    return dict(sorted(jobs.items()))
