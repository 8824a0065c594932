"""Heads for continuous actions: deterministic and squashed Gaussian actors in the action space's own units,
and critics of observation and action."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from rl.networks.ensemble import Ensemble

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


class ActionScale(nn.Module):
    """The map from [−1, 1] to a Box's bounds, per dimension: a = scale · x + bias.

    Attributes:
        scale, bias, low, high: tensors [D].
    """

    scale: Tensor
    bias: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        low, high = (np.asarray(bound, np.float64).ravel() for bound in (space.low, space.high))
        for name, value in (
            ("scale", (high - low) / 2),
            ("bias", (high + low) / 2),
            ("low", low),
            ("high", high),
        ):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Actions [B, D] of x in [−1, 1]."""
        return x * self.scale + self.bias

    def clip(self, actions: Tensor) -> Tensor:
        """Actions [B, D] within the bounds of each dimension."""
        return torch.minimum(torch.maximum(actions, self.low), self.high)


class DeterministicActor(nn.Module):
    """μ(s) = bias + scale · tanh(f(s)); `network` is f, from observations [B, …] to [B, D]."""

    def __init__(self, network: Any, observation_shape: tuple[int, ...], space: spaces.Box) -> None:
        super().__init__()
        head = nn.Linear(network.features(observation_shape), math.prod(space.shape))
        self.network = nn.Sequential(network.build(observation_shape), head, nn.Tanh())
        self.scale = ActionScale(space)

    def forward(self, obs: Tensor) -> Tensor:
        """Actions [B, D] of observations [B, …]."""
        actions: Tensor = self.scale(self.network(obs))
        return actions


class SquashedGaussianActor(nn.Module):
    """a = bias + scale · tanh(u), u ~ N(μ(s), σ(s)); `network` is from observations to [μ, raw log σ], [B,
    2·D]."""

    def __init__(self, network: Any, observation_shape: tuple[int, ...], space: spaces.Box) -> None:
        super().__init__()
        self.size = math.prod(space.shape)
        head = nn.Linear(network.features(observation_shape), 2 * self.size)
        self.network = nn.Sequential(network.build(observation_shape), head)
        self.scale = ActionScale(space)
        self.log_scale = float(np.log((space.high - space.low) / 2).sum())

    def forward(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [B, D] drawn with standard normal noise [B, D], and log π(a) [B]."""
        mean, raw = self.network(obs).float().split(self.size, dim=-1)
        log_std = squash_log_std(raw)
        u = mean + log_std.exp() * noise
        logprob = squashed_log_prob(noise, log_std, u) - self.log_scale
        actions: Tensor = self.scale(torch.tanh(u))
        return actions, logprob


def squash_log_std(raw: Tensor) -> Tensor:
    """log σ in [−5, 2] from any number: LOG_STD_MIN + ½ (LOG_STD_MAX − LOG_STD_MIN)(tanh(raw) + 1)."""
    return LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (torch.tanh(raw) + 1)


def squashed_log_prob(noise: Tensor, log_std: Tensor, u: Tensor) -> Tensor:
    """log density [B] of tanh(u), u = μ + σ · noise, all [B, D] (Haarnoja et al. 2018, appendix C).

        Σ_d −½ noise² − log σ − ½ log 2π − log(1 − tanh(u)²)

    with log(1 − tanh(u)²) = 2 (log 2 − u − softplus(−2u)), which neither over- nor underflows. Scaling the
    actions by s adds −Σ_d log s_d.
    """
    gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    jacobian = 2 * (math.log(2) - u - F.softplus(-2 * u))
    return (gaussian - jacobian).sum(-1)


class Critics(nn.Module):
    """E independent action values Q_e(s, a), as one ensemble."""

    def __init__(
        self, count: int, network: Any, observation_shape: tuple[int, ...], action_size: int
    ) -> None:
        super().__init__()
        shape = (math.prod(observation_shape) + action_size,)
        members = [
            nn.Sequential(network.build(shape), nn.Linear(network.features(shape), 1)) for _ in range(count)
        ]
        self.ensemble = Ensemble(members)

    def forward(self, obs: Tensor, actions: Tensor, count: int | None = None) -> Tensor:
        """Q [E, B] of observations [B, D] and actions [B, A]; with `count`, of that many first critics."""
        q: Tensor = self.ensemble(torch.cat((obs, actions), dim=-1), count)
        return q.squeeze(-1).float()
