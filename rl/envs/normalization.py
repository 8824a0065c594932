"""Running normalisation of observations and rewards, as part of an algorithm's state rather than of its
environments.

Statistics are kept in float64 and updated with whole batches by the parallel formula of Chan, Golub and
LeVeque ("Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979). Environments keep
giving raw numbers, so that logged returns need no undoing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

EPSILON = 1e-8  # added to the variance, as in gymnasium's wrappers
FIRST_COUNT = 1e-4  # weight of the mean 0 and variance 1 that statistics start from


class ObsNormalizer:
    """Maps observations to mean 0 and variance 1 per component, by what has been seen so far."""

    def __init__(self, shape: tuple[int, ...], clip: float | None) -> None:
        """Normalise observations of `shape`; the result is clipped to ±`clip` (None: not at all)."""
        self.mean = np.zeros(shape)
        self.var = np.ones(shape)
        self.count = FIRST_COUNT
        self._clip = clip
        self._deviation = np.sqrt(self.var + EPSILON)

    def __call__(self, obs: np.ndarray, update: bool = True) -> np.ndarray:
        """Return `obs` `[N, *shape]` normalised, as float32; with `update`, learn from it first."""
        normal = obs.astype(np.float64)
        if update:
            self._update(normal)
        normal -= self.mean
        normal /= self._deviation
        if self._clip is not None:
            np.maximum(normal, -self._clip, out=normal)
            np.minimum(normal, self._clip, out=normal)
        return normal.astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the statistics."""
        return {"mean": self.mean.copy(), "var": self.var.copy(), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the statistics of `state`."""
        self.mean = np.array(state["mean"], np.float64).reshape(self.mean.shape)
        self.var = np.array(state["var"], np.float64).reshape(self.var.shape)
        self.count = float(state["count"])
        self._deviation = np.sqrt(self.var + EPSILON)

    def _update(self, obs: np.ndarray) -> None:
        """Merge float64 observations of mean m, variance v and number n into (mean, var, count).

        With total = count + n:
        mean ← mean + (m − mean)·n/total
        var  ← (var·count + v·n + (m − mean)²·count·n/total) / total
        """
        n = len(obs)
        total = self.count + n
        batch_mean = obs[0] if n == 1 else np.add.reduce(obs, 0) / n
        delta = batch_mean - self.mean
        self.var *= self.count / total
        if n > 1:
            deviations = obs - batch_mean
            deviations *= deviations
            self.var += np.add.reduce(deviations, 0) / total
        self.mean += delta * (n / total)
        delta *= delta
        delta *= self.count * n / total**2
        self.var += delta
        self.count = total
        np.sqrt(self.var + EPSILON, self._deviation)


class RewardNormalizer:
    """Divides rewards by the standard deviation of the discounted sum of past rewards."""

    def __init__(self, num_envs: int, gamma: float, clip: float | None) -> None:
        """Scale rewards of `num_envs` environments; the result is clipped to ±`clip` (None: not at all)."""
        self.mean = 0.0
        self.var = 1.0
        self.count = FIRST_COUNT
        self.returns = np.zeros(num_envs)  # [N] sum over the running episode of gamma^(age)·reward
        self._gamma = gamma
        self._clip = clip

    def __call__(self, reward: np.ndarray, ended: np.ndarray, update: bool = True) -> np.ndarray:
        """Return `reward` `[N]` scaled, float32 `[N]`; with `update`, learn from it first.

        `ended` `[N]` tells where this step was the last of its episode, terminated or truncated: the sum
        begins anew after it.
        """
        if update:
            self._update(reward, ended)
        normal = reward.astype(np.float64)
        normal /= math.sqrt(self.var + EPSILON)
        if self._clip is not None:
            np.maximum(normal, -self._clip, out=normal)
            np.minimum(normal, self._clip, out=normal)
        return normal.astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the statistics and of the running sums."""
        return {"mean": self.mean, "var": self.var, "count": self.count, "returns": self.returns.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the statistics and running sums of `state`."""
        self.mean, self.var, self.count = (float(state[key]) for key in ("mean", "var", "count"))
        returns = np.array(state["returns"], np.float64).ravel()
        if returns.shape == self.returns.shape:  # a warm start or an evaluation may have other envs
            self.returns = returns

    def _update(self, reward: np.ndarray, ended: np.ndarray) -> None:
        """Add one step to the running sums, merge them into the statistics as `ObsNormalizer` does."""
        self.returns *= self._gamma
        self.returns += reward
        sums = self.returns.tolist()
        n = len(sums)
        total = self.count + n
        batch_mean = math.fsum(sums) / n
        batch_var = math.fsum((each - batch_mean) ** 2 for each in sums) / n if n > 1 else 0.0
        delta = batch_mean - self.mean
        self.mean += delta * n / total
        self.var = (self.var * self.count + batch_var * n + delta * delta * self.count * n / total) / total
        self.count = total
        self.returns[ended] = 0.0
