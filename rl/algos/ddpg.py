"""Deep deterministic policy gradient (Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971).

A critic learns towards r + γ Q_target(s', μ_target(s')), the actor follows its gradient; exploration adds
normal noise. As in CleanRL, actor and targets move once every `policy_frequency` gradient steps of the
critic.

Where it differs from CleanRL:
- an update is owed every `train_frequency` env steps, and the delay counts gradient steps, for any
  `env.num_envs`;
- exploration noise is scaled per action dimension.
HalfCheetah-v4 reaches 10374 ± 157 in 1M steps (CleanRL); benchmarks/ has ours.
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
class DDPGConfig:
    """The keys of `algo`; their meaning stands beside their values in
    conf/algo/ddpg_continuous_action.yaml."""

    action_spaces: ClassVar[tuple[str, ...]] = ("Box",)

    learning_rate: float = bounded(gt=0)
    buffer_size: int = bounded(ge=1)
    gamma: float = bounded(ge=0, le=1)
    tau: float = bounded(gt=0, le=1)
    batch_size: int = bounded(ge=1)
    exploration_noise: float = bounded(ge=0)
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


class DDPG:
    """DDPG on any vector env with bounded Box actions.

    Args:
        config: the hyperparameters.
        env: the env family to make training envs from.
        network: the description of actor and critic.
        context: length, streams and device of the run.
    """

    def __init__(self, config: DDPGConfig, env: Any, network: Any, context: Context) -> None:
        self.config, self.context = config, context
        self.experience = Experience(config, env, context)
        self.space: Any = self.experience.envs.action_space
        shape, size = self.experience.envs.observation_space.shape, int(np.prod(self.space.shape))
        torch.manual_seed(context.streams.integer("networks"))
        actor = DeterministicActor(network, shape, self.space).to(context.device)
        critic = Critics(1, network, shape, size).to(context.device)
        self.actor, self.critic = Learner(actor, config.learning_rate), Learner(critic, config.learning_rate)
        self.learners: dict[str, Learner[Any]] = {"actor": self.actor, "critic": self.critic}
        self.policy_mean = numpy_forward(actor.network, live=True)
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
        """One gradient step of the critic, and every `policy_frequency` of them one of actor and targets."""
        with self.context.autocast():
            losses, q = self.critic_loss(batch)
        self.critic.step(losses.sum())
        report = critic_report(losses, q)
        if self.experience.gradient_steps % self.config.policy_frequency == 0:
            self.critic.freeze(True)
            with self.context.autocast():
                loss = self.actor_loss(batch)
            self.actor.step(loss)
            self.critic.freeze(False)
            self.actor.follow(self.config.tau)
            self.critic.follow(self.config.tau)
            report["actor_loss"] = loss.detach()
        return report

    def _critic_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(Q(s, a) − y)² with y = r + γ (1 − terminated) Q_target(s', μ_target(s')); [1] and the mean Q
        [1]."""
        with torch.no_grad():
            next_q = self.critic.target(batch.next_obs, self.actor.target(batch.next_obs))[0]
            target = td_target(batch.rewards, batch.discounts, batch.terminated, next_q)
        q = self.critic.network(batch.obs, batch.actions)
        return (q - target).square().mean(1), q.mean(1)

    def _actor_loss(self, batch: Batch) -> Tensor:
        """−mean Q(s, μ(s))."""
        return -self.critic.network(batch.obs, self.actor.network(batch.obs)).mean()

    def policy(self) -> BoundedPolicy:
        """The present policy: μ(s), or with exploration noise when sampled."""
        mean = numpy_forward(self.actor.network.network)
        return BoundedPolicy(mean, self.space, self.experience.normalizer, self.config.exploration_noise)

    def state_dict(self) -> dict[str, Any]:
        """Networks, optimisers, normaliser, replay buffer, streams, envs and counters."""
        return {**learners_state(self.learners), **self.experience.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Continue from a saved state; notes on what could not be restored exactly."""
        load_learners(self.learners, state)
        return self.experience.load_state_dict(state)

    def close(self) -> None:
        """Close the training envs."""
        self.experience.envs.close()
