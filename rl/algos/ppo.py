"""Proximal policy optimisation (Schulman et al. 2017, https://arxiv.org/abs/1707.06347), clipped surrogate.

A rollout of `num_steps` in each of `num_envs` envs, advantages by GAE, then `update_epochs` passes over it in
minibatches. Of what the paper leaves out it does what CleanRL does: orthogonal initialisation, Adam's epsilon
1e-5, annealed step size, advantages normalised per minibatch, clipped value loss, global gradient clipping
(Huang et al. 2022, "The 37 implementation details of PPO").

Where it differs from CleanRL:
- an episode that a time limit cut is bootstrapped with V(next_obs); `bootstrap_truncated=false` puts 0 there;
- actions are sampled with a NumPy forward pass, and log-probabilities and values of the rollout computed in
  one batch after it;
- the losses reported are means over the minibatches of the iteration, not those of the last one;
- a step size annealed over N iterations counts the last, partial one: N = ⌈total_timesteps / batch⌉.
CartPole-v1 reaches 490 ± 6 in 500k steps, HalfCheetah-v4 1443 ± 46 in 1M (CleanRL); benchmarks/ has ours.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rl.algos import Context
from rl.distributions import Distribution, distribution_over
from rl.envs.normalization import ObsNormalizer, RewardNormalizer
from rl.errors import ConfigError
from rl.metrics import FinishedEpisode, Metrics, require_finite
from rl.networks.initialisers import layer_init
from rl.optim import Adam, clip_grad_norm, flatten_parameters, flushed_denormals
from rl.policies import ActorPolicy
from rl.returns import explained_variance, gae
from rl.rollout import Rollout
from rl.schemas import bounded
from rl.seeding import generator_state, set_generator_state


@dataclass
class PPOConfig:
    """The keys of `algo`; their meaning stands beside their values in conf/algo/ppo.yaml."""

    action_spaces: ClassVar[tuple[str, ...]] = ("Discrete", "MultiDiscrete", "Box")

    learning_rate: float = bounded(gt=0)
    anneal_lr: bool = bounded()
    num_steps: int = bounded(ge=1)
    gamma: float = bounded(ge=0, le=1)
    gae_lambda: float = bounded(ge=0, le=1)
    num_minibatches: int = bounded(ge=1)
    update_epochs: int = bounded(ge=1)
    norm_adv: bool = bounded()
    clip_coef: float = bounded(gt=0)
    clip_vloss: bool = bounded()
    ent_coef: float = bounded(ge=0)
    vf_coef: float = bounded(ge=0)
    max_grad_norm: float = bounded(gt=0)
    target_kl: float | None = bounded(gt=0)
    adam_eps: float = bounded(gt=0)
    bootstrap_truncated: bool = bounded()

    def check(self, run: Any, env: Any) -> None:
        """Raise ConfigError where the rollout does not divide into minibatches or the run is shorter than
        one."""
        batch = env.num_envs * self.num_steps
        if batch % self.num_minibatches:
            fits = max(n for n in range(1, self.num_minibatches) if batch % n == 0)
            raise ConfigError(
                f"algo.num_minibatches={self.num_minibatches} does not divide the batch of env.num_envs "
                f"× algo.num_steps = "
                f"{env.num_envs} × {self.num_steps} = {batch}; algo.num_minibatches={fits} does"
            )
        if self.norm_adv and batch == self.num_minibatches:
            raise ConfigError(
                f"algo.num_minibatches={self.num_minibatches} leaves minibatches of 1, whose advantages "
                f"cannot be normalised; "
                f"use fewer, or algo.norm_adv=false"
            )
        if run.total_timesteps < batch:
            raise ConfigError(
                f"total_timesteps={run.total_timesteps} is below one batch of env.num_envs × "
                f"algo.num_steps = {batch}; "
                f"total_timesteps={batch} is the least"
            )


def policy_loss(logratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """−min(ρ A, clip(ρ, 1−ε, 1+ε) A), the mean over [B], with ρ = exp(logratio) = π(a|s) / π_old(a|s)."""
    ratio = logratio.exp()
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)).mean()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float | None) -> Tensor:
    """½ (V − R)², the mean over [B]; with `clip_coef` the larger of that and of V clipped to V_old ± ε."""
    unclipped = (values - returns).square()
    if clip_coef is None:
        return 0.5 * unclipped.mean()
    clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
    return 0.5 * torch.max(unclipped, (clipped - returns).square()).mean()


def approximate_kl(logratio: Tensor) -> Tensor:
    """KL(π_old ‖ π) over the last axis by the low-variance estimate (ρ − 1) − log ρ,
    http://joschu.net/blog/kl-approx.html."""
    return (logratio.exp() - 1 - logratio).mean(-1)


