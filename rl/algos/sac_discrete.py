"""Soft actor-critic for discrete actions (Christodoulou 2019, https://arxiv.org/abs/1910.07207).

As in sac.py, but every expectation over actions is a sum over all of them, so nothing is sampled in the
losses: critics give a value for each action, the actor a probability for each.

Where it differs from CleanRL's sac_atari.py:
- an update is owed every `train_frequency` env steps and the targets follow every `target_network_frequency`
  env steps crossed, for any `env.num_envs`;
- the losses of actor and α are expectations over actions, where CleanRL's means divide them by |A|.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rl.algos import Context
from rl.checks import check_off_policy, check_replay_memory
from rl.distributions import distribution_over
from rl.learner import Learner, learners_state, load_learners
from rl.metrics import Metrics, require_finite
from rl.networks.initialisers import kaiming_init
from rl.offpolicy import Batch, Experience, critic_report
from rl.optim import Adam
from rl.policies import ActorPolicy
from rl.returns import td_target
from rl.schemas import bounded

ADAM_EPS = 1e-4


@dataclass
class DiscreteSACConfig:
    """The keys of `algo`; their meaning stands beside their values in conf/algo/sac_atari.yaml."""

    action_spaces: ClassVar[tuple[str, ...]] = ("Discrete",)

    policy_lr: float = bounded(gt=0)
    q_lr: float = bounded(gt=0)
    buffer_size: int = bounded(ge=1)
    memory_map: str | None = bounded()
    gamma: float = bounded(ge=0, le=1)
    tau: float = bounded(gt=0, le=1)
    target_network_frequency: int = bounded(ge=1)
    batch_size: int = bounded(ge=1)
    learning_starts: int = bounded(ge=0)
    train_frequency: int = bounded(ge=1)
    gradient_steps: int = bounded(ge=1)
    autotune: bool = bounded()
    alpha: float = bounded(ge=0)
    target_entropy_scale: float = bounded(gt=0, le=1)

    def check(self, run: Any, env: Any) -> None:
        """Raise ConfigError for what cannot work."""
        check_off_policy(self, run, env)

    def check_spaces(self, env: Any, observation_space: Any, action_space: Any) -> int:
        """The bytes of the replay buffer; ConfigError when the machine has less."""
        return check_replay_memory(self, env, observation_space, action_space)


def soft_value(q: Tensor, logprobs: Tensor, alpha: Tensor) -> Tensor:
    """Σ_a π(a|s) (min_e Q_e(s, a) − α log π(a|s)), [B] of q [E, B, A] and log π [B, A]."""
    return (logprobs.exp() * (q.min(0).values - alpha * logprobs)).sum(-1)


def alpha_loss(log_alpha: Tensor, logprobs: Tensor, target_entropy: float) -> Tensor:
    """−α · mean Σ_a π(a|s) (log π(a|s) + H̄): α rises while the entropy is below its target."""
    return -log_alpha.exp() * (logprobs.exp() * (logprobs + target_entropy)).sum(-1).mean()


class Critics(nn.Module):
    """Two networks from observations [B, …] to action values [B, A]."""

    def __init__(self, network: Any, observation_shape: tuple[int, ...], num_actions: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(head_on(network, observation_shape, num_actions) for _ in range(2))

    def forward(self, obs: Tensor) -> Tensor:
        """Values [2, B, A]."""
        return torch.stack([member(obs) for member in self.members]).float()


def head_on(network: Any, observation_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """The described encoder and a linear head of `outputs` units."""
    head = nn.Linear(network.features(observation_shape), outputs)
    return kaiming_init(nn.Sequential(network.build(observation_shape), head))


class DiscreteSAC:
    """SAC on any vector env with Discrete actions.

    Args:
        config: the hyperparameters.
        env: the env family to make training envs from.
        network: the description of actor and critics.
        context: length, streams and device of the run.
    """

    def __init__(self, config: DiscreteSACConfig, env: Any, network: Any, context: Context) -> None:
        self.config, self.context = config, context
        self.experience = Experience(config, env, context, memory_map=config.memory_map)
        self.distribution = distribution_over(self.experience.envs.action_space)
        shape, actions = self.experience.envs.observation_space.shape, self.distribution.outputs
        torch.manual_seed(context.streams.integer("networks"))
        actor = head_on(network, shape, actions).to(context.device)
        critics = Critics(network, shape, actions).to(context.device)
        self.actor = Learner(actor, config.policy_lr, ADAM_EPS)
        self.critics = Learner(critics, config.q_lr, ADAM_EPS)
        self.learners: dict[str, Learner[Any]] = {"actor": self.actor, "critics": self.critics}
        self.target_entropy = config.target_entropy_scale * float(np.log(actions))
        start = 0.0 if config.autotune else float(np.log(max(config.alpha, 1e-38)))
        self.log_alpha = nn.Parameter(torch.full((1,), start, device=context.device))
        self.log_alpha.grad = torch.zeros_like(self.log_alpha)
        self.alpha_optimizer = Adam(self.log_alpha, self.log_alpha.grad, config.q_lr, ADAM_EPS)
        self.logits = self.actor.acting(context.dtype)
        self.critic_loss = context.compiled(self._critic_loss)
        self.actor_loss = context.compiled(self._actor_loss)

    @property
    def env_steps(self) -> int:
        """Env steps over all envs."""
        return self.experience.env_steps

    def iterate(self) -> Metrics:
        """Some 1000 env steps and the updates they owe."""
        metrics = self.experience.run(self.act, self.update, self.sync_target)
        require_finite(metrics.scalars, self.actor.network)
        return metrics

    def act(self) -> np.ndarray:
        """Actions [N]: uniform until learning starts, then drawn from the policy."""
        rng, count = self.experience.action_rng, self.experience.num_envs
        noise = self.distribution.noise(rng, (count,))
        if self.experience.warming_up:
            return self.distribution.sample(np.zeros_like(noise), noise, None)
        obs = self.experience.normalized(self.experience.obs)
        return self.distribution.sample(self.logits(obs), noise, None)

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One gradient step of the critics, of the actor and, where it is learnt, of α."""
        alpha = self.log_alpha.detach().exp()
        with self.context.autocast():
            losses, q = self.critic_loss(batch, alpha)
        self.critics.step(losses.sum())
        with self.context.autocast():
            loss, logprobs = self.actor_loss(batch, alpha)
        self.actor.step(loss)
        logprobs = logprobs.detach()
        report = critic_report(losses, q)
        report |= {"actor_loss": loss.detach(), "entropy": -(logprobs.exp() * logprobs).sum(-1).mean()}
        if self.config.autotune:
            loss = alpha_loss(self.log_alpha, logprobs, self.target_entropy)
            self.alpha_optimizer.grad.zero_()
            loss.backward()
            self.alpha_optimizer.step()
            report["alpha_loss"] = loss.detach()[0]
        report["alpha"] = self.log_alpha.detach().exp()[0]
        return report

    def sync_target(self) -> None:
        """Let the target critics follow at every `target_network_frequency` env steps crossed."""
        for _ in range(self.experience.crossed(self.config.target_network_frequency)):
            self.critics.follow(self.config.tau)

    def _critic_loss(self, batch: Batch, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """(Q_e(s, a) − y)² with y = r + γ (1 − terminated) V(s'), V the soft value of the target critics; [E]
        and the mean Q [E]."""
        with torch.no_grad():
            logprobs = self._logprobs(batch.next_obs)
            next_value = soft_value(self.critics.target(batch.next_obs), logprobs, alpha)
            target = td_target(batch.rewards, batch.discounts, batch.terminated, next_value)
        index = batch.actions.view(1, -1, 1).expand(2, -1, 1)
        q = self.critics.network(batch.obs).gather(2, index).squeeze(2)
        return (q - target).square().mean(1), q.mean(1)

    def _actor_loss(self, batch: Batch, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """−mean V(s), V the soft value of the critics; and log π [B, A]."""
        with torch.no_grad():
            q = self.critics.network(batch.obs)
        logprobs = self._logprobs(batch.obs)
        return -soft_value(q, logprobs, alpha).mean(), logprobs

    def _logprobs(self, obs: Tensor) -> Tensor:
        return self.actor.network(obs).float().log_softmax(-1)

    def policy(self) -> ActorPolicy:
        """The present policy: the likeliest action, or drawn."""
        network, normalizer = self.actor.network, self.experience.normalizer
        return ActorPolicy(network, None, self.distribution, normalizer, self.context.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Networks, optimisers, α, normaliser, replay buffer, streams, envs and counters."""
        return {
            **learners_state(self.learners),
            "log_alpha": self.log_alpha.detach(),
            "alpha_optimizer": self.alpha_optimizer.state_dict(),
            **self.experience.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Continue from a saved state; notes on what could not be restored exactly."""
        load_learners(self.learners, state)
        self.log_alpha.data.copy_(state["log_alpha"])
        self.alpha_optimizer.load_state_dict(state["alpha_optimizer"])
        return self.experience.load_state_dict(state)

    def close(self) -> None:
        """Close the training envs."""
        self.experience.envs.close()
