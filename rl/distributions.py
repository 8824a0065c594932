"""Action distributions: sampled in NumPy while acting, evaluated in torch while learning.

The actor's head puts out `outputs` [N, K]: logits, or means beside which a state-independent log standard
deviation `logstd` [K] is learnt (None where the distribution has none). `noise` draws the randomness of a
whole rollout at once, so that a step of acting is an addition and the state of the stream is known between
rollouts.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F


class Distribution(Protocol):
    """What the policy-gradient algorithms need of a distribution over actions."""

    outputs: int  # K, the size of the actor's head
    has_logstd: bool
    action_shape: tuple[int, ...]  # of one env: () or (D,)
    action_dtype: Any

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Noise `[*shape, K]` for as many draws."""

    def sample(self, outputs: np.ndarray, noise: np.ndarray, std: np.ndarray | None) -> np.ndarray:
        """Actions [N] or [N, D] drawn with noise [N, K]."""

    def mode(self, outputs: np.ndarray) -> np.ndarray:
        """The most likely actions [N] or [N, D]."""

    def log_prob_and_entropy(
        self, outputs: Tensor, logstd: Tensor | None, actions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """log π(a) and the entropy, [B] each, of actions [B] or [B, D] under outputs [B, K]."""


class Categorical:
    """Independent choices among `nvec[0], nvec[1], …` actions from their logits side by side; `single`: one
    choice, actions [N]."""

    has_logstd = False
    action_dtype: Any = np.int64

    def __init__(self, nvec: list[int], single: bool) -> None:
        self.nvec = nvec
        self.single = single
        self.outputs = sum(nvec)
        self.action_shape: tuple[int, ...] = () if single else (len(nvec),)
        self._starts = np.cumsum([0, *nvec[:-1]]).tolist()

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Gumbel noise: argmax(logits + noise) is a draw from softmax(logits)."""
        return rng.gumbel(size=(*shape, self.outputs)).astype(np.float32)

    def sample(self, outputs: np.ndarray, noise: np.ndarray, std: np.ndarray | None) -> np.ndarray:
        """Actions [N] or [N, D] by the Gumbel-max trick."""
        return self.mode(outputs + noise)

    def mode(self, outputs: np.ndarray) -> np.ndarray:
        """The actions of the largest logits."""
        if self.single:
            return outputs.argmax(-1)
        choices = zip(self._starts, self.nvec, strict=True)
        return np.stack([outputs[:, start : start + n].argmax(-1) for start, n in choices], axis=-1)

    def log_prob_and_entropy(
        self, outputs: Tensor, logstd: Tensor | None, actions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """log softmax(logits)[a] and −Σ p log p, summed over the choices."""
        if self.single:
            logp = F.log_softmax(outputs, dim=-1)
            return logp.gather(-1, actions.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)
        parts = [Categorical([n], single=True) for n in self.nvec]
        pairs = [
            part.log_prob_and_entropy(logits, None, actions[:, i])
            for i, (part, logits) in enumerate(zip(parts, outputs.split(self.nvec, dim=-1), strict=True))
        ]
        logprobs, entropies = zip(*pairs, strict=True)
        return torch.stack(logprobs).sum(0), torch.stack(entropies).sum(0)


class DiagonalGaussian:
    """Independent normal distributions with a state-independent standard deviation."""

    has_logstd = True
    action_dtype: Any = np.float32

    def __init__(self, size: int) -> None:
        self.outputs = size
        self.action_shape: tuple[int, ...] = (size,)

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Standard normal noise."""
        return rng.standard_normal((*shape, self.outputs), dtype=np.float32)

    def sample(self, outputs: np.ndarray, noise: np.ndarray, std: np.ndarray | None) -> np.ndarray:
        """μ + σ · noise."""
        return outputs + std * noise

    def mode(self, outputs: np.ndarray) -> np.ndarray:
        """μ."""
        return outputs

    def log_prob_and_entropy(
        self, outputs: Tensor, logstd: Tensor | None, actions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """log N(a; μ, σ) = −½((a − μ)/σ)² − log σ − ½ log 2π and its entropy ½ + ½ log 2π + log σ, summed
        over dimensions."""
        assert logstd is not None
        z = (actions - outputs) * (-logstd).exp()
        constant = logstd.sum() + 0.5 * math.log(2 * math.pi) * self.outputs
        logprob = z.square().sum(-1).mul(-0.5) - constant
        return logprob, (constant + 0.5 * self.outputs).expand_as(logprob)


def distribution_over(space: Any) -> Distribution:
    """The distribution for one env's action space.

    Raises:
        TypeError: the space is not Discrete, MultiDiscrete or Box.
    """
    if isinstance(space, spaces.Discrete):
        return Categorical([int(space.n)], single=True)
    if isinstance(space, spaces.MultiDiscrete):
        return Categorical([int(n) for n in space.nvec.ravel()], single=False)
    if isinstance(space, spaces.Box):
        return DiagonalGaussian(math.prod(space.shape))
    raise TypeError(f"no distribution over {space}")
