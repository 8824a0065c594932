"""What an algorithm reports of one iteration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class FinishedEpisode(NamedTuple):
    """A training episode that ended: at which env step of the run, in which env, raw return and length in
    steps."""

    env_steps: int
    env: int
    episodic_return: float
    length: int


@dataclass
class Metrics:
    """Scalars under CleanRL's names (`losses/…`, `charts/…`, `time/…`) and the episodes that finished."""

    scalars: dict[str, float] = field(default_factory=dict)
    episodes: list[FinishedEpisode] = field(default_factory=list)
