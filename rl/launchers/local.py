"""Jobs side by side on this machine: a queue, and as many processes at a time as there is room for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from rl import machine
from rl.errors import ConfigError
from rl.launchers.ledger import Job
from rl.launchers.sweep_launcher import SweepLauncher, check_whole, module_path

POLL_SECONDS = 0.2
PATIENCE = 2  # signals of the user's after which what still runs is killed


@dataclass
class Slot:
    """What one job at a time may use: cores by number, and at most one CUDA device by name."""

    cores: list[int]
    device: str | None = None


@dataclass
class Running:
    """A process, where it runs, and the job's attempts before it."""

    process: subprocess.Popen[bytes]
    slot: Slot
    attempt: int
    signals: int = 0


class LocalLauncher(SweepLauncher):
    """A pool of `n_jobs` processes; each takes the next job as soon as its last has ended.

    Args:
        n_jobs: jobs at a time; None: one for each CUDA device where jobs use one, otherwise as many as have
            their `torch_threads` cores.
    """

    def __init__(self, n_jobs: int | None = None) -> None:
        check_whole("hydra.launcher.n_jobs", n_jobs, 1, or_null=True)
        self.n_jobs = n_jobs
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._queue: deque[Job] = deque()
        self._running: dict[int, Running] = {}

    @property
    def slots(self) -> int:
        """How many jobs can run at a time."""
        return len(self._deal())

    def start(self, jobs: Sequence[Job]) -> None:
        """Put jobs in line; the ledger has them as pending, whatever became of their earlier attempts."""
        self._deal()
        for job in jobs:
            if job.state != "pending":
                self.sweep.ledger.append(job.number, "pending", error=None)
        self._queue.extend(jobs)

    def poll(self) -> None:
        """Start what there is room for, and take note of processes that have ended."""
        while self._queue and self._free:
            job = self.sweep.jobs()[self._queue.popleft().number]
            if job.state != "cancelled":
                self._spawn(job, self._free.pop(0))
        time.sleep(POLL_SECONDS)
        for number, running in list(self._running.items()):
            code = running.process.poll()
            if code is not None:
                del self._running[number]
                self._free.append(running.slot)
                self.note_end(number, running.attempt, code)

    def stop(self, jobs: Sequence[Job], number: signal.Signals = signal.SIGTERM) -> None:
        """Ask jobs to save and end, those in line not to start; who asks a third time has them killed."""
        numbers = {job.number for job in jobs}
        self._queue = deque(job for job in self._queue if job.number not in numbers)
        for running in (self._running[n] for n in self._running.keys() & numbers):
            running.signals += 1
            running.process.send_signal(signal.SIGKILL if running.signals > PATIENCE else number)

    def unfinished(self, jobs: Sequence[Job]) -> list[Job]:
        """Jobs in line and running."""
        waiting = {job.number for job in self._queue} | self._running.keys()
        return [job for job in jobs if job.number in waiting]

    def close(self) -> None:
        """Kill what still runs: only an error in this process leaves something."""
        for running in self._running.values():
            running.process.terminate()
        for running in self._running.values():
            running.process.wait()

    def _spawn(self, job: Job, slot: Slot) -> None:
        environment = {**os.environ, "PYTHONPATH": module_path()}
        if slot.device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = slot.device
        command = [sys.executable, "-m", "rl.launchers.frozen_job", str(self.sweep.folder), str(job.number)]
        if hasattr(os, "sched_setaffinity"):
            command += ["--cores", ",".join(map(str, slot.cores))]
        # A session of its own: Ctrl-C comes to this process, which passes it on.
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        self._running[job.number] = Running(process, slot, job.attempt)

    def _deal(self) -> list[Slot]:
        """The slots, made at the first call: cores and CUDA devices dealt out evenly."""
        if not self._slots:
            cores = usable_cores()
            devices = devices_for(self.config.device)
            count = pool_size(self.n_jobs, len(cores), len(devices), self.config.torch_threads)
            share = max(1, len(cores) // count)
            self._slots = [
                Slot(
                    [cores[(i * share + j) % len(cores)] for j in range(share)],
                    devices[i % len(devices)] if devices else None,
                )
                for i in range(count)
            ]
            self._free = list(self._slots)
        return self._slots


def pool_size(n_jobs: int | None, cores: int, devices: int, torch_threads: int | None) -> int:
    """How many jobs run at a time on so many cores and CUDA devices."""
    return n_jobs or devices or max(1, cores // (torch_threads or cores))


def fitting_pool(cfg: DictConfig, jobs: int | None, replay: int) -> list[str]:
    """An override where memory holds fewer replay buffers than there would be jobs at a time.

    Each job by itself fits, and takes its memory only as it trains: too many would be killed hours later.

    Args:
        cfg: the composed configuration with Hydra's node.
        jobs: of the sweep; None: any number.
        replay: bytes of the largest replay buffer, of which memory holds one.

    Raises:
        ConfigError: the user has named a number of jobs that is too large, or none.
    """
    asked = cfg.hydra.launcher.n_jobs
    check_whole("hydra.launcher.n_jobs", asked, 1, or_null=True)
    at_a_time = pool_size(asked, len(usable_cores()), len(devices_for(cfg.device)), cfg.torch_threads)
    free = machine.available_bytes() or 0
    fits = max(1, free // replay)
    if fits >= (at_a_time if jobs is None else min(at_a_time, jobs)):
        return []
    why = f"replay buffers of up to {replay / 2**30:.2f} GiB each in {free / 2**30:.2f} GiB of memory"
    if asked is not None:
        raise ConfigError(f"hydra.launcher.n_jobs={asked}: {why}; hydra.launcher.n_jobs={fits} fits")
    print(f"jobs at a time: {fits} instead of {at_a_time}, for {why}")
    return [f"hydra.launcher.n_jobs={fits}"]


def devices_for(device: str) -> list[str]:
    """The CUDA devices that jobs with this `device` share."""
    return [] if device == "cpu" else visible_devices()


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def visible_devices() -> list[str]:
    """The CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(index) for index in range(machine.cuda_devices() or 0)]
