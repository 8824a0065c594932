"""What each agent of a game of several sees, as a row: its space, and how images and vectors fill it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium import spaces

from rl.envs.spaces import policy_action_space
from rl.envs.vector import ActionSpace
from rl.errors import ConfigError

SCREEN = (84, 84)  # height and width that image observations are brought to


class ParallelEnv(Protocol):
    """What is used of PettingZoo's `ParallelEnv`, which need not be its base class."""

    possible_agents: list[Any]
    agents: list[Any]
    metadata: dict[str, Any]

    def reset(self, seed: int | None = None) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Begin a game; observations and infos by agent."""
        ...

    def step(
        self, actions: dict[Any, Any]
    ) -> tuple[dict[Any, Any], dict[Any, float], dict[Any, bool], dict[Any, bool], dict[Any, Any]]:
        """Act at once; observations, rewards, terminations, truncations and infos by agent."""
        ...

    def observation_space(self, agent: Any) -> spaces.Space[Any]:
        """The space of what `agent` sees."""
        ...

    def action_space(self, agent: Any) -> spaces.Space[Any]:
        """The space of what `agent` does."""
        ...

    def render(self) -> Any:
        """The current frame."""
        ...

    def close(self) -> None:
        """Release everything held."""
        ...


class GameOptions(NamedTuple):
    """How a game is played and seen. `frame_skip` and `frame_stack` apply to image observations only."""

    frame_skip: int = 4  # frames for which an action is held
    frame_stack: int = 4  # newest frames in one observation
    agent_indicator: bool = True  # tell each row which agent it is
    noop_max: int = 0  # begin with 1..noop_max frames in which everybody takes action 0; 0: none
    clip_rewards: bool = False  # learn from the sign of the reward
    max_episode_steps: int | None = None  # time limit in agent steps


class RowSpaces(NamedTuple):
    """What a policy sees of each row, and how it acts."""

    observation: spaces.Box
    action: ActionSpace


def row_spaces(env: ParallelEnv, options: GameOptions, name: str) -> RowSpaces:
    """Return the spaces of the rows of `env`, which messages call `name`.

    Images (uint8 `[H, W]`, `[H, W, 1]` or `[H, W, 3]`) become uint8 `[C, 84, 84]`, C the stacked grey frames
    and then, with the indicator, a channel for each agent. All else becomes one row of float32, followed by
    a one-hot row that says which agent it is. Raises ConfigError where agents differ in their spaces, or a
    space is not allowed.
    """
    agents = list(env.possible_agents)
    first = env.observation_space(agents[0]), env.action_space(agents[0])
    for agent in agents[1:]:
        for what, one, other in zip(
            ("sees", "acts in"), first, (env.observation_space(agent), env.action_space(agent)), strict=True
        ):
            if one != other:
                here, there = (" ".join(str(space).split()) for space in (one, other))
                raise ConfigError(
                    f"env.id={name}: agent {agents[0]} {what} {here} but agent {agent} {there}; one policy "
                    "plays all, so pad them to the same space (env.id=pong_v3 has equal ones)"
                )
    seen, acts = first
    if not isinstance(acts, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box):
        raise ConfigError(
            f"env.id={name} has a {type(acts).__name__} action space; allowed are Discrete, MultiDiscrete, "
            "MultiBinary and Box (env.id=pong_v3 has Discrete)"
        )
    action = policy_action_space(SimpleNamespace(action_space=acts))  # type: ignore[arg-type]
    extra = len(agents) if options.agent_indicator else 0
    if is_image(seen):
        shape = (options.frame_stack + extra, *SCREEN)
        return RowSpaces(spaces.Box(0, 255, shape, np.uint8), action)
    if isinstance(seen, spaces.Box) and seen.dtype == np.uint8 and len(seen.shape) >= 2:
        raise ConfigError(
            f"env.id={name} has uint8 observations of shape {seen.shape}; images are [H, W], [H, W, 1] or "
            "[H, W, 3], and what is no image is a row or not uint8 (env.id=pong_v3 has [210, 160, 1])"
        )
    try:
        flat: spaces.Space[Any] = spaces.flatten_space(seen)
    except NotImplementedError:
        flat = seen
    if not isinstance(flat, spaces.Box):
        raise ConfigError(
            f"env.id={name} has observations of a changing size ({type(seen).__name__}); allowed are Box, "
            "Discrete, MultiDiscrete, MultiBinary, Dict and Tuple of those (env.id=pong_v3 has Box)"
        )
    with np.errstate(over="ignore"):  # a bound may be the largest float64
        low = np.concatenate([flat.low.astype(np.float32), np.zeros(extra, np.float32)])
        high = np.concatenate([flat.high.astype(np.float32), np.ones(extra, np.float32)])
    return RowSpaces(spaces.Box(low, high, dtype=np.float32), action)


class Images:
    """Stacks of grey 84×84 frames of the agents of one game, with a channel for each that says who looks.

    As in CleanRL's `ppo_pettingzoo_ma_atari.py`: maximum over the last two frames of a step, resized by area,
    indicator 255 in the channel of the agent's own place. Unlike there, grey is luminance (there the blue
    channel), and the first stack repeats the first frame (there it is black), as in `rl.envs.atari_game`.
    """

    def __init__(self, agents: int, options: GameOptions) -> None:
        import cv2  # the one image library that is needed; imported where images are made

        self._cv2 = cv2
        self._frames = np.zeros((agents, options.frame_stack, *SCREEN), np.uint8)
        self._who = None
        if options.agent_indicator:
            self._who = 255 * np.eye(agents, dtype=np.uint8)[:, :, None, None]

    def begin(self, observations: Sequence[Any | None]) -> None:
        """Fill the stacks with the first frames; black where there is none."""
        self._frames[:] = 0
        self.add([[] if seen is None else [seen] for seen in observations])
        self._frames[:] = self._frames[:, -1:]

    def add(self, seen: Sequence[Sequence[Any]]) -> None:
        """Take in the frames that each agent saw in one step, oldest first; none leaves its stack alone."""
        made: dict[tuple[int, ...], np.ndarray] = {}  # agents that share one screen share the work
        for j, frames in enumerate(seen):
            if not frames:
                continue
            key = tuple(id(frame) for frame in frames[-2:])
            if key not in made:
                made[key] = self._grey(frames[-1] if len(frames) == 1 else np.maximum(*frames[-2:]))
            self._frames[j, :-1] = self._frames[j, 1:]
            self._frames[j, -1] = made[key]

    def write(self, out: np.ndarray, shown: np.ndarray) -> None:
        stack = self._frames.shape[1]
        out[shown, :stack] = self._frames[shown]
        if self._who is not None:
            out[shown, stack:] = self._who[shown]

    def _grey(self, image: np.ndarray) -> np.ndarray:
        if image.ndim == 3 and image.shape[2] == 3:
            image = self._cv2.cvtColor(image, self._cv2.COLOR_RGB2GRAY)
        return self._cv2.resize(
            image.reshape(image.shape[:2]), SCREEN[::-1], interpolation=self._cv2.INTER_AREA
        )


class Vectors:
    """Observations of the agents of one game as float32 rows, each followed by a one-hot of its place."""

    def __init__(self, space: spaces.Space[Any], agents: int, row: spaces.Box, options: GameOptions) -> None:
        self._space = space
        self._rows = np.zeros((agents, *row.shape), np.float32)
        self._size = row.shape[0] - (agents if options.agent_indicator else 0)
        if options.agent_indicator:
            self._rows[:, self._size :] = np.eye(agents, dtype=np.float32)

    def begin(self, observations: Sequence[Any | None]) -> None:
        """Take in the first observations; zeros where there is none."""
        self._rows[:, : self._size] = 0.0
        self.add([[] if seen is None else [seen] for seen in observations])

    def add(self, seen: Sequence[Sequence[Any]]) -> None:
        for j, observations in enumerate(seen):
            if observations:
                self._rows[j, : self._size] = np.asarray(
                    spaces.flatten(self._space, observations[-1]), np.float32
                )

    def write(self, out: np.ndarray, shown: np.ndarray) -> None:
        out[shown] = self._rows[shown]


def is_image(space: spaces.Space[Any]) -> bool:
    """Whether observations are `[H, W]`, `[H, W, 1]` or `[H, W, 3]` of bytes."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8:
        return False
    return len(space.shape) == 2 or (len(space.shape) == 3 and space.shape[2] in (1, 3))
