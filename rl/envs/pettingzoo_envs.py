"""The PettingZoo family: the Atari games for several players, and any environment with the Parallel API."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from rl.envs.agent_views import GameOptions, ParallelEnv, row_spaces
from rl.envs.parallel import Maker, ParallelEnvs, fitting_num_envs
from rl.envs.vector import ActionSpace, VectorEnv
from rl.errors import ConfigError, one_line

_PACKAGES = ("pettingzoo", "multi_agent_ale_py", "ale_py", "cv2", "pygame")  # what the extra brings
_OWN_KEYS = ("id", "num_envs", "backend", "max_episode_steps", "frame_skip", "frame_stack")
_LEAST = {"num_envs": 1, "max_episode_steps": 1, "frame_skip": 1, "frame_stack": 1, "noop_max": 0}
_PARALLEL_API = ("possible_agents", "reset", "step", "observation_space", "action_space")


@dataclasses.dataclass(frozen=True)
class PettingZooEnvs:
    """N agents in games of one kind, one policy playing all; the fields are the keys of `env=…`.

    `id` is one of PettingZoo's Atari games (`pong_v3`), or `my_package.my_module:make`: a function or class
    that returns an environment with the Parallel API. `my_package.my_module` alone means its `parallel_env`,
    as PettingZoo's own modules call it. It is given `kwargs`, and `render_mode` where frames are drawn.
    """

    id: str
    num_envs: int
    backend: str = "sync"
    max_episode_steps: int | None = None
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    normalize_obs: bool = False
    normalize_reward: bool = False
    clip_obs: float | None = None
    clip_reward: float | None = None
    clip_rewards: bool = False
    frame_stack: int = 4
    frame_skip: int = 4
    agent_indicator: bool = True
    noop_max: int = 0

    def make(
        self,
        *,
        num_envs: int | None = None,
        backend: str | None = None,
        render_mode: str | None = None,
        evaluation: bool = False,
    ) -> VectorEnv:
        """Make the games; the arguments replace the configured values.

        With `evaluation`, rewards are raw and rows are added until the last game is whole: read `num_envs`
        of what comes back. Raises ConfigError as `check` does.
        """
        self._check_values(self.backend if backend is None else backend)
        return ParallelEnvs(
            self._maker(render_mode),
            self.num_envs if num_envs is None else num_envs,
            self._options(evaluation),
            name=self.id,
            round_up=evaluation,
        )

    def smallest(self) -> PettingZooEnvs:
        """The same: fewer rows may be no whole game."""
        return self

    def check(self, *, render: bool) -> tuple[spaces.Box, ActionSpace]:
        """Make one game, look at it and close it; return the spaces that a policy will see.

        With `render`, one frame is drawn too. Raises ConfigError for all that would keep a run from starting.
        """
        self._check_values(self.backend)
        env = self._maker("rgb_array" if render else None)()
        try:
            agents = len(env.possible_agents)
            if self.num_envs % agents:
                raise ConfigError(
                    f"env.num_envs={self.num_envs} counts agents, and {self.id} has {agents} a game; "
                    f"env.num_envs={fitting_num_envs(self.num_envs, agents)} is a whole number of games"
                )
            found = row_spaces(env, self._options(False), self.id)
            if found.observation.dtype == np.uint8:
                self._need("cv2")
            if render:
                self._check_frame(env)
        finally:
            env.close()
        return found.observation, found.action

    def _options(self, evaluation: bool) -> GameOptions:
        return GameOptions(
            frame_skip=self.frame_skip,
            frame_stack=self.frame_stack,
            agent_indicator=self.agent_indicator,
            noop_max=0 if self._is_users() else self.noop_max,
            clip_rewards=self.clip_rewards and not evaluation,
            max_episode_steps=self.max_episode_steps,
        )

    def _check_values(self, backend: str) -> None:
        if backend != "sync":
            raise ConfigError(f"env.backend={backend}: PettingZoo games run in one process; env.backend=sync")
        for key, least in _LEAST.items():
            value = getattr(self, key)
            if value is not None and value < least:
                raise ConfigError(f"env.{key}={value} must be at least {least}; try env.{key}={least}")
        for key, value in self.kwargs.items():
            if key in _OWN_KEYS:
                raise ConfigError(f"env.kwargs.{key} is not passed on; set env.{key}={value} instead")
            if key == "render_mode":
                raise ConfigError(
                    "env.kwargs.render_mode is ours to choose; set capture_video=true for videos"
                )

    def _is_users(self) -> bool:
        """Whether the id names a module instead of a game."""
        return ":" in self.id or "." in self.id

    def _maker(self, render_mode: str | None) -> Maker:
        """What makes one game; ConfigErrors tell what is wrong with id and kwargs when it is called."""
        kwargs = dict(self.kwargs)
        if render_mode is not None:
            kwargs["render_mode"] = render_mode
            if sys.platform.startswith("linux") and not os.environ.get("DISPLAY"):
                os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # else it greets on stdout
        create = self._users_maker() if self._is_users() else self._game_maker(kwargs)
        return functools.partial(self._made, create, kwargs)

    def _game_maker(self, kwargs: dict[str, Any]) -> Callable[..., Any]:
        """The maker of one of PettingZoo's Atari games, with ale-py's ROMs and grey frames."""
        for package in ("pettingzoo", "multi_agent_ale_py", "pygame"):
            self._need(package)
        if "auto_rom_install_path" not in kwargs:
            roms = self._need("ale_py")
            kwargs["auto_rom_install_path"] = str(roms / "roms")
        kwargs.setdefault("obs_type", "grayscale_image")
        games = atari_games()
        if self.id not in games:
            near = _nearest_game(self.id, games)
            raise ConfigError(
                f"env.id={self.id} is not a game of PettingZoo's: did you mean env.id={near}? (an "
                "environment of your own is written env.id=my_package.my_module:make)"
            )
        module = importlib.import_module(f"pettingzoo.atari.{self.id}")
        # The parallel environment itself: PettingZoo's conversions to turns and back take 40 % of the time.
        return lambda **given: module.raw_env(**given).env

    def _users_maker(self) -> Callable[..., Any]:
        name, _, attribute = self.id.partition(":")
        attribute = attribute or "parallel_env"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
                if error.name == "pettingzoo":
                    raise self._missing("pettingzoo") from error
                raise ConfigError(
                    f"env.id={self.id}: there is no module {error.name!r}; install it (pip install -e PATH) "
                    "or put its folder on PYTHONPATH, or take a game of PettingZoo's: env.id=pong_v3"
                ) from error
            raise self._missing(error.name or "") from error
        create = getattr(module, attribute, None)
        if not callable(create):
            names = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
            near = difflib.get_close_matches(attribute, names, n=1)
            advice = (
                f"did you mean env.id={name}:{near[0]}?"
                if near
                else f"write env.id={name}:NAME, NAME returning an environment"
            )
            raise ConfigError(f"env.id={self.id}: {name} has no function or class {attribute!r}; {advice}")
        return create

    def _made(self, create: Callable[..., Any], kwargs: dict[str, Any]) -> ParallelEnv:
        """One game, turning what is wrong with the configuration into a ConfigError."""
        try:
            env = create(**kwargs)
        except ImportError as error:
            raise self._missing((error.name or "").partition(".")[0]) from error
        except TypeError as error:
            match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if match is None or match[1] not in kwargs:
                if not self.kwargs:
                    raise
                raise self._refused(error) from error
            if match[1] == "render_mode":
                raise self._cannot_render("what makes it takes no render_mode") from error
            raise ConfigError(
                f"env.kwargs.{match[1]} is not an argument of {self.id}; env.kwargs={{}} takes the defaults"
            ) from error
        except Exception as error:
            if not self.kwargs:
                raise  # a mistake in the environment's own code: its author needs the traceback
            raise self._refused(error) from error
        lacking = [name for name in _PARALLEL_API if not hasattr(env, name)]
        if hasattr(env, "agent_iter"):
            raise ConfigError(
                f"env.id={self.id} takes turns (AEC); return pettingzoo.utils.aec_to_parallel(env) from it"
            )
        if lacking or not env.possible_agents:
            lacked = (lacking or ["possible_agents"])[0]
            raise ConfigError(
                f"env.id={self.id} gave a {type(env).__name__} without {lacked}; "
                "PettingZoo's Parallel API has it, with every agent that may ever play in possible_agents"
            )
        return env

    def _refused(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"env.kwargs={self.kwargs} was refused by {self.id} ({type(error).__name__}: {one_line(error)}); "
            "env.kwargs={} takes the defaults"
        )

    def _check_frame(self, env: ParallelEnv) -> None:
        try:
            env.reset(seed=0)
            frame = env.render()
        except Exception as error:
            raise self._cannot_render(f"{type(error).__name__}: {one_line(error)}") from error
        if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.shape[2] != 3:
            raise self._cannot_render("its frame is not an array [H, W, 3]")

    def _cannot_render(self, why: str) -> ConfigError:
        return ConfigError(f"env.id={self.id} cannot be recorded ({why}); set capture_video=false")

    def _need(self, package: str) -> Path:
        """Folder of an installed package; ConfigError with the command that installs it otherwise."""
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise self._missing(package)
        return Path(spec.origin).parent

    def _missing(self, module: str) -> ConfigError:
        command = "pip install -e '.[pettingzoo]'" if module in _PACKAGES else f"pip install {module}"
        return ConfigError(f"env.id={self.id} needs the package {module}, which is not installed: {command}")


@functools.cache
def atari_games() -> tuple[str, ...]:
    """Ids of PettingZoo's Atari games, newest versions only; pettingzoo must be installed."""
    folder = importlib.util.find_spec("pettingzoo.atari")
    places = [] if folder is None else list(folder.submodule_search_locations or [])
    return tuple(sorted(m.name for m in pkgutil.iter_modules(places) if re.search(r"_v\d+$", m.name)))


def _nearest_game(id: str, games: tuple[str, ...]) -> str:
    """The id of the same game in another version, else of the most similar spelling."""
    stems = {re.sub(r"_v\d+$", "", game): game for game in games}
    stem = re.sub(r"[_-]?v?\d*$", "", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", id)).lower()
    near = difflib.get_close_matches(stem, stems, n=1, cutoff=0.5)
    return stems[near[0]] if near else "pong_v3"
