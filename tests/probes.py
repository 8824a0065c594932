"""Environments with known answers, registered as a user would: `env.id=tests.probes:Counter-v0`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

Obs = np.ndarray | dict[str, Any]
Transition = tuple[Any, float, bool, bool, dict[str, Any]]


class Probe(gym.Env[Any, Any]):
    """Counts its own steps and episodes; what a probe gives is in `observe` and `outcome`."""

    observation_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.steps = 0
        self.episode = -1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        self.episode += 1
        return self.observe(), {}

    def step(self, action: Any) -> Transition:
        self.steps += 1
        reward, terminated, truncated = self.outcome(action)
        return self.observe(), reward, terminated, truncated, {}

    def observe(self) -> Any:
        return np.zeros(1, np.float32)

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        return 1.0, False, False


class ConstantReward(Probe):
    """Reward 1 for ever; only a time limit cuts it, so the value is 1 / (1 - gamma) everywhere."""


class TerminatingConstantReward(Probe):
    """Reward 1, over after `length` steps; observes the fraction done, so what is left is learnable."""

    def __init__(self, length: int = 5, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.length = length

    def observe(self) -> np.ndarray:
        return np.array([self.steps / self.length], np.float32)

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        return 1.0, self.steps >= self.length, False


class BothFlags(Probe):
    """Reward 1; terminated and truncated on the same step, its third."""

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        return 1.0, self.steps >= 3, self.steps >= 3


class Counter(Probe):
    """Observes [steps done, episode number] from 0, reward the step number: crossed transitions show."""

    observation_space = spaces.Box(0.0, np.inf, (2,), np.float32)

    def observe(self) -> np.ndarray:
        return np.array([self.steps, self.episode], np.float32)

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        return float(self.steps), False, False


class ThreeSteps(Probe):
    """Rewards 1, 2, 4, then terminated: every return is 7 and every length 3."""

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        return float(2 ** (self.steps - 1)), self.steps == 3, False


class AlternatingReward(Probe):
    """Ten steps of reward +1, then ten of -100 in the next episode, and so on; the observation says which."""

    def observe(self) -> np.ndarray:
        return np.array([1.0 if self.episode % 2 == 0 else -1.0], np.float32)

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        return 1.0 if self.episode % 2 == 0 else -100.0, self.steps >= 10, False


class SmallBox(Probe):
    """Two actions in [-0.05, 0.05], their sum the reward; raises AssertionError where one is outside."""

    action_space = spaces.Box(-0.05, 0.05, (2,), np.float32)

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        assert self.action_space.contains(action), f"action {action} is outside {self.action_space}"
        return float(np.sum(action)), self.steps >= 20, False


class BoxBounds(Probe):
    """Actions with bounds [-1, 1], [-10, 10], [0, 1]; observes the action it was given."""

    action_space = spaces.Box(
        np.array([-1, -10, 0], np.float32), np.array([1, 10, 1], np.float32), (3,), np.float32
    )
    observation_space = spaces.Box(-10.0, 10.0, (3,), np.float32)
    given = np.zeros(3, np.float32)

    def observe(self) -> np.ndarray:
        return self.given

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        assert self.action_space.contains(action), f"action {action} is outside {self.action_space}"
        self.given = action.copy()
        action[:] = 99.0  # an environment may do as it likes with what it is given
        return float(self.given.sum()), False, False


class StartAtFive(Probe):
    """Actions 5, 6, 7; observes the one it was given."""

    action_space = spaces.Discrete(3, start=5)
    observation_space = spaces.Box(0.0, 7.0, (1,), np.float32)
    given = 0

    def observe(self) -> np.ndarray:
        return np.array([self.given], np.float32)

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        assert self.action_space.contains(action), f"action {action} is outside {self.action_space}"
        self.given = action
        return float(action), False, False


class TwoChoices(Probe):
    """MultiDiscrete of 3 and 2 choices; observes the ones it was given, rewards their sum."""

    action_space = spaces.MultiDiscrete([3, 2])
    observation_space = spaces.Box(0.0, 2.0, (2,), np.float32)
    given = np.zeros(2)

    def observe(self) -> np.ndarray:
        return self.given.astype(np.float32)

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        assert self.action_space.contains(action), f"action {action} is outside {self.action_space}"
        self.given = action
        return float(action.sum()), self.steps >= 10, False


class Recall(Probe):
    """Shows −1 or 1 at first and zeros after; on its fifth step it pays 1 for action 0 or 1 respectively."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        gym.Env.reset(self, seed=seed)
        self.cue, self.steps = int(self.np_random.integers(2)), 0
        return np.array([2.0 * self.cue - 1], np.float32), {}

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        over = self.steps == 5
        return float(over and int(action) == self.cue), over, False


class SecondPays(Probe):
    """One step, which pays 1 for the second of two actions."""

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        return float(int(action) == 1), True, False


class Switches(TwoChoices):
    """MultiBinary of two; observes the ones it was given."""

    action_space = spaces.MultiBinary(2)


