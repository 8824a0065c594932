"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477).

Two critics learn towards the smaller of their targets' values at a smoothed target action; the actor follows
the first critic's gradient, once every `policy_frequency` gradient steps, and the targets follow after it.
Both critics are one batch of matrices.

Where it differs from CleanRL:
- an update is owed every `train_frequency` env steps, and the delay counts gradient steps, for any
  `env.num_envs`;
- exploration and target noise, and the clipping of targets, are scaled per action dimension.
HalfCheetah-v4 reaches 9583 ± 126 in 1M steps (CleanRL); benchmarks/ has ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rl.algos import Context
from rl.checks import check_bounded, check_off_policy, check_replay_memory, check_vectors
from rl.learner import Learner, learners_state, load_learners
from rl.metrics import Metrics, require_finite
from rl.networks.continuous import Critics, DeterministicActor
from rl.networks.numpy_forward import numpy_forward
from rl.offpolicy import Batch, Experience, critic_report
from rl.policies import BoundedPolicy, explore, random_actions
from rl.returns import td_target
from rl.schemas import bounded


@dataclass
class TD3Config:
    """The keys of `algo`; their meaning stands beside their values in
    conf/algo/td3_continuous_action.yaml."""

    action_spaces: ClassVar[tuple[str, ...]] = ("Box",)

    learning_rate: float = bounded(gt=0)
    buffer_size: int = bounded(ge=1)
    gamma: float = bounded(ge=0, le=1)
    tau: float = bounded(gt=0, le=1)
    batch_size: int = bounded(ge=1)
    policy_noise: float = bounded(ge=0)
    exploration_noise: float = bounded(ge=0)
    noise_clip: float = bounded(ge=0)
    learning_starts: int = bounded(ge=0)
    policy_frequency: int = bounded(ge=1)
    train_frequency: int = bounded(ge=1)
    gradient_steps: int = bounded(ge=1)

    def check(self, run: Any, env: Any) -> None:
        """Raise ConfigError for what cannot work."""
        check_off_policy(self, run, env)

    def check_spaces(self, env: Any, observation_space: Any, action_space: Any) -> int:
        """The replay buffer's bytes; ConfigError for more than there are, unbounded actions and images."""
        check_bounded(action_space, env)
        check_vectors(observation_space, env)
        return check_replay_memory(self, env, observation_space, action_space)


def smoothing_noise(noise: Tensor, policy_noise: float, noise_clip: float, scale: Tensor) -> Tensor:
    """clip(σ · noise, ±c) · scale [B, D] from standard normal noise: in the units of each action
    dimension."""
    return (noise * policy_noise).clamp(-noise_clip, noise_clip) * scale


class TD3:
    """TD3 on any vector env with bounded Box actions.

    Args:
        config: the hyperparameters.
        env: the env family to make training envs from.
        network: the description of actor and critics.
        context: length, streams and device of the run.
    """

    def __init__(self, config: TD3Config, env: Any, network: Any, context: Context) -> None:
        self.config, self.context = config, context
        self.experience = Experience(config, env, context)
        self.space: Any = self.experience.envs.action_space
        shape, size = self.experience.envs.observation_space.shape, int(np.prod(self.space.shape))
        torch.manual_seed(context.streams.integer("networks"))
        actor = DeterministicActor(network, shape, self.space).to(context.device)
        critics = Critics(2, network, shape, size).to(context.device)
        self.actor, self.critics = (
            Learner(actor, config.learning_rate),
            Learner(critics, config.learning_rate),
        )
        self.learners: dict[str, Learner[Any]] = {"actor": self.actor, "critics": self.critics}
        self.policy_mean = numpy_forward(actor.network, live=True)
        # On the CPU: the same numbers on every device, and a checkpoint that another can continue.
        self.rng = torch.Generator().manual_seed(context.streams.integer("updates") >> 1)
        self.critic_loss = context.compiled(self._critic_loss)
        self.actor_loss = context.compiled(self._actor_loss)

    @property
    def env_steps(self) -> int:
        """Env steps over all envs."""
        return self.experience.env_steps

    def iterate(self) -> Metrics:
        """Some 1000 env steps and the updates they owe."""
        metrics = self.experience.run(self.act, self.update)
        require_finite(metrics.scalars, self.actor.network)
        return metrics

    def act(self) -> np.ndarray:
        """Exploring actions [N, D]: uniform until learning starts, then μ(s) + noise · scale, clipped."""
        rng = self.experience.action_rng
        if self.experience.warming_up:
            return random_actions(rng, self.space, self.experience.num_envs)
        x = self.policy_mean(self.experience.normalized(self.experience.obs))
        return explore(x, self.config.exploration_noise, rng, self.space)

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One gradient step of the critics, and every `policy_frequency` of them one of actor and targets."""
        c = self.config
        noise = torch.randn(batch.actions.shape, generator=self.rng).to(self.context.device)
        with self.context.autocast():
            losses, q = self.critic_loss(batch, noise)
        self.critics.step(losses.sum())
        report = critic_report(losses, q)
        if self.experience.gradient_steps % c.policy_frequency == 0:
            self.critics.freeze(True)
            with self.context.autocast():
                loss = self.actor_loss(batch)
            self.actor.step(loss)
            self.critics.freeze(False)
            self.actor.follow(c.tau)
            self.critics.follow(c.tau)
            report["actor_loss"] = loss.detach()
        return report

    def _critic_loss(self, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """(Q_e(s, a) − y)² with y = r + γ (1 − terminated) min_e Q_target,e(s', μ_target(s') + ε); [E] and Q
        [E]."""
        c, scale = self.config, self.actor.target.scale
        with torch.no_grad():
            smoothing = smoothing_noise(noise, c.policy_noise, c.noise_clip, scale.scale)
            following = scale.clip(self.actor.target(batch.next_obs) + smoothing)
            next_q = self.critics.target(batch.next_obs, following).min(0).values
            target = td_target(batch.rewards, batch.discounts, batch.terminated, next_q)
        q = self.critics.network(batch.obs, batch.actions)
        return (q - target).square().mean(1), q.mean(1)

    def _actor_loss(self, batch: Batch) -> Tensor:
        """−mean Q_1(s, μ(s))."""
        return -self.critics.network(batch.obs, self.actor.network(batch.obs), count=1).mean()

    def policy(self) -> BoundedPolicy:
        """The present policy: μ(s), or with exploration noise when sampled."""
        mean = numpy_forward(self.actor.network.network)
        return BoundedPolicy(mean, self.space, self.experience.normalizer, self.config.exploration_noise)

    def state_dict(self) -> dict[str, Any]:
        """Networks, optimisers, normaliser, replay buffer, streams, envs and counters."""
        return {
            **learners_state(self.learners),
            "noise": self.rng.get_state(),
            **self.experience.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Continue from a saved state; notes on what could not be restored exactly."""
        load_learners(self.learners, state)
        self.rng.set_state(state["noise"])
        return self.experience.load_state_dict(state)

    def close(self) -> None:
        """Close the training envs."""
        self.experience.envs.close()
