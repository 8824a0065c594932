"""Games of several agents with known answers, made as a user's: `env.id=tests.probes_parallel:Earners`."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

Transition = tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, Any]]


class Earners:
    """Agent i earns i + 1 a step; those in `dies` die on that step, all others are done on step `length`.

    Observes [steps done, games begun before this one, own place].
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(
        self,
        agents: int = 3,
        length: int = 5,
        dies: dict[int, int] | None = None,
        truncates: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.possible_agents = [f"agent_{i}" for i in range(agents)]
        self.agents: list[str] = []
        self.place = {agent: i for i, agent in enumerate(self.possible_agents)}
        self.length, self.truncates, self.render_mode = length, truncates, render_mode
        self.dies = {int(i): step for i, step in (dies or {}).items()}
        self.game = -1
        self.steps = 0
        self.seeds: list[int | None] = []
        self.given: list[dict[str, Any]] = []
        self.closed = 0

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1.0, 1000.0, (3,), np.float64)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def observe(self, agent: str) -> Any:
        return np.array([self.steps, self.game, self.place[agent]], np.float64)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.seeds.append(seed)
        self.agents = list(self.possible_agents)
        self.game += 1
        self.steps = 0
        return {agent: self.observe(agent) for agent in self.agents}, {}

    def step(self, actions: dict[str, Any]) -> Transition:
        assert set(actions) == set(self.agents), f"{set(actions)} act, {self.agents} live"
        self.given.append(dict(actions))
        self.steps += 1
        acting = self.agents
        over = self.steps >= self.length
        dead = {agent: self.dies.get(self.place[agent]) == self.steps for agent in acting}
        ended = {agent: over or dead[agent] for agent in acting}
        cut = {agent: over and self.truncates and not dead[agent] for agent in acting}
        self.agents = [agent for agent in acting if not ended[agent]]
        return (
            {agent: self.observe(agent) for agent in acting},
            {agent: self.earned(agent) for agent in acting},
            {agent: ended[agent] and not cut[agent] for agent in acting},
            cut,
            {},
        )

    def earned(self, agent: str) -> float:
        return self.place[agent] + 1.0

    def render(self) -> np.ndarray | None:
        return None if self.render_mode is None else np.full((4, 6, 3), self.steps, np.uint8)

    def close(self) -> None:
        self.closed += 1


class Walkers(Earners):
    """Each step adds a draw of the seeded generator and the agent's action; observes the sum."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.at = dict.fromkeys(self.possible_agents, 0.0)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.np_random = np.random.default_rng(seed)
        self.at = {agent: self.np_random.normal() for agent in self.possible_agents}
        return super().reset(seed)

    def step(self, actions: dict[str, Any]) -> Transition:
        for agent, action in actions.items():
            self.at[agent] += self.np_random.normal() + action
        return super().step(actions)

    def observe(self, agent: str) -> Any:
        return np.array([self.steps, self.at[agent], self.place[agent]])

    def earned(self, agent: str) -> float:
        return self.at[agent] / 3.0


class Unseeded(Earners):
    """Draws from a generator that no seed reaches: no replay brings a game back."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.own = np.random.default_rng()

    def observe(self, agent: str) -> Any:
        return np.array([self.steps, self.own.uniform(), self.place[agent]])


class Screens(Earners):
    """Everybody sees one colour, level(frame) in all three channels, on a screen of 42 × 168."""

    levels = (10, 200, 30, 40, 50, 60, 120, 80, 90)  # of frames 0, 1, 2, …

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, 255, (42, 168, 3), np.uint8)

    def observe(self, agent: str) -> Any:
        return np.full((42, 168, 3), self.levels[self.steps], np.uint8)


class GreyScreens(Screens):
    """The same with one channel."""

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, 255, (42, 168, 1), np.uint8)

    def observe(self, agent: str) -> Any:
        return np.full((42, 168, 1), self.levels[self.steps], np.uint8)


class ChannelsFirst(Screens):
    """Images in an order that is not taken."""

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, 255, (3, 42, 168), np.uint8)


class DifferentEyes(Earners):
    """The last agent sees more than the others."""

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1.0, 1.0, (3 + (agent == self.possible_agents[-1]),))


class DifferentHands(Earners):
    """The last agent can do more than the others."""

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3 + (agent == self.possible_agents[-1]))


class DictActions(Earners):
    """Dict actions, which no algorithm here can choose."""

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Dict({"gas": spaces.Discrete(2)})


class DictEyes(Earners):
    """Observes a Dict; flattened: one-hot of the place among 3, then the steps done."""

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Dict({"place": spaces.Discrete(3), "steps": spaces.Box(0.0, 99.0, (1,), np.float64)})

    def observe(self, agent: str) -> Any:
        return {"place": self.place[agent], "steps": np.array([self.steps])}


class Steering(Earners):
    """Two actions within ±0.5; earns their sum, and changes what it is given."""

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-0.5, 0.5, (2,), np.float32)

    def step(self, actions: dict[str, Any]) -> Transition:
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action), f"{action} is out of bounds"
        self.sums = {agent: float(action.sum()) for agent, action in actions.items()}
        transition = super().step(actions)
        for action in actions.values():
            action[:] = 99.0
        return transition

    def earned(self, agent: str) -> float:
        return self.sums[agent]


class PaysNaN(Earners):
    """The last agent earns NaN."""

    def earned(self, agent: str) -> float:
        return np.nan if agent == self.possible_agents[-1] else 1.0


class LeavesWithoutAFlag(Earners):
    """Whoever is done is in no termination: it only disappears from `agents`."""

    def step(self, actions: dict[str, Any]) -> Transition:
        observations, rewards, terminations, truncations, infos = super().step(actions)
        return observations, rewards, dict.fromkeys(terminations, False), truncations, infos


class NoRenderMode(Earners):
    """Its constructor knows no render_mode."""

    def __init__(self) -> None:
        super().__init__()


class TakesTurns(Earners):
    """Has what marks PettingZoo's AEC interface."""

    def agent_iter(self) -> None:
        raise NotImplementedError


def parallel_env(render_mode: str | None = None) -> Earners:
    """What an id without a name stands for."""
    return Earners(agents=2, render_mode=render_mode)


def not_an_environment() -> object:
    return object()


NOT_CALLABLE = 3
