"""What every backend must do, sync and async alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl.envs.gymnasium_envs import GymnasiumEnvs
from rl.envs.vector import Episode, VectorEnv
from rl.errors import NonFiniteError

SEED = np.random.SeedSequence(7)
Make = Callable[..., VectorEnv]


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[VectorEnv] = []

    def make(id: str, num_envs: int = 2, **kwargs: Any) -> VectorEnv:
        name = id if "-v" in id else f"tests.probes:{id}-v0"
        made.append(GymnasiumEnvs(name, num_envs, request.param, kwargs=kwargs).make())
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def zeros(envs: VectorEnv) -> np.ndarray:
    space = envs.action_space
    if isinstance(space, spaces.Discrete):
        return np.zeros(envs.num_envs, np.int64)
    if isinstance(space, spaces.MultiDiscrete):
        return np.zeros((envs.num_envs, len(space.nvec)), np.int64)
    return np.zeros((envs.num_envs, int(np.prod(space.shape))), np.float32)


def random_actions(envs: VectorEnv, steps: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    space = envs.action_space
    if isinstance(space, spaces.Discrete):
        return list(rng.integers(0, space.n, (steps, envs.num_envs)))
    assert isinstance(space, spaces.Box)
    return list(rng.normal(size=(steps, envs.num_envs, int(np.prod(space.shape)))).astype(np.float32))


class TestTransitions:
    def test_counter_shows_only_transitions_that_happened(self, make: Make) -> None:
        envs = make("Counter", 3)  # cut after 7 steps; observes [step, episode], rewards the step
        obs = envs.reset(SEED)
        assert obs.dtype == np.float32 and obs.tolist() == [[0, 0]] * 3
        for t in range(1, 30):
            step = envs.step(zeros(envs))
            k, episode = (t - 1) % 7 + 1, (t - 1) // 7
            assert step.next_obs.tolist() == [[k, episode]] * 3
            assert step.reward.dtype == np.float32 and step.reward.tolist() == [k] * 3
            assert step.truncated.dtype == np.bool_ and step.truncated.tolist() == [k == 7] * 3
            assert not step.terminated.any()
            if k == 7:
                assert step.obs.tolist() == [[0, episode + 1]] * 3
                assert step.episodes == [Episode(i, 28.0, 7) for i in range(3)]
            else:
                assert step.obs is step.next_obs and step.episodes == []

    def test_three_step_episodes_have_their_exact_return_and_length(self, make: Make) -> None:
        envs = make("ThreeSteps", 2)
        envs.reset(SEED)
        episodes = [episode for _ in range(9) for episode in envs.step(zeros(envs)).episodes]
        assert episodes == [Episode(0, 7.0, 3), Episode(1, 7.0, 3)] * 3

    def test_both_flags_are_passed_on(self, make: Make) -> None:
        envs = make("BothFlags")
        envs.reset(SEED)
        flags = [
            (bool(s.terminated[0]), bool(s.truncated[0])) for s in (envs.step(zeros(envs)) for _ in range(6))
        ]
        assert flags == [(False, False), (False, False), (True, True)] * 2

    def test_what_was_returned_is_never_written_to_again(self, make: Make) -> None:
        envs = make("Counter")
        first = envs.reset(SEED)
        steps = [envs.step(zeros(envs)) for _ in range(8)]
        assert first.tolist() == [[0, 0]] * 2
        assert [s.next_obs[0, 0] for s in steps] == [1, 2, 3, 4, 5, 6, 7, 1]
        assert [s.reward[1] for s in steps] == [1, 2, 3, 4, 5, 6, 7, 1]
        assert [bool(s.truncated[0]) for s in steps] == [False] * 6 + [True, False]

    def test_reset_again_starts_over(self, make: Make) -> None:
        envs = make("CartPole-v1")
        first = envs.reset(SEED)
        for action in random_actions(envs, 50):
            envs.step(action)
        assert (envs.reset(SEED) == first).all()
        episode = next(s.episodes[0] for s in (envs.step(zeros(envs)) for _ in range(30)) if s.episodes)
        assert episode.episodic_return == episode.length < 30


class TestSpaces:
    def test_box_actions_are_clipped_per_dimension(self, make: Make) -> None:
        envs = make("BoxBounds")  # [-1, 1], [-10, 10], [0, 1]; observes what it was given
        envs.reset(SEED)
        actions = np.array([[5, 5, 5], [-50, -50, -50]], np.float32)
        assert envs.step(actions).obs.tolist() == [[1, 5, 1], [-1, -10, 0]]
        assert actions.tolist() == [[5, 5, 5], [-50, -50, -50]]

    def test_a_small_box_never_sees_an_action_out_of_bounds(self, make: Make) -> None:
        envs = make("SmallBox")
        envs.reset(SEED)
        for action in random_actions(envs, 50):
            envs.step(action)

    def test_discrete_actions_are_counted_from_zero(self, make: Make) -> None:
        envs = make("StartAtFive", 3)
        envs.reset(SEED)
        assert envs.action_space == spaces.Discrete(3)
        assert envs.step(np.array([0, 1, 2])).obs.tolist() == [[5], [6], [7]]

    @pytest.mark.parametrize(("id", "nvec"), [("TwoChoices", [3, 2]), ("Switches", [2, 2])])
    def test_several_choices(self, make: Make, id: str, nvec: list[int]) -> None:
        envs = make(id)
        envs.reset(SEED)
        assert isinstance(envs.action_space, spaces.MultiDiscrete) and envs.action_space.nvec.tolist() == nvec
        assert envs.step(np.array([[1, 0], [0, 1]])).obs.tolist() == [[1, 0], [0, 1]]

    def test_actions_of_a_wrong_shape_are_refused(self, make: Make) -> None:
        envs = make("Counter", 3)
        envs.reset(SEED)
        with pytest.raises(ValueError, match="shape"):
            envs.step(np.zeros(2, np.int64))

    def test_dict_observations_are_flattened(self, make: Make) -> None:
        envs = make("DictObs")
        obs = envs.reset(SEED)
        assert envs.observation_space.shape == (7,) and obs.dtype == np.float32
        assert obs[0].tolist() == [1, 0, 0, 0, 0, 0.5, -1]
        assert envs.step(zeros(envs)).obs[1].tolist() == [0, 1, 0, 0, 1, 0.5, -1]

    @pytest.mark.parametrize(("given", "seen"), [("int64", np.float32), ("uint8", np.uint8)])
    def test_integers_become_floats_and_bytes_stay(self, make: Make, given: str, seen: Any) -> None:
        envs = make("IntegerObs", dtype=given)
        obs = envs.reset(SEED)
        assert envs.observation_space.dtype == obs.dtype == envs.step(zeros(envs)).next_obs.dtype == seen
        assert obs.tolist() == [[0, 200]] * 2


class TestSeeds:
    def test_envs_differ_and_do_not_depend_on_their_number(self, make: Make) -> None:
        four, two = make("RandomWalk", 4), make("RandomWalk", 2)
        a, b = four.reset(SEED), two.reset(SEED)
        assert len(np.unique(a[:, 0])) == 4 and (a[:2] == b).all()
        for _ in range(100):  # over several episodes of each
            assert (four.step(zeros(four)).next_obs[:2] == two.step(zeros(two)).next_obs).all()

    def test_neighbouring_seeds_share_no_initial_state(self, make: Make) -> None:
        envs = make("RandomWalk", 4)
        seen = [envs.reset(np.random.SeedSequence(seed).spawn(1)[0])[:, 0] for seed in (0, 1)]
        assert len(np.unique(np.concatenate(seen))) == 8

    def test_streams_of_one_seed_share_no_initial_state(self, make: Make) -> None:
        envs = make("RandomWalk", 4)
        training, evaluation = np.random.SeedSequence(0).spawn(2)
        seen = [envs.reset(stream)[:, 0] for stream in (training, evaluation)]
        assert len(np.unique(np.concatenate(seen))) == 8


class TestNonFinite:
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    @pytest.mark.parametrize("where", ["observation", "reward"])
    def test_stops_and_says_what_went_bad(self, make: Make, where: str, value: float) -> None:
        envs = make("NaNAfter", 2, where=where, value=value)
        envs.reset(SEED)
        envs.step(zeros(envs))
        envs.step(zeros(envs))
        with pytest.raises(NonFiniteError, match=rf"the {where} of environment 0 .*NaNAfter.* is {value}"):
            envs.step(zeros(envs))


class TestErrors:
    def test_what_an_environment_raises_comes_through(self, make: Make) -> None:
        envs = make("RaisesAfter", 3)
        envs.reset(SEED)
        envs.step(zeros(envs))
        envs.step(zeros(envs))
        with pytest.raises(ValueError, match="the probe broke on step 3"):
            envs.step(zeros(envs))

    def test_close_twice(self, make: Make) -> None:
        envs = make("Counter")
        envs.close()
        envs.close()


@pytest.mark.parametrize("id", ["CartPole-v1", "HalfCheetah-v4", "LunarLander-v3"])
def test_async_is_sync_bit_for_bit(id: str) -> None:
    factory = GymnasiumEnvs(id, 3, num_workers=2)
    one, other = factory.make(backend="sync"), factory.make(backend="async")
    try:
        assert one.observation_space == other.observation_space and one.action_space == other.action_space
        assert (one.reset(SEED) == other.reset(SEED)).all()
        ended = 0
        for action in random_actions(one, 500):
            a, b = one.step(action), other.step(action)
            assert all(
                x.tobytes() == y.tobytes() and x.dtype == y.dtype for x, y in zip(a[:5], b[:5], strict=True)
            )
            assert a.episodes == b.episodes
            ended += len(a.episodes)
        assert ended or id == "HalfCheetah-v4"
    finally:
        one.close()
        other.close()
