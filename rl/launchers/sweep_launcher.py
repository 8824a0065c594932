"""What our launchers share: freeze the jobs, start those that are due, follow them, say how they ended."""

from __future__ import annotations

import os
import signal
import sys
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from rl.errors import ConfigError
from rl.launchers.display import SweepDisplay, table
from rl.launchers.ledger import STOPPED, Job
from rl.launchers.sweep import Sweep


class JobFailed(Exception):
    """A job of a sweep ended without a result; the message says which and why."""


class SweepStopped(SystemExit):
    """A signal stopped the sweep; its running jobs have been saved. The code is 128 + the signal's number."""


class SweepLauncher(Launcher):
    """Base of the launchers whose jobs are frozen folders with a ledger.

    Hydra's sweepers call `launch`. A sweeper that decides as it goes uses `job`, `start`, `poll` and `stop`.
    """

    config: DictConfig
    context: HydraContext
    sweep: Sweep

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra offers; the task function is not used, a job's process has its own.

        Raises:
            ConfigError: an agent of a W&B sweep has started this command.
        """
        if "wandb" in config.logger and os.environ.get("WANDB_SWEEP_ID"):
            raise ConfigError(
                "-m: the agent of a W&B sweep has given this command one W&B run, to which all jobs would "
                "write; leave -m out, the agent starts run after run"
            )
        self.context, self.config = hydra_context, config
        self.sweep = Sweep(Path(str(config.hydra.sweep.dir)))
        changed = self.sweep.changed_code()
        if changed is not None:
            print(changed, flush=True)

    # --- what a launcher defines ------------------------------------------------------------------

    waits = True
    """Whether `launch` returns only when every job has ended."""

    @abstractmethod
    def start(self, jobs: Sequence[Job]) -> None:
        """Begin to run these jobs, or put them in line."""

    @abstractmethod
    def poll(self) -> None:
        """Let up to a second pass, and note in the ledger what became of jobs that could not do so."""

    @abstractmethod
    def stop(self, jobs: Sequence[Job], number: signal.Signals = signal.SIGTERM) -> None:
        """Send these jobs a signal on which they save and end; those still in line are not started."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """How many jobs can run at a time."""

    def settle(self) -> None:
        """Note what became of the jobs of earlier commands."""
        self.sweep.settle()

    def close(self) -> None:
        """End what the launcher holds; the jobs have ended."""

    # --- what they share --------------------------------------------------------------------------

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run the jobs of these overrides, those that are complete from before excepted; how each ended."""
        self.settle()
        jobs = [self.job(overrides) for overrides in job_overrides]
        distinct = {job.number: job for job in jobs}  # the same values twice are one job
        others = sum(job.state == "running" for job in distinct.values())
        if others:
            print(f"{others} of the jobs are run by another command; see: rl status {self.sweep.folder}")
        try:
            self.start([job for job in distinct.values() if self.is_due(job)])
            if self.waits:
                self.follow(list(distinct))
        finally:
            self.close()
        current = self.sweep.jobs()
        return [outcome(current[job.number]) for job in jobs]

    def job(self, overrides: Sequence[str]) -> Job:
        """The frozen job of these overrides: that of an earlier command for this sweep, or a new one."""
        known = self.sweep.find(overrides)
        if known is not None:
            return known
        setup_globals()
        cfg = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        shared = self.config.hydra.job.config.override_dirname.exclude_keys
        return self.sweep.freeze(cfg, overrides, shared)

    def is_due(self, job: Job) -> bool:
        """Whether this command has to run the job."""
        if job.state == "failed":
            return bool(self.config.retry_failed)
        return job.state == "pending" or job.state in STOPPED

    def follow(self, numbers: Sequence[int]) -> None:
        """Wait until these jobs have ended, showing how they stand; stop all on a signal, or at the first
        that fails where `fail_fast` is set.

        Raises:
            SweepStopped: a signal came; the jobs have saved.
        """
        with SweepSignals() as signals, SweepDisplay(self.sweep, numbers) as display:
            asked: signal.Signals | None = None
            while True:
                self.poll()
                jobs = [job for number, job in self.sweep.jobs().items() if number in set(numbers)]
                display.update(jobs)
                running = self.unfinished(jobs)
                if not running:
                    break
                if signals.take():
                    asked = signals.requested
                    assert asked is not None
                    self.stop(running, signal.SIGINT if asked == signal.SIGINT else signal.SIGTERM)
                failed = any(job.state == "failed" for job in jobs if job.ended and job.ended > display.began)
                if failed and self.config.fail_fast and asked is None:
                    asked = signal.SIGTERM
                    display.say("fail_fast: stopping the others")
                    self.stop(running)
        if signals.requested is not None:
            print(table(self.sweep), end="")
            print(f"stopped; continue with: python launch.py resume={self.sweep.folder}")
            raise SweepStopped(128 + signals.requested)

    def note_end(self, number: int, attempt: int, code: int) -> None:
        """Put in the ledger what a job's process could not: a death by signal, or before it could write.

        Args:
            attempt: the job's attempts before this process.
            code: its exit code, or minus the signal that ended it.
        """
        if self.has_said(number, attempt):
            return
        if code < 0:
            why = f"its process was ended by {signal.Signals(-code).name}"
            self.sweep.ledger.append(number, "killed", error=why)
        else:
            self.sweep.ledger.append(number, "failed", error=f"its process ended with exit code {code}")

    def has_said(self, number: int, attempt: int) -> bool:
        """Whether a job's process has said itself how it ended, or was not to begin; `attempt` as above."""
        job = self.sweep.jobs()[number]
        return job.state == "cancelled" or (job.state != "running" and job.attempt > attempt)

    def unfinished(self, jobs: Sequence[Job]) -> list[Job]:
        """Those of the jobs that this command still waits for."""
        return [job for job in jobs if job.state in ("submitted", "running")]


def module_path() -> str:
    """This process's module search path as PYTHONPATH, good from any folder."""
    return os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)


def check_whole(key: str, value: Any, least: int, or_null: bool = False) -> None:
    """Raise ConfigError, naming `key`, unless `value` is a whole number of at least `least`, or None where it
    may be."""
    if (value is not None or not or_null) and (type(value) is not int or value < least):
        null = ", or null" if or_null else ""
        raise ConfigError(f"{key}={value}: must be a whole number of at least {least}{null}")


def outcome(job: Job) -> JobReturn:
    """How a job stands, in Hydra's terms: its objective, or an error; neither while it has not ended."""
    done = JobReturn(overrides=job.overrides, status=JobStatus.COMPLETED)
    if job.state in ("pending", "submitted", "running", "completed"):
        done.return_value = job.objective
    else:
        done.status = JobStatus.FAILED
        done.return_value = JobFailed(f"job {job.number} {job.state}: {job.error or job.path / 'output.txt'}")
    return done


class SweepSignals:
    """While active, SIGTERM, SIGHUP (a closed terminal) and Ctrl-C are noted and end nothing."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        """The last signal that came."""
        self._new = False
        self._before: dict[signal.Signals, Any] = {}

    def take(self) -> bool:
        """Whether a signal has come since the last call."""
        new, self._new = self._new, False
        return new

    def __enter__(self) -> SweepSignals:
        for number in self.NUMBERS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        self.requested, self._new = signal.Signals(number), True
