"""The contract between an algorithm and its environments, whatever simulates them.

Shapes: `N` is the number of environments, `D` the shape of one observation. An algorithm sees arrays of `N`
rows and never an environment itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from gymnasium import spaces

ActionSpace: TypeAlias = spaces.Discrete | spaces.MultiDiscrete | spaces.Box


class Episode(NamedTuple):
    """One episode that has just ended, with the rewards the environment itself gave."""

    env: int  # which of the N environments
    episodic_return: float  # undiscounted sum of raw rewards, accumulated in float64
    length: int  # agent steps


class Step(NamedTuple):
    """What one step of all environments produced. Every array is new: the caller may keep it."""

    obs: np.ndarray
    """`[N, *D]` what the policy acts on next: the first observation of a new episode where one ended. Images
    are uint8 `[N, C, H, W]`, C the frames stacked."""
    reward: np.ndarray
    """`[N]` float32, what is learnt from: raw, or its sign where the family's `clip_rewards` is on."""
    terminated: np.ndarray
    """`[N]` bool, the task itself ended. A life lost where `episodic_life` is on counts as that, but no
    episode ended then: nothing is reset, `obs` goes on and `episodes` has no entry."""
    truncated: np.ndarray
    """`[N]` bool, cut off from outside (a time limit); both may be set."""
    next_obs: np.ndarray
    """`[N, *D]` true successor of the action; the very same array as `obs` when no episode ended."""
    episodes: list[Episode]
    """Those that ended on this step, in order of their environment: raw returns of whole episodes."""
    active: np.ndarray | None = None
    """`[N]` bool, False where the row was dead before this step and nothing can be learnt from it (an agent
    that died before its game was over); None: all were alive. `terminated` stays set while a row is dead."""


class Restored(NamedTuple):
    """What `VectorEnv.load_state_dict` brought back."""

    obs: np.ndarray  # [N, *D] current observations
    exact: np.ndarray  # [N] bool; False where the episode could not be reproduced and a new one was started

    def notes(self) -> list[str]:
        """A line for the user for each environment that is not exact."""
        return [
            f"env {i}: its running episode could not be restored, a new one starts"
            for i in np.flatnonzero(~self.exact).tolist()
        ]


class VectorEnv(Protocol):
    """N environments stepped together. An episode that ends is followed by a reset within the same step.

    Observations are float32, or uint8 where the environment gives uint8; spaces that are not a Box are
    flattened to one row. `observation_space` and `action_space` describe what passes through here for one
    environment:

    - `Discrete(n)`: actions are integers `[N]` in `0..n-1`, whatever `start` the environment has;
    - `MultiDiscrete`: integers `[N, K]`, each counted from 0;
    - `Box`: floats `[N, prod(shape)]` in the environment's own units, clipped to its bounds per dimension.
    """

    num_envs: int
    observation_space: spaces.Box
    action_space: ActionSpace
    render_fps: float  # frames a second at which what `render` gives plays

    def reset(self, seed: np.random.SeedSequence) -> np.ndarray:
        """Start a new episode everywhere and return the observations `[N, *D]`.

        Environment `i` is seeded from child `i` of `seed` (`spawn_key + (i,)`), however many there are.
        """
        ...

    def step(self, actions: np.ndarray) -> Step:
        """Take one action in each environment.

        Raises NonFiniteError when an observation or a reward is NaN or infinite, and what an environment
        raises.
        """
        ...

    def render(self, index: int) -> np.ndarray:
        """Return the current frame of environment `index`, uint8 `[H, W, 3]`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all it takes to continue: nested dicts and lists of JSON values, big integers and arrays."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Restored:
        """Continue from `state`, saved by any backend of the same environments; needs no `reset`."""
        ...

    def close(self) -> None:
        """Release everything held; safe to call twice."""
        ...


class SentVectorEnv(VectorEnv, Protocol):
    """A `VectorEnv` that steps in threads of its own, while its caller does something else."""

    def send(self, actions: np.ndarray) -> None:
        """Begin a step with these actions; raises as `step` does."""
        ...

    def receive(self) -> Step:
        """Wait for the step that `send` began. `step` is the two in turn."""
        ...
