"""What one sees of a sweep: a live table in a terminal, elsewhere a line for each change."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rl.launchers.ledger import Job
from rl.launchers.sweep import Sweep
from rl.progress import clock
from rl.standing import last_metrics

STYLES = {
    "completed": "green", "running": "bold", "failed": "bold red", "killed": "red", "preempted": "yellow",
    "interrupted": "yellow", "cancelled": "magenta", "pruned": "blue",
}  # fmt: skip
COLUMNS = ("job", "what", "state", "attempt", "step", "return", "objective")
LEAST_NAME = 16  # columns for the name of a job
MOST_ROWS = 25  # of running jobs in the live table


class SweepDisplay:
    """Shows how the jobs of a sweep stand, each time `update` is called."""

    def __init__(self, sweep: Sweep, numbers: Sequence[int], console: Console | None = None) -> None:
        self.sweep = sweep
        self.total = len(numbers)
        self.console = console or Console(stderr=True)
        self.began = time.time()
        self._shown: dict[int, str] = {}
        self._live: Live | None = None

    def __enter__(self) -> SweepDisplay:
        self.say(f"sweep {self.sweep.folder}")
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str, style: str = "") -> None:
        """Print a line, above the table where there is one."""
        self.console.print(Text(line, style), soft_wrap=True, highlight=False)

    def update(self, jobs: Sequence[Job]) -> None:
        """Show these jobs: a line for each whose state has changed, and the table."""
        done = sum(job.state == "completed" for job in jobs)
        for job in jobs:
            if self._shown.get(job.number) != job.state:
                self._shown[job.number] = job.state
                if job.state not in ("pending", "submitted") and (job.ended or 0) >= self.began:
                    self.say(f"{change(job)}  ({done} of {self.total} complete)", STYLES.get(job.state, ""))
                elif job.state == "running" and self._live is None:
                    self.say(change(job))
        if self._live is not None:
            self._live.update(self._drawing(jobs), refresh=True)

    def _drawing(self, jobs: Sequence[Job]) -> Group:
        counts = Counter(job.state for job in jobs)
        running = [job for job in jobs if job.state == "running"]
        rows = Table("job", "what", "step", "steps/s", "return", "left", box=None, padding=(0, 2, 0, 0))
        for job in running[:MOST_ROWS]:
            rows.add_row(str(job.number), job.name, *progress(job))
        line = "  ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        elapsed = clock(time.time() - self.began)
        return Group(rows, Text(f"{line}  {elapsed} elapsed", "cyan"))


def change(job: Job) -> str:
    """A line for a job that has changed its state."""
    line = f"job {job.number} ({job.name}) {job.state}"
    if job.state == "completed" and job.objective is not None:
        line += f": objective {job.objective:,.2f}"
    if job.state == "running" and job.attempt > 1:
        line += f", attempt {job.attempt}"
    if job.state in ("failed", "killed"):
        line += f": {job.error or 'no word of why'}; see {job.path / 'output.txt'}"
    return line


def progress(job: Job) -> tuple[str, str, str, str]:
    """Step, steps a second, latest return and time left of a job, as text; dashes where unknown."""
    facts = progress_facts(job)
    step, total, speed, latest = (facts[key] for key in ("env_steps", "total_timesteps", "SPS", "return"))
    left = clock((total - step) / speed) if speed and total and step is not None else "-"
    return (
        "-" if step is None else f"{step:,}" + (f"/{total:,}" if total else ""),
        "-" if speed is None else f"{speed:,.0f}",
        "-" if latest is None else f"{latest:,.1f}",
        left if job.state == "running" else "-",
    )


def progress_facts(job: Job) -> dict[str, Any]:
    """`env_steps`, `total_timesteps`, `SPS` and the latest training `return` of a job, None where unknown."""
    from rl import rundir

    record = rundir.read_if_any(job.path)
    newest = last_metrics(job.path)
    steps = [value for value in (record.get("env_steps"), newest.get("env_steps")) if value is not None]
    return {
        "env_steps": max(steps) if steps else None,
        "total_timesteps": record.get("total_timesteps"),
        "SPS": newest.get("charts/SPS"),
        "return": newest.get("charts/episodic_return"),
    }


def table(sweep: Sweep) -> str:
    """How every job of a sweep stands, as text for the end of a command."""
    jobs = sweep.jobs().values()
    heads = [head for head in COLUMNS if head != "attempt" or any(job.attempt > 1 for job in jobs)]
    rows = []
    for job in jobs:
        step, _, latest, _ = progress(job)
        objective = "-" if job.objective is None else f"{job.objective:,.2f}"
        state = Text(job.state, STYLES.get(job.state, ""))
        cells = (str(job.number), job.name, state, str(job.attempt), step, latest, objective)
        rows.append([cell for head, cell in zip(COLUMNS, cells, strict=True) if head in heads])
    return whole_table(heads, rows, fold="what") + "\n"


def whole_table(heads: Sequence[str], rows: Sequence[Sequence[Any]], fold: str | None = None) -> str:
    """A table as text. The column `fold` shares its lines where there is little room; nothing is cut, even
    where the lines get longer than the terminal is wide."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in heads:
        wraps = head == fold
        table.add_column(head, no_wrap=not wraps, overflow="fold", min_width=LEAST_NAME if wraps else None)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    console = Console()
    unbounded = console.options.update(width=10_000)
    console.width = max(console.width, console.measure(table, options=unbounded).minimum)
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")
