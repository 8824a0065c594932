"""What acting for a while in several envs gave, as the on-policy algorithms store it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from rl.envs.double_buffer import DoubleBuffer, shifted
from rl.envs.normalization import RewardNormalizer
from rl.envs.vector import Step, VectorEnv


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
        self._store(0, slice(0, n), obs)
        self.actions: np.ndarray = np.empty((steps, n, *action_shape), action_dtype)
        self.rewards = np.empty((steps, n), np.float32)
        self.terminated, self.truncated = np.empty((2, steps, n), bool)
        self.active = np.ones((steps, n), bool)
        self.cut: list[tuple[int, int, np.ndarray]] = []

    def add(self, t: int, rows: slice, step: Step, obs: np.ndarray) -> list[int]:
        """Store step t of these envs, with the observations as learnt from; which of them were cut at it,
        the first of `rows` being 0."""
        self._store(t + 1, rows, obs)
        self.rewards[t, rows] = step.reward
        self.terminated[t, rows], self.truncated[t, rows] = step.terminated, step.truncated
        if step.active is not None:
            self.active[t, rows] = step.active
        if not step.episodes:
            return []
        return [int(i) for i in np.flatnonzero(step.truncated & ~step.terminated)]

    def _store(self, t: int, rows: slice, obs: np.ndarray) -> None:
        self.obs[t, rows] = obs
        if self.inputs.device.type != "cpu":
            self.inputs[t, rows].copy_(torch.from_numpy(self.obs[t, rows]), non_blocking=True)

    def normalize_rewards(self, normalizer: RewardNormalizer) -> None:
        """Divide the rewards as `normalizer` does, in order of time."""
        for t, rewards in enumerate(self.rewards):
            self.rewards[t] = normalizer(rewards, self.terminated[t] | self.truncated[t])

    def next_values(self, values: np.ndarray, cut_values: np.ndarray) -> np.ndarray:
        """V of each step's true successor [T, N], from V of `obs` [T + 1, N] and of those in `cut`."""
        following = values[1:].copy()
        for (t, i, _), value in zip(self.cut, cut_values, strict=True):
            following[t, i] = value
        return following


def stepped(
    envs: VectorEnv, steps: int, act: Callable[[int, slice], np.ndarray]
) -> Iterator[tuple[int, slice, Step]]:
    """Step `envs`, and give what each step brought. Of a `DoubleBuffer` one half steps while the caller acts
    for the other, with the cores that the envs leave.

    Args:
        steps: T.
        act: actions for time t and the envs `rows`; step t - 1 of these has been given before.

    Yields:
        t, the rows of the envs that stepped, and their step.
    """
    if not isinstance(envs, DoubleBuffer):
        rows = slice(0, envs.num_envs)
        for t in range(steps):
            yield t, rows, envs.step(act(t, rows))
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - envs.num_threads))
    try:
        for t in range(steps):
            for rows, half in envs.halves:
                if t > 0:
                    yield t - 1, rows, shifted(half.receive(), rows)
                half.send(act(t, rows))
        for rows, half in envs.halves:
            yield steps - 1, rows, shifted(half.receive(), rows)
    finally:
        torch.set_num_threads(threads)
