"""The `rl` commands for sweeps: how one stands, what its jobs print, cancelling them, collecting results.

`rl.cli` makes commands of these functions. What they need is imported where they run: `rl --help` is quick.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl import rundir
from rl.errors import ConfigError, one_line
from rl.launchers.ledger import STOPPED, Job

if TYPE_CHECKING:
    from rl.launchers.slurm import InLine
    from rl.launchers.sweep import Sweep

CLEAR = "\x1b[2J\x1b[H"  # a terminal
SETTLE_SECONDS = 5.0  # between two looks for what became of killed jobs, while following
FOLLOW_SECONDS = 0.3
PATIENCE_SECONDS = 120.0  # for cancelled jobs to save and end

SweepArgument = Annotated[Path, typer.Argument(metavar="SWEEP", help="a sweep's folder")]


# --- status -----------------------------------------------------------------------------------------------


def status(
    sweep: Annotated[Path, typer.Argument(metavar="SWEEP", help="a sweep's folder, or a run directory")],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
    watch: Annotated[
        float | None, typer.Option(min=0.5, metavar="SECONDS", help="again and again, until all has ended")
    ] = None,
) -> None:
    """Say how each job of a sweep stands, from its files and, if there is one, the cluster."""
    if (sweep / "run.json").is_file():
        from rl.cli import show  # which imports this module

        show(sweep, as_json)
        return
    opened = _open(sweep)
    from rl.launchers import standings

    try:
        while True:
            found = standings.look(opened)
            if watch is not None and not as_json and sys.stdout.isatty():
                print(CLEAR, end="")
            values = standings.values(opened, found) if as_json else None
            print(json.dumps(values) if as_json else standings.drawn(opened, found), flush=True)
            if watch is None or not any(standing.active for standing in found):
                return
            time.sleep(watch)
    except KeyboardInterrupt:
        return


# --- logs -------------------------------------------------------------------------------------------------


def logs(
    sweep: SweepArgument,
    number: Annotated[
        int | None,
        typer.Argument(metavar="[NUMBER]", help="of a job; without: those that failed, else those that run"),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on until the job has ended")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="from the end")] = 40,
) -> None:
    """Print the end of what jobs have printed."""
    from rl.launchers.standings import settle, spans

    opened = _open(sweep)
    rows = settle(opened)
    jobs = opened.jobs()
    if number is not None:
        chosen = [jobs[n] for n in _known([number], jobs, "NUMBER")]
    else:
        chosen = [job for job in jobs.values() if job.state == "failed"]
        chosen = chosen or [job for job in jobs.values() if job.state == "running"]
    if not chosen or (follow and len(chosen) > 1):
        which = "no job has failed or runs" if not chosen else "--follow takes one job"
        choice = spans(jobs if not chosen else [job.number for job in chosen])
        raise ConfigError(f"SWEEP={sweep}: {which}; name one: rl logs {sweep} NUMBER, of {choice or 'none'}")
    position = 0
    try:
        for job in chosen:
            for path in _printed(job):
                if len(chosen) > 1 or path.parent != job.path:
                    print(f"==> job {job.number} ({job.name}) {job.state}: {path} <==")
                end, size = _last(path, lines)
                _write(end)
                position = size if path.parent == job.path else 0
        if follow:
            _follow(opened, chosen[0].number, position, rows)
    except KeyboardInterrupt:
        return


def _printed(job: Job) -> list[Path]:
    """The files in which a job's output is: its own, or Slurm's where it never got so far."""
    own = job.path / "output.txt"
    if own.exists():
        return [own]
    slurm = sorted((job.sweep / ".submitit").glob(f"{job.slurm_job}_*_log.*")) if job.slurm_job else []
    written = [path for path in slurm if path.stat().st_size]
    if not written:
        why = f": {job.error}" if job.error else ""
        print(f"job {job.number} ({job.name}) is {job.state} and has printed nothing{why}", file=sys.stderr)
    return written


def _last(path: Path, count: int) -> tuple[bytes, int]:
    """The last `count` lines of a file, and its size then."""
    size = path.stat().st_size
    data, start = b"", size
    with path.open("rb") as file:
        while start > 0 and data.count(b"\n") <= count:
            before, start = start, max(0, start - 65536)
            file.seek(start)
            data = file.read(before - start) + data
    return b"".join(data.splitlines(keepends=True)[-count:]), size


def _write(data: bytes) -> None:
    """Print what a file has as it is."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _follow(sweep: Sweep, number: int, position: int, rows: Mapping[str, InLine] | None) -> None:
    """Print what a job has printed beyond this many bytes, and what it prints from now on, until it has
    ended; `rows` is what Slurm has in line at the beginning."""
    from rl.launchers.standings import settle

    path = sweep.jobs()[number].path / "output.txt"
    looked = time.monotonic()
    while True:
        over = _over(sweep.jobs()[number], rows or {})  # before the last reading
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                new = file.read()
            position += len(new)
            _write(new)
        if over:
            print(f"job {number} {sweep.jobs()[number].state}", file=sys.stderr)
            return
        time.sleep(FOLLOW_SECONDS)
        if time.monotonic() > looked + SETTLE_SECONDS:
            rows = settle(sweep)
            looked = time.monotonic()


