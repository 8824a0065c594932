"""The gymnasium family: any registered id, a user's own package included, checked before a run starts."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec, parse_env_id

from rl.envs.spaces import flat_observations, policy_action_space, policy_observation_space
from rl.envs.sync import SyncEnvs
from rl.envs.vector import ActionSpace, VectorEnv
from rl.errors import ConfigError, one_line

if TYPE_CHECKING:
    from rl.envs.envpool_envs import EnvPoolEnvs

log = logging.getLogger(__name__)

BACKENDS = ("sync", "async", "envpool")
# import name → our extra
_EXTRAS = {
    "mujoco": "mujoco",
    "Box2D": "box2d",
    "pygame": "video",
    "ale_py": "atari",
}
_ATARI_ID = re.compile(r"ALE/|\w+(NoFrameskip|Deterministic|-ram)\b")
_OWN_KEYS = ("id", "num_envs", "backend", "num_workers", "max_episode_steps")


@dataclasses.dataclass(frozen=True)
class EnvMaker:
    """Makes one environment, in this process or, pickled, in another where its id need not be registered."""

    spec: EnvSpec
    module: str | None  # imported first: the package part of `my_pkg:MyEnv-v0`
    max_episode_steps: int | None
    kwargs: dict[str, Any]
    render_mode: str | None = None

    def __call__(self) -> gym.Env[Any, Any]:
        """Return a new environment, without gymnasium's checkers: `SyncEnvs` keeps to the order of calls."""
        kwargs = dict(self.kwargs)
        if self.render_mode is not None:
            kwargs["render_mode"] = self.render_mode
            _draw_without_display()
        if self.module is not None:
            importlib.import_module(self.module)
        spec = dataclasses.replace(self.spec, order_enforce=False)
        if isinstance(spec.entry_point, str):
            importlib.import_module(spec.entry_point.partition(":")[0])
        with _mujoco_quiet(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not in the possible render_modes")  # `check` says so
            return gym.make(
                spec, max_episode_steps=self.max_episode_steps, disable_env_checker=True, **kwargs
            )


@dataclasses.dataclass(frozen=True)
class GymnasiumEnvs:
    """N environments of one gymnasium id; the fields are the keys of `env=…`."""

    id: str
    num_envs: int
    backend: str = "sync"
    num_workers: int | None = None
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
        """Make the environments; the arguments replace the configured values (evaluation needs its own).

        `evaluation` changes nothing here: training sees whole episodes and raw rewards too. Raises
        ConfigError as `check` does.
        """
        self._check_numbers()
        num_envs = self.num_envs if num_envs is None else num_envs
        backend = self.backend if backend is None else backend
        if backend == "envpool" and render_mode is None:
            return self._pooled(num_envs)
        makers = [self._maker(render_mode)] * num_envs
        if backend != "async":  # whatever is drawn, gymnasium draws
            return SyncEnvs(makers)
        from rl.envs.async_workers import AsyncEnvs

        return AsyncEnvs(makers, num_workers=self.num_workers)

    def smallest(self) -> GymnasiumEnvs:
        """One env in this process, for what needs its spaces only."""
        return dataclasses.replace(self, num_envs=1, backend="sync")

    def check(self, *, render: bool) -> tuple[spaces.Box, ActionSpace]:
        """Make one environment, look at it and close it; return the spaces that a policy will see.

        With `render`, one frame is drawn too. Raises ConfigError for all that would keep a run from starting.
        """
        self._check_numbers()
        maker = self._maker("rgb_array" if render else None)
        self._check_kwargs()
        env = self._make_one(maker, render)
        try:
            flat = flat_observations(env)
            spaces_ = policy_observation_space(flat), policy_action_space(flat)
            if render:
                self._check_frame(env)
        finally:
            env.close()
        if self.backend == "envpool":
            from rl.envs.envpool_envs import require_same_spaces

            require_same_spaces(self._pooled(1), *spaces_)
        return spaces_

    def _pooled(self, num_envs: int) -> EnvPoolEnvs:
        from rl.envs.envpool_envs import EnvPoolEnvs

        return EnvPoolEnvs(
            self.id,
            num_envs,
            num_threads=self.num_workers,
            max_episode_steps=self.max_episode_steps,
            **self.kwargs,
        )

    def _check_numbers(self) -> None:
        if self.backend not in BACKENDS:
            near = difflib.get_close_matches(str(self.backend), BACKENDS, n=1, cutoff=0.3) or ["sync"]
            raise ConfigError(
                f"env.backend={self.backend} is none of {', '.join(BACKENDS)}; try env.backend={near[0]}"
            )
        for key, value in (("num_envs", self.num_envs), ("num_workers", self.num_workers)):
            if value is not None and value < 1:
                raise ConfigError(f"env.{key}={value} must be at least 1; try env.{key}=1")
        if self.max_episode_steps is not None and self.max_episode_steps < 1:
            raise ConfigError(
                f"env.max_episode_steps={self.max_episode_steps} must be at least 1; "
                "env.max_episode_steps=null keeps the limit that the environment was registered with"
            )

    def _maker(self, render_mode: str | None) -> EnvMaker:
        module, _, name = self.id.rpartition(":")
        if module:
            self._import(module)
        return EnvMaker(
            spec=self._registered(name, f"{module}:" if module else ""),
            module=module or None,
            max_episode_steps=self.max_episode_steps,
            kwargs=dict(self.kwargs),
            render_mode=render_mode,
        )

    def _import(self, module: str) -> None:
        """Import the user's package, which registers its environments; errors of its own pass through."""
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
                raise ConfigError(
                    f"env.id={self.id}: there is no package {error.name!r}; install it (pip install -e PATH) "
                    "or put its folder on PYTHONPATH, or take an id without one: env.id=CartPole-v1"
                ) from error
            raise ConfigError(_missing_package(self.id, error, "")) from error

    def _registered(self, name: str, prefix: str) -> EnvSpec:
        spec = gym.registry.get(name)
        if spec is not None:
            return spec
        if not prefix and _ATARI_ID.match(name):
            try:
                importlib.import_module("ale_py")
            except ImportError as error:
                raise ConfigError(_missing_package(self.id, error, "")) from error
            if name in gym.registry:
                return gym.registry[name]
        near = [f"env.id={prefix if _from_module(key, prefix) else ''}{key}" for key in _near_ids(name)]
        advice = f"did you mean {' or '.join(near)}?"
        if not near:
            advice = "your own package's is written env.id=my_pkg:MyEnv-v0; env.id=CartPole-v1 is one"
        raise ConfigError(f"env.id={self.id} is not a registered environment: {advice}")

    def _check_kwargs(self) -> None:
        for key, value in self.kwargs.items():
            if key in _OWN_KEYS:
                raise ConfigError(f"env.kwargs.{key} is not passed on; set env.{key}={value} instead")
            if key == "render_mode":
                raise ConfigError(
                    "env.kwargs.render_mode is ours to choose; set capture_video=true for videos"
                )

    def _make_one(self, maker: EnvMaker, render: bool) -> gym.Env[Any, Any]:
        """Make one environment, turning what is wrong with the configuration into a ConfigError."""
        try:
            env = maker()
        except ImportError as error:
            raise ConfigError(_missing_package(self.id, error, maker.spec.entry_point)) from error
        except TypeError as error:
            match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if match is None and not self.kwargs:
                raise
            if match is not None and match[1] == "render_mode" and render:
                raise self._cannot_render("its constructor takes no render_mode") from error
            if match is None or match[1] not in self.kwargs:
                raise self._refused(error) from error
            raise ConfigError(self._unknown_kwarg(match[1], maker.spec)) from error
        except gym.error.Error as error:
            missing = _missing_module(error)
            if missing is not None:
                raise ConfigError(_missing_package(self.id, error, maker.spec.entry_point)) from error
            raise ConfigError(
                f"env.id={self.id} cannot be made: {one_line(error)}; env.id=CartPole-v1 can"
            ) from error
        except Exception as error:
            if not self.kwargs:
                raise  # a mistake in the environment's own code: its author needs the traceback
            raise self._refused(error) from error
        return env

    def _refused(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"env.kwargs={self.kwargs} was refused by {self.id} ({type(error).__name__}: {one_line(error)}); "
            "env.kwargs={} takes the defaults"
        )

    def _unknown_kwarg(self, key: str, spec: EnvSpec) -> str:
        known = sorted(set(_parameters(spec)) | set(spec.kwargs))
        near = difflib.get_close_matches(key, known, n=1)
        if near:
            advice = f"did you mean env.kwargs.{near[0]}?"
        elif known:
            advice = f"it takes {', '.join(known)}"
        else:
            advice = "it takes none; env.kwargs={} works"
        return f"env.kwargs.{key} is not an argument of {self.id}: {advice}"

    def _cannot_render(self, why: str) -> ConfigError:
        return ConfigError(f"env.id={self.id} cannot be recorded ({why}); set capture_video=false")

    def _check_frame(self, env: gym.Env[Any, Any]) -> None:
        modes = env.metadata.get("render_modes") or []
        if "rgb_array" not in modes:
            raise self._cannot_render(
                f"its render modes are {', '.join(map(str, modes)) or 'none'}, not rgb_array"
            )
        try:
            env.reset(seed=0)
            frame = env.render()
        except Exception as error:
            entry_point = env.spec.entry_point if env.spec is not None else None
            if "mujoco" in sys.modules and _missing_module(error) != "mujoco" and "mujoco" in _ancestry(env):
                raise ConfigError(
                    f"capture_video=true: MuJoCo could not draw a frame of {self.id} ({one_line(error)}); "
                    "set MUJOCO_GL=egl and apt-get install libegl1 libgl1-mesa-dri, or set "
                    "capture_video=false"
                ) from error
            if _missing_module(error) is not None:
                raise ConfigError(_missing_package(self.id, error, entry_point, drawing=True)) from error
            raise self._cannot_render(f"{type(error).__name__}: {one_line(error)}") from error
        if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.shape[2] != 3:
            raise self._cannot_render("its frame is not an array [H, W, 3]")


def _near_ids(name: str) -> list[str]:
    """Registered ids most like `name`, best first: other versions of it, then similar spellings."""
    lower = {key.lower(): key for key in gym.registry}
    wanted = re.sub(r"-v\d+$", "", name.lower())
    versions = [key for low, key in lower.items() if re.sub(r"-v\d+$", "", low) == wanted]
    versions.sort(key=lambda key: -(parse_env_id(key)[2] or 0))
    similar = [lower[low] for low in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.7)]
    return list(dict.fromkeys([*versions, *similar]))[:3]


