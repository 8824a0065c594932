"""What acting for a while in several envs gave, as the on-policy algorithms store it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl.envs.vector import Step


class Rollout:
    """Buffers for T steps in N envs, filled with `add` from t = 0.

    Attributes:
        obs: [T + 1, N, …], what was acted on and, last, what will be.
        actions: [T, N, …], as sampled.
        rewards: [T, N] float32, as learnt from.
        terminated, truncated: [T, N] bool.
        active: [T, N] bool, False where there was nobody to act (see `Step.active`).
        cut: (t, env, true successor [1, …]) wherever an episode was cut and not terminated.
    """

    def __init__(self, steps: int, obs: np.ndarray, action_shape: Sequence[int], action_dtype: type) -> None:
        n = len(obs)
        self.obs = np.empty((steps + 1, *obs.shape), obs.dtype)
        self.obs[0] = obs
        self.actions: np.ndarray = np.empty((steps, n, *action_shape), action_dtype)
        self.rewards = np.empty((steps, n), np.float32)
        self.terminated, self.truncated = np.empty((2, steps, n), bool)
        self.active = np.ones((steps, n), bool)
        self.cut: list[tuple[int, int, np.ndarray]] = []

    def add(self, t: int, step: Step, obs: np.ndarray, rewards: np.ndarray) -> list[int]:
        """Store step t, with the observations and rewards as learnt from; which envs were cut at it."""
        self.obs[t + 1] = obs
        self.rewards[t] = rewards
        self.terminated[t], self.truncated[t] = step.terminated, step.truncated
        if step.active is not None:
            self.active[t] = step.active
        if not step.episodes:
            return []
        return [int(i) for i in np.flatnonzero(step.truncated & ~step.terminated)]

    def next_values(self, values: np.ndarray, cut_values: np.ndarray) -> np.ndarray:
        """V of each step's true successor [T, N], from V of `obs` [T + 1, N] and of those in `cut`."""
        following = values[1:].copy()
        for (t, i, _), value in zip(self.cut, cut_values, strict=True):
            following[t, i] = value
        return following