def _over(job: Job, rows: Mapping[str, InLine]) -> bool:
    """Whether a job has ended, and Slurm, which has `rows` in line, will not start it once more."""
    if job.state in ("pending", "submitted", "running"):
        return False
    return job.state not in STOPPED or job.slurm_job not in rows


# --- cancel -----------------------------------------------------------------------------------------------


def cancel(
    sweep: SweepArgument,
    numbers: Annotated[
        list[int] | None, typer.Argument(metavar="[NUMBERS]...", help="of jobs; without: all of them")
    ] = None,
) -> None:
    """Cancel jobs that are in line or run; what runs is saved, and the sweep can be continued."""
    from rl.launchers import slurm

    opened = _open(sweep)
    folder = shlex.quote(str(opened.folder))
    leader = {} if numbers else opened.leader()
    try:
        led = _end_leader(leader)
        opened.settle()
        jobs = opened.jobs()
        chosen = _known(numbers, jobs, "NUMBERS") if numbers else list(jobs)
        asked = [n for n in chosen if slurm.expected(jobs[n])]
        slurm.cancel([str(jobs[n].slurm_job) for n in asked])
        # Those in line first: a pool starts the next as soon as one has ended.
        others = sorted(set(chosen) - set(asked), key=lambda n: jobs[n].state == "running")
        asked += [n for n in others if _ask_to_end(opened, n)]
        late = _await_ends(opened, asked)
    except OSError as error:
        raise ConfigError(f"SWEEP={sweep}: cannot cancel its jobs: {one_line(error)}") from error
    for job in (opened.jobs()[n] for n in sorted(asked)):
        how = f"has not ended yet; see: rl status {folder}" if job.number in late else job.state
        print(f"job {job.number} ({job.name}) {how}")
    if led:
        print("the study has stopped, and the jobs that ran have saved")
    elsewhere = [
        job for n, job in opened.jobs().items() if n in set(chosen) - set(asked) and job.state == "running"
    ]
    for job in elsewhere:
        print(f"job {job.number} ({job.name}) runs on {job.host}: cancel it there", file=sys.stderr)
    if asked or led:
        print(f"continue with: python launch.py resume={folder}")
    elif not elsewhere:
        print(f"nothing to cancel: no{' such' if numbers else ''} job is in line or runs")
    if elsewhere:
        raise typer.Exit(1)


