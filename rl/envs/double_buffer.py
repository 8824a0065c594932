"""Double-buffered sampling: half of the envs step while a policy acts for the others (Petrenko et al. 2020,
Sample Factory, https://arxiv.org/abs/2006.11751)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.envs.vector import Restored, SentVectorEnv, Step


class DoubleBuffer:
    """A `VectorEnv` of two halves. `step` steps both; who acts for one half at a time finds them in `halves`.

    Args:
        first, second: envs of the same kind, as many in each; the second half is seeded as the envs that
            follow the first.
        num_threads: threads in which they step, both together.
    """

    def __init__(self, first: SentVectorEnv, second: SentVectorEnv, num_threads: int) -> None:
        n = first.num_envs
        self.halves = ((slice(0, n), first), (slice(n, 2 * n), second))
        self.num_envs, self.num_threads = 2 * n, num_threads
        self.observation_space, self.action_space = first.observation_space, first.action_space
        self.render_fps = first.render_fps

    def reset(self, seed: np.random.SeedSequence) -> np.ndarray:
        """See `VectorEnv.reset`."""
        return np.concatenate([half.reset(seed) for _, half in self.halves])

    def step(self, actions: np.ndarray) -> Step:
        """See `VectorEnv.step`."""
        actions = np.asarray(actions)
        if len(actions) != self.num_envs:
            raise ValueError(f"actions are for {len(actions)} envs, not for {self.num_envs}")
        for rows, half in self.halves:
            half.send(actions[rows])
        return _joined([shifted(half.receive(), rows) for rows, half in self.halves])

    def render(self, index: int) -> np.ndarray:
        """See `VectorEnv.render`."""
        (_, first), (_, second) = self.halves
        return first.render(index) if index < first.num_envs else second.render(index - first.num_envs)

    def state_dict(self) -> dict[str, Any]:
        """See `VectorEnv.state_dict`: as of one vector of all envs."""
        first, second = (half.state_dict() for _, half in self.halves)
        return {**first, "envs": [*first["envs"], *second["envs"]]}

    def load_state_dict(self, state: Mapping[str, Any]) -> Restored:
        """See `VectorEnv.load_state_dict`."""
        if len(state["envs"]) != self.num_envs:
            raise ValueError(f"the saved state is of {len(state['envs'])} environments, not {self.num_envs}")
        parts = [half.load_state_dict({**state, "envs": state["envs"][rows]}) for rows, half in self.halves]
        return Restored(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def close(self) -> None:
        """See `VectorEnv.close`."""
        for _, half in self.halves:
            half.close()


def shifted(step: Step, rows: slice) -> Step:
    """A half's step, its episodes numbered by the rows of the whole."""
    if not step.episodes:
        return step
    return step._replace(episodes=[e._replace(env=e.env + rows.start) for e in step.episodes])


def _joined(steps: Sequence[Step]) -> Step:
    """The steps of both halves as one; `next_obs` is `obs` where no episode ended, as the contract has it."""
    obs, reward, terminated, truncated, next_obs = (
        np.concatenate(x) for x in list(zip(*steps, strict=True))[:5]
    )
    episodes = [episode for step in steps for episode in step.episodes]
    return Step(obs, reward, terminated, truncated, next_obs if episodes else obs, episodes)
