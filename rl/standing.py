"""How a run stands, from the files in its directory alone: they may be being written meanwhile."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from rl import rundir

_TAIL = 65536  # bytes at the end of metrics.jsonl that are looked at


def standing(run: Path) -> dict[str, Any]:
    """run.json with what the other files know: the newest step, rate, returns and evaluation; `killed` where
    its process is gone."""
    record = rundir.read(run)
    facts: dict[str, Any] = {"directory": str(run), **record}
    if record.get("status") == "running" and not rundir.is_alive(record):
        facts["status"] = "killed"
    line = last_metrics(run)
    facts["env_steps"] = max(line.get("env_steps", 0), record.get("env_steps", 0))
    facts["SPS"] = line.get("charts/SPS")
    returns = [float(row["return"]) for row in _rows(run / "episodes.csv")]
    facts["episodes"] = len(returns)
    facts["recent_return"] = sum(returns[-100:]) / len(returns[-100:]) if returns else None
    facts["checkpoints"] = (
        sorted(p.name for p in (run / "checkpoints").glob("step_*")) if (run / "checkpoints").is_dir() else []
    )
    facts["evaluations"] = {steps: sum(values) / len(values) for steps, values in evaluations(run).items()}
    facts["videos"] = (
        sorted(str(p) for p in (run / "videos").glob("*.mp4")) if (run / "videos").is_dir() else []
    )
    return facts


def evaluations(run: Path) -> dict[int, list[float]]:
    """The returns of a run's evaluations by env step; none where there was no evaluation yet."""
    returns: dict[int, list[float]] = {}
    for row in _rows(run / "evaluations.csv"):
        returns.setdefault(int(row["env_steps"]), []).append(float(row["return"]))
    return returns


def _rows(path: Path) -> list[dict[str, str]]:
    """The complete rows of a CSV file that may be being written; none where there is no file."""
    if not path.exists():
        return []
    text = path.read_text()
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))


def last_metrics(run: Path) -> dict[str, Any]:
    """The newest complete line of a run's metrics.jsonl that has a training rate, with the
    `charts/episodic_return` of the newest line that has one. Empty where there is none."""
    newest: dict[str, Any] = {}
    for line in reversed(_last_lines(run / "metrics.jsonl")):
        if b'"charts/SPS"' in line and line.startswith(b"{"):
            parsed: dict[str, Any] = json.loads(line)
            newest = newest or parsed
            if "charts/episodic_return" in parsed:
                return {**newest, "charts/episodic_return": parsed["charts/episodic_return"]}
    return newest


def newest_metrics(run: Path) -> dict[str, Any]:
    """The newest value of each metric in the last lines of a run's metrics.jsonl, sorted by name; None for
    one that was not finite. Empty where there is none."""
    newest: dict[str, Any] = {}
    for line in _last_lines(run / "metrics.jsonl"):
        if line.startswith(b"{"):
            newest.update(json.loads(line))
    newest.pop("env_steps", None)
    return dict(sorted(newest.items()))


def _last_lines(path: Path) -> list[bytes]:
    """The complete lines at the end of a file, the first of them perhaps cut; none where there is no file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL))
        return file.read().split(b"\n")[:-1]
