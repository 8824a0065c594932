"""Continuous actions in units of their own, and the losses of DDPG, TD3 and SAC by hand."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

from rl.algos.sac import alpha_loss, soft_value
from rl.algos.td3 import smoothing_noise
from rl.learner import Learner
from rl.networks.continuous import ActionScale, DeterministicActor, SquashedGaussianActor, squash_log_std
from rl.networks.ensemble import Ensemble
from rl.networks.mlp import MLP
from rl.networks.numpy_forward import numpy_forward
from rl.offpolicy import Batch
from rl.policies import explore, random_actions, to_bounds
from rl.seeding import Streams
from tests.conftest import algorithm
from tests.probes import BoxBounds, Probe

DDPG, TD3, SAC = "ddpg_continuous_action", "td3_continuous_action", "sac_continuous_action"
DETERMINISTIC, ALL = (DDPG, TD3), (DDPG, TD3, SAC)
SPACE = BoxBounds.action_space  # [−1, 1], [−10, 10], [0, 1]
HALF_WIDTHS, MIDDLE = np.array([1.0, 10.0, 0.5]), np.array([0.0, 0.0, 0.5])
NETWORK = MLP([16], "relu", shared=False, orthogonal=False)


class Goal(Probe):
    """One step an episode; the reward falls with the distance from [.5, −5, .25], in half widths."""

    action_space = SPACE
    GOAL = np.array([0.5, -5.0, 0.25])

    def outcome(self, action: Any) -> tuple[float, bool, bool]:
        return -float((((action - self.GOAL) / HALF_WIDTHS) ** 2).sum()), True, False


gym.register("Goal-v0", entry_point="tests.test_continuous:Goal")


def bounded(recipe: str, *overrides: str) -> Any:
    """An algorithm on BoxBounds-v0, small."""
    return algorithm(
        f"algo={recipe}",
        "env.id=tests.probes:BoxBounds-v0",
        "network.hidden_sizes=[16]",
        "algo.buffer_size=20000",
        "algo.batch_size=16",
        "algo.learning_starts=100",
        *overrides,
    )


def fill(network: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(value)


def acting_at_the_middle(recipe: str, steps: int, *overrides: str) -> tuple[np.ndarray, Any]:
    """Actions taken [steps, N, D] by an actor that puts out 0, past the random ones; and the algorithm."""
    algo = bounded(recipe, "algo.learning_starts=0", *overrides)
    fill(algo.actor.network, 0.0)
    taken = []
    for _ in range(steps):
        actions = algo.act()
        taken.append(actions.copy())
        algo.experience.step(actions)
    algo.close()
    return np.array(taken), algo


class TestExploration:
    STEPS = 4000

    @pytest.mark.parametrize("recipe", ALL)
    def test_noise_is_independent_and_as_wide_as_each_dimension(self, recipe: str) -> None:
        # An actor that puts out 0: DDPG and TD3 add 0.1 · N(0, 1) half widths; SAC has tanh(0.2231 · N(0, 1))
        # as log σ = −5 + ½ · 7 · (0 + 1) = −1.5. Either way the deviations are as 1 : 10 : 0.5.
        # Of 8000 draws a deviation is known to 1 / √16000 = 0.8 %, a correlation to 1 / √8000 = 0.011
        taken, _ = acting_at_the_middle(recipe, self.STEPS, "env.num_envs=2")
        std = taken.std((0, 1))
        np.testing.assert_allclose(std / std[0], HALF_WIDTHS, rtol=0.05)
        if recipe != SAC:
            np.testing.assert_allclose(std, 0.1 * HALF_WIDTHS, rtol=0.04)
        np.testing.assert_allclose(taken.mean((0, 1)), MIDDLE, atol=0.02 * HALF_WIDTHS.max())
        np.testing.assert_allclose((taken.mean((0, 1)) - MIDDLE) / HALF_WIDTHS, 0, atol=0.015)
        columns = taken.reshape(self.STEPS, 6).T  # both envs, all dimensions
        assert np.abs(np.corrcoef(columns) - np.eye(6)).max() < 5 / math.sqrt(self.STEPS)
        following = [np.corrcoef(column[:-1], column[1:])[0, 1] for column in columns]
        assert np.abs(following).max() < 5 / math.sqrt(self.STEPS), "each step has noise of its own"

    @pytest.mark.parametrize("recipe", DETERMINISTIC)
    def test_never_out_of_bounds(self, recipe: str) -> None:
        """With noise of three half widths; the env itself would raise, and rows are as it was given them."""
        taken, algo = acting_at_the_middle(recipe, 500, "algo.exploration_noise=3", "env.num_envs=2")
        assert (taken >= SPACE.low).all() and (taken <= SPACE.high).all()
        # |3 · N(0, 1)| > 1 in 74 %: there the noise is clipped to the bounds themselves
        at_the_ends = (taken == SPACE.low) | (taken == SPACE.high)
        np.testing.assert_allclose(at_the_ends.mean((0, 1)), 0.74, atol=0.07)
        stored = algo.experience.buffer.arrays["actions"][:500]
        np.testing.assert_array_equal(stored, taken)

    @pytest.mark.parametrize("backend", ["sync", "async"])
    def test_what_is_stored_is_what_the_env_was_given(self, backend: str) -> None:
        """BoxBounds observes the action that it got, and spoils its copy."""
        algo = bounded(DDPG, "env.num_envs=2", f"env.backend={backend}")
        for _ in range(60):
            algo.experience.step(algo.act())
        algo.close()
        arrays = algo.experience.buffer.arrays
        np.testing.assert_array_equal(arrays["next_obs"][:60], arrays["actions"][:60])
        np.testing.assert_array_equal(arrays["rewards"][:60], arrays["actions"][:60].sum(-1))

    def test_explore_by_hand(self) -> None:
        # x + σ · noise, clipped to [−1, 1], then half width · x + middle
        class Draws:
            def standard_normal(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
                return np.array([[1.0, -1.0, 2.0], [4.0, 0.0, -8.0]], dtype)

        x = np.array([[0.5, 0.5, 0.0], [0.0, -1.0, 0.0]], np.float32)
        actions = explore(x, 0.25, Draws(), SPACE)  # type: ignore[arg-type]
        # x: [0.75, 0.25, 0.5], [1, −1, −1 (−2)]
        np.testing.assert_allclose(actions, [[0.75, 2.5, 0.75], [1.0, -10.0, 0.0]])


class TestActionMeans:
    @pytest.mark.parametrize("recipe", ALL)
    def test_an_output_of_zero_is_the_middle_of_each_range(self, recipe: str) -> None:
        algo = bounded(recipe)
        fill(algo.actor.network, 0.0)
        actions, _ = algo.policy()(np.ones((2, 3), np.float32), None, None)
        np.testing.assert_array_equal(actions, [MIDDLE, MIDDLE])
        algo.close()

    @pytest.mark.parametrize(("bias", "end"), [(50.0, SPACE.high), (-50.0, SPACE.low)])
    @pytest.mark.parametrize("recipe", ALL)
    def test_a_large_output_is_its_end(self, recipe: str, bias: float, end: np.ndarray) -> None:
        algo = bounded(recipe)
        fill(algo.actor.network, 0.0)
        head = [layer for layer in algo.actor.network.network.modules() if isinstance(layer, nn.Linear)][-1]
        with torch.no_grad():
            head.bias[:3].fill_(bias)
        actions, _ = algo.policy()(np.ones((1, 3), np.float32), None, None)
        np.testing.assert_allclose(actions, [end], rtol=1e-6)
        algo.close()

    def test_torch_and_numpy_scale_alike(self) -> None:
        x = np.linspace(-1, 1, 9, dtype=np.float32)[:, None].repeat(3, 1)
        scaled = ActionScale(SPACE)(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(scaled, to_bounds(x, SPACE), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(scaled[2], HALF_WIDTHS * -0.5 + MIDDLE)

    @pytest.mark.parametrize("recipe", ALL)
    def test_acting_and_learning_see_the_same_actor(self, recipe: str) -> None:
        algo = bounded(recipe)
        obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
        actions, _ = algo.policy()(obs, None, None)
        with torch.no_grad():
            if recipe == SAC:
                mean = algo.actor.network.network(torch.from_numpy(obs))[:, :3]
                expected = algo.actor.network.scale(torch.tanh(mean))
            else:
                expected = algo.actor.network(torch.from_numpy(obs))
        np.testing.assert_allclose(actions, expected.numpy(), rtol=1e-5, atol=1e-5)
        algo.close()


class TestRandomActions:
    def test_uniform_within_each_range(self) -> None:
        # A uniform distribution has its mean in the middle and a deviation of half width / √3
        actions = random_actions(np.random.default_rng(0), SPACE, 20_000)
        assert actions.dtype == np.float32 and actions.shape == (20_000, 3)
        assert (actions >= SPACE.low).all() and (actions <= SPACE.high).all()
        np.testing.assert_allclose((actions.mean(0) - MIDDLE) / HALF_WIDTHS, 0, atol=0.02)
        np.testing.assert_allclose(actions.std(0), HALF_WIDTHS / math.sqrt(3), rtol=0.02)
        assert np.abs(np.corrcoef(actions.T) - np.eye(3)).max() < 0.04

    @pytest.mark.parametrize("recipe", ALL)
    def test_before_learning_starts_from_the_runs_own_stream(self, recipe: str) -> None:
        algo = bounded(recipe, "env.num_envs=2", "seed=7")
        fill(algo.actor.network, 0.0)
        np.random.seed(0)  # noqa: NPY002
        rng = Streams(7).generator("actions")
        for step in range(60):  # learning_starts=100 is after 50 of them
            actions = algo.act()
            expected = rng.uniform(SPACE.low, SPACE.high, (2, 3)).astype(np.float32)
            assert np.array_equal(actions, expected) == (step < 50)
            algo.experience.step(actions)
        algo.close()


def batch(rewards: list[float], terminated: list[float], discount: float = 0.5) -> Batch:
    """A batch of equal observations 0 and actions 0."""
    rows = len(rewards)
    zeros = torch.zeros(rows, 3)
    return Batch(
        zeros, zeros, torch.tensor(rewards), zeros, torch.tensor(terminated), torch.full((rows,), discount)
    )


def linear(recipe: str, *overrides: str) -> Any:
    """Without hidden layers, all weights 0: Q is w · [obs, action] + b of weights [E, 6, 1] and biases."""
    algo = bounded(recipe, "network.hidden_sizes=[]", *overrides)
    algo.close()
    for learner in algo.learners.values():
        fill(learner.network, 0.0)
        fill(learner.target, 0.0)
    return algo


def set_critics(network: Any, action_weight: float, biases: list[float]) -> None:
    with torch.no_grad():
        network.ensemble.weights[0][:, 3:] = action_weight
        network.ensemble.biases[0][:, 0, 0] = torch.tensor(biases)


class TestDDPG:
    def test_critic_target(self) -> None:
        # μ_target = [0, 0, 0.5] and Q_target = Σ a + 3 = 3.5: y = 1 + 0.5 · 3.5 = 2.75, terminated: 2; Q = 0.
        # The actor itself is elsewhere
        ddpg = linear(DDPG)
        fill(ddpg.actor.network, 1.0)
        set_critics(ddpg.critic.target, 1.0, [3.0])
        losses, q = ddpg._critic_loss(batch([1.0, 2.0], [0.0, 1.0]))
        assert losses.tolist() == pytest.approx([(2.75**2 + 2.0**2) / 2])
        assert q.tolist() == [0.0]

    def test_actor_climbs_the_critic_in_each_dimensions_units(self) -> None:
        # Q = Σ a, the loss −Q: dQ/df = half width_d · (1 − tanh(0)²), so the bias' gradient is −[1, 10, ½]
        ddpg = linear(DDPG)
        set_critics(ddpg.critic.network, 1.0, [0.0])
        loss = ddpg._actor_loss(batch([0.0], [0.0]))
        assert loss.item() == pytest.approx(-0.5)
        loss.backward()
        assert ddpg.actor.network.network[1].bias.grad.tolist() == pytest.approx((-HALF_WIDTHS).tolist())


class TestTD3:
    def test_smoothing_noise(self) -> None:
        # 0.2 · [1, −5, 10] = [0.2, −1, 2], clipped to ±0.5, times half widths
        noise = smoothing_noise(torch.tensor([[1.0, -5.0, 10.0]]), 0.2, 0.5, torch.tensor([1.0, 10.0, 0.5]))
        assert noise[0].tolist() == pytest.approx([0.2, -5.0, 0.25])

    def test_actions_are_clipped_to_each_dimensions_own_bounds(self) -> None:
        given = torch.tensor([[2.0, 2.0, 2.0], [-2.0, -20.0, -2.0], [0.5, 9.5, 0.5]])
        clipped = ActionScale(SPACE).clip(given)
        assert clipped.tolist() == [[1.0, 2.0, 1.0], [-1.0, -10.0, 0.0], [0.5, 9.5, 0.5]]

    @pytest.mark.parametrize(
        ("noise", "q"),
        [
            # μ_target is the upper end, [1, 10, 1]; Q_target = Σ a + {2, 1}, the smaller counts
            (9.0, 13.0),  # beyond the bounds: stays at [1, 10, 1], Σ = 12
            (-9.0, 7.25),  # −½ half width: [0.5, 5, 0.75], Σ = 6.25
            (-1.0, 10.7),  # −0.2 half widths: [0.8, 8, 0.9], Σ = 9.7
        ],
    )
    def test_critic_target(self, noise: float, q: float) -> None:
        # y = 1 + 0.5 · Q, terminated: 2. The critics say 0 and 1
        td3 = linear(TD3, "algo.policy_noise=0.2", "algo.noise_clip=0.5")
        with torch.no_grad():
            td3.actor.target.network[1].bias.fill_(50.0)
        set_critics(td3.critics.target, 1.0, [2.0, 1.0])
        set_critics(td3.critics.network, 0.0, [0.0, 1.0])
        losses, values = td3._critic_loss(batch([1.0, 2.0], [0.0, 1.0]), torch.full((2, 3), noise))
        y = 1 + 0.5 * q
        expected = [(y**2 + 2**2) / 2, ((y - 1) ** 2 + 1) / 2]
        assert losses.tolist() == pytest.approx(expected, rel=1e-5)
        assert values.tolist() == [0.0, 1.0]

    def test_the_actor_follows_the_first_critic(self) -> None:
        td3 = linear(TD3)
        with torch.no_grad():
            td3.critics.network.ensemble.weights[0][0, 3:] = 1.0
            td3.critics.network.ensemble.weights[0][1, 3:] = -7.0
        loss = td3._actor_loss(batch([0.0], [0.0]))
        loss.backward()
        assert loss.item() == pytest.approx(-0.5)
        assert td3.actor.network.network[1].bias.grad.tolist() == pytest.approx((-HALF_WIDTHS).tolist())


class TestDelay:
    @pytest.mark.parametrize("recipe", DETERMINISTIC)
    def test_actor_and_targets_move_at_every_second_step_by_tau(self, recipe: str) -> None:
        algo = bounded(recipe, "algo.tau=0.25", "algo.policy_frequency=2")
        for _ in range(120):
            algo.experience.step(algo.act())

        def weights() -> list[torch.Tensor]:
            networks = [n for learner in algo.learners.values() for n in (learner.network, learner.target)]
            return [torch.cat([p.detach().reshape(-1) for p in n.parameters()]).clone() for n in networks]

        previous = weights()
        for step in range(1, 5):
            algo.update(algo.experience.sample())
            actor, actor_target, critic, critic_target = now = weights()
            moved = [not torch.equal(a, b) for a, b in zip(previous, now, strict=True)]
            assert moved == ([False, False, True, False] if step % 2 else [True, True, True, True])
            if step % 2 == 0:
                torch.testing.assert_close(actor_target, 0.75 * previous[1] + 0.25 * actor)
                torch.testing.assert_close(critic_target, 0.75 * previous[3] + 0.25 * critic)
            previous = now
        algo.close()


class TestSAC:
    def test_log_std_is_squashed(self) -> None:
        # −5 + 3.5 · (tanh + 1): the ends −5 and 2, the middle −1.5
        assert squash_log_std(torch.tensor([-50.0, 0.0, 50.0])).tolist() == pytest.approx([-5.0, -1.5, 2.0])

    def test_log_prob_is_that_of_the_transformed_distribution(self) -> None:
        torch.manual_seed(0)
        actor = SquashedGaussianActor(NETWORK, (3,), SPACE).double()
        obs, noise = torch.randn(64, 3).double() * 3, torch.randn(64, 3).double()
        actions, logprobs = actor(obs, noise)
        mean, raw = actor.network(obs).float().double().split(3, dim=-1)
        std = squash_log_std(raw).exp()
        reference = TransformedDistribution(
            Independent(Normal(mean, std), 1),
            [
                TanhTransform(),
                AffineTransform(
                    torch.tensor(MIDDLE, dtype=torch.float64),
                    torch.tensor(HALF_WIDTHS, dtype=torch.float64),
                    event_dim=1,
                ),
            ],
        )
        torch.testing.assert_close(
            logprobs.double(), reference.log_prob(actions.double()), rtol=1e-3, atol=1e-3
        )
        torch.testing.assert_close(
            actions.double(), actor.scale(torch.tanh(mean + std * noise)).double(), rtol=1e-5, atol=1e-5
        )

    def test_log_prob_far_out_is_finite(self) -> None:
        # tanh(u) is 1 to the last bit, where log(1 − tanh(u)²) would be −∞; it is 2 (log 2 − u) to the last
        actor = SquashedGaussianActor(MLP([], "relu", shared=False, orthogonal=False), (3,), SPACE)
        fill(actor, 0.0)
        with torch.no_grad():
            actor.network[1].bias[:3] = 40.0
        actions, logprobs = actor(torch.zeros(1, 3), torch.zeros(1, 3))
        gaussian = 1.5 - 0.5 * math.log(2 * math.pi)  # −log σ − ½ log 2π
        expected = 3 * (gaussian - 2 * (math.log(2) - 40)) - math.log(1 * 10 * 0.5)
        assert logprobs.item() == pytest.approx(expected)
        np.testing.assert_allclose(actions[0].detach(), SPACE.high)

    def test_soft_value(self) -> None:
        # The smaller of [1, 2] and [5, 3], less 0.2 · log π: 1 + 0.2, 3 − 0.1
        q, logprobs = torch.tensor([[1.0, 5.0], [2.0, 3.0]]), torch.tensor([-1.0, 0.5])
        assert soft_value(q, logprobs, torch.tensor(0.2)).tolist() == pytest.approx([1.2, 2.9])

    def test_alpha_loss(self) -> None:
        # α = ½, mean log π = ½: −½ · (½ − 3) = 1.25, and its gradient in log α the same. The entropy −½ is
        # above its target −3, so α falls; with log π = 4 it is below: −½ · (4 − 3) = −½ and α rises
        log_alpha = torch.tensor([math.log(0.5)], requires_grad=True)
        loss = alpha_loss(log_alpha, torch.tensor([-1.0, 2.0]), -3.0)
        loss.backward()
        assert loss.item() == pytest.approx(1.25)
        assert log_alpha.grad is not None and log_alpha.grad.item() == pytest.approx(1.25)
        assert alpha_loss(log_alpha, torch.tensor([4.0]), -3.0).item() == pytest.approx(-0.5)

    def test_critic_target(self) -> None:
        # Deterministic at 0 noise: a' is the middle, log π = Σ_d (−log σ − ½ log 2π) − log(1 · 10 · ½), with
        # log σ = −1.5 and no tanh Jacobian at 0. Q_target = {4, 6}: y = 1 + ½ (4 − 0.2 log π); terminated: 2
        sac = linear(SAC, "algo.autotune=false", "algo.alpha=0.2")
        set_critics(sac.critics.target, 0.0, [4.0, 6.0])
        set_critics(sac.critics.network, 0.0, [0.0, 1.0])
        logprob = 3 * (1.5 - 0.5 * math.log(2 * math.pi)) - math.log(5)
        y = 1 + 0.5 * (4 - 0.2 * logprob)
        losses, _ = sac._critic_loss(
            batch([1.0, 2.0], [0.0, 1.0]), torch.zeros(2, 3), sac.log_alpha.detach().exp()
        )
        assert losses.tolist() == pytest.approx([(y**2 + 4) / 2, ((y - 1) ** 2 + 1) / 2], rel=1e-5)

    def test_actor_loss(self) -> None:
        # Q = Σ a + {0, 9}: α log π − ½ at the middle; the mean's gradient is −half widths, log π's 0 there
        sac = linear(SAC)
        set_critics(sac.critics.network, 1.0, [0.0, 9.0])
        loss, logprobs = sac._actor_loss(batch([0.0], [0.0]), torch.zeros(1, 3), torch.tensor([0.2]))
        logprob = 3 * (1.5 - 0.5 * math.log(2 * math.pi)) - math.log(5)
        assert logprobs.item() == pytest.approx(logprob, rel=1e-5)
        assert loss.item() == pytest.approx(0.2 * logprob - 0.5, rel=1e-5)
        loss.backward()
        assert sac.actor.network.network[1].bias.grad[:3].tolist() == pytest.approx((-HALF_WIDTHS).tolist())

    def test_target_entropy_is_minus_the_number_of_dimensions(self) -> None:
        sac = bounded(SAC)
        sac.close()
        assert sac.target_entropy == -3.0

    def test_without_autotune_alpha_stays(self) -> None:
        sac = bounded(SAC, "algo.autotune=false", "algo.alpha=0.3", "total_timesteps=200")
        before = sac.log_alpha.detach().clone()
        scalars = sac.iterate().scalars
        sac.close()
        assert sac.experience.gradient_steps == 100
        assert torch.equal(sac.log_alpha.detach(), before)
        assert scalars["losses/alpha"] == pytest.approx(0.3)
        assert "losses/alpha_loss" not in scalars

    def test_autotuned_it_starts_at_1_and_falls_while_the_entropy_is_above_its_target(self) -> None:
        # A new actor has log σ near −1.5, an entropy of Σ_d (−1.5 + 1.42) + log 5 = 1.4, above −3; each of
        # Adam's steps is of some q_lr = 1e-3: 100 of them take log α to −0.1
        sac = bounded(SAC, "algo.alpha=0.3", "total_timesteps=200", "algo.q_lr=1e-3")
        assert sac.log_alpha.item() == 0.0
        sac.iterate()
        sac.close()
        assert sac.log_alpha.item() == pytest.approx(-0.1, abs=0.01)

    def test_the_policy_samples_as_the_loss_does(self) -> None:
        # tanh(μ + σ · noise), in the units of each dimension, with the draws of its generator
        sac = bounded(SAC)
        sac.close()
        obs = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
        actions, _ = sac.policy()(obs, None, np.random.default_rng(5))
        noise = np.random.default_rng(5).standard_normal((4, 3), dtype=np.float32)
        with torch.no_grad():
            expected, _ = sac.actor.network(torch.from_numpy(obs), torch.from_numpy(noise))
        np.testing.assert_allclose(actions, expected.numpy(), rtol=1e-4, atol=1e-5)


class TestTruncation:
    @pytest.mark.parametrize(("num_envs", "backend"), [(1, "sync"), (3, "async")])
    @pytest.mark.parametrize("recipe", ALL)
    def test_every_row_bootstraps_at_a_time_limit(self, recipe: str, num_envs: int, backend: str) -> None:
        """Q_target = 8 everywhere, cut after 7 steps and never over: y = r + 0.9 · 8 in every row."""
        sac = ("algo.autotune=false", "algo.alpha=0") if recipe == SAC else ()
        algo = bounded(
            recipe,
            "network.hidden_sizes=[]",
            "env.max_episode_steps=7",
            f"env.num_envs={num_envs}",
            f"env.backend={backend}",
            "algo.gamma=0.9",
            "algo.batch_size=256",
            "algo.buffer_size=300",
            *sac,
        )
        critics = algo.learners["critic" if recipe == DDPG else "critics"]
        fill(critics.network, 0.0)
        fill(critics.target, 0.0)
        set_critics(critics.target, 0.0, [8.0] * critics.target.ensemble.size)
        for _ in range(120):
            algo.experience.step(algo.act())
        assert algo.experience.buffer.arrays["ended"].any()
        rows = algo.experience.sample()
        noise = torch.zeros(256, 3)
        arguments = {DDPG: (), TD3: (noise,), SAC: (noise, torch.zeros(1))}[recipe]
        losses, _ = algo._critic_loss(rows, *arguments)
        expected = (rows.rewards + 7.2).square().mean()
        torch.testing.assert_close(losses, expected.expand_as(losses))
        algo.close()


class TestEnsemble:
    def members(self, activation: type[nn.Module] = nn.Tanh) -> list[nn.Sequential]:
        torch.manual_seed(0)
        return [
            nn.Sequential(
                nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 8), activation()), nn.Linear(8, 1)
            )
            for _ in range(3)
        ]

    @pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
    def test_equals_its_members_one_by_one(self, activation: type[nn.Module]) -> None:
        members, x = self.members(activation), torch.randn(5, 4)
        expected = torch.stack([member(x) for member in members])
        ensemble = Ensemble(members)
        torch.testing.assert_close(ensemble(x), expected)
        torch.testing.assert_close(ensemble(x, 1), expected[:1])

    def test_gradients_too(self) -> None:
        members, x = self.members(), torch.randn(5, 4)
        ensemble = Ensemble(members)
        ensemble(x).square().sum().backward()
        sum(member(x).square().sum() for member in members).backward()  # type: ignore[union-attr]
        for i, member in enumerate(members):
            layers = [layer for layer in member.modules() if isinstance(layer, nn.Linear)]
            for layer, weight, bias in zip(layers, ensemble.weights, ensemble.biases, strict=True):
                torch.testing.assert_close(weight.grad[i].T, layer.weight.grad)
                torch.testing.assert_close(bias.grad[i, 0], layer.bias.grad)

    def test_members_start_apart(self) -> None:
        a, b = Ensemble(self.members())(torch.randn(5, 4))[:2]
        assert not torch.allclose(a, b)

    def test_other_layers_are_refused(self) -> None:
        with pytest.raises(TypeError, match="LayerNorm"):
            Ensemble([nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))])


class TestNumpyForward:
    @pytest.mark.parametrize("activation", ["tanh", "relu", "gelu"])
    def test_live_it_follows_training_and_copied_it_does_not(self, activation: str) -> None:
        torch.manual_seed(0)
        network = nn.Sequential(
            MLP([16], activation, shared=False, orthogonal=False).build((3,)), nn.Linear(16, 2)
        )
        learner = Learner(network, 1e-2)
        live, copied = numpy_forward(network, live=True), numpy_forward(network)
        x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
        before = copied(x).copy()
        np.testing.assert_allclose(live(x), before, rtol=1e-5, atol=1e-6)
        for _ in range(3):
            learner.step(network(torch.from_numpy(x)).square().sum())
        with torch.no_grad():
            trained = network(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(live(x), trained, rtol=1e-5, atol=1e-6)
        assert np.abs(trained - before).max() > 1e-3
        np.testing.assert_array_equal(copied(x), before)

    def test_live_it_follows_a_loaded_state(self) -> None:
        network, other = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2))
        learner, source = Learner(network, 1e-2), Learner(other, 1e-2)
        live, x = numpy_forward(network, live=True), np.ones((1, 3), np.float32)
        learner.load_weights(source.weights())
        with torch.no_grad():
            np.testing.assert_allclose(live(x), other(torch.from_numpy(x)).numpy(), rtol=1e-6)

    def test_what_it_is_given_stays(self) -> None:
        x = np.full((2, 3), -1.0, np.float32)
        numpy_forward(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))(x)
        assert (x == -1.0).all()


class TestLearner:
    def learner(self) -> Learner[Any]:
        learner: Learner[Any] = Learner(nn.Sequential(nn.Linear(2, 1)), 0.5)
        fill(learner.network, 4.0)
        fill(learner.target, 0.0)
        return learner

    def test_follow(self) -> None:
        # 0.75 · 0 + 0.25 · 4 = 1; then 0.75 · 1 + 0.25 · 4 = 1.75; τ = 1: a copy
        learner = self.learner()
        for tau, expected in ((0.25, 1.0), (0.25, 1.75), (1.0, 4.0)):
            learner.follow(tau)
            assert all((p == expected).all() for p in learner.target.parameters())
            assert all((p == 4.0).all() for p in learner.network.parameters())

    def test_the_target_starts_as_a_copy_of_its_own(self) -> None:
        learner: Learner[Any] = Learner(nn.Sequential(nn.Linear(2, 1)), 0.5)
        before = [p.clone() for p in learner.target.parameters()]
        assert all(map(torch.equal, before, learner.network.parameters()))
        learner.step(learner.network(torch.ones(1, 2)).sum())
        assert all(map(torch.equal, before, learner.target.parameters()))
        assert not any(map(torch.equal, before, learner.network.parameters()))

    def test_frozen_weights_get_no_gradient_and_pass_one_on(self) -> None:
        learner = self.learner()
        x = torch.ones(1, 2, requires_grad=True)
        learner.freeze(True)
        learner.network(x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [[4.0, 4.0]]
        assert all(p.grad is None or not p.grad.any() for p in learner.network.parameters())
        learner.freeze(False)
        learner.step(learner.network(x).sum())  # Adam's first step: lr · sign
        assert all((p == 3.5).all() for p in learner.network.parameters())

    def test_loaded_weights_are_trained_on(self) -> None:
        # Adam's first step takes 1 to 0.5; half way to it the target is at 0.25
        learner = self.learner()
        ones, zeros = ({"0.weight": x.expand(1, 2), "0.bias": x} for x in (torch.ones(1), torch.zeros(1)))
        learner.load_weights({"online": ones, "target": zeros})
        learner.step(learner.network(torch.ones(1, 2)).sum())
        for parameter in learner.network.parameters():
            torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 0.5))
        learner.follow(0.5)
        for parameter in learner.target.parameters():
            torch.testing.assert_close(parameter, torch.full_like(parameter, 0.25))


class TestSpaces:
    def test_a_matrix_of_actions_is_a_row(self) -> None:
        space = spaces.Box(np.array([[-1, 0], [2, -4]], np.float32), np.array([[1, 4], [6, 4]], np.float32))
        actor = DeterministicActor(NETWORK, (3,), space)
        fill(actor, 0.0)
        assert actor(torch.ones(2, 3)).tolist() == [[0.0, 2.0, 4.0, 0.0]] * 2


class TestLearning:
    @pytest.mark.parametrize("recipe", ALL)
    def test_the_best_action_of_ranges_of_any_width_is_found(self, recipe: str) -> None:
        # A new actor is off by some half width in each dimension
        options = ("algo.policy_lr=1e-2", "algo.q_lr=1e-2")
        if recipe != SAC:
            options = ("algo.learning_rate=1e-2", "algo.exploration_noise=0.3")
        algo = algorithm(
            f"algo={recipe}",
            "env.id=tests.test_continuous:Goal-v0",
            "env.num_envs=2",
            "network.hidden_sizes=[32]",
            "algo.batch_size=64",
            "algo.buffer_size=2000",
            "algo.learning_starts=300",
            "total_timesteps=1500",
            *options,
        )
        while algo.env_steps < 1500:
            algo.iterate()
        algo.close()
        actions, _ = algo.policy()(np.zeros((1, 1), np.float32), None, None)
        np.testing.assert_allclose((actions[0] - Goal.GOAL) / HALF_WIDTHS, 0, atol=0.2)
