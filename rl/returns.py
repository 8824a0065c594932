"""Advantages and returns: pure functions of a rollout, tested against hand-worked numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    gamma: float,
    gae_lambda: float,
) -> np.ndarray:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), episodes ended and cut correctly.

        δ_t = r_t + γ (1 − terminated_t) V(s'_t) − V(s_t)
        A_t = δ_t + γλ (1 − (terminated_t | truncated_t)) A_{t+1}

    Args:
        rewards, values, terminated, truncated: [T, N]; V(s_t) of the observations acted on.
        next_values: [T, N], V of the true successor s'_t; not read where an episode terminated.

    Returns:
        Advantages [T, N], float32. Returns are `advantages + values`.
    """
    deltas = rewards + gamma * np.where(terminated, 0.0, next_values) - values
    decay = (gamma * gae_lambda) * ~(terminated | truncated)
    advantages = np.empty_like(deltas)
    if deltas.shape[1] == 1:  # scalars are several times faster than arrays of one
        return _discounted_sums(deltas[:, 0].tolist(), decay[:, 0].tolist())[:, None]
    running = np.zeros(deltas.shape[1])
    for t in range(len(deltas) - 1, -1, -1):
        running = deltas[t] + decay[t] * running
        advantages[t] = running
    return advantages.astype(np.float32)


def _discounted_sums(deltas: list[float], decay: list[float]) -> np.ndarray:
    """A_t = δ_t + decay_t · A_{t+1} along one env, [T] float32."""
    advantages, running = [0.0] * len(deltas), 0.0
    for t in range(len(deltas) - 1, -1, -1):
        advantages[t] = running = deltas[t] + decay[t] * running
    return np.asarray(advantages, dtype=np.float32)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var(R − V) / Var(R) of values and returns [B]; NaN where the returns do not vary."""
    variance = float(returns.var(correction=0))
    return 1 - float((returns - values).var(correction=0)) / variance if variance > 0 else math.nan


def td_target(rewards: Tensor, discounts: Tensor, terminated: Tensor, next_values: Tensor) -> Tensor:
    """r + γⁿ (1 − terminated) V(s'), all [B]."""
    return rewards + discounts * (1 - terminated) * next_values
