"""Atari games in the threads of ALE's own C++ vector environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rl.envs.atari_game import FRAMES_PER_SECOND, SIDE, GameSettings
from rl.envs.restarted import RestartedEnvs
from rl.envs.vector import ActionSpace, Episode, Step
from rl.machine import cpus

_NO_FRAME_LIMIT = 10**9


class AleEnvs(RestartedEnvs):
    """A `VectorEnv` of whole games with raw rewards; observations uint8 `[frame_stack, 84, 84]`.

    `lives` `[N]` are those left after the last step. The emulators cannot be saved: `load_state_dict` starts
    new games.
    """

    def __init__(
        self, settings: GameSettings, num_envs: int, *, num_threads: int | None = None, first: int = 0
    ) -> None:
        """Load the game `num_envs` times, stepped by `num_threads` threads (None: one a usable core); they
        are games number `first` and on of all that are trained on.

        Raises ImportError without ale_py.
        """
        from ale_py.vector_env import AtariVectorEnv

        self.num_envs = num_envs
        self.render_fps = FRAMES_PER_SECOND / settings.frame_skip
        self.settings = settings
        self._ale: Any = AtariVectorEnv(
            settings.rom,
            num_envs,
            num_threads=min(num_envs, cpus() if num_threads is None else num_threads),
            # Its own limit takes the final observation before the last frame is drawn, so ours is used.
            max_num_frames_per_episode=_NO_FRAME_LIMIT,
            repeat_action_probability=settings.sticky,
            full_action_space=settings.full_action_space,
            autoreset_mode=AutoresetMode.SAME_STEP,
            img_height=SIDE,
            img_width=SIDE,
            stack_num=settings.frame_stack,
            frameskip=settings.frame_skip,
            noop_max=settings.noop_max,
            reward_clipping=False,
            use_fire_reset=settings.fire_reset,
        )
        self._num_actions = len(self._ale.ale.get_action_set())
        self.observation_space: spaces.Box = spaces.Box(0, 255, (settings.frame_stack, SIDE, SIDE), np.uint8)
        self.action_space: ActionSpace = spaces.Discrete(self._num_actions)
        self.lives = np.zeros(num_envs, np.int32)
        super().__init__(first)
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)

    def step(self, actions: np.ndarray) -> Step:
        """See `VectorEnv.step`. Raises ValueError for actions of a wrong shape or that do not exist."""
        self.send(actions)
        return self.receive()

    def send(self, actions: np.ndarray) -> None:
        """See `SentVectorEnv.send`."""
        self._ale.send(self._checked(actions))

    def receive(self) -> Step:
        """See `SentVectorEnv.receive`."""
        raw, reward, over, _, info = self._ale.recv()
        self._steps += 1
        self._lengths += 1
        self._returns += reward
        next_obs = raw
        if over.any():
            next_obs = raw.copy()
            next_obs[over] = info["final_obs"][over]
        self._repeat_first_frame(next_obs)
        truncated = (self._lengths >= self.settings.max_episode_steps) & ~over
        reward = reward.astype(np.float32)
        if truncated.any():
            raw, info = self._ale.reset(options={"reset_mask": truncated})
        self.lives = info["lives"]
        ended = np.flatnonzero(over | truncated)
        if not len(ended):
            return Step(next_obs, reward, over, truncated, next_obs, [])
        episodes = [Episode(i, float(self._returns[i]), int(self._lengths[i])) for i in ended.tolist()]
        self._returns[ended] = 0.0
        self._lengths[ended] = 0
        obs = next_obs.copy()
        obs[ended] = raw[ended]
        self._repeat_first_frame(obs)
        return Step(obs, reward, over, truncated, next_obs, episodes)

    def render(self, index: int) -> np.ndarray:
        """Raise RuntimeError: ALE's vector environment shows nobody its screens."""
        raise RuntimeError("env.backend=ale cannot be filmed; env.backend=sync can")

    def close(self) -> None:
        """End the threads; safe to call twice."""
        self._ale = None

    def _begin(self, seeds: list[int]) -> np.ndarray:
        obs, info = self._ale.reset(seed=np.array(seeds))
        self.lives = info["lives"]
        self._returns[:] = 0.0
        self._lengths[:] = 0
        self._repeat_first_frame(obs)
        return np.asarray(obs)

    def _checked(self, actions: np.ndarray) -> np.ndarray:
        """The actions as ALE wants them, which waits for ever for one that does not exist."""
        actions = np.asarray(actions, np.int64)
        if actions.shape != (self.num_envs,):
            raise ValueError(
                f"actions have shape {actions.shape}; one integer for each of {self.num_envs} is expected"
            )
        if actions.min() < 0 or actions.max() >= self._num_actions:
            raise ValueError(f"actions {actions.tolist()} are not all in 0..{self._num_actions - 1}")
        return actions

    def _repeat_first_frame(self, obs: np.ndarray) -> None:
        """Fill the stacks `obs` `[N, C, H, W]` of games younger than C - 1 steps, which ALE pads with black.

        After k steps the game's first frame is number C - 1 - k.
        """
        first = self.settings.frame_stack - 1
        for i in np.flatnonzero(self._lengths < first).tolist():
            k = first - int(self._lengths[i])
            obs[i, :k] = obs[i, k]
