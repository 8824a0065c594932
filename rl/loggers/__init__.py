"""Where metrics go: the contract of a logger, and what a logger is told about its run. One module a sink."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class RunInfo:
    """What a logger may know of its run."""

    path: Path  # the run directory
    name: str
    config: dict[str, Any]  # resolved, nested, JSON values
    tags: list[str] = field(default_factory=list)
    group: str | None = None
    env_steps: int = 0  # 0, or where a resumed run continues


class Logger(Protocol):
    """A sink for metrics. Calls arrive in order of `env_steps`, between `open` and `close`."""

    def check(self) -> None:
        """Raises ConfigError where the sink cannot work here; imports nothing heavy, touches no file."""

    def open(self, run: RunInfo, state: dict[str, Any] | None) -> None:
        """Start, or continue from `state` (what `state_dict` gave when the resumed checkpoint was written).

        What an earlier process logged after `run.env_steps` is dropped or superseded, never shown twice.
        """

    def log(self, env_steps: int, metrics: dict[str, float]) -> None:
        """Record scalars at `env_steps`; NaN and infinity are values like any other."""

    def video(self, env_steps: int, path: Path) -> None:
        """Show the mp4 at `path`; a sink that cannot show videos does nothing."""

    def flush(self) -> None:
        """Hand everything logged so far to the file or service."""

    def state_dict(self) -> dict[str, Any]:
        """What `open` needs to continue, as JSON values. Flushes first: what the state counts is written."""

    def close(self, status: str) -> None:
        """Finish with the run's status: completed, failed, preempted or interrupted. Twice is as once."""


class StepMeans:
    """Gathers what is logged at one env step, for sinks that show one value a step: they get the mean.

    (Environments with a time limit end together: eight episodes at one env step are common.)
    """

    def __init__(self) -> None:
        self.env_steps = 0
        self._values: dict[str, list[float]] = {}  # name -> [sum, count], of the current step
        self._changed: dict[str, None] = {}  # names, in order, not taken since their last value

    def add(self, env_steps: int, metrics: dict[str, float]) -> tuple[int, dict[str, float]] | None:
        """Add values; returns the previous step and its untaken means when `env_steps` has moved on."""
        finished = None
        if env_steps != self.env_steps:
            if self._changed:
                finished = self.env_steps, self.take()
            self._values.clear()
            self.env_steps = env_steps
        for name, value in metrics.items():
            entry = self._values.setdefault(name, [0.0, 0])
            entry[0] += value
            entry[1] += 1
            self._changed[name] = None
        return finished

    def take(self) -> dict[str, float]:
        """Means of what changed at the current step since the last `take`; they stay, to be added to."""
        means = {name: self._values[name][0] / self._values[name][1] for name in self._changed}
        self._changed.clear()
        return means
