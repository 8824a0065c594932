"""PPO on problems whose answers are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rl.algos import Context
from rl.algos.ppo import policy_loss, value_loss
from rl.distributions import Categorical, DiagonalGaussian
from rl.envs.vector import Step
from rl.errors import ConfigError, NonFiniteError
from rl.rollout import Rollout
from rl.seeding import Streams
from tests.conftest import algorithm, configure

PROBE = (
    "total_timesteps=20000",
    "env.num_envs=2",
    "algo.num_steps=64",
    "algo.learning_rate=3e-3",
    "algo.anneal_lr=false",
    "algo.gamma=0.9",
    "algo.clip_vloss=false",
)


def learned_values(obs: list[list[float]], iterations: int, *overrides: str) -> np.ndarray:
    """The critic's values of observations after some iterations on a probe."""
    ppo = algorithm(*PROBE, *overrides)
    for _ in range(iterations):
        ppo.iterate()
    ppo.close()
    with torch.no_grad():
        values: np.ndarray = ppo.agent(torch.tensor(obs))[1].numpy()
    return values


class TestLosses:
    def test_policy_loss_clips_what_would_gain_and_not_what_would_lose(self) -> None:
        # ρ = 1.5 with A = 1 is clipped to 1.2; ρ = 0.5 with A = −1 to 0.8; ρ = 0.5 with A = 1 and ρ = 1.5
        # with A = −1 are not
        logratio = torch.tensor([1.5, 0.5, 0.5, 1.5]).log()
        advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
        expected = -(1.2 - 0.8 + 0.5 - 1.5) / 4
        assert policy_loss(logratio, advantages, 0.2).item() == pytest.approx(expected)

    def test_value_loss_takes_the_larger_of_clipped_and_unclipped(self) -> None:
        # V = 2 from V_old = 1 with R = 3: unclipped (2−3)² = 1, clipped to 1.2: (1.2−3)² = 3.24 → ½·3.24
        values, old, returns = torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([3.0])
        assert value_loss(values, old, returns, 0.2).item() == pytest.approx(1.62)
        assert value_loss(values, old, returns, None).item() == pytest.approx(0.5)


class TestDistributions:
    def test_categorical_agrees_with_torch(self) -> None:
        logits = torch.randn(7, 5)
        actions = torch.randint(0, 5, (7,))
        logprob, entropy = Categorical([5], single=True).log_prob_and_entropy(logits, None, actions)
        reference = torch.distributions.Categorical(logits=logits)
        torch.testing.assert_close(logprob, reference.log_prob(actions))
        torch.testing.assert_close(entropy, reference.entropy())

    def test_several_choices_add_up(self) -> None:
        logits = torch.randn(7, 5)
        actions = torch.stack([torch.randint(0, 3, (7,)), torch.randint(0, 2, (7,))], dim=1)
        logprob, entropy = Categorical([3, 2], single=False).log_prob_and_entropy(logits, None, actions)
        parts = [torch.distributions.Categorical(logits=part) for part in logits.split([3, 2], dim=-1)]
        torch.testing.assert_close(logprob, sum(p.log_prob(actions[:, i]) for i, p in enumerate(parts)))
        torch.testing.assert_close(entropy, sum(p.entropy() for p in parts))

    def test_gaussian_agrees_with_torch(self) -> None:
        mean, logstd, actions = torch.randn(7, 3), torch.randn(3), torch.randn(7, 3)
        logprob, entropy = DiagonalGaussian(3).log_prob_and_entropy(mean, logstd, actions)
        reference = torch.distributions.Normal(mean, logstd.exp())
        torch.testing.assert_close(logprob, reference.log_prob(actions).sum(-1))
        torch.testing.assert_close(entropy, reference.entropy().sum(-1))

    def test_categorical_samples_have_the_probabilities_of_the_logits(self) -> None:
        choice, rng = Categorical([3], single=True), np.random.default_rng(0)
        logits = np.log(np.array([[0.5, 0.3, 0.2]], np.float32)).repeat(100_000, axis=0)
        actions = choice.sample(logits, choice.noise(rng, (100_000,)), None)
        # the standard error of a frequency is at most 0.0016
        np.testing.assert_allclose(np.bincount(actions) / 100_000, [0.5, 0.3, 0.2], atol=0.008)

    def test_gaussian_samples_have_mean_and_deviation(self) -> None:
        normal, rng = DiagonalGaussian(2), np.random.default_rng(0)
        mean = np.array([[1.0, -2.0]], np.float32).repeat(100_000, axis=0)
        draws = normal.sample(mean, normal.noise(rng, (100_000,)), np.array([0.5, 3.0], np.float32))
        np.testing.assert_allclose(draws.mean(0), [1.0, -2.0], atol=0.05)
        np.testing.assert_allclose(draws.std(0), [0.5, 3.0], rtol=0.02)