def _end_leader(identity: dict[str, Any]) -> bool:
    """Stop the process that chooses a sweep's jobs, which would choose others for those that end; it stops
    its jobs itself. Whether there was one. Raises ConfigError where it runs on another machine, or does not
    end."""
    exists = rundir.process_exists(identity)
    if exists is None:
        raise ConfigError(
            f"NUMBERS: a process on {identity['host']} chooses this sweep's jobs, and would choose others; "
            "cancel the sweep there, or give the numbers of single jobs"
        )
    if exists:
        _terminate(identity["pid"])
        end = time.monotonic() + PATIENCE_SECONDS
        while rundir.process_exists(identity):
            if time.monotonic() > end:
                raise ConfigError(
                    f"SWEEP: process {identity['pid']}, which chooses its jobs, has not ended yet"
                )
            time.sleep(FOLLOW_SECONDS)
    return bool(exists)


def _terminate(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _ask_to_end(sweep: Sweep, number: int) -> bool:
    """Cancel a job that is in line, or ask one that runs on this machine to save and end; whether it was
    one of these. Raises OSError where the ledger cannot be written, or the process is another user's."""
    while True:
        job = sweep.jobs()[number]
        if job.state in ("pending", "submitted"):
            if sweep.ledger.append(number, "cancelled", only_if=job, error=None):
                return True
        elif job.state == "running":
            exists = rundir.process_exists(vars(job))
            if exists is None:
                return False
            if not exists:
                sweep.settle()
            elif sweep.ledger.append(number, "running", only_if=job, cancelling=True):
                assert job.pid is not None
                _terminate(job.pid)
                return True
        else:
            return False


def _await_ends(sweep: Sweep, numbers: Sequence[int]) -> set[int]:
    """Wait until jobs that were asked to end have, and note it for those that could not; the numbers of those
    that take too long."""
    from rl.launchers import slurm

    end = time.monotonic() + PATIENCE_SECONDS
    waiting = set(numbers)
    while True:
        sweep.settle()
        jobs = [job for number, job in sweep.jobs().items() if number in waiting]
        for job in jobs:
            if job.state == "killed":  # before it had saved
                sweep.ledger.append(job.number, "cancelled", only_if=job)
            elif job.state not in ("pending", "submitted", "running") and not slurm.expected(job):
                waiting.discard(job.number)
        if not waiting or time.monotonic() > end:
            return waiting
        time.sleep(1.0 if any(job.slurm_job for job in jobs) else FOLLOW_SECONDS)


# --- collect ----------------------------------------------------------------------------------------------


def collect(
    sweep: SweepArgument,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="SWEEP/collected.csv by default")
    ] = None,
) -> None:
    """Write the results of a sweep's jobs to one CSV file, and print their objectives over seeds."""
    from rl.launchers import standings
    from rl.launchers.display import whole_table
    from rl.launchers.results import columns, objectives, results, text

    opened = _open(sweep)
    standings.settle(opened)
    rows, keys = results(opened)
    path = output or opened.folder / "collected.csv"
    try:
        rundir.replace_text(path, text(columns(rows, keys), rows))
    except OSError as error:
        raise ConfigError(
            f"--output={path}: {one_line(error)}; name a file in a folder that is there"
        ) from error
    heads, groups = objectives(rows, keys)
    print(whole_table(heads, groups))
    print(f"{len(rows)} jobs in {path}")


# --- what they share --------------------------------------------------------------------------------------


def _open(path: Path) -> Sweep:
    """The sweep whose folder is at `path`; ConfigError where there is none."""
    from rl.launchers.sweep import open_sweep

    return open_sweep(path)


def _known(numbers: Iterable[int], jobs: Collection[int], name: str) -> list[int]:
    """The numbers, each once. Raises ConfigError, naming the argument `name`, unless the jobs have them."""
    from rl.launchers.standings import spans

    chosen = list(dict.fromkeys(numbers))
    for number in chosen:
        if number not in jobs:
            raise ConfigError(f"{name}={number}: the sweep has no such job; its jobs are {spans(jobs)}")
    return chosen
