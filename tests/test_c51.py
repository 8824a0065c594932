"""C51's projection worked out by hand, and values it must learn."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch

from rl.algos.c51 import expected_values, project
from rl.errors import ConfigError
from rl.offpolicy import Batch
from tests.conftest import algorithm, configure

ATOMS = torch.arange(5.0)  # 0, 1, 2, 3, 4
P = torch.tensor([[0.1, 0.2, 0.3, 0.2, 0.2]])
LEARN = (
    "algo=c51",
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


def projected(targets: torch.Tensor, p: torch.Tensor = P) -> list[float]:
    row: list[float] = project(p, targets.expand_as(p), ATOMS)[0].tolist()
    return row


class TestProjection:
    """Onto 0, 1, 2, 3, 4."""

    def test_on_the_atoms(self) -> None:
        assert projected(ATOMS) == pytest.approx(P[0].tolist())

    def test_shifted_by_an_atom(self) -> None:
        # 0 → 1, …, 3 → 4, and 4 → 5 stays at 4: 0.2 + 0.2
        assert projected(ATOMS + 1) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
        assert projected(ATOMS - 1) == pytest.approx([0.3, 0.3, 0.2, 0.2, 0])

    def test_between_two_atoms_the_nearer_gets_more(self) -> None:
        # 1.25: three quarters to 1, one to 2
        p = torch.tensor([[1.0, 0, 0, 0, 0]])
        assert projected(ATOMS + 1.25, p) == pytest.approx([0, 0.75, 0.25, 0, 0])

    def test_several_share_an_atom(self) -> None:
        # γ = ½: targets 0, ½, 1, 1½, 2; atom 0: 0.1 + 0.2/2, atom 1: 0.2/2 + 0.3 + 0.2/2, atom 2: 0.2/2 + 0.2
        assert projected(ATOMS / 2) == pytest.approx([0.2, 0.5, 0.3, 0, 0])

    def test_beyond_the_ends(self) -> None:
        assert projected(ATOMS + 1e6) == pytest.approx([0, 0, 0, 0, 1])
        assert projected(ATOMS - 1e6) == pytest.approx([1, 0, 0, 0, 0])

    def test_terminal(self) -> None:
        """Without a future all mass is at the reward, whatever the distribution was."""
        assert projected(torch.tensor(3.0)) == pytest.approx([0, 0, 0, 1, 0])
        assert projected(torch.tensor(2.5)) == pytest.approx([0, 0, 0.5, 0.5, 0])
        assert projected(torch.tensor(4.0)) == pytest.approx([0, 0, 0, 0, 1])
        assert projected(torch.tensor(0.0)) == pytest.approx([1, 0, 0, 0, 0])

    def test_rows_are_independent(self) -> None:
        p = torch.cat([P, P.flip(1)])
        both = project(p, torch.stack([ATOMS + 1, ATOMS / 2]), ATOMS)
        torch.testing.assert_close(both[0], torch.tensor([0, 0.1, 0.2, 0.3, 0.4]))
        # [.2, .2, .3, .2, .1] on 0, ½, 1, 1½, 2: 0.2 + 0.1, 0.1 + 0.3 + 0.1, 0.1 + 0.1
        torch.testing.assert_close(both[1], torch.tensor([0.3, 0.5, 0.2, 0, 0]))

    @pytest.mark.parametrize(
        ("v_min", "v_max", "n"), [(-100, 100, 101), (-10, 10, 51), (-0.3, 0.7, 7), (1, 2, 2)]
    )
    def test_rows_sum_to_one_and_keep_their_mean(self, v_min: float, v_max: float, n: int) -> None:
        generator = torch.Generator().manual_seed(0)
        atoms = torch.linspace(v_min, v_max, n)
        p = torch.rand(500, n, generator=generator)
        p /= p.sum(1, keepdim=True)
        width = v_max - v_min
        anywhere = v_min - width + 3 * width * torch.rand(500, n, generator=generator)
        m = project(p, anywhere, atoms)
        assert (m >= 0).all()
        torch.testing.assert_close(m.sum(1), torch.ones(500))
        inside = v_min + width * torch.rand(500, n, generator=generator)
        m = project(p, inside, atoms)
        torch.testing.assert_close(m.sum(1), torch.ones(500))
        torch.testing.assert_close(
            (m * atoms).sum(1), (p * inside).sum(1), atol=1e-5 * width * n**0.5, rtol=1e-5
        )
        torch.testing.assert_close(project(p, atoms.expand_as(p), atoms), p, atol=1e-4, rtol=1e-3)


class TestLoss:
    """Atoms 0 … 4, two actions, a network of biases: the logits are the same for every observation.

    Online: action 0 [.6 .1 .1 .1 .1], mean 1; action 1 [.1 .2 .4 .2 .1], mean 2. Target network: action 0
    all at atom 2, action 1 all at atom 1.
    """

    ONLINE = ((0.6, 0.1, 0.1, 0.1, 0.1), (0.1, 0.2, 0.4, 0.2, 0.1))
    TARGET = ((0, 0, 1, 0, 0), (0, 1, 0, 0, 0))

    def loss(
        self, reward: float, terminated: float, discount: float, action: int = 1, *overrides: str
    ) -> tuple[float, float, float]:
        c51 = algorithm(
            "algo=c51",
            "env.id=tests.probes:ConstantReward-v0",
            "env.num_envs=1",
            "network.hidden_sizes=[]",
            "algo.n_atoms=5",
            "algo.v_min=0",
            "algo.v_max=4",
            *overrides,
        )
        c51.close()
        with torch.no_grad():
            for network, rows in ((c51.q.network, self.ONLINE), (c51.q.target, self.TARGET)):
                network[-1].weight.zero_()
                network[-1].bias.copy_(torch.tensor(rows).float().clamp(1e-30).log().reshape(-1))
        one = torch.ones(1)
        batch = Batch(
            one[:, None], torch.tensor([action]), reward * one, one[:, None], terminated * one, discount * one
        )
        loss, q, outside = c51._loss(batch)
        return loss.item(), q.item(), outside.item()

    def test_terminal(self) -> None:
        # All at 1.5, half to 1 and half to 2: −½ log 0.2 − ½ log 0.4; Q(a = 1) = 2
        loss, q, outside = self.loss(1.5, 1.0, 0.5)
        assert loss == pytest.approx(-0.5 * math.log(0.2) - 0.5 * math.log(0.4))
        assert (q, outside) == (pytest.approx(2.0), 0.0)

    def test_the_action_taken(self) -> None:
        # a = 0 gives 0.1 to both atoms
        loss, q, _ = self.loss(1.5, 1.0, 0.5, 0)
        assert loss == pytest.approx(-math.log(0.1))
        assert q == pytest.approx(1.0)

    def test_the_target_networks_best_action(self) -> None:
        # Action 0, at atom 2: 1 + 0.5 · 2 = 2: −log 0.4
        assert self.loss(1.0, 0.0, 0.5)[0] == pytest.approx(-math.log(0.4), rel=1e-4)

    def test_double_lets_the_online_network_choose(self) -> None:
        # Action 1, which the target network has at atom 1: 1 + 1.0 · 1 = 2 against 1 + 1.0 · 2 = 3
        assert self.loss(1.0, 0.0, 1.0)[0] == pytest.approx(-math.log(0.2), rel=1e-4)
        assert self.loss(1.0, 0.0, 1.0, 1, "algo.double_q=true")[0] == pytest.approx(-math.log(0.4), rel=1e-4)

    def test_outside_the_support(self) -> None:
        # 3 + 0.9 · 2 = 4.8 is beyond 4; 2 + 0.9 · 2 = 3.8 is not, nor is a terminal 4; −1 is below 0
        assert [
            self.loss(*row)[2]
            for row in ((3.0, 0.0, 0.9), (2.0, 0.0, 0.9), (4.0, 1.0, 0.9), (-1.0, 1.0, 0.9))
        ] == [1.0, 0.0, 0.0, 1.0]

    def test_values_for_acting(self) -> None:
        # The means of both actions, for two observations
        logits = np.log(np.array([self.ONLINE, self.ONLINE[::-1]])).reshape(2, 10) + 1000.0
        found = expected_values(lambda obs: logits, ATOMS)(np.zeros((2, 1)))
        np.testing.assert_allclose(found, [[1.0, 2.0], [2.0, 1.0]], rtol=1e-4)


def trained(*overrides: str) -> Any:
    """A C51 at the end of its run."""
    c51 = algorithm(*LEARN, *overrides)
    while c51.env_steps < c51.context.total_timesteps:
        c51.iterate()
    c51.close()
    return c51


class TestKnownValues:
    @pytest.mark.parametrize(
        "options", [("env.num_envs=1",), ("env.num_envs=3", "env.backend=async", "env.num_workers=1")]
    )
    def test_a_time_limit_is_no_end(self, options: tuple[str, ...]) -> None:
        # 1 / (1 − 0.9) = 10
        c51 = trained(
            "env.id=tests.probes:ConstantReward-v0",
            "algo.v_min=0",
            "algo.v_max=20",
            "algo.n_atoms=21",
            *options,
        )
        found = c51.policy().values(np.zeros((1, 1), np.float32))
        np.testing.assert_allclose(found, [[10.0, 10.0]], atol=0.4)

    @pytest.mark.parametrize("options", [(), ("algo.n_step=3", "algo.double_q=true")])
    def test_a_termination_is_one(self, options: tuple[str, ...]) -> None:
        # With k steps to go (1 − 0.9^k) / (1 − 0.9)
        c51 = trained(
            "env.id=tests.probes:TerminatingConstantReward-v0",
            "env.num_envs=1",
            "algo.v_min=0",
            "algo.v_max=5",
            "algo.n_atoms=11",
            *options,
        )
        found = c51.policy().values(np.arange(5, dtype=np.float32)[:, None] / 5)
        expected = [(1 - 0.9**k) / 0.1 for k in (5, 4, 3, 2, 1)]
        np.testing.assert_allclose(found, np.stack([expected, expected], axis=1), atol=0.25)


class TestSupport:
    def test_v_min_not_below_v_max_is_refused(self) -> None:
        for v_min in (100, 150):
            with pytest.raises(ConfigError, match=f"algo.v_min={v_min} is not below algo.v_max=100"):
                configure("algo=c51", f"algo.v_min={v_min}")

    def test_a_warning_where_returns_leave_it(self, caplog: pytest.LogCaptureFixture) -> None:
        """The value is 10: a support to 2 is too small, and said to be so once."""
        options = (
            "env.id=tests.probes:ConstantReward-v0",
            "env.num_envs=1",
            "algo.v_min=0",
            "algo.n_atoms=11",
        )
        with caplog.at_level(logging.WARNING, "rl.algos.c51"):
            trained(*options, "algo.v_max=12", "total_timesteps=500")
            assert not caplog.records
            trained(*options, "algo.v_max=2", "total_timesteps=500")
        (record,) = caplog.records
        assert "algo.v_max=2" in record.getMessage() and "algo.v_min=-1 algo.v_max=3" in record.getMessage()
