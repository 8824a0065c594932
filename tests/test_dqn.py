"""DQN on problems whose answers are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rl.algos.dqn import next_action_values
from rl.offpolicy import Batch
from rl.returns import td_target
from tests.conftest import algorithm

LEARN = (
    "algo=dqn",
    "algo.gamma=0.9",
    "algo.learning_rate=1e-2",
    "algo.buffer_size=500",
    "algo.batch_size=32",
    "algo.learning_starts=100",
    "algo.train_frequency=1",
    "algo.target_network_frequency=10",
    "network.hidden_sizes=[32]",
    "total_timesteps=900",
)


def trained(*overrides: str) -> Any:
    """A DQN at the end of its run."""
    dqn = algorithm(*LEARN, *overrides)
    while dqn.env_steps < dqn.context.total_timesteps:
        dqn.iterate()
    dqn.close()
    return dqn


def values(dqn: Any, obs: list[list[float]]) -> np.ndarray:
    with torch.no_grad():
        q: np.ndarray = dqn.q.network(torch.tensor(obs)).numpy()
    return q


class TestTargets:
    def test_td_target(self) -> None:
        # 1 + 0.5·8 = 5; terminated: 2 and nothing else; three steps with γ³ = 0.125: 7 + 0.125·8 = 8
        target = td_target(
            torch.tensor([1.0, 2.0, 7.0]),
            torch.tensor([0.5, 0.5, 0.125]),
            torch.tensor([0.0, 1.0, 0.0]),
            torch.tensor([8.0, 8.0, 8.0]),
        )
        assert target.tolist() == [5.0, 2.0, 8.0]

    def test_the_target_networks_best_action(self) -> None:
        target_q = torch.tensor([[1.0, 4.0, 2.0], [-3.0, -1.0, -2.0]])
        assert next_action_values(target_q, None).tolist() == [4.0, -1.0]

    def test_double_dqn_lets_the_online_network_choose(self) -> None:
        # The online network prefers actions 2 and 0: worth 2 and −3 to the target network
        target_q = torch.tensor([[1.0, 4.0, 2.0], [-3.0, -1.0, -2.0]])
        online_q = torch.tensor([[0.0, 1.0, 9.0], [5.0, 1.0, 2.0]])
        assert next_action_values(target_q, online_q).tolist() == [2.0, -3.0]


class TestLoss:
    """A linear network on one number: Q(s) = [s, 2s] online, [3s, s + 1] the target network."""

    # s, a, r, s', terminated, γⁿ
    ROWS = ((1, 0, 1, 2, 0, 0.5), (1, 1, 2, 5, 1, 0.5), (2, 1, 4, 1, 0, 0.25))

    def loss(self, *overrides: str) -> tuple[torch.Tensor, Any]:
        dqn = algorithm(
            "algo=dqn",
            "env.id=tests.probes:ConstantReward-v0",
            "env.num_envs=1",
            "network.hidden_sizes=[]",
            *overrides,
        )
        dqn.close()
        with torch.no_grad():
            for network, weights, biases in (
                (dqn.q.network, [[1.0], [2.0]], [0.0, 0.0]),
                (dqn.q.target, [[3.0], [1.0]], [0.0, 1.0]),
            ):
                network[-1].weight.copy_(torch.tensor(weights))
                network[-1].bias.copy_(torch.tensor(biases))
        s, a, r, following, terminated, discounts = (
            torch.tensor(x).float() for x in zip(*self.ROWS, strict=True)
        )
        batch = Batch(s[:, None], a.long(), r, following[:, None], terminated, discounts)
        loss, q = dqn._loss(batch)
        assert q.tolist() == [1.0, 2.0, 4.0]
        return loss, dqn

    def test_squared_error(self) -> None:
        # y0 = 1 + 0.5·max(6, 3) = 4, y1 = 2 (terminated), y2 = 4 + 0.25·max(3, 2) = 4.75; Q = 1, 2, 4:
        # (3² + 0 + 0.75²) / 3
        assert self.loss()[0].item() == pytest.approx((9 + 0.5625) / 3)

    def test_double(self) -> None:
        # Online Q(2) = [2, 4] and Q(1) = [1, 2]: action 1 both times, worth 3 and 2 to the target network:
        # y0 = 1 + 0.5·3 = 2.5, y2 = 4 + 0.25·2 = 4.5
        assert self.loss("algo.double_q=true")[0].item() == pytest.approx((1.5**2 + 0.5**2) / 3)

    def test_huber(self) -> None:
        # Beyond an error of 1 linear: |3| − ½ = 2.5; below, half the square: ½ · 0.75² = 0.28125
        assert self.loss("algo.huber=true")[0].item() == pytest.approx((2.5 + 0.28125) / 3)

    @pytest.mark.parametrize(("huber", "expected"), [("false", -2 * 3 / 3), ("true", -1 / 3)])
    def test_gradient_only_through_q_of_the_action_taken(self, huber: str, expected: float) -> None:
        # Row 0 alone takes action 0: d/dQ (Q − y)² / 3 = 2 · (−3) / 3, Huber: −1 / 3; times s = 1
        loss, dqn = self.loss(f"algo.huber={huber}")
        loss.backward()
        assert dqn.q.network[-1].bias.grad[0].item() == pytest.approx(expected)
        assert dqn.q.network[-1].weight.grad[0, 0].item() == pytest.approx(expected)
        assert all(p.grad is None or not p.grad.any() for p in dqn.q.target.parameters())

    def test_adam_takes_a_step_of_the_learning_rate(self) -> None:
        # Adam's first step is lr · sign(gradient): Q of both actions was too low in rows 0 and 2
        loss, dqn = self.loss("algo.learning_rate=0.25")
        dqn.q.step(loss)
        assert dqn.q.network[-1].bias.tolist() == pytest.approx([0.25, 0.25])
        assert dqn.q.target[-1].bias.tolist() == [0.0, 1.0]


class TestKnownValues:
    @pytest.mark.parametrize(
        "options",
        [
            ("env.num_envs=1",),
            ("env.num_envs=3", "env.backend=async", "env.num_workers=1", "algo.n_step=3"),
        ],
    )
    def test_a_time_limit_is_no_end(self, options: tuple[str, ...]) -> None:
        # Reward 1 for ever, cut every 10 steps: 1 / (1 − 0.9) = 10. Were the cut an end: at most 6.5
        dqn = trained("env.id=tests.probes:ConstantReward-v0", *options)
        np.testing.assert_allclose(values(dqn, [[0.0]]), [[10.0, 10.0]], atol=0.3)

    @pytest.mark.parametrize("options", [(), ("algo.n_step=3", "algo.double_q=true", "algo.huber=true")])
    def test_a_termination_is_one(self, options: tuple[str, ...]) -> None:
        # Reward 1 for 5 steps: with k to go (1 − 0.9^k) / (1 − 0.9) = 4.0951, 3.439, 2.71, 1.9, 1
        dqn = trained("env.id=tests.probes:TerminatingConstantReward-v0", "env.num_envs=1", *options)
        expected = [(1 - 0.9**k) / 0.1 for k in (5, 4, 3, 2, 1)]
        found = values(dqn, [[k / 5] for k in range(5)])
        np.testing.assert_allclose(found, np.stack([expected, expected], axis=1), atol=0.25)

    def test_the_better_action_is_found(self) -> None:
        # StartAtFive gives the action itself, 5, 6 or 7, as reward; it observes the last one
        dqn = trained("env.id=tests.probes:StartAtFive-v0", "env.num_envs=2", "algo.gamma=0")
        obs = np.array([[5.0], [6.0], [7.0]], np.float32)
        actions, _ = dqn.policy()(obs, None, None)
        assert actions.tolist() == [2, 2, 2]
        np.testing.assert_allclose(values(dqn, [[7.0]]), [[5.0, 6.0, 7.0]], atol=0.3)


class TestPolicy:
    def test_it_is_frozen(self) -> None:
        dqn = algorithm(*LEARN, "env.id=tests.probes:TerminatingConstantReward-v0", "env.num_envs=2")
        policy, obs = dqn.policy(), np.linspace(-1, 1, 9, dtype=np.float32)[:, None]
        before = policy.values(obs).copy()
        dqn.iterate()
        np.testing.assert_array_equal(policy.values(obs), before)
        assert not np.array_equal(dqn.policy().values(obs), before)
        dqn.close()
