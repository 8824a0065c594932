"""EnvPool's environments: simulated in C++ by a pool of threads inside this process.

EnvPool itself resets an environment on the step after the one that ended its episode. Here those that have
just ended are reset within the same step, so that no step is spent on a reset. Facts about version 1.2.5,
read in its sources and measured:

- A seed for each environment is taken at construction only, so `reset` makes a new pool.
- It marks what ends on the last allowed step as truncated even where the task itself ended, so the time limit
  is kept here and EnvPool's own put out of reach. Only Procgen's timeout is part of its games.
- An environment's state cannot be read or set.
- Atari: a game starts with 1 to `noop_max` no-ops, one of them replaced by FIRE for a single frame where the
  game has that action; the reset of the common wrappers plays FIRE and another action for four frames each.
- MuJoCo: one step from the same state gives gymnasium's observation to 1e-5 (v4 and v5) and a reward rounded
  to float32, once `post_constraint` is on: without it the contact forces of the v4 ids are all 0. Drawing
  needs OpenGL, and the process ends where there is none, so it is refused.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from rl.envs.restarted import RestartedEnvs
from rl.envs.spaces import action_adapter
from rl.envs.vector import ActionSpace, Episode, Step
from rl.errors import ConfigError, NonFiniteError, one_line
from rl.machine import cpus

_MAX_INT = 2**31 - 1
# What EnvPool would take, but what is decided here.
_OURS = (
    *("num_envs", "num_threads", "batch_size", "max_num_players", "seed", "env_seed", "base_path"),
    *("gym_reset_return_info", "reward_clip", "episodic_life", "zero_discount_on_life_loss"),
    *("channel_first", "from_pixels", "task", "env_name"),
    *("render_mode", "render_env_id", "render_width", "render_height", "render_camera_id"),
)


class EnvPoolEnvs(RestartedEnvs):
    """A `VectorEnv` over EnvPool. Images are uint8 `[C, H, W]`; the state of an episode cannot be saved."""

    def __init__(
        self,
        task_id: str,
        num_envs: int,
        *,
        num_threads: int | None = None,
        max_episode_steps: int | None = None,
        clip_rewards: bool = False,
        episodic_life: bool = False,
        render: bool = False,
        render_size: int | None = None,
        render_fps: float = 30.0,
        **options: Any,
    ) -> None:
        """Describe `num_envs` environments; they are made by `reset` or `load_state_dict`.

        Args:
            task_id: EnvPool's name of the environment: `CartPole-v1`, `Breakout-v5`, `StarpilotEasy-v0`.
            num_threads: None takes the cores that this process may use; never more than `num_envs`.
            max_episode_steps: agent steps after which an episode is truncated; None is EnvPool's own limit.
            clip_rewards: `Step.reward` is the sign of the raw reward.
            episodic_life: a lost life sets `terminated`; the game goes on. Needs a game that counts lives.
            render: allow `render`.
            render_size: side in pixels of square frames; None draws each as the environment does.
            render_fps: see `VectorEnv`.
            options: EnvPool's own, such as `frame_skip` of Atari or `num_levels` of Procgen.

        Raises:
            ConfigError: EnvPool or a library that it needs is missing, or it has no such environment or
                option.
        """
        self._envpool = _import_envpool()
        self.task_id = task_id
        _check_known(self._envpool, task_id)
        spec = _spec(self._envpool, task_id, {})
        limit = spec.config.max_episode_steps if max_episode_steps is None else max_episode_steps
        self._limit = min(int(limit), _MAX_INT)
        # Procgen ends its games by itself, and says by this number which ends were its timeout.
        self._own_timeout = "info:prev_level_complete" in spec._state_keys
        self._options = dict(options)
        if not self._own_timeout:
            self._options["max_episode_steps"] = min(self._limit + 1, _MAX_INT)
        _check_options(task_id, options, spec)
        if "post_constraint" in spec._config_keys:
            self._options.setdefault("post_constraint", True)
        spec = _spec(self._envpool, task_id, self._options)
        self.observation_space = _observation_space(task_id, spec)
        self.action_space = _action_space(task_id, spec)
        self._has_lives = "info:lives" in spec._state_keys
        if episodic_life and not self._has_lives:
            raise ConfigError(f"env.episodic_life=true: {task_id} counts no lives; env.episodic_life=false")

        self._render = render
        if render:
            if ".mujoco" in self._envpool.registration.registry.specs[task_id][0]:
                raise ConfigError(
                    f"EnvPool cannot draw {task_id} everywhere; env.backend=sync draws it, or set "
                    "capture_video=false"
                )
            self._options["render_mode"] = "rgb_array"
            if render_size is not None:
                self._options |= {"render_width": render_size, "render_height": render_size}
        self.num_envs = num_envs
        self.render_fps = render_fps
        self._num_threads = min(num_envs, cpus() if num_threads is None else num_threads)
        self._clip_rewards = clip_rewards
        self._episodic_life = episodic_life
        self._actions = action_adapter(self.action_space, num_envs)
        self._check_obs = self.observation_space.dtype != np.uint8
        self._pool: Any = None
        super().__init__()
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._lives = np.zeros(num_envs, np.int32)

    def step(self, actions: np.ndarray) -> Step:
        """See `VectorEnv.step`.

        `reward` is its sign where `clip_rewards` is on. With `episodic_life`, `terminated` is also set where
        a life was lost and the game goes on: `obs` is then `next_obs`, and no episode is listed.
        """
        pixels, raw, terminated, timed_out, info = self._pool.step(self._for_envs(actions))
        self._steps += 1
        self._lengths += 1
        self._returns += raw
        next_obs = self._delivered(pixels)
        self._require_finite(next_obs)

        truncated = self._lengths >= self._limit
        if self._own_timeout:
            terminated = terminated | (timed_out & (info["prev_level_complete"] != 0))
            truncated |= timed_out
        ended = np.flatnonzero(terminated | truncated)
        if self._has_lives:
            lives = info["lives"]
            if self._episodic_life:
                terminated = terminated | ((lives < self._lives) & (lives > 0))
            self._lives = lives.copy()

        obs, episodes = next_obs, []
        if len(ended):
            first, info = self._pool.reset(ended.astype(np.int32))
            obs = next_obs.copy()
            obs[ended] = self._delivered(first)
            episodes = [Episode(i, float(self._returns[i]), int(self._lengths[i])) for i in ended.tolist()]
            self._returns[ended] = 0.0
            self._lengths[ended] = 0
            if self._has_lives:
                self._lives[ended] = info["lives"]
            self._require_finite(obs)
        reward = np.sign(raw) if self._clip_rewards else raw
        return Step(obs, reward.astype(np.float32, copy=False), terminated, truncated, next_obs, episodes)

    def render(self, index: int) -> np.ndarray:
        """See `VectorEnv.render`; `render=True` must have been given."""
        if not self._render:
            raise RuntimeError(f"environment {index} was not made with render=True, so it has no frame")
        return self._pool.render([index])[0]

    def close(self) -> None:
        """End the threads of the pool; safe to call twice."""
        self._pool = None

    def _begin(self, seeds: list[int]) -> np.ndarray:
        """Make a new pool, start an episode everywhere and return the observations `[N, *D]`."""
        self.close()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*precision lowered")  # EnvPool's bounds are float64
            self._pool = self._envpool.make(
                self.task_id,
                env_type="gymnasium",
                num_envs=self.num_envs,
                num_threads=self._num_threads,
                env_seed=seeds,
                **self._options,
            )
            first, info = self._pool.reset()
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, np.int64)
        if self._has_lives:
            self._lives = info["lives"].copy()
        obs = self._delivered(first)
        self._require_finite(obs)
        return obs

    def _for_envs(self, actions: np.ndarray) -> np.ndarray:
        """The actions as EnvPool takes them. It checks neither their number nor their range: we do."""
        rows = np.asarray(self._actions.for_envs(actions))
        if isinstance(self.action_space, spaces.Discrete) and not (
            rows.min() >= 0 and rows.max() < self.action_space.n
        ):
            raise ValueError(f"actions {rows.tolist()} are not all in 0..{self.action_space.n - 1}")
        return rows

    def _delivered(self, obs: np.ndarray) -> np.ndarray:
        return obs.astype(self.observation_space.dtype, copy=False)

    def _require_finite(self, obs: np.ndarray) -> None:
        """Raise NonFiniteError about the first environment with an observation or return that is not."""
        if not np.isfinite(self._returns).all():
            i = int(np.flatnonzero(~np.isfinite(self._returns))[0])
            raise NonFiniteError(f"the reward of environment {i} ({self.task_id}) is not finite")
        if self._check_obs and not np.isfinite(obs).all():
            i, *at = (int(k) for k in np.argwhere(~np.isfinite(obs))[0])
            raise NonFiniteError(
                f"the observation of environment {i} ({self.task_id}) is {obs[(i, *at)]} at {at}"
            )


def require_same_spaces(envs: EnvPoolEnvs, observation_space: spaces.Box, action_space: ActionSpace) -> None:
    """Raise ConfigError unless `envs` observes and acts as gymnasium's environment of that id does.

    Bounds of observations are not compared: EnvPool leaves some open.
    """
    theirs = envs.observation_space
    same = (theirs.shape, theirs.dtype) == (observation_space.shape, observation_space.dtype)
    if not (same and envs.action_space == action_space):
        raise ConfigError(
            f"env.backend=envpool: the {envs.task_id} of EnvPool has observations {theirs.shape} and actions "
            f"{envs.action_space}, that of gymnasium {observation_space.shape} and {action_space}; "
            "env.backend=sync takes gymnasium's"
        )


def _import_envpool() -> Any:
    try:
        import envpool
    except ImportError as error:
        raise ConfigError(
            f"env.backend=envpool needs the package envpool ({one_line(error)}): pip install -e '.[envpool]'"
        ) from error
    return envpool


def _check_known(envpool: Any, task_id: str) -> None:
    known = envpool.list_all_envs()
    if task_id not in known:
        near = difflib.get_close_matches(task_id, known, n=1, cutoff=0.8)
        raise ConfigError(
            f"env.backend=envpool: EnvPool has no environment {task_id}"
            + (f" (it has {near[0]})" if near else "")
            + "; env.backend=sync takes any id"
        )


def _spec(envpool: Any, task_id: str, options: Mapping[str, Any]) -> Any:
    """EnvPool's description of one environment."""
    try:
        return envpool.make_spec(task_id, **options)
    except ImportError as error:
        raise ConfigError(_missing_library(task_id, error)) from error
    except TypeError as error:  # known names, so a value: EnvPool only lists the types of all options
        raise ConfigError(
            f"env.kwargs={dict(options)}: a value has a type that EnvPool's {task_id} does not take; "
            "env.kwargs={} takes the defaults"
        ) from error