class DictObs(Probe):
    """Dict observations: the kind, one of 4, and the place, 3 numbers; flattened: [one-hot kind, place]."""

    observation_space = spaces.Dict(
        {"kind": spaces.Discrete(4), "place": spaces.Box(-9.0, 9.0, (3,), np.float64)}
    )

    def observe(self) -> dict[str, Any]:
        return {"kind": self.steps % 4, "place": np.array([self.steps, 0.5, -1.0])}


class DictActions(Probe):
    """Dict actions, which no algorithm here can choose."""

    action_space = spaces.Dict({"gas": spaces.Discrete(2)})


class IntegerObs(Probe):
    """int64 observations; `dtype=uint8` for bytes."""

    def __init__(self, dtype: str = "int64", render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = spaces.Box(0, 200, (2,), np.dtype(dtype).type)

    def observe(self) -> np.ndarray:
        return np.array([self.steps, 200], self.observation_space.dtype)


class RandomWalk(Probe):
    """Observes a sum of draws from the environment's own, seeded generator; terminates at random."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    place = np.zeros(2)

    def observe(self) -> np.ndarray:
        if self.steps == 0:
            self.place = np.zeros(2)
        self.place = self.place + self.np_random.normal(size=2)
        return self.place

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        return float(self.place[0]) / 3.0, bool(self.np_random.random() < 0.05), False


class Catch(Probe):
    """Catch of bsuite (Osband et al. 2020) in pixels: a ball falls down a picture of 10x5 squares; +1 where
    the paddle stands under it at the bottom, −1 elsewhere. The actions are left, stay, right."""

    observation_space = spaces.Box(0, 255, (1, 40, 40), np.uint8)
    action_space = spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        gym.Env.reset(self, seed=seed)
        self.ball, self.paddle = int(self.np_random.integers(5)), 2
        return super().reset()

    def observe(self) -> np.ndarray:
        squares = np.zeros((10, 5), np.uint8)
        squares[9, self.paddle], squares[self.steps, self.ball] = 128, 255
        return squares.repeat(4, 0).repeat(8, 1)[None]

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        self.paddle = min(4, max(0, self.paddle + int(action) - 1))
        landed = self.steps == 9
        return (1.0 if self.paddle == self.ball else -1.0) if landed else 0.0, landed, False


class OwnGenerator(Probe):
    """Draws from a generator of its own that `reset` does not seed: no replay brings an episode back."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.own = np.random.default_rng()

    def observe(self) -> np.ndarray:
        return self.own.uniform(-1.0, 1.0, 1).astype(np.float32)


class NoGenerator(ThreeSteps):
    """Never touches the generator that gymnasium would give it."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return self.observe(), {}


class RaisesAfter(Probe):
    """Raises ValueError on step `steps` of its first episode."""

    def __init__(self, steps: int = 3, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.last = steps

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        if self.steps == self.last:
            raise ValueError(f"the probe broke on step {self.steps}")
        return 1.0, False, False


class OddError(Exception):
    """An exception that cannot be unpickled: its arguments are not those of its constructor."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} is not {right}")


class RaisesOddError(Probe):
    """Raises an exception that does not survive a trip between processes."""

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        raise OddError(1, 2)


class NaNAfter(Probe):
    """On step `steps` the `where` (observation or reward) becomes `value`."""

    def __init__(
        self,
        steps: int = 3,
        where: str = "observation",
        value: float = np.nan,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode)
        self.last, self.where, self.value = steps, where, value

    def observe(self) -> np.ndarray:
        bad = self.steps >= self.last and self.where == "observation"
        return np.array([self.value if bad else 0.0], np.float32)

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        return self.value if self.steps >= self.last and self.where == "reward" else 1.0, False, False


class Sleeper(Probe):
    """A step that takes `seconds`."""

    def __init__(self, seconds: float = 60.0, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.seconds = seconds

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        import time

        time.sleep(self.seconds)
        return 1.0, False, False


class NeedsMissingPackage(Probe):
    """Imports a package that nobody has."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        import package_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401


_TIME_LIMITS = {"ConstantReward": 10, "Counter": 7, "OwnGenerator": 50}
for _probe in (
    ConstantReward,
    TerminatingConstantReward,
    BothFlags,
    Counter,
    ThreeSteps,
    AlternatingReward,
    SmallBox,
    BoxBounds,
    StartAtFive,
    TwoChoices,
    Recall,
    SecondPays,
    Switches,
    DictObs,
    DictActions,
    IntegerObs,
    RandomWalk,
    Catch,
    OwnGenerator,
    NoGenerator,
    RaisesAfter,
    RaisesOddError,
    NaNAfter,
    Sleeper,
    NeedsMissingPackage,
):
    gym.register(
        id=f"{_probe.__name__}-v0",
        entry_point=f"tests.probes:{_probe.__name__}",
        max_episode_steps=_TIME_LIMITS.get(_probe.__name__),
    )
