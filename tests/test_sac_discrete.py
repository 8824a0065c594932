"""SAC with discrete actions: its targets and losses by hand."""

from __future__ import annotations

import math

import torch

from rl.algos.sac_discrete import alpha_loss, soft_value
from tests.conftest import algorithm


def test_soft_value_by_hand() -> None:
    """π = (¼, ¾), min Q = (1, 2), α = 2: ¼ (1 − 2 log ¼) + ¾ (2 − 2 log ¾)."""
    q = torch.tensor([[[1.0, 5.0]], [[4.0, 2.0]]])
    logprobs = torch.tensor([[0.25, 0.75]]).log()
    expected = 0.25 * (1 - 2 * math.log(0.25)) + 0.75 * (2 - 2 * math.log(0.75))
    torch.testing.assert_close(soft_value(q, logprobs, torch.tensor([2.0])), torch.tensor([expected]))


def test_alpha_falls_above_the_target_entropy_and_rises_below() -> None:
    """d/d log α of −α (H̄ − H) is −α (H̄ − H): the entropy of two even actions is log 2."""
    logprobs = torch.tensor([[0.5, 0.5]]).log()
    for target, gradient in ((0.5, math.log(2) - 0.5), (0.9, math.log(2) - 0.9)):
        log_alpha = torch.zeros(1, requires_grad=True)
        alpha_loss(log_alpha, logprobs, target).backward()
        torch.testing.assert_close(log_alpha.grad, torch.tensor([gradient]))


def test_one_step_without_a_future_learns_which_action_pays() -> None:
    """SecondPays pays for action 1; the critics' values and the policy must say so."""
    algo = algorithm(
        "algo=sac_atari",
        "env=classic",
        "env.id=tests.probes:SecondPays-v0",
        "env.num_envs=1",
        "network=mlp",
        "algo.buffer_size=2000",
        "algo.learning_starts=200",
        "algo.policy_lr=3e-3",
        "algo.q_lr=3e-3",
        "algo.target_entropy_scale=0.1",
        "algo.train_frequency=2",
        "algo.target_network_frequency=50",
        "total_timesteps=4000",
    )
    for _ in range(4):
        algo.iterate()
    obs = algo.experience.obs
    q = algo.critics.network(torch.from_numpy(obs))[:, 0].detach()
    torch.testing.assert_close(q, torch.tensor([[0.0, 1.0], [0.0, 1.0]]), rtol=0, atol=0.1)
    assert algo.policy()(obs, None, None)[0].tolist() == [1]
    algo.close()
