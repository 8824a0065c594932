"""What acting for a while in several envs gave, as the on-policy algorithms store it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rl.envs.vector import Step


class Rollout:
    """Buffers for T steps in N envs, filled with `add` from t = 0.

    Args:
        steps: T.
        obs: [N, …], what is acted on first.
        action_shape, action_dtype: of one env's action.
        device: of the networks.

    Attributes:
        obs: [T + 1, N, …], what was acted on and, last, what will be.
        inputs: the same as a tensor on the device. On the CPU it is the same memory; elsewhere each step's
            observations are sent there once, without waiting for them to arrive, to act on and to learn from.
        actions: [T, N, …], as sampled.
        rewards: [T, N] float32, as learnt from.
        terminated, truncated: [T, N] bool.
        active: [T, N] bool, False where there was nobody to act (see `Step.active`).
        cut: (t, env, true successor [1, …]) wherever an episode was cut and not terminated.
    """

    def __init__(
        self,
        steps: int,
        obs: np.ndarray,
        action_shape: Sequence[int],
        action_dtype: type,
        device: torch.device,
    ) -> None:
        n = len(obs)
        first = torch.from_numpy(obs)
        pinned = device.type == "cuda"  # what a copy that nobody waits for has to start from
        host = torch.empty((steps + 1, *first.shape), dtype=first.dtype, pin_memory=pinned)
        self.obs = host.numpy()
        self.inputs = host if device.type == "cpu" else torch.empty_like(host, device=device)
        self._store(0, obs)
        self.actions: np.ndarray = np.empty((steps, n, *action_shape), action_dtype)
        self.rewards = np.empty((steps, n), np.float32)
        self.terminated, self.truncated = np.empty((2, steps, n), bool)
        self.active = np.ones((steps, n), bool)
        self.cut: list[tuple[int, int, np.ndarray]] = []

    def add(self, t: int, step: Step, obs: np.ndarray, rewards: np.ndarray) -> list[int]:
        """Store step t, with the observations and rewards as learnt from; which envs were cut at it."""
        self._store(t + 1, obs)
        self.rewards[t] = rewards
        self.terminated[t], self.truncated[t] = step.terminated, step.truncated
        if step.active is not None:
            self.active[t] = step.active
        if not step.episodes:
            return []
        return [int(i) for i in np.flatnonzero(step.truncated & ~step.terminated)]

    def _store(self, t: int, obs: np.ndarray) -> None:
        self.obs[t] = obs
        if self.inputs.device.type != "cpu":
            self.inputs[t].copy_(torch.from_numpy(self.obs[t]), non_blocking=True)

    def next_values(self, values: np.ndarray, cut_values: np.ndarray) -> np.ndarray:
        """V of each step's true successor [T, N], from V of `obs` [T + 1, N] and of those in `cut`."""
        following = values[1:].copy()
        for (t, i, _), value in zip(self.cut, cut_values, strict=True):
            following[t, i] = value
        return following
