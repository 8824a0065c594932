"""The process that trains one job of a sweep, whoever starts it.

    python -m rl.launchers.frozen_job SWEEP NUMBER

It runs the configuration that was frozen when the job was submitted, continues from the job's newest
checkpoint where there is one, prints to `output.txt` in the job's folder, and notes in the ledger how it
starts and ends. Exit code: 0 completed, or cancelled before it began; 1 failed; 128 + the signal's number
when a signal stopped it, and what it had trained is saved then.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl import checkpoint, rundir
from rl.errors import one_line
from rl.launchers.ledger import Job, Ledger, State
from rl.launchers.sweep import Sweep, code_version

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # of Linux's prctl


def main(argv: list[str] | None = None) -> int:
    """Run the job that the arguments name; the exit code."""
    parser = argparse.ArgumentParser(prog="rl.launchers.frozen_job")
    parser.add_argument("sweep", type=Path)
    parser.add_argument("number", type=int)
    parser.add_argument("--cores", help="numbers of the cores to run on, with commas")
    parser.add_argument("--with-parent", type=int, metavar="PID", help="stop when this parent process ends")
    args = parser.parse_args(argv)
    if args.cores:
        os.sched_setaffinity(0, [int(core) for core in args.cores.split(",")])
    job = Sweep(args.sweep.resolve()).jobs()[args.number]
    with output_to(job.path / "output.txt"), leaving_on_signals():
        if args.with_parent is not None:
            end_with_parent(args.with_parent)
        return run(job)


def run(job: Job) -> int:
    """Train `job` to its end or a signal, with its starts and ends in the ledger; the exit code."""
    ledger = Sweep(job.sweep).ledger
    identity = {**rundir.process_identity(), "slurm_job": slurm_job(), "cancelling": False}
    while True:
        # A cluster may start once more what ended while it was being pre-empted, a pool what its user has
        # just cancelled; who goes on with a cancelled job puts it in line again first.
        if job.state in ("completed", "cancelled"):
            print(f"job {job.number} is {job.state}")
            return 0
        if ledger.append(job.number, "running", only_if=job, attempt=job.attempt + 1, **identity):
            break
        job = ledger.jobs()[job.number]
    state: State = "failed"
    facts: dict[str, Any] = {}
    code = 1
    try:
        warn_of_changed_code(job)
        objective = train(job)
        state, facts, code = "completed", {"objective": objective}, 0
    except SystemExit as stopped:
        code = int(stopped.code or 0)
        state, facts = ending(job, code)
        code = 0 if state == "completed" else code
    except BaseException as error:
        traceback.print_exc()
        facts = {"error": f"{type(error).__name__}: {one_line(error)}"}
        if isinstance(error, KeyboardInterrupt):
            state, code = "interrupted", 128 + signal.SIGINT
    finally:
        ledger.append(job.number, state, **facts)
    return code


def train(job: Job) -> float | None:
    """Run the frozen configuration as Hydra runs a job; the objective."""
    from hydra._internal.callbacks import Callbacks
    from hydra.core.utils import run_job, setup_globals
    from hydra.types import HydraContext

    from rl.config import register_schema
    from rl.job import run_job as task

    register_schema()
    setup_globals()
    cfg = frozen_config(job)
    context = HydraContext(config_loader=None, callbacks=Callbacks(cfg))  # type: ignore[arg-type]
    done = run_job(
        task_function=task,
        config=cfg,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
        hydra_context=context,
    )
    if isinstance(done._return_value, Exception):
        raise done._return_value
    result: float | None = done.return_value
    return result


def frozen_config(job: Job) -> DictConfig:
    """What `job.yaml` holds, Hydra's node typed; a job that has a checkpoint continues from that one."""
    from hydra.conf import HydraConf

    cfg = OmegaConf.load(job.path / "job.yaml")
    assert isinstance(cfg, DictConfig)
    keys = [f.name for f in fields(HydraConf) if f.name in cfg.hydra]
    cfg.hydra = OmegaConf.merge(OmegaConf.structured(HydraConf), OmegaConf.masked_copy(cfg.hydra, keys))
    if checkpoint.newest(job.path / "checkpoints") is not None:
        cfg.resume = "auto"
    return cfg


def ending(job: Job, code: int) -> tuple[State, dict[str, Any]]:
    """State and facts of a job whose process leaves with `code` on a signal, as its record has it."""
    record = rundir.read_if_any(job.path)
    if record.get("status") == "completed" and record.get("result"):
        return "completed", {"objective": record["result"]["objective"]}
    if Ledger(job.sweep).jobs()[job.number].cancelling:
        return "cancelled", {"exit_code": code}
    return ("interrupted" if code == 128 + signal.SIGINT else "preempted"), {"exit_code": code}


def warn_of_changed_code(job: Job) -> None:
    """Say so where the code is not what it was when the job was frozen."""
    now, _ = code_version()
    if job.code and now != job.code:
        was = f"commit {str(job.code.get('commit'))[:12]}"
        what = (
            "other changes" if now["commit"] == job.code.get("commit") else f"now {str(now['commit'])[:12]}"
        )
        print(f"warning: the code is not what it was at submission ({was}; {what}); it runs as it is now")


def slurm_job() -> str | None:
    """The Slurm job that this process belongs to, as `123` or `123_4`; None elsewhere."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def end_with_parent(parent: int) -> None:
    """Have Linux send this process SIGTERM, on which it saves, when its parent `parent` ends. Raises
    SystemExit where that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Append what this process and its children print to `path`."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, earlier in zip((1, 2), kept, strict=True):
            os.dup2(earlier, number)
            os.close(earlier)


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Outside the training loop, which saves first, SIGTERM, SIGUSR2 and Ctrl-C end the process with 128 +
    their number, through every `finally`; a second one does not disturb that."""

    def leave(number: int, frame: FrameType | None) -> None:
        for ending in before:
            signal.signal(ending, signal.SIG_IGN)
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