def _from_module(id: str, prefix: str) -> bool:
    """Whether the environment `id` comes from the user's package named by `prefix` (`my_pkg:`)."""
    if not prefix:
        return False
    entry_point = gym.registry[id].entry_point
    module = entry_point if isinstance(entry_point, str) else getattr(entry_point, "__module__", "")
    return module.split(":")[0].split(".")[0] == prefix[:-1].split(".")[0]


def _parameters(spec: EnvSpec) -> list[str]:
    """Names of the constructor's arguments, those of its parents included where it passes `**kwargs` on."""
    creator: Any = spec.entry_point
    if isinstance(creator, str):
        module, _, attribute = creator.partition(":")
        creator = getattr(importlib.import_module(module), attribute)
    functions: list[Callable[..., Any]] = [creator]
    if inspect.isclass(creator):
        functions = [vars(cls)["__init__"] for cls in creator.__mro__[:-1] if "__init__" in vars(cls)]
    names: list[str] = []
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        names += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return [name for name in dict.fromkeys(names) if name not in ("self", "render_mode", "env", "args")]


def _missing_module(error: BaseException | None) -> str | None:
    """Top-level name of the module whose absence led to `error`, found along its causes."""
    while error is not None:
        if isinstance(error, ImportError) and error.name:
            return error.name.partition(".")[0]
        error = error.__cause__ or error.__context__
    return None


