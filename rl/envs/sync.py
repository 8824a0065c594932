"""Gymnasium environments stepped one after the other in this process: fastest while a step costs
microseconds.

The running episode of each environment can be saved without a line of code per environment: the random state
just before its reset is kept, and the actions since. Replaying them brings the episode back, and comparing
what comes out with what was saved tells whether it did.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np

from rl.envs.spaces import (
    action_adapter,
    env_name,
    flat_observations,
    policy_action_space,
    policy_observation_space,
)
from rl.envs.vector import Episode, Restored, Step
from rl.errors import NonFiniteError
from rl.seeding import seed_of, sequence_of, sequence_state

log = logging.getLogger(__name__)

Maker: TypeAlias = Callable[[], gym.Env[Any, Any]]

# An episode that runs for longer is not saved: replaying it would take longer than it is worth.
REMEMBERED_STEPS = 200_000


class SyncEnvs:
    """A `VectorEnv` over gymnasium environments in a plain loop."""

    def __init__(
        self, makers: Sequence[Maker], *, first_index: int = 0, remembered_steps: int = REMEMBERED_STEPS
    ) -> None:
        """Make one environment with each of `makers`.

        `first_index` is the number of the first one where these are a slice of a larger set: seeds, episodes
        and errors use it. Episodes longer than `remembered_steps` are not saved. Raises ConfigError for a
        space that is not allowed, and what a maker raises.
        """
        self._envs: list[gym.Env[Any, Any]] = []
        self._closed = False
        try:
            for maker in makers:
                self._envs.append(flat_observations(maker()))
            self.observation_space = policy_observation_space(self._envs[0])
            self.action_space = policy_action_space(self._envs[0])
        except BaseException:
            self.close()
            raise
        self.num_envs = len(self._envs)
        self.render_fps = float(self._envs[0].metadata.get("render_fps") or 30)
        self._first_index = first_index
        self._obs_shape = (self.num_envs, *self.observation_space.shape)
        self._obs_dtype = self.observation_space.dtype
        self._check_obs = self._obs_dtype != np.uint8
        self._step_functions = [env.step for env in self._envs]
        self._actions = action_adapter(self._envs[0].action_space, self.num_envs)

        self._seed: np.random.SeedSequence | None = None
        self._steps = 0  # vector steps since `reset`
        self._obs = np.zeros(self._obs_shape, self._obs_dtype)
        self._false = np.zeros(self.num_envs, np.bool_)
        self._returns = [0.0] * self.num_envs
        self._starts = [0] * self.num_envs  # value of `_steps` at which the running episode began
        self._resets = [_Reset(None, None)] * self.num_envs
        self._history: list[Any] = []  # what the environments were given on steps `_history_start`, +1, …
        self._history_start = 0
        self._remembered_steps = remembered_steps
        self._trim_at = remembered_steps

    def reset(self, seed: np.random.SeedSequence) -> np.ndarray:
        """See `VectorEnv.reset`."""
        self._seed = seed
        self._steps = self._history_start = 0
        self._trim_at = self._remembered_steps
        self._history = []
        obs = np.empty(self._obs_shape, self._obs_dtype)
        for i in range(self.num_envs):
            obs[i] = self._begin(i, seed_of(seed, self._first_index + i))
        self._require_finite(obs)
        self._obs = obs
        return obs.copy()

    def step(self, actions: np.ndarray) -> Step:
        """See `VectorEnv.step`."""
        rows = self._actions.for_envs(actions)
        self._history.append(self._actions.kept(rows))
        self._steps += 1
        next_obs = np.empty(self._obs_shape, self._obs_dtype)
        reward = np.empty(self.num_envs, np.float32)
        returns = self._returns
        ended: list[tuple[int, bool, bool]] = []
        i = 0
        for step, action in zip(self._step_functions, rows, strict=True):
            next_obs[i], raw, is_terminated, is_truncated, _ = step(action)
            raw = float(raw)
            reward[i] = raw
            returns[i] += raw
            if is_terminated or is_truncated:
                ended.append((i, bool(is_terminated), bool(is_truncated)))
            i += 1  # noqa: SIM113
        if not isfinite(sum(returns)):  # a quarter of the time that NumPy takes over a few numbers
            self._raise_non_finite("reward", np.array(returns))
        if self._check_obs and b"\0" in np.isfinite(next_obs).tobytes():
            self._raise_non_finite("observation", next_obs)

        terminated = self._false.copy()
        truncated = self._false.copy()
        if not ended:
            if self._steps >= self._trim_at:
                self._trim()
            self._obs = next_obs
            return Step(next_obs, reward, terminated, truncated, next_obs, [])
        obs = next_obs.copy()
        episodes = []
        for i, is_terminated, is_truncated in ended:
            terminated[i], truncated[i] = is_terminated, is_truncated
            episodes.append(Episode(self._first_index + i, returns[i], self._steps - self._starts[i]))
            obs[i] = self._begin(i, None)
        self._require_finite(obs)
        self._trim()
        self._obs = obs
        return Step(obs, reward, terminated, truncated, next_obs, episodes)

    def render(self, index: int) -> np.ndarray:
        """See `VectorEnv.render`; the environments must have been made with `render_mode="rgb_array"`."""
        frame = self._envs[index].render()
        if not isinstance(frame, np.ndarray):
            raise RuntimeError(
                f"environment {index} was not made with render_mode='rgb_array', so it has no frame"
            )
        return frame

    def state_dict(self) -> dict[str, Any]:
        """See `VectorEnv.state_dict`. Nothing in it is shared with these environments."""
        if self._seed is None:
            raise RuntimeError("environments that were never reset have no state to save")
        return {
            "steps": self._steps,
            "seed": sequence_state(self._seed),
            "envs": [self._env_state(i) for i in range(self.num_envs)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Restored:
        """See `VectorEnv.load_state_dict`.

        An environment is exact when replaying its running episode gives the saved observation, return, length
        and random state, bit for bit; what an environment hides from all four (Box2D worlds that outlive an
        episode, as BipedalWalker's) cannot be seen. Another one starts a new episode, seeded from the saved
        seed and step count.
        """
        records = state["envs"]
        if len(records) != self.num_envs:
            raise ValueError(f"the saved state is of {len(records)} environments, not {self.num_envs}")
        seed = self._seed = sequence_of(state["seed"])
        self._steps = int(state["steps"])
        obs = np.empty(self._obs_shape, self._obs_dtype)
        exact = np.zeros(self.num_envs, np.bool_)
        for i, record in enumerate(records):
            exact[i] = self._replay(i, record)
            if exact[i]:
                obs[i] = record["obs"]
            else:
                obs[i] = self._begin(i, seed_of(seed, self._first_index + i, self._steps))
        self._require_finite(obs)
        self._obs = obs
        self._history_start = min(self._starts)
        self._history = self._actions.history(
            [record["actions"] if exact[i] else None for i, record in enumerate(records)],
            self._steps - self._history_start,
        )
        self._trim_at = self._steps + self._remembered_steps
        return Restored(obs.copy(), exact)

    def close(self) -> None:
        """Close every environment; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for env in self._envs:
            env.close()

    def _begin(self, i: int, seed: int | None) -> Any:
        """Start an episode of environment `i` and return its first observation, as the env gives it."""
        env = self._envs[i]
        self._resets[i] = _Reset(seed, None if seed is not None else _random_state(env))
        self._starts[i] = self._steps
        self._returns[i] = 0.0
        return env.reset(seed=seed)[0]

    def _trim(self) -> None:
        """Forget the actions that no running episode needs, a whole stretch at a time."""
        starts = [start for start in self._starts if self._steps - start <= self._remembered_steps]
        needed_from = min(starts, default=self._steps)
        unneeded = needed_from - self._history_start
        if unneeded > 256 and 2 * unneeded > len(self._history):
            del self._history[:unneeded]
            self._history_start = needed_from
        self._trim_at = self._steps + max(1, self._remembered_steps // 4)

    def _env_state(self, i: int) -> dict[str, Any]:
        """What `_replay` needs for environment `i`; no actions where its episode is too long to remember."""
        reset = self._resets[i]
        length = self._steps - self._starts[i]
        actions = None
        if length <= self._remembered_steps:
            rows = [given[i] for given in self._history[self._starts[i] - self._history_start :]]
            actions = np.array(rows, self._actions.dtype).reshape(length, *self._actions.shape)
        return {
            "seed": reset.seed,
            "random_state": copy.deepcopy(reset.random_state),
            "actions": actions,
            "obs": self._obs[i].copy(),
            "return": self._returns[i],
            "length": length,
            "random_state_now": _random_state(self._envs[i]),
        }

    def _replay(self, i: int, record: Mapping[str, Any]) -> bool:
        """Bring back the saved episode of environment `i`; tell whether it came out the same, bit for bit."""
        env = self._envs[i]
        seed, random_state, actions = record["seed"], record["random_state"], record["actions"]
        if actions is None:
            return False
        obs = np.empty(self._obs_shape[1:], self._obs_dtype)
        episodic_return = 0.0
        try:
            if random_state is not None:
                env.unwrapped.np_random.bit_generator.state = copy.deepcopy(random_state)
            obs[...] = env.reset(seed=seed)[0]
            for action in self._actions.replayed(actions):
                obs[...], reward, is_terminated, is_truncated, _ = env.step(action)
                episodic_return += float(reward)
                if is_terminated or is_truncated:
                    return False
        except Exception as error:  # whatever an environment raises here, a new episode is the way out
            log.debug("replaying the episode of environment %d failed", self._first_index + i, exc_info=error)
            return False
        self._resets[i] = _Reset(seed, copy.deepcopy(random_state))
        self._starts[i] = self._steps - len(actions)
        self._returns[i] = episodic_return
        return bool(
            obs.tobytes() == np.asarray(record["obs"], self._obs_dtype).tobytes()
            and episodic_return == record["return"]
            and len(actions) == record["length"]
            and _same(_random_state(env), record["random_state_now"])
        )

    def _require_finite(self, obs: np.ndarray) -> None:
        if self._check_obs and not np.isfinite(obs).all():
            self._raise_non_finite("observation", obs)

    def _raise_non_finite(self, what: str, array: np.ndarray) -> None:
        """Raise NonFiniteError about the first environment whose row of `array` `[N, ...]` is not finite."""
        bad = np.argwhere(~np.isfinite(array))
        place = tuple(int(k) for k in bad[0]) if len(bad) else (0,)
        name = env_name(self._envs[place[0]])
        at = f" at {list(place[1:])}" if place[1:] else ""
        raise NonFiniteError(
            f"the {what} of environment {self._first_index + place[0]} ({name}) is {array[place]}{at}"
        )


class _Reset(NamedTuple):
    """How an episode began: with `reset(seed=seed)`, or `reset()` with the generator in `random_state`."""

    seed: int | None
    random_state: dict[str, Any] | None


def _random_state(env: gym.Env[Any, Any]) -> dict[str, Any] | None:
    """The state of the environment's generator; None where it has none (`np_random` would make one)."""
    generator = getattr(env.unwrapped, "_np_random", None)
    return dict(generator.bit_generator.state) if isinstance(generator, np.random.Generator) else None


def _same(a: Any, b: Any) -> bool:
    """Equality of nested dicts of numbers, strings and arrays."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)
