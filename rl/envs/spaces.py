"""What a policy sees of an environment and how its actions get there: the spaces in which it works, and
adapters from its actions to those of the environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rl.envs.vector import ActionSpace
from rl.errors import ConfigError


def flat_observations(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Return `env` with a Box observation space: itself, or wrapped so that each observation is one row."""
    if isinstance(env.observation_space, spaces.Box):
        return env
    return gym.wrappers.FlattenObservation(env)


def policy_observation_space(env: gym.Env[Any, Any]) -> spaces.Box:
    """Return the float32 or uint8 Box that a policy sees of `env`, which `flat_observations` made.

    Raises ConfigError where there is none.
    """
    space = env.observation_space
    if not isinstance(space, spaces.Box):
        raise ConfigError(
            f"env.id={env_name(env)} has observations of a changing size ({type(space).__name__}); allowed "
            "are Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple of those (env.id=CartPole-v1 has "
            "Box)"
        )
    dtype = np.uint8 if space.dtype == np.uint8 else np.float32
    shape = space.shape or (1,)
    with np.errstate(over="ignore"):  # a bound may be the largest float64
        low, high = (np.asarray(bound, dtype).reshape(shape) for bound in (space.low, space.high))
    return spaces.Box(low, high, shape, dtype)  # type: ignore[arg-type]


def policy_action_space(env: gym.Env[Any, Any]) -> ActionSpace:
    """Return the space, counted from 0, in which a policy chooses actions for `env`.

    Raises ConfigError where there is none.
    """
    space = env.action_space
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec.reshape(-1))
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiDiscrete([2] * int(np.prod(space.shape)))
    if isinstance(space, spaces.Box):
        return space
    raise ConfigError(
        f"env.id={env_name(env)} has a {type(space).__name__} action space; allowed are Discrete, "
        "MultiDiscrete, MultiBinary and Box (env.id=CartPole-v1 has Discrete, env.id=HalfCheetah-v4 has Box)"
    )


def env_name(env: gym.Env[Any, Any]) -> str:
    """What messages call `env`: its id, or its class where it was not made by id."""
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


class _DiscreteActions:
    """Integers `[N]` counted from 0 → one Python int per environment, counted from the space's start."""

    shape: tuple[int, ...] = ()
    dtype: Any = np.dtype(np.int64)

    def __init__(self, space: spaces.Discrete, num_envs: int) -> None:
        self._start = int(space.start)
        self._num_envs = num_envs

    def for_envs(self, actions: np.ndarray) -> list[int]:
        actions = np.asarray(actions, np.int64)
        if actions.shape != (self._num_envs,):
            raise ValueError(
                f"actions have shape {actions.shape}; one integer for each of {self._num_envs} is expected"
            )
        return (actions + self._start if self._start else actions).tolist()

    def kept(self, rows: Any) -> list[int]:
        return rows

    def replayed(self, actions: np.ndarray) -> list[int]:
        return np.asarray(actions).tolist()

    def history(self, actions: Sequence[np.ndarray | None], length: int) -> list[Any]:
        return _aligned(actions, length, self.shape, self.dtype).tolist()


class _ArrayActions:
    """Rows `[N, K]` → arrays `[N, *shape]` of the space's own dtype, shifted by its start or clipped."""

    def __init__(self, space: spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box, num_envs: int) -> None:
        self.shape = tuple(space.shape)
        self.dtype: Any = space.dtype
        self._num_envs = num_envs
        self._start = space.start if isinstance(space, spaces.MultiDiscrete) and np.any(space.start) else None
        self._round = isinstance(space, spaces.Box) and not np.issubdtype(self.dtype, np.floating)
        self._low: Any = None
        self._high: Any = None
        if isinstance(space, spaces.Box) and not (np.isinf(space.low) & np.isinf(space.high)).all():
            self._low, self._high = space.low, space.high

    def for_envs(self, actions: np.ndarray) -> np.ndarray:
        actions = np.asarray(actions).reshape(self._num_envs, *self.shape)
        if self._round:  # integers in a Box: clip before the cast, which wraps around
            return np.clip(np.rint(actions), self._low, self._high).astype(self.dtype)
        rows = actions.astype(self.dtype)  # a copy: an environment may keep or change what it is given
        if self._low is not None:
            np.maximum(rows, self._low, out=rows)
            np.minimum(rows, self._high, out=rows)
        elif self._start is not None:
            rows += self._start
        return rows

    def kept(self, rows: Any) -> np.ndarray:
        return rows.copy()

    def replayed(self, actions: np.ndarray) -> np.ndarray:
        return np.array(actions, self.dtype)

    def history(self, actions: Sequence[np.ndarray | None], length: int) -> list[Any]:
        return [row.copy() for row in _aligned(actions, length, self.shape, self.dtype)]


def action_adapter(space: spaces.Space[Any], num_envs: int) -> _DiscreteActions | _ArrayActions:
    """What brings the actions of a policy to `num_envs` environments with action space `space`."""
    if isinstance(space, spaces.Discrete):
        return _DiscreteActions(space, num_envs)
    assert isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box)
    return _ArrayActions(space, num_envs)


def _aligned(
    actions: Sequence[np.ndarray | None], length: int, shape: tuple[int, ...], dtype: Any
) -> np.ndarray:
    """Put the actions of each environment `[L_i, *shape]` at the end of one array `[length, N, *shape]`."""
    together = np.zeros((length, len(actions), *shape), dtype)
    for i, given in enumerate(actions):
        if given is not None and len(given):
            together[length - len(given) :, i] = given
    return together