class TestValues:
    def test_a_time_limit_is_bootstrapped(self) -> None:
        # reward 1 for ever, cut every 10 steps: V = 1/(1 − 0.9) = 10
        assert learned_values([[0.0]], 150, "env.id=tests.probes:ConstantReward-v0")[0] == pytest.approx(
            10, abs=0.5
        )

    def test_without_bootstrapping_the_time_limit_looks_like_an_end(self) -> None:
        # the same env with CleanRL's zero at the limit: the mean over t of (1 − 0.9^(10−t))/(1 − 0.9), t =
        # 0…9
        expected = np.mean([(1 - 0.9**left) / 0.1 for left in range(1, 11)])
        value = learned_values(
            [[0.0]], 150, "env.id=tests.probes:ConstantReward-v0", "algo.bootstrap_truncated=false"
        )[0]
        assert value == pytest.approx(expected, abs=0.5)
        assert value < 6

    def test_termination_is_not_bootstrapped(self) -> None:
        # reward 1, over after 5 steps: V = (1 − 0.9^left)/(1 − 0.9)
        obs = [[step / 5] for step in range(5)]
        expected = [(1 - 0.9 ** (5 - step)) / 0.1 for step in range(5)]
        values = learned_values(obs, 200, "env.id=tests.probes:TerminatingConstantReward-v0")
        np.testing.assert_allclose(values, expected, atol=0.3)

    def test_terminated_wins_where_both_flags_are_set(self) -> None:
        # three steps, one observation: the mean of 1, 1.9 and 2.71, where bootstrapping would lead to 10
        value = learned_values([[0.0]], 150, "env.id=tests.probes:BothFlags-v0")[0]
        assert value == pytest.approx((1 + 1.9 + 2.71) / 3, abs=0.3)


