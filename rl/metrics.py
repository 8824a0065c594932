"""What an algorithm reports of one iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rl.errors import NonFiniteError

if TYPE_CHECKING:
    from torch import nn


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


def require_finite(scalars: dict[str, float], module: nn.Module) -> None:
    """Raise NonFiniteError naming the first scalar or parameter that is NaN or infinite."""
    for name, value in scalars.items():
        if not math.isfinite(value):
            raise NonFiniteError(f"{name} is {value}")
    import torch

    names, parameters = zip(*module.named_parameters(), strict=True)
    finite = torch.stack([parameter.isfinite().all() for parameter in parameters]).tolist()
    for name, is_finite in zip(names, finite, strict=True):
        if not is_finite:
            raise NonFiniteError(f"parameter {name} is not finite after the update")