class Agent(nn.Module):
    """Actor and critic, two networks of the same shape, or two heads on one when `network.shared`."""

    def __init__(self, network: Any, observation_shape: tuple[int, ...], distribution: Distribution) -> None:
        super().__init__()
        features = network.features(observation_shape)
        actor, critic = network.build(observation_shape), network.build(observation_shape)
        critic = actor if network.shared else critic
        self.actor = nn.Sequential(actor, layer_init(nn.Linear(features, distribution.outputs), std=0.01))
        self.critic = nn.Sequential(critic, layer_init(nn.Linear(features, 1), std=1.0))
        self.logstd = nn.Parameter(torch.zeros(distribution.outputs)) if distribution.has_logstd else None
        self.shared = network.shared

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """The actor's outputs [B, K] and values [B] of observations [B, …]."""
        if self.shared:
            hidden = self.actor[0](obs)
            return self.actor[1](hidden), self.critic[1](hidden).squeeze(-1)
        return self.actor(obs), self.critic(obs).squeeze(-1)


class PPO:
    """PPO on any vector env with Discrete, MultiDiscrete or Box actions.

    Args:
        config: the hyperparameters.
        env: the env family to make training envs from.
        network: the description of actor and critic.
        context: length, streams and device of the run.
    """

    LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")

    def __init__(self, config: PPOConfig, env: Any, network: Any, context: Context) -> None:
        self.config, self.context, self.device = config, context, context.device
        self.envs = env.make()
        self.num_envs = self.envs.num_envs
        self.batch_size = self.num_envs * config.num_steps
        self.num_iterations = math.ceil(context.total_timesteps / self.batch_size)
        observation_shape = self.envs.observation_space.shape
        self.distribution = distribution_over(self.envs.action_space)

        torch.manual_seed(context.streams.integer("networks"))
        self.agent = Agent(network, observation_shape, self.distribution).to(self.device)
        self.flat, self.grad = flatten_parameters(self.agent)
        self.optimizer = Adam(self.flat, self.grad, config.learning_rate, config.adam_eps)
        self.obs_normalizer = ObsNormalizer(observation_shape, env.clip_obs) if env.normalize_obs else None
        self.reward_normalizer = (
            RewardNormalizer(self.num_envs, config.gamma, env.clip_reward) if env.normalize_reward else None
        )
        self.action_rng = context.streams.generator("actions")
        self.minibatch_rng = context.streams.generator("minibatches")
        self.losses = torch.compile(self._losses) if context.compile else self._losses

        self.env_steps = 0
        self.iteration = 0
        self.obs = self._normalize(self.envs.reset(context.streams.sequence("envs")))

    def iterate(self) -> Metrics:
        """One rollout of `num_envs × num_steps` env steps and its update."""
        start = time.perf_counter()
        self.iteration += 1
        batch, episodes = self.collect()
        collected = time.perf_counter()
        with flushed_denormals():
            scalars = self.update(batch)
        scalars["time/collect"] = collected - start
        scalars["time/update"] = time.perf_counter() - collected
        return Metrics(scalars, episodes)

    def collect(self) -> tuple[dict[str, Tensor], list[FinishedEpisode]]:
        """Act for `num_steps` in every env; the batch to learn from, and the episodes that finished."""
        actor = ActorPolicy(self.agent.actor, self.agent.logstd, self.distribution)
        noise = self.distribution.noise(self.action_rng, (self.config.num_steps, self.num_envs))
        shape, dtype = self.distribution.action_shape, self.distribution.action_dtype
        rollout = Rollout(self.config.num_steps, self.obs, shape, dtype)
        episodes: list[FinishedEpisode] = []
        for t in range(self.config.num_steps):
            rollout.actions[t] = actor.sample(rollout.obs[t], noise[t])
            step = self.envs.step(rollout.actions[t])
            self.env_steps += self.num_envs
            rewards = step.reward
            if self.reward_normalizer is not None:
                rewards = self.reward_normalizer(step.reward, step.terminated | step.truncated)
            for i in rollout.add(t, step, self._normalize(step.obs), rewards):
                rollout.cut.append((t, i, self._normalize(step.next_obs[i : i + 1], update=False)))
            episodes += [FinishedEpisode(self.env_steps, *episode) for episode in step.episodes]
        self.obs = rollout.obs[-1]
        return self._batch(rollout), episodes

    @torch.no_grad()
    def _batch(self, rollout: Rollout) -> dict[str, Tensor]:
        """The rollout as tensors [T·N, …] with log-probabilities, values, advantages and returns."""
        c, size = self.config, self.batch_size
        obs = torch.from_numpy(rollout.obs).to(self.device).flatten(0, 1)
        actions = torch.from_numpy(rollout.actions).to(self.device).flatten(0, 1)
        outputs, v = self._forward(obs)
        logprobs, _ = self.distribution.log_prob_and_entropy(outputs[:size], self.agent.logstd, actions)
        values = v.cpu().numpy().reshape(-1, self.num_envs)
        cut_values = np.empty(0)
        if rollout.cut:
            final_obs = np.concatenate([obs for _, _, obs in rollout.cut])
            cut_values = self._forward(torch.from_numpy(final_obs).to(self.device))[1].cpu().numpy()
        next_values = rollout.next_values(values, cut_values)
        terminated, truncated = rollout.terminated, rollout.truncated
        if not c.bootstrap_truncated:
            terminated = terminated | truncated
        advantages = gae(
            rollout.rewards, values[:-1], next_values, terminated, truncated, c.gamma, c.gae_lambda
        )
        return {
            "obs": obs[:size],
            "actions": actions,
            "logprobs": logprobs,
            "values": v[:size],
            "advantages": torch.from_numpy(advantages).flatten().to(self.device),
            "returns": torch.from_numpy(advantages + values[:-1]).flatten().to(self.device),
        }

    def update(self, batch: dict[str, Tensor]) -> dict[str, float]:
        """`update_epochs` passes over the batch in minibatches; the iteration's mean losses."""
        c = self.config
        learning_rate = c.learning_rate
        if c.anneal_lr:  # lr at iteration i of N is lr · (1 − (i − 1)/N)
            learning_rate *= max(0.0, 1 - (self.iteration - 1) / self.num_iterations)
        self.optimizer.lr = learning_rate
        losses: list[tuple[Tensor, ...]] = []
        for _ in range(c.update_epochs):
            order = torch.from_numpy(self.minibatch_rng.permutation(self.batch_size)).to(self.device)
            minibatches = {name: x[order].unflatten(0, (c.num_minibatches, -1)) for name, x in batch.items()}
            if c.norm_adv:  # each minibatch by its own mean and deviation
                a = minibatches["advantages"]
                minibatches["advantages"] = (a - a.mean(1, keepdim=True)) / (a.std(1, keepdim=True) + 1e-8)
            for i in range(c.num_minibatches):
                loss, *parts = self.losses({name: x[i] for name, x in minibatches.items()})
                self.grad.zero_()
                loss.backward()
                clip_grad_norm(self.grad, c.max_grad_norm)
                self.optimizer.step()
                losses.append(tuple(part.detach() for part in parts))
            if c.target_kl is not None and approximate_kl(losses[-1][-1]) > c.target_kl:
                break
        pg, v, entropy, logratio = (torch.stack(parts) for parts in zip(*losses, strict=True))
        clipfrac = ((logratio.exp() - 1).abs() > c.clip_coef).float().mean(1)
        stats = (pg, v, entropy, -logratio.mean(1), approximate_kl(logratio), clipfrac)
        self.minibatch_losses = torch.stack(stats, dim=1)  # [minibatches, LOSSES]
        means = self.minibatch_losses.mean(0).tolist()
        scalars = {f"losses/{name}": value for name, value in zip(self.LOSSES, means, strict=True)}
        require_finite(scalars, self.agent)
        scalars["losses/explained_variance"] = explained_variance(batch["values"], batch["returns"])
        scalars["charts/learning_rate"] = learning_rate
        return scalars

    def _losses(self, mb: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The loss of a minibatch; its policy loss, value loss and entropy; and log π/π_old of each row,
        [B]."""
        c = self.config
        outputs, values = self._forward(mb["obs"])
        logprobs, entropies = self.distribution.log_prob_and_entropy(
            outputs, self.agent.logstd, mb["actions"]
        )
        logratio = logprobs - mb["logprobs"]
        pg_loss = policy_loss(logratio, mb["advantages"], c.clip_coef)
        v_loss = value_loss(
            values.float(), mb["values"], mb["returns"], c.clip_coef if c.clip_vloss else None
        )
        entropy = entropies.mean()
        loss = pg_loss - c.ent_coef * entropy + c.vf_coef * v_loss
        return loss, pg_loss, v_loss, entropy, logratio

    def _forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Actor outputs and values in float32, computed in the run's precision."""
        with self.context.autocast():
            outputs, values = self.agent(obs)
        return outputs.float(), values.float()

    def _normalize(self, obs: np.ndarray, update: bool = True) -> np.ndarray:
        return obs if self.obs_normalizer is None else self.obs_normalizer(obs, update=update)

    def policy(self) -> ActorPolicy:
        """The present policy, its weights and normaliser copied."""
        return ActorPolicy(self.agent.actor, self.agent.logstd, self.distribution, self.obs_normalizer)

    def state_dict(self) -> dict[str, Any]:
        """Networks, optimiser, normalisers, streams, envs and counters."""
        normalizers = {"obs": self.obs_normalizer, "reward": self.reward_normalizer}
        return {
            "networks": {"agent": dict(self.agent.state_dict())},
            "normalizers": {name: n.state_dict() for name, n in normalizers.items() if n is not None},
            "optimizer": self.optimizer.state_dict(),
            "streams": {
                "actions": generator_state(self.action_rng),
                "minibatches": generator_state(self.minibatch_rng),
            },
            "envs": self.envs.state_dict(),
            "counters": {"env_steps": self.env_steps, "iteration": self.iteration},
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Continue from a saved state; a note for each env whose running episode could not be restored."""
        self.agent.load_state_dict(state["networks"]["agent"])
        if self.obs_normalizer is not None:
            self.obs_normalizer.load_state_dict(state["normalizers"]["obs"])
        if self.reward_normalizer is not None:
            self.reward_normalizer.load_state_dict(state["normalizers"]["reward"])
        self.optimizer.load_state_dict(state["optimizer"])
        set_generator_state(self.action_rng, state["streams"]["actions"])
        set_generator_state(self.minibatch_rng, state["streams"]["minibatches"])
        self.env_steps = state["counters"]["env_steps"]
        self.iteration = state["counters"]["iteration"]
        restored = self.envs.load_state_dict(state["envs"])
        self.obs = self._normalize(restored.obs, update=False)
        if self.reward_normalizer is not None:
            self.reward_normalizer.returns[~restored.exact] = 0.0
        return restored.notes()

    def close(self) -> None:
        """Close the training envs."""
        self.envs.close()