class TestRollout:
    def test_networks_see_the_observations_of_the_rollout(self) -> None:
        first = np.arange(6, dtype=np.uint8).reshape(2, 3)
        rollout = Rollout(4, first, (), np.int64, torch.device("cpu"))
        nobody = np.zeros(2, bool)
        step = Step(first, np.zeros(2, np.float32), nobody, nobody, first, [])
        rollout.add(0, slice(0, 2), step, first + 1)
        assert rollout.inputs[:2].tolist() == [first.tolist(), (first + 1).tolist()]
        assert np.shares_memory(rollout.inputs.numpy(), rollout.obs), "on the CPU nothing is stored twice"
        elsewhere = Rollout(4, first, (), np.int64, torch.device("meta"))
        elsewhere.add(0, slice(0, 2), step, first + 1)
        assert elsewhere.inputs.device.type == "meta"
        assert elsewhere.inputs.shape == elsewhere.obs.shape
        assert elsewhere.obs[1].tolist() == (first + 1).tolist()

    def rollout(self, *overrides: str) -> tuple[Any, dict[str, torch.Tensor]]:
        ppo = algorithm(*overrides)
        ppo.iteration = 1
        batch, _ = ppo.collect()
        return ppo, batch

    def test_returns_do_not_leak_across_an_episode_boundary(self) -> None:
        # λ = 1 and γ = 1 make returns plain sums to the episode's end: 10…1 times +1, then 10…1 times −100,
        # then again
        _, batch = self.rollout(
            "env.id=tests.probes:AlternatingReward-v0",
            "env.num_envs=1",
            "algo.num_steps=40",
            "algo.gae_lambda=1",
            "algo.gamma=1",
            "total_timesteps=40",
        )
        left = np.arange(10, 0, -1)
        expected = np.concatenate([left, -100 * left, left, -100 * left])
        np.testing.assert_allclose(batch["returns"].numpy(), expected, rtol=1e-5)

    def test_true_successor_counts_at_a_time_limit(self) -> None:
        # The counter is cut after 7 steps: with λ = 0 the return of a step is r + γ V(next step), never V
        # of the new episode
        ppo, batch = self.rollout(
            "env.id=tests.probes:Counter-v0",
            "env.num_envs=2",
            "algo.num_steps=20",
            "algo.gae_lambda=0",
            "total_timesteps=40",
        )
        obs = batch["obs"].clone()
        successor = obs + torch.tensor([1.0, 0.0])
        with torch.no_grad():
            expected = successor[:, 0] + 0.99 * ppo.agent(successor)[1]
        torch.testing.assert_close(batch["returns"], expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("env", ["SmallBox-v0", "TwoChoices-v0", "StartAtFive-v0", "DictObs-v0"])
    def test_first_minibatch_has_ratio_one(self, env: str) -> None:
        ppo, batch = self.rollout(f"env.id=tests.probes:{env}", "total_timesteps=10000")
        ppo.update(batch)
        first = dict(zip(ppo.LOSSES, ppo.minibatch_losses[0].tolist(), strict=True))
        assert first["clipfrac"] == 0
        assert first["approx_kl"] == pytest.approx(0, abs=1e-6)
        assert first["old_approx_kl"] == pytest.approx(0, abs=1e-5)
        last = dict(zip(ppo.LOSSES, ppo.minibatch_losses[-1].tolist(), strict=True))
        assert last["approx_kl"] != 0, "the policy did not move at all"

    def test_what_was_sampled_is_stored_not_what_was_clipped(self) -> None:
        _, batch = self.rollout(
            "env.id=tests.probes:SmallBox-v0", "total_timesteps=10000"
        )  # the env asserts its bounds
        assert batch["actions"].abs().max() > 0.5, "σ is 1, the bounds are ±0.05"
        assert batch["actions"].std() == pytest.approx(1, abs=0.1)

    def test_rewards_are_normalised_for_learning_and_raw_in_the_episodes(self) -> None:
        ppo = algorithm(
            "algo=ppo_continuous_action",
            "algo.num_steps=1000",
            "algo.num_minibatches=10",
            "total_timesteps=1000",
        )
        _, episodes = ppo.collect()
        ppo.close()
        assert len(episodes) == 1
        assert -800 < episodes[0].episodic_return < -50, (
            "a random HalfCheetah loses a few hundred; normalised it would be ±10"
        )


class TestSchedules:
    def test_learning_rate_falls_linearly(self) -> None:
        ppo = algorithm("total_timesteps=1000", "algo.num_steps=64")  # batches of 256: N = 4
        rates = [ppo.iterate().scalars["charts/learning_rate"] for _ in range(4)]
        ppo.close()
        np.testing.assert_allclose(rates, [2.5e-4 * (1 - i / 4) for i in range(4)])

    def test_env_steps_count_all_envs(self) -> None:
        ppo = algorithm("total_timesteps=1000", "algo.num_steps=64", "env.num_envs=3")
        ppo.iterate()
        ppo.close()
        assert ppo.env_steps == 192

    def test_target_kl_ends_the_epochs(self) -> None:
        ppo = algorithm(
            "total_timesteps=1000", "algo.num_steps=64", "algo.target_kl=1e-9", "algo.learning_rate=0.1"
        )
        ppo.iterate()
        ppo.close()
        assert len(ppo.minibatch_losses) == 4, "one epoch of four minibatches"


class TestRefused:
    def test_minibatches_that_do_not_divide(self) -> None:
        with pytest.raises(
            ConfigError, match=r"algo.num_minibatches=5 does not divide .* algo.num_minibatches=4 does"
        ):
            configure("algo.num_minibatches=5")

    def test_minibatches_of_one(self) -> None:
        with pytest.raises(ConfigError, match="minibatches of 1"):
            configure("algo.num_minibatches=512")
        configure("algo.num_minibatches=512", "algo.norm_adv=false")

    def test_less_than_a_batch(self) -> None:
        with pytest.raises(ConfigError, match=r"total_timesteps=511 is below one batch .* = 512"):
            configure("total_timesteps=511")

    @pytest.mark.parametrize("minibatches", [1, 2, 4, 8, 256])
    def test_every_divisor_trains(self, minibatches: int) -> None:
        ppo = algorithm(f"algo.num_minibatches={minibatches}", "algo.update_epochs=1")
        scalars = ppo.iterate().scalars
        ppo.close()
        assert len(ppo.minibatch_losses) == minibatches
        assert all(np.isfinite(v) for k, v in scalars.items())


class TestNonFinite:
    @pytest.mark.parametrize("where", ["observation", "reward"])
    @pytest.mark.parametrize("value", ["nan", "inf"])
    def test_env(self, where: str, value: str) -> None:
        ppo = algorithm(
            "env.id=tests.probes:NaNAfter-v0", f"env.kwargs={{steps: 20, where: {where}, value: {value}}}"
        )
        with pytest.raises(NonFiniteError, match=where):
            ppo.iterate()
        assert ppo.env_steps == 4 * 19, "19 whole vector steps were taken"
        ppo.close()

    def test_loss(self) -> None:
        ppo = algorithm()
        with torch.no_grad():
            ppo.agent.critic[1].bias.fill_(float("nan"))
        with pytest.raises(NonFiniteError, match="losses/policy_loss"):
            ppo.iterate()
        ppo.close()


class TestPrecisionAndCompilation:
    def test_bf16_acts_and_learns_in_the_same_precision(self) -> None:
        ppo = algorithm("precision=bf16", "total_timesteps=10000")
        ppo.iterate()
        first = dict(zip(ppo.LOSSES, ppo.minibatch_losses[0].tolist(), strict=True))
        ppo.close()
        assert first["approx_kl"] == pytest.approx(0, abs=1e-5)
        assert first["clipfrac"] == 0

    def test_compiled_losses_are_the_same(self) -> None:
        plain, compiled = (algorithm(f"compile={flag}", "algo.update_epochs=1") for flag in ("false", "true"))
        losses = [ppo.iterate().scalars["losses/value_loss"] for ppo in (plain, compiled)]
        plain.close()
        compiled.close()
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)

    def test_what_a_cuda_graph_returns_outlives_the_next_replay(self) -> None:
        # Without a CUDA device the kernels run as they are: the wrapper and its copies are what is tested.
        context = Context(1, Streams(1), torch.device("cuda"), compile=True)
        weight = torch.ones(3, requires_grad=True)
        losses = context.compiled(lambda x: ((weight * x).sum(), x * 2))
        (loss, first), (_, second) = losses(torch.ones(3)), losses(torch.full((3,), 5.0))
        loss.backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [1, 1, 1]
        assert first.tolist() == [2, 2, 2]
        assert second.tolist() == [10, 10, 10]
        assert context.compiled(lambda x: x.sum())(torch.ones(3)) == 3


class TestSharedNetwork:
    def test_one_trunk(self) -> None:
        apart, shared = algorithm(), algorithm("network.shared=true")
        trunk = 4 * 64 + 64 + 64 * 64 + 64
        count = {
            name: sum(p.numel() for p in ppo.agent.parameters())
            for name, ppo in (("apart", apart), ("shared", shared))
        }
        assert count["apart"] - count["shared"] == trunk
        assert np.isfinite(shared.iterate().scalars["losses/value_loss"])
        apart.close()
        shared.close()
