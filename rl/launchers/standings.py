"""How the jobs of a sweep stand, from its files and the cluster: as JSON values, and as text for people."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from rl.errors import one_line
from rl.launchers import slurm
from rl.launchers.display import STYLES, progress, progress_facts, whole_table
from rl.launchers.ledger import STOPPED, Job
from rl.launchers.slurm import InLine
from rl.launchers.sweep import Sweep


@dataclass
class Standing:
    """How a job stands by the ledger and by Slurm."""

    job: Job
    slurm: InLine | None = None
    """None where Slurm does not have it."""
    accounted: str | None = None
    """How Slurm's accounting says it ended."""

    @property
    def active(self) -> bool:
        """Whether it runs or is in line; also for the second time."""
        return self.job.state in ("pending", "submitted", "running") or self.slurm is not None

    @property
    def node(self) -> str | None:
        """Where it runs, or ran last."""
        return (self.slurm.nodes if self.slurm else None) or self.job.host

    @property
    def reason(self) -> str | None:
        """Why it does not run, where anything knows."""
        if self.slurm is not None and self.slurm.state != "RUNNING":
            why = f" ({self.slurm.reason})" if self.slurm.reason not in ("", "None") else ""
            return f"{self.slurm.state}{why}"
        if self.job.state in ("pending", "submitted", "running", "completed"):
            return None
        slurm = f"Slurm: {self.accounted}" if self.accounted else None
        return "; ".join(filter(None, (self.job.error, slurm))) or None


def look(sweep: Sweep) -> list[Standing]:
    """How each job of a sweep stands; what became of killed ones is noted first, where we may write."""
    rows = settle(sweep) or {}
    standings = [Standing(job) for job in sweep.jobs().values()]
    for s in standings:
        s.slurm = rows.get(str(s.job.slurm_job)) if slurm.expected(s.job) else None
    ended = {s.job.slurm_job for s in standings if not s.active and s.job.state != "completed"} - {None}
    accounted = slurm.accounting([str(name) for name in ended])
    for s in standings:
        s.accounted = None if s.active else accounted.get(str(s.job.slurm_job))
    return standings


def values(sweep: Sweep, standings: Sequence[Standing]) -> dict[str, Any]:
    """What `rl status --json` prints."""
    jobs = []
    for s in standings:
        job, facts = s.job, progress_facts(s.job)
        step, total, speed = facts["env_steps"], facts["total_timesteps"], facts["SPS"]
        running = job.state == "running" and speed and total and step is not None
        jobs.append(
            {
                "job": job.number,
                "folder": str(job.path),
                "overrides": job.overrides,
                "state": job.state,
                "attempt": job.attempt,
                **facts,
                "seconds_left": (total - step) / speed if running else None,
                "objective": _finite(job.objective),
                "node": s.node,
                "slurm_job": job.slurm_job,
                "slurm_state": s.slurm.state if s.slurm else None,
                "reason": s.reason,
                **{key: getattr(job, key) for key in ("created", "submitted", "started", "ended")},
            }
        )
    return {"sweep": str(sweep.folder), "counts": Counter(s.job.state for s in standings), "jobs": jobs}


def drawn(sweep: Sweep, standings: Sequence[Standing]) -> str:
    """The counts, a table of the jobs without columns that would be empty, why some do not run, and what can
    be done about it."""
    local = os.uname().nodename
    rows = []
    for s in standings:
        job = s.job
        step, speed, latest, left = progress(job)
        rows.append(
            {
                "job": str(job.number),
                "what": job.name,
                "state": Text(job.state, STYLES.get(job.state, "")),
                "attempt": str(job.attempt) if job.attempt > 1 else "-",
                "step": step,
                "steps/s": speed if job.state == "running" else "-",
                "return": latest,
                "left": left,
                "objective": "-" if job.objective is None else f"{job.objective:,.2f}",
                "node": s.node if s.node and (job.slurm_job or s.node != local) else "-",
            }
        )
    always = ("job", "what", "state", "step")
    shown = [key for key in (rows[0] if rows else ()) if key in always or any(r[key] != "-" for r in rows)]
    counts = "  ".join(f"{n} {state}" for state, n in Counter(s.job.state for s in standings).items())
    table = whole_table(shown, [[row[key] for key in shown] for row in rows], fold="what")
    lines = [f"sweep {sweep.folder}", counts or "no jobs", "", table, *_reasons(standings)]
    return "\n".join([*lines, *_advice(sweep, standings)])


def _reasons(standings: Sequence[Standing]) -> list[str]:
    """A line for each reason why jobs do not run, with the jobs that have it in common."""
    sharing: dict[tuple[str, str], list[int]] = defaultdict(list)
    for s in standings:
        if s.reason is not None:
            sharing[s.job.state, s.reason].append(s.job.number)
    return [f"{_jobs(numbers)} {state}: {why}" for (state, why), numbers in sharing.items()]


def _advice(sweep: Sweep, standings: Sequence[Standing]) -> list[str]:
    """The commands that go on with jobs that have stopped or failed."""
    go_on = f"python launch.py resume={shlex.quote(str(sweep.folder))}"
    states = {s.job.state for s in standings}
    lines = []
    if any(s.job.state in STOPPED and not s.active for s in standings):
        lines.append(f"continue with: {go_on}")
    elif "pending" in states and not states & {"running", "submitted"}:
        lines.append(f"pending jobs wait for the process that started the sweep; where it is gone: {go_on}")
    if "failed" in states:
        lines.append(
            f"see why: rl logs {shlex.quote(str(sweep.folder))}; retry with: {go_on} retry_failed=true"
        )
    return lines


def settle(sweep: Sweep) -> dict[str, InLine] | None:
    """Note what became of jobs that could not do so, unless the sweep is not ours to write; what Slurm has of
    them, as `Sweep.settle` says."""
    try:
        return sweep.settle()
    except OSError as error:
        print(f"shown as it was noted, since nothing can be noted now: {one_line(error)}", file=sys.stderr)
        return slurm.in_line(os.stat(sweep.folder).st_uid)


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers as text: 0-3, 5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _jobs(numbers: Sequence[int]) -> str:
    return f"job{'s' * (len(numbers) > 1)} {spans(numbers)}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
