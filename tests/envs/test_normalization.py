"""Running statistics against gymnasium's wrappers, NumPy's moments and numbers worked out by hand."""

from __future__ import annotations

import json

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers.utils import RunningMeanStd

from rl.envs.normalization import ObsNormalizer, RewardNormalizer


class TestObs:
    def test_one_env_is_gymnasiums_wrapper(self) -> None:
        raw, wrapped = gym.make("Pendulum-v1"), gym.wrappers.NormalizeObservation(gym.make("Pendulum-v1"))
        wrapped.obs_rms = RunningMeanStd(shape=(3,))  # in float64, as ours; the wrapper's own is float32
        normalizer = ObsNormalizer((3,), clip=None)
        (a, _), (b, _) = raw.reset(seed=3), wrapped.reset(seed=3)
        rng = np.random.default_rng(0)
        for t in range(500):
            ours = normalizer(a[None])
            assert ours.dtype == np.float32 and ours.shape == (1, 3)
            np.testing.assert_allclose(ours[0], b, rtol=1e-5, atol=1e-6)
            action = rng.uniform(-2, 2, 1).astype(np.float32)
            a, b = raw.step(action)[0], wrapped.step(action)[0]
            if t % 200 == 199:
                normalizer(a[None])  # the wrapper learns from final observations too
                (a, _), (b, _) = raw.reset(), wrapped.reset()

    def test_batches_add_up_to_the_moments_of_all(self) -> None:
        rng = np.random.default_rng(1)
        batches = [rng.normal([3, -50], [0.1, 20], (n, 2)) for n in (8, 8, 1, 300, 5)]
        normalizer = ObsNormalizer((2,), clip=None)
        for batch in batches:
            normalizer(batch)
        everything = np.concatenate(batches)
        # the start counts for 1e-4 of an observation: mean 0, variance 1
        np.testing.assert_allclose(normalizer.mean, everything.mean(0), rtol=1e-5)
        np.testing.assert_allclose(normalizer.var, everything.var(0), rtol=2e-2)
        n, c = len(everything), 1e-4
        delta = everything.mean(0)
        var = (c + n * everything.var(0) + delta**2 * c * n / (c + n)) / (c + n)
        np.testing.assert_allclose(normalizer.var, var, rtol=1e-12)
        assert normalizer.count == pytest.approx(n + c)

    def test_frozen_and_clipped(self) -> None:
        normalizer = ObsNormalizer((1,), clip=5.0)
        normalizer(np.array([[1.0], [3.0]]))  # mean 2, variance 1, but for the start's weight
        before = normalizer.state_dict()
        assert normalizer(np.array([[2.5], [1e6], [-1e6]]), update=False)[:, 0] == pytest.approx(
            [0.5, 5, -5], abs=1e-3
        )
        assert normalizer.state_dict() == before

    def test_the_input_is_left_alone_and_states_continue_bit_for_bit(self) -> None:
        rng = np.random.default_rng(2)
        one, other = ObsNormalizer((4,), 10.0), ObsNormalizer((4,), 10.0)
        obs = rng.normal(size=(3, 4)).astype(np.float32)
        before = obs.copy()
        one(obs)
        assert (obs == before).all()
        other.load_state_dict(one.state_dict())
        state = one.state_dict()
        for _ in range(20):
            obs = rng.normal(size=(3, 4)).astype(np.float32)
            assert one(obs).tobytes() == other(obs).tobytes()
        assert state["count"] == 3 + 1e-4  # a copy

    def test_images(self) -> None:
        assert ObsNormalizer((2, 3, 3), 10.0)(np.ones((4, 2, 3, 3), np.float32)).shape == (4, 2, 3, 3)


class TestReward:
    def test_by_hand(self) -> None:
        normalizer = RewardNormalizer(1, gamma=0.5, clip=None)
        no, yes = np.array([False]), np.array([True])
        # sums: 1; 2 + 0.5 = 2.5; then, as the episode ended, 4 alone. Start: mean 0, var 1, count c = 1e-4.
        sums, c = [1.0, 2.5, 4.0], 1e-4
        for k, (reward, ended) in enumerate([(1.0, no), (2.0, yes), (4.0, no)]):
            seen = np.array(sums[: k + 1])
            n = len(seen)
            var = (c + n * seen.var() + seen.mean() ** 2 * c * n / (c + n)) / (c + n)
            scaled = normalizer(np.array([reward], np.float32), ended)
            assert scaled.dtype == np.float32 and scaled[0] == pytest.approx(
                reward / np.sqrt(var + 1e-8), rel=1e-6
            )

    def test_an_episode_without_an_end_is_gymnasiums_wrapper(self) -> None:
        raw, wrapped = (
            gym.make("Pendulum-v1"),
            gym.wrappers.NormalizeReward(gym.make("Pendulum-v1"), gamma=0.9),
        )
        raw.reset(seed=3)
        wrapped.reset(seed=3)
        normalizer = RewardNormalizer(1, gamma=0.9, clip=None)
        for _ in range(200):
            action = np.array([0.5], np.float32)
            reward, expected = raw.step(action)[1], wrapped.step(action)[1]
            ours = normalizer(np.array([reward], np.float32), np.array([False]))
            assert ours[0] == pytest.approx(float(expected), rel=1e-5)

    def test_nothing_leaks_from_one_episode_into_the_next(self) -> None:
        normalizer = RewardNormalizer(2, gamma=0.99, clip=None)
        normalizer(np.array([-100, -100], np.float32), np.array([True, False]))
        normalizer(np.array([1, 1], np.float32), np.array([False, False]))
        assert normalizer.returns.tolist() == [1.0, 1 - 99.0]

    def test_frozen_and_clipped(self) -> None:
        normalizer = RewardNormalizer(2, gamma=0.9, clip=3.0)
        normalizer(np.array([1, 2], np.float32), np.array([False, True]))
        before = json.dumps(normalizer.state_dict(), default=np.ndarray.tolist)
        scaled = normalizer(np.array([1e6, -1e6], np.float32), np.array([True, True]), update=False)
        assert scaled.tolist() == [3, -3]
        assert json.dumps(normalizer.state_dict(), default=np.ndarray.tolist) == before

    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_states_continue_bit_for_bit(self, num_envs: int) -> None:
        rng = np.random.default_rng(3)
        one, other = RewardNormalizer(num_envs, 0.99, 10.0), RewardNormalizer(num_envs, 0.99, 10.0)
        for k in range(40):
            if k == 20:
                other.load_state_dict(one.state_dict())
            reward, ended = rng.normal(size=num_envs).astype(np.float32), rng.random(num_envs) < 0.2
            scaled = one(reward, ended)
            assert k < 20 or scaled.tobytes() == other(reward, ended).tobytes()

    def test_other_envs_start_their_sums_anew(self) -> None:
        """As in an evaluation or a warm start with another number of envs."""
        one, other = RewardNormalizer(2, 0.99, 10.0), RewardNormalizer(3, 0.99, 10.0)
        one(np.array([5, 7], np.float32), np.array([False, False]))
        other.load_state_dict(one.state_dict())
        assert (other.mean, other.var, other.count) == (one.mean, one.var, one.count)
        assert other.returns.tolist() == [0.0, 0.0, 0.0]
