"""What the C++ vector environments share: their episodes cannot be saved, so a resume starts new ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rl.envs.vector import Restored
from rl.seeding import seed_of, sequence_of, sequence_state


class RestartedEnvs:
    """The part of a `VectorEnv` that seeds and counts; `_begin` starts an episode everywhere.

    Args:
        first: the number of its first environment, where it is a part of a larger one.
    """

    num_envs: int

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._seed: np.random.SeedSequence | None = None
        self._steps = 0  # vector steps since `reset`

    def reset(self, seed: np.random.SeedSequence) -> np.ndarray:
        """See `VectorEnv.reset`."""
        self._seed, self._steps = seed, 0
        return self._begin([seed_of(seed, self._first + i) for i in range(self.num_envs)])

    def state_dict(self) -> dict[str, Any]:
        """See `VectorEnv.state_dict`; enough to go on counting and to seed new episodes."""
        if self._seed is None:
            raise RuntimeError("environments that were never reset have no state to save")
        no_replay = {"seed": None, "random_state": None, "actions": None}
        return {
            "steps": self._steps,
            "seed": sequence_state(self._seed),
            "envs": [dict(no_replay) for _ in range(self.num_envs)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Restored:
        """See `VectorEnv.load_state_dict`.

        No environment is exact: each starts a new episode, seeded from the saved seed and step count.
        """
        if len(state["envs"]) != self.num_envs:
            raise ValueError(f"the saved state is of {len(state['envs'])} environments, not {self.num_envs}")
        seed = self._seed = sequence_of(state["seed"])
        self._steps = int(state["steps"])
        obs = self._begin([seed_of(seed, self._first + i, self._steps) for i in range(self.num_envs)])
        return Restored(obs, np.zeros(self.num_envs, np.bool_))

    def _begin(self, seeds: list[int]) -> np.ndarray:
        """Start an episode in each environment with its seed and return the observations `[N, *D]`."""
        raise NotImplementedError