def _missing_library(task_id: str, error: ImportError) -> str:
    if "Qt" in str(error):
        return (
            f"env.id={task_id}: EnvPool's Procgen needs the Qt 5 libraries of the system: "
            "apt-get install libqt5core5a libqt5gui5"
        )
    return f"env.id={task_id}: EnvPool cannot load it ({one_line(error)}); env.backend=sync"


def _check_options(task_id: str, options: Mapping[str, Any], spec: Any) -> None:
    known = sorted(set(spec._config_keys) - {*_OURS, "max_episode_steps"})
    for key in options:
        if key == "noop_max" and options[key] < 1:
            raise ConfigError(f"env.noop_max={options[key]}: EnvPool needs at least 1; try env.noop_max=1")
        if key in _OURS:
            raise ConfigError(f"env.kwargs.{key} is not passed on to EnvPool; leave it out")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(
                f"env.kwargs.{key} is not an option of EnvPool's {task_id}: "
                + (f"did you mean env.kwargs.{near[0]}?" if near else f"it takes {', '.join(known)}")
            )


def _observation_space(task_id: str, spec: Any) -> spaces.Box:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered")
        space = spec.gymnasium_observation_space
    if not isinstance(space, spaces.Box):
        raise ConfigError(
            f"env.backend=envpool: {task_id} has observations of type {type(space).__name__} there, not Box; "
            "env.backend=sync flattens them"
        )
    dtype: Any = np.uint8 if space.dtype == np.uint8 else np.float32
    with np.errstate(over="ignore"):  # a bound may be the largest float64
        return spaces.Box(space.low.astype(dtype), space.high.astype(dtype), space.shape, dtype)


def _action_space(task_id: str, spec: Any) -> ActionSpace:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered")
        space = spec.gymnasium_action_space
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return spaces.Box(
            space.low.astype(np.float32), space.high.astype(np.float32), space.shape, np.float32
        )
    raise ConfigError(
        f"env.backend=envpool: {task_id} has {space} actions there; allowed are Discrete and Box of floats; "
        "env.backend=sync"
    )
