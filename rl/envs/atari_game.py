"""One preprocessed Atari game in this process, step for step what ALE's own vector environment does.

As Mnih et al. (2015, "Human-level control through deep reinforcement learning") with the sticky actions of
Machado et al. (2018, "Revisiting the Arcade Learning Environment"): the action is held for `frame_skip`
frames, the last two are max-pooled against flicker, made grey, shrunk to 84×84 by area and stacked.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

SIDE = 84  # pixels, height and width of an observation
FRAMES_PER_SECOND = 60
_NOOP, _FIRE = 0, 1  # `ale_py.Action`


@dataclasses.dataclass(frozen=True)
class GameSettings:
    """What is played and how it is preprocessed, the same for every backend."""

    rom: str  # ALE's name of the game, e.g. ms_pacman
    sticky: float  # probability, a frame, that the previous action is repeated
    frame_skip: int = 4
    frame_stack: int = 4
    noop_max: int = 30  # a game starts after 0 to noop_max - 1 frames of doing nothing, fire included
    fire_reset: bool = True  # the first of these is the fire button, in games that have it
    full_action_space: bool = False  # all 18 actions, not the game's own
    max_episode_steps: int = 27_000  # agent steps
    mode: int | None = None  # the game's switches, see ALE's documentation; None: as registered there
    difficulty: int | None = None


class AtariGame(gym.Env[np.ndarray, np.int64]):
    """A gymnasium environment of whole games with raw rewards; observations uint8 `[frame_stack, 84, 84]`.

    All that is random is drawn from `np_random`, sticky actions too, so that a game can be replayed from the
    state of that generator before its reset and its actions. The first stack repeats the first frame.
    """

    def __init__(self, settings: GameSettings) -> None:
        """Load the game. Raises ImportError without ale_py or cv2."""
        import cv2
        from ale_py import ALEInterface, LoggerMode, roms

        self.settings = settings
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": FRAMES_PER_SECOND / settings.frame_skip}
        cv2.setNumThreads(1)  # threads cost more than so few pixels
        self._cv2 = cv2
        ALEInterface.setLoggerMode(LoggerMode.Error)
        self._ale = ALEInterface()
        self._ale.setInt("random_seed", 0)
        self._ale.setFloat("repeat_action_probability", 0.0)
        rom = roms.get_rom_path(settings.rom)
        assert rom is not None, settings.rom
        self._ale.loadROM(rom)
        if settings.mode is not None:
            self._ale.setMode(settings.mode)
        if settings.difficulty is not None:
            self._ale.setDifficulty(settings.difficulty)
        self._ale.reset_game()  # the first game after power-on may differ from all others (BeamRider)
        full = settings.full_action_space
        actions = self._ale.getLegalActionSet() if full else self._ale.getMinimalActionSet()
        self._actions = [int(action.value) for action in actions]
        self._fires = settings.fire_reset and _FIRE in self._actions
        self._held = _NOOP
        self._steps = 0
        self._raw = np.zeros((2, *self._ale.getScreenDims()), np.uint8)  # the last frame, that before it
        self._stack = np.zeros((settings.frame_stack, SIDE, SIDE), np.uint8)
        self.action_space = spaces.Discrete(len(self._actions))
        self.observation_space = spaces.Box(0, 255, self._stack.shape, np.uint8)

    @property
    def lives(self) -> int:
        """Lives left; 0 in games without."""
        return int(self._ale.lives())

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start a new game."""
        super().reset(seed=seed)
        self._restart()
        if self._fires:
            self._act(_FIRE)
        waits = int(self.np_random.integers(max(self.settings.noop_max, 1))) - int(self._fires)
        for _ in range(waits):
            self._act(_NOOP)
            if self._ale.game_over():
                self._restart()
        self._ale.getScreenGrayscale(self._raw[0])
        self._raw[1] = 0
        self._stack[:] = self._shrunk()
        self._steps = 0
        return self._stack.copy(), {}

    def step(self, action: int | np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Hold the action for `frame_skip` frames, fewer where the game ends."""
        reward = 0
        over = False
        held = self._actions[action]
        for left in range(self.settings.frame_skip - 1, -1, -1):
            reward += self._act(held)
            over = self._ale.game_over()
            if over:
                break
            if left < 2:
                self._ale.getScreenGrayscale(self._raw[left])
        self._stack[:-1] = self._stack[1:]
        self._stack[-1] = self._shrunk()
        self._steps += 1
        truncated = self._steps >= self.settings.max_episode_steps and not over
        return self._stack.copy(), float(reward), over, truncated, {}

    def render(self) -> np.ndarray:
        """Return the emulator's screen, uint8 `[210, 160, 3]` in most games."""
        return np.asarray(self._ale.getScreenRGB())

    def _restart(self) -> None:
        self._ale.reset_game()
        self._held = _NOOP

    def _act(self, action: int) -> int:
        """Advance one frame and return its reward; with sticky actions the last action may be held on to."""
        sticky = self.settings.sticky
        if sticky == 0.0 or self.np_random.random() >= sticky:
            self._held = action
        return int(self._ale.act(self._held))

    def _shrunk(self) -> np.ndarray:
        """The last two frames pooled and shrunk, `[84, 84]`."""
        np.maximum(self._raw[0], self._raw[1], out=self._raw[0])
        return self._cv2.resize(self._raw[0], (SIDE, SIDE), interpolation=self._cv2.INTER_AREA)
