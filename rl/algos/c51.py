"""Categorical DQN (Bellemare, Dabney & Munos 2017, https://arxiv.org/abs/1707.06887).

The return of each action is a distribution over `n_atoms` fixed values between `v_min` and `v_max`; the
target is the next state's distribution, shrunk by γ and shifted by the reward, projected back onto the atoms;
the loss is the cross entropy. Double DQN and n-step returns are options, off by default.

Where it differs from CleanRL:
- the counting is in env steps for any `env.num_envs`, as in dqn.py;
- the cross entropy takes log-softmax of the logits rather than the log of clamped probabilities;
- returns that leave the support are warned of.
CartPole-v1 reaches 481 ± 20 in 500k steps (CleanRL); benchmarks/ has ours.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rl.algos import Context
from rl.checks import check_off_policy, check_replay_memory
from rl.errors import ConfigError
from rl.learner import Learner, learners_state, load_learners
from rl.metrics import Metrics, require_finite
from rl.networks.numpy_forward import numpy_forward
from rl.offpolicy import Batch, Experience
from rl.policies import GreedyPolicy, epsilon_greedy
from rl.schedules import linear_schedule
from rl.schemas import bounded

log = logging.getLogger(__name__)


@dataclass
class C51Config:
    """The keys of `algo`; their meaning stands beside their values in conf/algo/c51.yaml."""

    action_spaces: ClassVar[tuple[str, ...]] = ("Discrete",)

    learning_rate: float = bounded(gt=0)
    n_atoms: int = bounded(ge=2)
    v_min: float = bounded()
    v_max: float = bounded()
    buffer_size: int = bounded(ge=1)
    memory_map: str | None = bounded()
    gamma: float = bounded(ge=0, le=1)
    tau: float = bounded(gt=0, le=1)
    target_network_frequency: int = bounded(ge=1)
    batch_size: int = bounded(ge=1)
    start_e: float = bounded(ge=0, le=1)
    end_e: float = bounded(ge=0, le=1)
    exploration_fraction: float = bounded(ge=0, le=1)
    learning_starts: int = bounded(ge=0)
    train_frequency: int = bounded(ge=1)
    gradient_steps: int = bounded(ge=1)
    n_step: int = bounded(ge=1)
    double_q: bool = bounded()

    def check(self, run: Any, env: Any) -> None:
        """Raise ConfigError for what cannot work."""
        if self.v_min >= self.v_max:
            raise ConfigError(
                f"algo.v_min={self.v_min:g} is not below algo.v_max={self.v_max:g}; "
                f"the atoms span what returns can be, e.g. algo.v_min={-abs(self.v_max) - 1:g}"
            )
        check_off_policy(self, run, env)

    def check_spaces(self, env: Any, observation_space: Any, action_space: Any) -> int:
        """The bytes of the replay buffer; ConfigError when the machine has less."""
        return check_replay_memory(self, env, observation_space, action_space)


def project(probabilities: Tensor, targets: Tensor, atoms: Tensor) -> Tensor:
    """The distribution over `targets` [B, K] with `probabilities` [B, K], projected onto `atoms` [K]: [B, K].

    A target beyond the ends goes to the end; one between two atoms is shared by them, the nearer the more, so
    that each row sums to 1 and, within the ends, keeps its mean.
    """
    delta = (atoms[-1] - atoms[0]) / (len(atoms) - 1)
    b = ((targets.clamp(atoms[0], atoms[-1]) - atoms[0]) / delta).clamp(0, len(atoms) - 1)
    lower = b.floor()
    upper_share = b - lower
    index = lower.long()
    projected = torch.zeros_like(probabilities)
    projected.scatter_add_(1, index, probabilities * (1 - upper_share))
    projected.scatter_add_(1, (index + 1).clamp(max=len(atoms) - 1), probabilities * upper_share)
    return projected


class C51:
    """C51 on any vector env with Discrete actions.

    Args:
        config: the hyperparameters.
        env: the env family to make training envs from.
        network: the description of the network below the atoms' logits.
        context: length, streams and device of the run.
    """

    def __init__(self, config: C51Config, env: Any, network: Any, context: Context) -> None:
        self.config, self.context = config, context
        self.experience = Experience(config, env, context, n_step=config.n_step, memory_map=config.memory_map)
        self.num_actions = int(self.experience.envs.action_space.n)
        shape = self.experience.envs.observation_space.shape
        torch.manual_seed(context.streams.integer("networks"))
        head = nn.Linear(network.features(shape), self.num_actions * config.n_atoms)
        self.q = Learner(
            nn.Sequential(network.build(shape), head).to(context.device),
            config.learning_rate,
            adam_eps=0.01 / config.batch_size,
        )
        self.atoms = torch.linspace(config.v_min, config.v_max, config.n_atoms, device=context.device)
        self.values = expected_values(self.q.acting(context.dtype), self.atoms)
        self.loss = context.compiled(self._loss)
        self.warned = False

    @property
    def env_steps(self) -> int:
        """Env steps over all envs."""
        return self.experience.env_steps

    @property
    def epsilon(self) -> float:
        """The probability of a random action at this env step."""
        c = self.config
        duration = c.exploration_fraction * self.context.total_timesteps
        return linear_schedule(c.start_e, c.end_e, duration, self.env_steps)

    def iterate(self) -> Metrics:
        """Some 1000 env steps and the updates they owe."""
        metrics = self.experience.run(self.act, self.update, self.sync_target)
        require_finite(metrics.scalars, self.q.network)
        metrics.scalars["charts/epsilon"] = self.epsilon
        self._warn_outside(metrics.scalars.get("losses/outside_support", 0.0))
        return metrics

    def act(self) -> np.ndarray:
        """ε-greedy actions [N], each env on its own; all random until learning starts."""
        epsilon = 1.0 if self.experience.warming_up else self.epsilon
        obs = self.experience.normalized(self.experience.obs)
        return epsilon_greedy(self.values, obs, self.num_actions, epsilon, self.experience.action_rng)

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One gradient step; the cross entropy, the mean action value, and the part of the targets cut
        off."""
        with self.context.autocast():
            loss, q, outside = self.loss(batch)
        self.q.step(loss)
        return {"loss": loss.detach(), "q_values": q.detach(), "outside_support": outside}

    def sync_target(self) -> None:
        """Let the target follow at every `target_network_frequency` env steps crossed."""
        for _ in range(self.experience.crossed(self.config.target_network_frequency)):
            self.q.follow(self.config.tau)

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """−Σ_k m_k log p_k(s, a), the mean over the batch; mean Q(s, a); how much of the targets is
        clipped."""
        with torch.no_grad():
            following = self._distributions(self.q.target, batch.next_obs).softmax(-1)
            chooser = following
            if self.config.double_q:
                chooser = self._distributions(self.q.network, batch.next_obs).softmax(-1)
            best = (chooser * self.atoms).sum(-1).argmax(1)
            probabilities = following[torch.arange(len(best), device=best.device), best]
            alive = (batch.discounts * (1 - batch.terminated)).unsqueeze(1)
            targets = batch.rewards.unsqueeze(1) + alive * self.atoms
            target = project(probabilities, targets, self.atoms)
            mean = (probabilities * targets).sum(1)
            outside = ((mean < self.atoms[0]) | (mean > self.atoms[-1])).float().mean()
        logits = self._distributions(self.q.network, batch.obs)
        chosen = F.log_softmax(logits[torch.arange(len(best), device=best.device), batch.actions], dim=-1)
        q = (chosen.detach().exp() * self.atoms).sum(-1).mean()
        return -(target * chosen).sum(-1).mean(), q, outside

    def _distributions(self, network: nn.Module, obs: Tensor) -> Tensor:
        """Logits [B, A, K]."""
        logits: Tensor = network(obs).float()
        return logits.unflatten(1, (self.num_actions, self.config.n_atoms))

    def _warn_outside(self, part: float) -> None:
        """Warn once when a hundredth of the targets' means lie beyond the atoms."""
        if part > 0.01 and not self.warned:
            self.warned = True
            low, high = self.config.v_min, self.config.v_max
            log.warning(
                "%.0f%% of the returns lie outside algo.v_min=%g … algo.v_max=%g: widen them, e.g. "
                "algo.v_min=%g algo.v_max=%g",
                100 * part, low, high, low - (high - low) / 2, high + (high - low) / 2,
            )  # fmt: skip

    def policy(self) -> GreedyPolicy:
        """The present policy: greedy, or ε-greedy with `end_e` when sampled."""
        values = expected_values(numpy_forward(self.q.network, dtype=self.context.dtype), self.atoms)
        return GreedyPolicy(values, self.num_actions, self.config.end_e, self.experience.normalizer)

    def state_dict(self) -> dict[str, Any]:
        """Networks, optimiser, normaliser, replay buffer, streams, envs and counters."""
        return {**learners_state({"q": self.q}), **self.experience.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Continue from a saved state; notes on what could not be restored exactly."""
        load_learners({"q": self.q}, state)
        return self.experience.load_state_dict(state)

    def close(self) -> None:
        """Close the training envs."""
        self.experience.envs.close()


def expected_values(logits: Any, atoms: Tensor) -> Any:
    """A function from observations [N, …] to Σ_k p_k z_k [N, A], given one to logits [N, A·K]."""
    z = atoms.cpu().numpy()

    def values(obs: np.ndarray) -> np.ndarray:
        x = logits(obs).reshape(len(obs), -1, len(z))
        p = np.exp(x - x.max(-1, keepdims=True))
        expected: np.ndarray = (p @ z) / p.sum(-1)
        return expected

    return values
