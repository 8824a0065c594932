"""What training sees of whole Atari games: signs of rewards, and lost lives as ends of the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from rl.envs.vector import Restored, SentVectorEnv, Step, VectorEnv


class AtariTraining:
    """A `VectorEnv` over another one of whole games with raw rewards, which `episodes` keep reporting.

    A lost life sets `terminated` and nothing else: the game goes on, `obs` is its next frame, no episode is
    reported. Only the last life ends a game.
    """

    def __init__(
        self,
        envs: VectorEnv,
        lives: Callable[[], np.ndarray],
        *,
        episodic_life: bool,
        clip_rewards: bool,
    ) -> None:
        """`lives()` gives the lives left in each game `[N]`, of the new game where one has just begun."""
        self.num_envs = envs.num_envs
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        self.render_fps = envs.render_fps
        self._envs = envs
        self._count_lives = lives
        self._episodic_life, self._clip_rewards = episodic_life, clip_rewards
        self._lives = np.zeros(self.num_envs, np.int64)

    def reset(self, seed: np.random.SeedSequence) -> np.ndarray:
        """See `VectorEnv.reset`."""
        obs = self._envs.reset(seed)
        self._lives = self._count_lives()
        return obs

    def step(self, actions: np.ndarray) -> Step:
        """See `VectorEnv.step`."""
        return self._as_training_sees_it(self._envs.step(actions))

    def send(self, actions: np.ndarray) -> None:
        """See `SentVectorEnv.send`, which the games must have."""
        cast("SentVectorEnv", self._envs).send(actions)

    def receive(self) -> Step:
        """See `SentVectorEnv.receive`."""
        return self._as_training_sees_it(cast("SentVectorEnv", self._envs).receive())

    def _as_training_sees_it(self, step: Step) -> Step:
        lives, before = self._count_lives(), self._lives
        self._lives = lives
        if self._episodic_life:
            # Some games show no lives for a while before they are over (Qbert); that end is the game's.
            lost = (lives < before) & (lives > 0) & ~step.truncated
            step = step._replace(terminated=step.terminated | lost)
        if self._clip_rewards:
            step = step._replace(reward=np.sign(step.reward))
        return step

    def render(self, index: int) -> np.ndarray:
        """See `VectorEnv.render`."""
        return self._envs.render(index)

    def state_dict(self) -> dict[str, Any]:
        """See `VectorEnv.state_dict`."""
        return self._envs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> Restored:
        """See `VectorEnv.load_state_dict`."""
        restored = self._envs.load_state_dict(state)
        self._lives = self._count_lives()
        return restored

    def close(self) -> None:
        """See `VectorEnv.close`."""
        self._envs.close()
