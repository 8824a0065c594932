"""The Atari family: what the three spellings of an id mean, and the backends that play it.

All backends preprocess alike: see `rl/envs/atari_game.py`. Observations are the last `frame_stack` grey
frames, uint8 `[frame_stack, 84, 84]`. In training only, rewards are their signs and a lost life ends the task
but not the game; reported returns are always raw and of whole games.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from rl.envs.atari_game import AtariGame, GameSettings
from rl.envs.vector import ActionSpace, VectorEnv
from rl.errors import ConfigError
from rl.machine import cpus

log = logging.getLogger(__name__)

BACKENDS = ("ale", "sync", "envpool")
LEAST_DOUBLE_BUFFERED = 4  # games: to act for one at a time costs as much as to act for two
MAX_FRAMES = 108_000  # half an hour of play, the limit that ids of all three spellings are registered with
_TWO_PLAYERS = ("combat", "joust", "maze_craze", "warlords")
# What may stand around a game's name, and the probability of a sticky action that it means.
_SPELLINGS = {"{}NoFrameskip-v4": 0.0, "ALE/{}-v5": 0.25, "{}-v5": 0.0}
_OTHER = re.compile(
    r"(ALE/)?(?P<name>\w+?)(NoFrameskip|Deterministic)?(?P<ram>-ram\w*)?(-v\d+)?", re.IGNORECASE
)


class AtariId(NamedTuple):
    """What an id names."""

    name: str  # as in ids: MsPacman
    rom: str  # as ALE calls it: ms_pacman
    sticky: float  # probability, a frame, that the previous action is repeated


def parse(id: str) -> AtariId:
    """What `id` means in its spelling: `XNoFrameskip-v4` and EnvPool's `X-v5` are without sticky actions,
    `ALE/X-v5` repeats actions with probability 0.25.

    The frame skip of an id (none, 4 and 4) is replaced by the family's own, so that frames are never skipped
    twice. Raises ConfigError for other ids, other spellings and games that do not exist.
    """
    roms = _module("ale_py.roms", id)
    games = {rom.title().replace("_", ""): rom for rom in roms.get_all_rom_ids() if rom not in _TWO_PLAYERS}
    known = {
        spelling.format(name): AtariId(name, rom, sticky)
        for spelling, sticky in _SPELLINGS.items()
        for name, rom in games.items()
    }
    if id in known:
        return known[id]
    found = _OTHER.fullmatch(id)
    lower = {name.lower(): name for name in games}
    name = lower.get(found["name"].lower()) if found else None
    if found is None or name is None:
        names = {key.lower(): key for key in known}
        near = difflib.get_close_matches(id.lower(), names, n=1, cutoff=0.6)
        advice = f"did you mean env.id={names[near[0]]}?" if near else "env.id=BreakoutNoFrameskip-v4 is one"
        raise ConfigError(f"env.id={id} is not an Atari game for one player: {advice}")
    what = "observes memory, not pixels" if found["ram"] else "is none of the spellings known here"
    raise ConfigError(
        f"env.id={id} {what}: env.id={name}NoFrameskip-v4 has no sticky actions, env.id=ALE/{name}-v5 has "
        f"(probability 0.25), env.id={name}-v5 (EnvPool's) has none"
    )


@dataclasses.dataclass(frozen=True)
class AtariEnvs:
    """N copies of one Atari game; the fields are the keys of `env=atari`."""

    id: str
    num_envs: int
    backend: str = "ale"
    num_threads: int | None = None
    double_buffer: bool = True
    max_episode_steps: int | None = None
    frame_skip: int = 4
    frame_stack: int = 4
    noop_max: int = 30
    fire_reset: bool = True
    episodic_life: bool = True
    clip_rewards: bool = True
    repeat_action_probability: float | None = None
    full_action_space: bool = False
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
        """Make the environments; the arguments replace the configured values (evaluation needs its own).

        With `evaluation` they are whole games with raw rewards. `render_mode` asks for nothing here: `sync`
        always draws, the others never. Raises ConfigError as `check` does.
        """
        self._check_keys()
        settings = self._settings()
        num_envs = self.num_envs if num_envs is None else num_envs
        backend = self.backend if backend is None else backend
        episodic_life = self.episodic_life and not evaluation
        clip_rewards = self.clip_rewards and not evaluation
        if not evaluation:
            log.info(self.meaning())
        if backend == "envpool":
            return self._envpool(settings, num_envs, episodic_life, clip_rewards)
        _module("ale_py", self.id)
        trained = partial(_trained, episodic_life=episodic_life, clip_rewards=clip_rewards)
        if backend == "sync":
            from rl.envs.sync import SyncEnvs

            _module("cv2", self.id)
            games = [AtariGame(settings) for _ in range(num_envs)]
            return trained(SyncEnvs([partial(_given, game) for game in games]), partial(_lives, games))
        from rl.envs.ale_vector import AleEnvs

        threads = cpus() if self.num_threads is None else self.num_threads
        halved = self.double_buffer and threads > 1 and num_envs % 2 == 0
        if evaluation or not halved or num_envs < LEAST_DOUBLE_BUFFERED:
            ale = AleEnvs(settings, num_envs, num_threads=threads)
            return trained(ale, partial(getattr, ale, "lives"))
        from rl.envs.double_buffer import DoubleBuffer

        half, each = num_envs // 2, max(1, min(threads, num_envs) // 2)
        halves = [AleEnvs(settings, half, num_threads=each, first=first) for first in (0, half)]
        one, other = (trained(ale, partial(getattr, ale, "lives")) for ale in halves)
        return DoubleBuffer(one, other, 2 * each)

    def smallest(self) -> AtariEnvs:
        """One game in this process, for what needs its spaces only."""
        return dataclasses.replace(self, num_envs=1, backend="sync")

    def check(self, *, render: bool) -> tuple[spaces.Box, ActionSpace]:
        """Make one environment of training and one of evaluation, and close them; return the spaces that a
        policy will see.

        Raises ConfigError for all that would keep a run from starting. `render` adds nothing: every game can
        be drawn.
        """
        self._check_keys()
        if self.backend != "sync":  # as evaluation: a run says what its id means when it starts
            self.make(num_envs=1, evaluation=True).close()
        envs = self.make(num_envs=1, backend="sync", evaluation=True)
        envs.close()
        return envs.observation_space, envs.action_space

    def meaning(self) -> str:
        """One line on what `id` and the other keys amount to."""
        game, settings = parse(self.id), self._settings()
        sticky = (
            f"sticky actions (probability {settings.sticky:g})" if settings.sticky else "no sticky actions"
        )
        life = "a lost life is terminal in training" if self.episodic_life else "lost lives are not terminal"
        return (
            f"{self.id} is the game {game.name} with {sticky}; {settings.frame_skip} frames a step, skipped "
            f"once; {life}; games of at most {settings.max_episode_steps * settings.frame_skip} frames"
        )

    def _settings(self) -> GameSettings:
        game = parse(self.id)
        given, limit = self.repeat_action_probability, self.max_episode_steps
        return GameSettings(
            rom=game.rom,
            sticky=game.sticky if given is None else given,
            frame_skip=self.frame_skip,
            frame_stack=self.frame_stack,
            noop_max=self.noop_max,
            fire_reset=self.fire_reset,
            full_action_space=self.full_action_space,
            max_episode_steps=max(1, MAX_FRAMES // self.frame_skip) if limit is None else limit,
            **self.kwargs,
        )

    def _envpool(
        self, settings: GameSettings, num_envs: int, episodic_life: bool, clip_rewards: bool
    ) -> VectorEnv:
        from rl.envs.envpool_envs import EnvPoolEnvs

        envs: VectorEnv = EnvPoolEnvs(
            f"{parse(self.id).name}-v5",
            num_envs,
            num_threads=self.num_threads,
            clip_rewards=clip_rewards,
            episodic_life=episodic_life,
            frame_skip=settings.frame_skip,
            stack_num=settings.frame_stack,
            noop_max=settings.noop_max,
            use_fire_reset=settings.fire_reset,
            repeat_action_probability=settings.sticky,
            max_episode_steps=settings.max_episode_steps,
            full_action_space=settings.full_action_space,
        )
        return envs

    def _check_keys(self) -> None:
        if self.backend not in BACKENDS:
            near = difflib.get_close_matches(str(self.backend), BACKENDS, n=1, cutoff=0.3) or ["ale"]
            raise ConfigError(
                f"env.backend={self.backend} is none of {', '.join(BACKENDS)}; try env.backend={near[0]}"
            )
        least = {"num_envs": 1, "num_threads": 1, "max_episode_steps": 1, "frame_skip": 1, "frame_stack": 1}
        for key, low in {**least, "noop_max": 0}.items():
            value = getattr(self, key)
            if value is not None and value < low:
                raise ConfigError(f"env.{key}={value} must be at least {low}; try env.{key}={low}")
        sticky = self.repeat_action_probability
        if sticky is not None and not 0.0 <= sticky < 1.0:
            raise ConfigError(
                f"env.repeat_action_probability={sticky} must be at least 0 and below 1; "
                "env.repeat_action_probability=null takes what the id says"
            )
        if self.normalize_obs:
            raise ConfigError(
                "env.normalize_obs=true is not for pixels, which the network scales itself; "
                "set env.normalize_obs=false"
            )
        self._check_kwargs()

    def _check_kwargs(self) -> None:
        own = [field.name for field in dataclasses.fields(self)]
        for key, value in self.kwargs.items():
            if key in own:
                raise ConfigError(f"env.kwargs.{key} is not passed on; set env.{key}={value} instead")
            if key not in ("mode", "difficulty"):
                raise ConfigError(
                    f"env.kwargs.{key} is not an argument of {self.id}: it takes mode and difficulty; "
                    "env.kwargs={} works"
                )
            if self.backend != "sync":
                raise ConfigError(
                    f"env.kwargs.{key}={value} cannot be had with env.backend={self.backend}; "
                    "set env.backend=sync"
                )
        if self.kwargs:
            self._check_switches()

    def _check_switches(self) -> None:
        """Mode and difficulty must be among those that the game has."""
        ale_py = _module("ale_py", self.id)
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        ale = ale_py.ALEInterface()
        ale.loadROM(ale_py.roms.get_rom_path(parse(self.id).rom))
        allowed = {"mode": ale.getAvailableModes(), "difficulty": ale.getAvailableDifficulties()}
        for key, value in self.kwargs.items():
            if value not in allowed[key]:
                raise ConfigError(
                    f"env.kwargs.{key}={value}: {self.id} has {', '.join(map(str, allowed[key]))}; "
                    f"try env.kwargs.{key}={allowed[key][0]}"
                )


def _trained(envs: Any, lives: Callable[[], np.ndarray], *, episodic_life: bool, clip_rewards: bool) -> Any:
    """Whole games as training is to see them: see `AtariTraining`."""
    if not (episodic_life or clip_rewards):
        return envs
    from rl.envs.atari_training import AtariTraining

    return AtariTraining(envs, lives, episodic_life=episodic_life, clip_rewards=clip_rewards)


def _given(game: AtariGame) -> AtariGame:
    return game


def _lives(games: list[AtariGame]) -> np.ndarray:
    return np.array([game.lives for game in games])


def _module(name: str, id: str) -> Any:
    """Import a module that only the extra `atari` installs."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"env.id={id} needs the package {package}, which is not installed: pip install -e '.[atari]'"
        ) from error
