"""The Procgen family: sixteen games with levels drawn at random (Cobbe et al. 2020), simulated by EnvPool."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from gymnasium import spaces

from rl.envs.envpool_envs import EnvPoolEnvs
from rl.envs.vector import ActionSpace, VectorEnv
from rl.errors import ConfigError

GAMES = (
    "bigfish",
    "bossfight",
    "caveflyer",
    "chaser",
    "climber",
    "coinrun",
    "dodgeball",
    "fruitbot",
    "heist",
    "jumper",
    "leaper",
    "maze",
    "miner",
    "ninja",
    "plunder",
    "starpilot",
)
DISTRIBUTIONS = ("easy", "hard")
_MAX_LEVEL = 2**31 - 1
_FRAMES_A_SECOND = 15.0
_FRAME_SIDE = 256  # the games draw 64×64


@dataclasses.dataclass(frozen=True)
class ProcgenEnvs:
    """N environments of one Procgen game; the fields are the keys of `env=procgen`."""

    id: str
    num_envs: int
    backend: str = "envpool"
    num_threads: int | None = None
    distribution_mode: str = "easy"
    num_levels: int = 0
    start_level: int = 0
    max_episode_steps: int | None = None
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    normalize_obs: bool = False
    normalize_reward: bool = False
    clip_obs: float | None = None
    clip_reward: float | None = None

    def make(
        self,
        *,
        num_envs: int | None = None,
        backend: str | None = None,
        render_mode: str | None = None,
        evaluation: bool = False,
    ) -> VectorEnv:
        """Make the environments: uint8 `[N, 3, 64, 64]`, 15 actions, raw rewards.

        `num_envs` replaces the configured value. EnvPool simulates them whatever `backend` says, and
        `evaluation` changes nothing: these games have no lives. Raises ConfigError as `check` does.
        """
        self._check_values()
        return EnvPoolEnvs(
            f"{self.id.capitalize()}{self.distribution_mode.capitalize()}-v0",
            self.num_envs if num_envs is None else num_envs,
            num_threads=self.num_threads,
            max_episode_steps=self.max_episode_steps,
            render=render_mode is not None,
            render_size=_FRAME_SIDE,
            render_fps=_FRAMES_A_SECOND,
            num_levels=self.num_levels,
            start_level=self.start_level,
            **self.kwargs,
        )

    def smallest(self) -> ProcgenEnvs:
        """One game, for what needs its spaces only."""
        return dataclasses.replace(self, num_envs=1)

    def check(self, *, render: bool) -> tuple[spaces.Box, ActionSpace]:
        """Return the spaces that a policy will see. Raises ConfigError for all that would keep a run from
        starting."""
        envs = self.make(num_envs=1, render_mode="rgb_array" if render else None)
        return envs.observation_space, envs.action_space

    def _check_values(self) -> None:
        if self.id not in GAMES:
            near = difflib.get_close_matches(self.id.lower(), GAMES, n=1, cutoff=0.4)
            advice = f"did you mean env.id={near[0]}?" if near else f"choose one of {', '.join(GAMES)}"
            raise ConfigError(f"env.id={self.id} is not a Procgen game: {advice}")
        if self.backend != "envpool":
            raise ConfigError(f"env.backend={self.backend}: Procgen has env.backend=envpool only")
        if self.distribution_mode not in DISTRIBUTIONS:
            near = difflib.get_close_matches(self.distribution_mode, DISTRIBUTIONS, n=1) or ["easy"]
            raise ConfigError(
                f"env.distribution_mode={self.distribution_mode} is neither easy nor hard; try "
                f"env.distribution_mode={near[0]}"
            )
        if self.normalize_obs:
            raise ConfigError(
                "env.normalize_obs=true is not for pixels, which the network scales itself; "
                "env.normalize_obs=false"
            )
        for key in ("num_envs", "num_threads", "max_episode_steps"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"env.{key}={value} must be at least 1; try env.{key}=64")
        for key in ("num_levels", "start_level"):
            if getattr(self, key) < 0:
                raise ConfigError(f"env.{key}={getattr(self, key)} must be at least 0; try env.{key}=0")
        if self.start_level and not self.num_levels:
            raise ConfigError(
                f"env.start_level={self.start_level} has no effect on unlimited levels; set "
                "env.num_levels=200, or env.start_level=0"
            )
        if self.start_level + self.num_levels > _MAX_LEVEL:
            raise ConfigError(
                f"env.start_level={self.start_level} and env.num_levels={self.num_levels}: the last level is "
                f"{_MAX_LEVEL - 1}; try env.start_level=0"
            )
        for key in ("distribution_mode", "num_levels", "start_level", "max_episode_steps", "num_threads"):
            if key in self.kwargs:
                raise ConfigError(
                    f"env.kwargs.{key} is not passed on; set env.{key}={self.kwargs[key]} instead"
                )
