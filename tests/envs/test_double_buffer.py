"""Half of the envs step while a policy acts for the others: the same games, and the same training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl.algos.ppo import PPO
from rl.envs.atari import AtariEnvs
from rl.envs.double_buffer import DoubleBuffer
from rl.envs.vector import Episode, Step, VectorEnv
from rl.rollout import stepped
from tests.conftest import algorithm
from tests.envs.test_atari import assert_same_step

SEED = np.random.SeedSequence(7)
GAME = "BreakoutNoFrameskip-v4"
N = 4


class Half:
    """Envs that note in `events` when they are told to step, and when they are waited for."""

    num_envs, render_fps = 2, 1.0
    observation_space, action_space = spaces.Box(0, 1, (1,)), spaces.Discrete(2)

    def __init__(self, name: str, events: list[tuple[Any, ...]]) -> None:
        self.name, self.events, self.sent = name, events, False

    def send(self, actions: np.ndarray) -> None:
        assert not self.sent
        self.sent = True
        self.events.append(("send", self.name, actions.tolist()))

    def receive(self) -> Step:
        assert self.sent
        self.sent = False
        self.events.append(("receive", self.name))
        no = np.zeros(2, bool)
        obs = np.zeros((2, 1), np.float32)
        return Step(obs, np.zeros(2, np.float32), no, no, obs, [Episode(1, 5.0, 3)])


def test_one_half_steps_while_the_other_is_acted_for() -> None:
    events: list[tuple[Any, ...]] = []
    envs: Any = DoubleBuffer(Half("a", events), Half("b", events), 1)  # type: ignore[arg-type]

    def act(t: int, rows: slice) -> np.ndarray:
        events.append(("act", t, rows.start))
        return np.full(2, t)

    for t, rows, step in stepped(envs, 2, act):
        events.append(("step", t, rows.start, step.episodes[0].env))
    assert events == [
        ("act", 0, 0), ("send", "a", [0, 0]),
        ("act", 0, 2), ("send", "b", [0, 0]),
        ("receive", "a"), ("step", 0, 0, 1), ("act", 1, 0), ("send", "a", [1, 1]),
        ("receive", "b"), ("step", 0, 2, 3), ("act", 1, 2), ("send", "b", [1, 1]),
        ("receive", "a"), ("step", 1, 0, 1),
        ("receive", "b"), ("step", 1, 2, 3),
    ]  # fmt: skip


@pytest.mark.parametrize(("env_threads", "left"), [(3, 1), (2, 2), (8, 1)])
def test_acting_leaves_the_envs_their_threads(env_threads: int, left: int) -> None:
    envs: Any = DoubleBuffer(Half("a", []), Half("b", []), env_threads)  # type: ignore[arg-type]
    seen: list[int] = []

    def act(t: int, rows: slice) -> np.ndarray:
        seen.append(torch.get_num_threads())
        return np.zeros(2)

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert len(list(stepped(envs, 1, act))) == 2
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert seen == [left, left]


@pytest.fixture
def both() -> Iterator[tuple[VectorEnv, VectorEnv]]:
    """Breakout with a time limit and lives that end the task: one vector of games, and two halves."""
    pytest.importorskip("ale_py", reason="needs the extra atari")
    made = [
        AtariEnvs(GAME, N, "ale", num_threads=2, max_episode_steps=60, double_buffer=doubled).make()
        for doubled in (False, True)
    ]
    yield made[0], made[1]
    for envs in made:
        envs.close()


class TestGames:
    def test_the_same_games(self, both: tuple[VectorEnv, VectorEnv]) -> None:
        one, halves = both
        assert isinstance(halves, DoubleBuffer) and not isinstance(one, DoubleBuffer)
        np.testing.assert_array_equal(one.reset(SEED), halves.reset(SEED))
        ended = lost = 0
        for actions in np.random.default_rng(0).integers(0, 4, (150, N)):
            step = one.step(actions)
            other = halves.step(actions)
            assert_same_step(step, other)
            assert (step.next_obs is step.obs) == (other.next_obs is other.obs)
            ended += len(step.episodes)
            lost += int(step.terminated.sum())
        assert ended == 2 * N and lost > 0

    def test_either_continues_the_others_state(self, both: tuple[VectorEnv, VectorEnv]) -> None:
        for envs in both:
            envs.reset(SEED)
            envs.step(np.ones(N, np.int64))
        one, halves = both
        assert one.state_dict() == halves.state_dict()
        state = one.state_dict()
        restored = [envs.load_state_dict(state) for envs in both]
        np.testing.assert_array_equal(restored[0].obs, restored[1].obs)
        assert not restored[1].exact.any() and len(restored[1].exact) == N
        with pytest.raises(ValueError, match="3 environments, not 4"):
            halves.load_state_dict({**state, "envs": state["envs"][:3]})

    def test_mistakes(self, both: tuple[VectorEnv, VectorEnv]) -> None:
        both[1].reset(SEED)
        with pytest.raises(ValueError, match="actions are for 3 envs, not for 4"):
            both[1].step(np.zeros(3, np.int64))
        with pytest.raises(RuntimeError, match="cannot be filmed"):
            both[1].render(3)

    @pytest.mark.parametrize(
        ("num_envs", "keys"),
        [(2, {"num_threads": 2}), (5, {"num_threads": 2}), (4, {"num_threads": 1}), (4, {"backend": "sync"})],
    )
    def test_one_vector_where_halves_are_no_use(self, num_envs: int, keys: dict[str, Any]) -> None:
        pytest.importorskip("ale_py", reason="needs the extra atari")
        envs = AtariEnvs(GAME, num_envs, **keys).make()
        assert not isinstance(envs, DoubleBuffer)
        envs.close()


@pytest.mark.parametrize("recipe", ["ppo_atari", "ppo_atari_lstm"])
def test_training_collects_the_same(recipe: str) -> None:
    """An iteration of each: what was seen, done and learnt from, and which episodes ended."""
    pytest.importorskip("ale_py", reason="needs the extra atari")
    found = []
    for doubled in ("false", "true"):
        algo: PPO = algorithm(
            f"algo={recipe}", "env.num_envs=4", "env.max_episode_steps=40", "network.hidden_size=16",
            "algo.num_steps=64", "env.num_threads=2", f"env.double_buffer={doubled}",
        )  # fmt: skip
        assert isinstance(algo.envs, DoubleBuffer) == (doubled == "true")
        batch, episodes = algo.collect()
        found.append((batch, episodes, algo.obs, algo.env_steps))
        algo.close()
    (batch, episodes, obs, steps), (other_batch, other_episodes, other_obs, other_steps) = found
    assert episodes == other_episodes and len(episodes) >= 4 and steps == other_steps == 256
    np.testing.assert_array_equal(obs, other_obs)
    assert batch.keys() == other_batch.keys()
    for name, x in batch.items():
        torch.testing.assert_close(x, other_batch[name], rtol=1e-4, atol=1e-5)
