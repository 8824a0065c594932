"""The results of a sweep's jobs as rows: the values swept, the objective, the last metrics and evaluation."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from rl import rundir
from rl.launchers.display import progress_facts
from rl.launchers.ledger import Job
from rl.launchers.sweep import Sweep
from rl.standing import evaluations, newest_metrics

Row = dict[str, Any]


def results(sweep: Sweep) -> tuple[list[Row], list[str]]:
    """A row for each job, without what is not known of it, and the swept keys: those that not all jobs set to
    the same value."""
    jobs = sweep.jobs()
    values = settings(jobs)
    found = dict.fromkeys(key for of_job in values.values() for key in of_job)
    keys = [key for key in found if len({of_job.get(key) for of_job in values.values()}) > 1]
    return [row(job, {key: values[n].get(key) for key in keys}) for n, job in jobs.items()], keys


def settings(jobs: Mapping[int, Job]) -> dict[int, dict[str, str]]:
    """What the overrides of jobs set, as text by key, by number."""
    words = {word for job in jobs.values() for word in job.overrides}
    parsed = {word: assigned(word) for word in words}
    return {number: dict(parsed[word] for word in job.overrides) for number, job in jobs.items()}


def assigned(override: str) -> tuple[str, str]:
    """Key and value of an override, the value without quotes and escapes where it is a plain text."""
    parsed = OverridesParser.create().parse_override(override)
    value = parsed.value()
    plain = value if isinstance(value, str) else override.partition("=")[2]
    return str(parsed.key_or_group), plain


def row(job: Job, swept: Mapping[str, str | None]) -> Row:
    """What is known of one job. `train_seconds` is over all its processes; the evaluation is the final one,
    with the standard deviation of its episodes' returns."""
    record = rundir.read_if_any(job.path)
    steps = progress_facts(job)["env_steps"]
    final = evaluations(job.path).get(record.get("env_steps", -1), []) if job.state == "completed" else []
    return {
        "job": job.number,
        "folder": job.folder,
        "state": job.state,
        "attempt": job.attempt,
        **swept,
        "seed": swept.get("seed") or record.get("seed"),
        "objective": job.objective,
        "env_steps": steps,
        "train_seconds": record.get("train_seconds"),
        "evaluation_mean": statistics.fmean(final) if final else None,
        "evaluation_std": statistics.pstdev(final) if final else None,
        "evaluation_episodes": len(final) or None,
        **newest_metrics(job.path),
    }


def columns(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """The columns of the rows: which job, what was swept, what came of it, its metrics by name."""
    metrics = sorted({name for row in rows for name in row if "/" in name and name not in keys})
    first = ["job", "folder", "state", "attempt", *(key for key in keys if key != "seed"), "seed"]
    measured = ["objective", "env_steps", "train_seconds"]
    return [*first, *measured, "evaluation_mean", "evaluation_std", "evaluation_episodes", *metrics]


def text(heads: Sequence[str], rows: Sequence[Row]) -> str:
    """The rows as CSV; what is not known is empty."""
    file = io.StringIO()
    writer = csv.DictWriter(file, heads, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in row.items()} for row in rows)
    return file.getvalue()


def objectives(rows: Sequence[Row], keys: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Mean and standard deviation of the objective over seeds, for each combination of the other swept
    values: the heads and the lines of a table. One seed has no deviation."""
    others = [key for key in keys if key != "seed"]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row[key] or "") for key in others), []).append(row)
    lines = []
    for values, members in groups.items():
        known = [row["objective"] for row in members if row["objective"] is not None]
        mean = f"{statistics.fmean(known):,.2f}" if known else "-"
        spread = f" ± {statistics.pstdev(known):,.2f}" if len(known) > 1 else ""
        lines.append([*values, f"{len(known)} of {len(members)}", mean + spread])
    return [*others, "complete", "objective"], lines
