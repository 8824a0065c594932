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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rl.algos import Context, Policy
from rl.checks import check_rollout
from rl.distributions import Distribution, distribution_over
from rl.envs.normalization import ObsNormalizer, RewardNormalizer
from rl.errors import ConfigError
from rl.metrics import FinishedEpisode, Metrics, require_finite
from rl.networks.initialisers import layer_init
from rl.optim import Adam, clip_grad_norm, flatten_parameters, flushed_denormals
from rl.policies import ActorPolicy
from rl.returns import explained_variance, gae
from rl.rollout import Rollout, stepped
from rl.schemas import bounded
from rl.seeding import generator_state, set_generator_state

CHUNK = 2048  # observations of a rollout that are evaluated at once


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
        check_rollout(self, run, env)

    def check_spaces(self, env: Any, observation_space: Any, action_space: Any) -> int:
        """0: there is no replay buffer to find memory for."""
        return 0


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


def clip_fraction(logratio: Tensor, clip_coef: float) -> Tensor:
    """The part of [B] whose ratio lies beyond 1 ± ε."""
    return ((logratio.exp() - 1).abs() > clip_coef).float().mean()


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
        self.agent = self._agent(network, observation_shape).to(self.device)
        self.flat, self.grad = flatten_parameters(self.agent)
        self.optimizer = Adam(self.flat, self.grad, config.learning_rate, config.adam_eps)
        self.obs_normalizer = ObsNormalizer(observation_shape, env.clip_obs) if env.normalize_obs else None
        self.reward_normalizer = (
            RewardNormalizer(self.num_envs, config.gamma, env.clip_reward) if env.normalize_reward else None
        )
        self.action_rng = context.streams.generator("actions")
        self.minibatch_rng = context.streams.generator("minibatches")
        self.losses = context.compiled(self._losses)

        self.env_steps = 0
        self.iteration = 0
        self.obs = self._normalize(self.envs.reset(context.streams.sequence("envs")))

    def _agent(self, network: Any, observation_shape: tuple[int, ...]) -> Any:
        return Agent(network, observation_shape, self.distribution)

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
        actor = ActorPolicy(self.agent.actor, self.agent.logstd, self.distribution, dtype=self.context.dtype)
        noise = self.distribution.noise(self.action_rng, (self.config.num_steps, self.num_envs))
        shape, dtype = self.distribution.action_shape, self.distribution.action_dtype
        rollout = Rollout(self.config.num_steps, self.obs, shape, dtype, self.device)
        inputs = rollout.obs if actor.in_numpy else rollout.inputs
        episodes: list[FinishedEpisode] = []

        def act(t: int, rows: slice) -> np.ndarray:
            rollout.actions[t, rows] = actor.sample(inputs[t, rows], noise[t, rows])
            return rollout.actions[t, rows]

        before = self.env_steps
        for t, rows, step in stepped(self.envs, self.config.num_steps, act):
            self.env_steps = before + (t + 1) * self.num_envs
            for i in rollout.add(t, rows, step, self._normalize(step.obs)):
                following = self._normalize(step.next_obs[i : i + 1], update=False)
                rollout.cut.append((t, rows.start + i, following))
            episodes += [FinishedEpisode(self.env_steps, *episode) for episode in step.episodes]
        if self.reward_normalizer is not None:
            rollout.normalize_rewards(self.reward_normalizer)
        self.obs = rollout.obs[-1]
        return self._batch(rollout), episodes

    @torch.no_grad()
    def _batch(self, rollout: Rollout) -> dict[str, Tensor]:
        """The rollout as tensors [T·N, …] with log-probabilities, values, advantages and returns."""
        size = self.batch_size
        obs = rollout.inputs.flatten(0, 1)
        actions = torch.from_numpy(rollout.actions).to(self.device).flatten(0, 1)
        outputs, v = (torch.cat(parts) for parts in zip(*map(self._forward, obs.split(CHUNK)), strict=True))
        logprobs, _ = self.distribution.log_prob_and_entropy(outputs[:size], self.agent.logstd, actions)
        values = v.cpu().numpy().reshape(-1, self.num_envs)
        cut_values = np.empty(0)
        if rollout.cut:
            final_obs = np.concatenate([obs for _, _, obs in rollout.cut])
            cut_values = self._forward(torch.from_numpy(final_obs).to(self.device))[1].cpu().numpy()
        advantages = self._advantages(rollout, values, cut_values)
        batch = {
            "obs": obs[:size],
            "actions": actions,
            "logprobs": logprobs,
            "values": v[:size],
            "advantages": torch.from_numpy(advantages).flatten().to(self.device),
            "returns": torch.from_numpy(advantages + values[:-1]).flatten().to(self.device),
        }
        if rollout.active.all():
            return batch
        alive = torch.from_numpy(np.flatnonzero(rollout.active)).to(self.device)
        return {name: x[alive] for name, x in batch.items()}

    def _advantages(self, rollout: Rollout, values: np.ndarray, cut_values: np.ndarray) -> np.ndarray:
        """GAE [T, N] from V of `obs` [T + 1, N] and of the true successors in `cut`."""
        c, terminated, truncated = self.config, rollout.terminated, rollout.truncated
        if not c.bootstrap_truncated:
            terminated = terminated | truncated
        following = rollout.next_values(values, cut_values)
        return gae(rollout.rewards, values[:-1], following, terminated, truncated, c.gamma, c.gae_lambda)

    def update(self, batch: dict[str, Tensor]) -> dict[str, float]:
        """`update_epochs` passes over the batch in minibatches; the iteration's mean losses."""
        c = self.config
        learning_rate = c.learning_rate
        if c.anneal_lr:  # lr at iteration i of N is lr · (1 − (i − 1)/N)
            learning_rate *= max(0.0, 1 - (self.iteration - 1) / self.num_iterations)
        self.optimizer.lr = learning_rate
        losses: list[tuple[Tensor, ...]] = []
        for _ in range(c.update_epochs):
            for minibatch in self._minibatches(batch):
                loss, *parts = self.losses(minibatch)
                self.grad.zero_()
                loss.backward()
                clip_grad_norm(self.grad, c.max_grad_norm)
                self.optimizer.step()
                losses.append(tuple(part.detach() for part in parts))
            if c.target_kl is not None and approximate_kl(losses[-1][-1]) > c.target_kl:
                break
        *means_of, logratios = zip(*losses, strict=True)
        ratios = [(-x.mean(), approximate_kl(x), clip_fraction(x, c.clip_coef)) for x in logratios]
        columns: list[Any] = [*means_of, *zip(*ratios, strict=True)]
        self.minibatch_losses = torch.stack([torch.stack(x) for x in columns], dim=1)  # [minibatches, LOSSES]
        means = self.minibatch_losses.mean(0).tolist()
        scalars = {f"losses/{name}": value for name, value in zip(self.LOSSES, means, strict=True)}
        require_finite(scalars, self.agent)
        scalars["losses/explained_variance"] = explained_variance(batch["values"], batch["returns"])
        scalars["charts/learning_rate"] = learning_rate
        return scalars

    def _minibatches(self, batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """One epoch: the rows of the batch in random order, `num_minibatches` equal parts of them; what does
        not divide is left to other epochs."""
        parts, rows = self.config.num_minibatches, len(batch["obs"])
        order = torch.from_numpy(self.minibatch_rng.permutation(rows)[: rows - rows % parts])
        order = order.to(self.device).view(parts, -1)
        advantages = batch["advantages"][order]
        if self.config.norm_adv:  # each minibatch by its own mean and deviation
            mean, std = advantages.mean(1, keepdim=True), advantages.std(1, keepdim=True)
            advantages = (advantages - mean) / (std + 1e-8)
        for rows_of_part, part in zip(order, advantages, strict=True):
            yield {**{name: x[rows_of_part] for name, x in batch.items()}, "advantages": part}

    def _losses(self, mb: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The loss of a minibatch; its policy loss, value loss and entropy; and log π/π_old of each row,
        [B]."""
        c = self.config
        outputs, values = self._evaluate(mb)
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

    def _evaluate(self, mb: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Actor outputs [B, K] and values [B] at a minibatch."""
        return self._forward(mb["obs"])

    def _forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Actor outputs and values in float32, computed in the run's precision."""
        with self.context.autocast():
            outputs, values = self.agent(obs)
        return outputs.float(), values.float()

    def _normalize(self, obs: np.ndarray, update: bool = True) -> np.ndarray:
        return obs if self.obs_normalizer is None else self.obs_normalizer(obs, update=update)

    def policy(self) -> Policy:
        """The present policy, its weights and normaliser copied."""
        return ActorPolicy(
            self.agent.actor,
            self.agent.logstd,
            self.distribution,
            self.obs_normalizer,
            self.context.dtype,
        )

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
        self._restarted(~restored.exact)
        return restored.notes()

    def _restarted(self, envs: np.ndarray) -> None:
        """New episodes began in these envs [N] while nobody looked."""
        if self.reward_normalizer is not None:
            self.reward_normalizer.returns[envs] = 0.0

    def close(self) -> None:
        """Close the training envs."""
        self.envs.close()
