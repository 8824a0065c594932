"""What this process may use of the machine it runs on: cores, memory, CUDA devices; or, while a job for
another machine is being checked, what that one will give it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # of glibc's malloc.h

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class Allocation:
    """What a job will get elsewhere: `memory` in bytes, None where nothing is known about it."""

    memory: int | None = None


_elsewhere: list[Allocation] = []


@contextmanager
def elsewhere(allocation: Allocation) -> Iterator[None]:
    """Within the block, checks are about a job that will run on another machine, with `allocation`."""
    _elsewhere.append(allocation)
    try:
        yield
    finally:
        _elsewhere.pop()


def cpus() -> int:
    """Cores that this process may use: its affinity's, and no more than its launcher (RL_CPUS) or Slurm
    (`cpus_per_task`) gives it."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    names = ("RL_CPUS", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE")
    granted = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return min(usable, int(granted)) if granted.isdigit() and int(granted) else usable


def available_bytes() -> int | None:
    """Memory that this process may still take: the machine's, its cgroup's or its Slurm allocation's, the
    least; None where the job will run elsewhere with an unknown amount."""
    if _elsewhere:
        return _elsewhere[-1].memory
    import psutil

    limits = [psutil.virtual_memory().available]
    for limit, used in _CGROUPS:
        if Path(limit).exists() and Path(limit).read_text().strip().isdigit():
            limits.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    allocated = _slurm_mebibytes()
    if allocated:
        limits.append(allocated * 2**20)
    return max(0, min(limits))


def _slurm_mebibytes() -> int:
    """Memory that Slurm gives this job on the node, in MiB; 0 where there is no such limit."""
    per_node, per_cpu = os.environ.get("SLURM_MEM_PER_NODE", ""), os.environ.get("SLURM_MEM_PER_CPU", "")
    if per_node.isdigit():
        return int(per_node)
    return int(per_cpu) * int(os.environ.get("SLURM_CPUS_ON_NODE", "1")) if per_cpu.isdigit() else 0


def cuda_devices() -> int | None:
    """How many CUDA devices this process may use, asked of the driver itself so that torch need not be
    imported; None where the job will run elsewhere."""
    if _elsewhere:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def keep_freed_memory() -> None:
    """Let this process keep memory that it frees, for the next tensor of that size.

    glibc hands every block above 32 MiB back to the system when it is freed, so each layer of each minibatch
    of images gets new pages, which the system has to zero: two fifths of an update of `ppo_procgen`. Called
    when all that lives through the training is in place; what is freed later stays with the process. Nothing
    happens where the C library has no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