def _missing_package(id: str, error: BaseException, entry_point: Any, *, drawing: bool = False) -> str:
    module = _missing_module(error)
    if module is None:
        near = [key for key in _near_ids(id) if key != id] or ["CartPole-v1"]
        return f"env.id={id} cannot be imported ({one_line(error)}); try env.id={near[0]}"
    extra = _EXTRAS.get(module)
    if module == "pygame" and ".box2d" in str(entry_point):
        extra = "box2d"
    install = f"pip install -e '.[{extra}]'" if extra else f"pip install {module}"
    if drawing:
        return f"capture_video=true: drawing {id} needs {module}: {install}, or set capture_video=false"
    return f"env.id={id} needs the package {module}, which is not installed: {install}"


def _ancestry(env: gym.Env[Any, Any]) -> str:
    return " ".join(cls.__module__ for cls in type(env.unwrapped).__mro__)


def _draw_without_display() -> None:
    """Choose off-screen drawing where there is no screen; must precede the import of mujoco and pygame."""
    if sys.platform.startswith("linux") and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        os.environ.setdefault("MUJOCO_GL", "egl")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


@contextlib.contextmanager
def _mujoco_quiet() -> Iterator[None]:
    """While a model is compiled, drop MuJoCo's remark on `settotalmass` in gymnasium's models; log others.

    Without a handler MuJoCo prints to the terminal and writes MUJOCO_LOG.TXT into the working directory.
    """
    mujoco: Any = sys.modules.get("mujoco")
    if mujoco is None or not hasattr(mujoco, "set_mju_user_warning"):
        yield
        return
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(
        lambda text: None if "settotalmass" in text else log.warning("MuJoCo: %s", text)
    )
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)
