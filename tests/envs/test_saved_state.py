"""Saving an env by what its running episode was started with and the actions since, and replaying it."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest

from rl.envs.gymnasium_envs import GymnasiumEnvs
from rl.envs.sync import SyncEnvs
from rl.envs.vector import Step, VectorEnv
from tests.envs.test_contract import SEED, random_actions, zeros


def through_json(state: Any) -> Any:
    """What a checkpoint does to a state: arrays stay arrays, all else is written as JSON."""
    arrays: list[np.ndarray] = []

    def keep(value: Any) -> Any:
        arrays.append(value.copy())
        return {"array": len(arrays) - 1}

    text = json.dumps(state, default=keep)
    return json.loads(text, object_hook=lambda d: arrays[d["array"]] if set(d) == {"array"} else d)


def same(a: Step, b: Step) -> bool:
    return (
        all(x.tobytes() == y.tobytes() for x, y in zip(a[:5], b[:5], strict=True))
        and a.episodes == b.episodes
    )


class TestExact:
    @pytest.mark.parametrize("backend", ["sync", "async"])
    @pytest.mark.parametrize(
        "id", ["CartPole-v1", "LunarLander-v3", "HalfCheetah-v4", "tests.probes:RandomWalk-v0"]
    )
    def test_continues_bit_for_bit(self, id: str, backend: str) -> None:
        envs, other = (GymnasiumEnvs(id, 2, backend, num_workers=k).make() for k in (2, 1))
        try:
            envs.reset(SEED)
            actions = random_actions(envs, 550)
            for action in actions[:250]:
                step = envs.step(action)
            state = through_json(envs.state_dict())
            restored = other.load_state_dict(state)
            assert restored.exact.tolist() == [True, True]
            assert restored.obs.tobytes() == step.obs.tobytes()
            for action in actions[250:]:
                assert same(envs.step(action), other.step(action))
            assert repr(envs.state_dict()) == repr(other.state_dict())
        finally:
            envs.close()
            other.close()

    @pytest.mark.parametrize("id", ["TwoChoices", "BoxBounds", "Switches", "StartAtFive"])
    def test_every_kind_of_action(self, id: str) -> None:
        factory = GymnasiumEnvs(f"tests.probes:{id}-v0", 2)
        envs, other = factory.make(), factory.make()
        envs.reset(SEED)
        for _ in range(5):
            envs.step(zeros(envs) + 1)
        assert other.load_state_dict(through_json(envs.state_dict())).exact.all()
        assert same(envs.step(zeros(envs)), other.step(zeros(envs)))

    def test_an_env_that_has_no_generator(self) -> None:
        factory = GymnasiumEnvs("tests.probes:NoGenerator-v0", 2)
        envs, other = factory.make(), factory.make()
        envs.reset(SEED)
        for _ in range(5):  # in the second episode
            envs.step(zeros(envs))
        assert other.load_state_dict(through_json(envs.state_dict())).exact.all()
        assert same(envs.step(zeros(envs)), other.step(zeros(envs)))

    def test_before_the_first_step_and_right_after_a_reset(self) -> None:
        factory = GymnasiumEnvs("tests.probes:ThreeSteps-v0", 2)
        envs, other = factory.make(), factory.make()
        envs.reset(SEED)
        assert other.load_state_dict(envs.state_dict()).exact.all()
        for _ in range(3):
            envs.step(zeros(envs))
        assert other.load_state_dict(envs.state_dict()).exact.all()
        assert same(envs.step(zeros(envs)), other.step(zeros(envs)))

    def test_the_time_limit_is_restored_too(self) -> None:
        envs = GymnasiumEnvs("tests.probes:ConstantReward-v0", 1, max_episode_steps=4).make()
        envs.reset(SEED)
        for _ in range(3):
            envs.step(zeros(envs))
        other = GymnasiumEnvs("tests.probes:ConstantReward-v0", 1, max_episode_steps=4).make()
        assert other.load_state_dict(envs.state_dict()).exact.all()
        step = other.step(zeros(other))
        assert step.truncated.all() and step.episodes == [(0, 4.0, 4)]

    def test_a_state_is_a_copy_and_backends_read_each_other(self) -> None:
        factory = GymnasiumEnvs("CartPole-v1", 3, num_workers=2)
        envs, workers = factory.make(), factory.make(backend="async")
        try:
            envs.reset(SEED)
            actions = random_actions(envs, 300)
            for action in actions[:100]:
                envs.step(action)
            state = envs.state_dict()
            before = repr(copy.deepcopy(state))
            assert workers.load_state_dict(state).exact.all()
            for action in actions[100:200]:
                assert same(envs.step(action), workers.step(action))
            assert repr(state) == before
            assert repr(workers.state_dict()) == repr(envs.state_dict())
        finally:
            workers.close()

    def test_actions_that_no_episode_needs_are_forgotten(self) -> None:
        envs = GymnasiumEnvs("CartPole-v1", 2).make()
        assert isinstance(envs, SyncEnvs)
        envs.reset(SEED)
        for action in random_actions(envs, 5000):
            envs.step(action)
        assert len(envs._history) < 1000
        other = GymnasiumEnvs("CartPole-v1", 2).make()
        assert other.load_state_dict(envs.state_dict()).exact.all()


class TestNotExact:
    @pytest.mark.parametrize("backend", ["sync", "async"])
    def test_an_env_with_a_generator_of_its_own(self, backend: str) -> None:
        factory = GymnasiumEnvs("tests.probes:OwnGenerator-v0", 2, backend)
        envs, other = factory.make(), factory.make()
        try:
            envs.reset(SEED)
            for _ in range(20):
                envs.step(zeros(envs))
            restored = other.load_state_dict(envs.state_dict())
            assert restored.exact.tolist() == [False, False]
            episodes = [e for _ in range(50) for e in other.step(zeros(other)).episodes]
            assert episodes == [(0, 50.0, 50), (1, 50.0, 50)]  # new ones, from their first step
        finally:
            envs.close()
            other.close()

    def test_bipedal_walker_whose_world_outlives_its_episodes(self) -> None:
        # Box2D keeps things from earlier episodes that a new world lacks: only first episodes are sure.
        factory = GymnasiumEnvs("BipedalWalker-v3", 4)
        envs = factory.make()
        envs.reset(SEED)
        exact = []
        for t, action in enumerate(random_actions(envs, 301)):
            envs.step(action)
            if t >= 150 and t % 50 == 0:
                state = envs.state_dict()
                other = factory.make()
                exact.append(other.load_state_dict(state).exact)
                assert all(
                    ok for ok, env in zip(exact[-1], state["envs"], strict=True) if env["seed"] is not None
                )
                lengths = [env["length"] for env in other.state_dict()["envs"]]
                assert lengths == [
                    env["length"] if ok else 0 for ok, env in zip(exact[-1], state["envs"], strict=True)
                ]
                for _ in range(5):
                    other.step(zeros(other))
        assert not np.all(exact)

    def spoiled(self, **fields: Any) -> tuple[VectorEnv, dict[str, Any]]:
        envs = GymnasiumEnvs("tests.probes:RandomWalk-v0", 2).make()
        envs.reset(SEED)
        for _ in range(4):
            envs.step(zeros(envs))
        state = envs.state_dict()
        state["envs"][1].update(fields)
        return envs, state

    @pytest.mark.parametrize(
        "fields",
        [
            {"obs": np.zeros(2, np.float32)},
            {"return": 1.5},
            {"length": 5},
            {"actions": None},
            {"actions": np.zeros(500, np.int64)},  # the episode ends during the replay
            {"seed": None, "random_state": {"bit_generator": "nonsense"}},  # raises
        ],
        ids=["obs", "return", "length", "forgotten", "ends", "raises"],
    )
    def test_only_that_env_starts_a_new_episode_and_the_same_one_each_time(
        self, fields: dict[str, Any]
    ) -> None:
        _, state = self.spoiled(**fields)
        runs = []
        for _ in range(2):
            envs = GymnasiumEnvs("tests.probes:RandomWalk-v0", 2).make()
            restored = envs.load_state_dict(state)
            assert restored.exact.tolist() == [True, False]
            runs.append([restored.obs, *(envs.step(zeros(envs)).next_obs for _ in range(30))])
            again = GymnasiumEnvs("tests.probes:RandomWalk-v0", 2).make()
            assert again.load_state_dict(through_json(envs.state_dict())).exact.all()
        assert np.array_equal(runs[0], runs[1])

    def test_an_episode_that_is_too_long_is_given_up_and_later_ones_are_not(self) -> None:
        factory = GymnasiumEnvs("tests.probes:RandomWalk-v0", 1)
        envs = SyncEnvs([factory._maker(None)], remembered_steps=8)
        envs.reset(SEED)
        given_up = kept = 0
        for _ in range(200):
            envs.step(zeros(envs))
            state = envs.state_dict()["envs"][0]
            assert (state["actions"] is None) == (state["length"] > 8)
            assert len(envs._history) <= 300
            exact = factory.make().load_state_dict(envs.state_dict()).exact
            assert exact.tolist() == [state["length"] <= 8]
            given_up += not exact[0]
            kept += exact[0]
        assert given_up > 20 and kept > 20

    def test_another_number_of_envs_is_refused(self) -> None:
        _, state = self.spoiled()
        with pytest.raises(ValueError, match="2 environments, not 3"):
            GymnasiumEnvs("tests.probes:RandomWalk-v0", 3).make().load_state_dict(state)
