"""Deep Q-learning (Mnih et al. 2015, https://www.nature.com/articles/nature14236).

One network of action values, acted on ε-greedily; minibatches from a replay buffer are regressed onto r + γ
max_a Q_target(s', a); the target network is a copy that follows at intervals. Options, off by default: double
DQN (van Hasselt et al. 2016), n-step returns (Sutton 1988), the Huber loss.

Where it differs from CleanRL:
- an update is owed every `train_frequency` env steps and the target follows at every
  `target_network_frequency` env steps crossed, for any `env.num_envs`; ε falls with env steps;
- ε is drawn for each env on its own.
CartPole-v1 reaches 488.7 ± 16 in 500k steps (CleanRL); benchmarks/ has ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rl.algos import Context
from rl.checks import check_off_policy, check_replay_memory
from rl.learner import Learner, learners_state, load_learners
from rl.metrics import Metrics, require_finite
from rl.networks.numpy_forward import numpy_forward
from rl.offpolicy import Batch, Experience
from rl.policies import GreedyPolicy, epsilon_greedy
from rl.returns import td_target
from rl.schedules import linear_schedule
from rl.schemas import bounded


@dataclass
class DQNConfig:
    """The keys of `algo`; their meaning stands beside their values in conf/algo/dqn.yaml."""

    action_spaces: ClassVar[tuple[str, ...]] = ("Discrete",)

    learning_rate: float = bounded(gt=0)
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
    huber: bool = bounded()

    def check(self, run: Any, env: Any) -> None:
        """Raise ConfigError for what cannot work."""
        check_off_policy(self, run, env)

    def check_spaces(self, env: Any, observation_space: Any, action_space: Any) -> int:
        """The bytes of the replay buffer; ConfigError when the machine has less."""
        return check_replay_memory(self, env, observation_space, action_space)


def next_action_values(target_q: Tensor, online_q: Tensor | None) -> Tensor:
    """max_a Q_target(s', a) [B] from [B, A]; with `online_q` the action is its choice (double DQN)."""
    if online_q is None:
        return target_q.max(dim=1).values
    return target_q.gather(1, online_q.argmax(dim=1, keepdim=True)).squeeze(1)


class DQN:
    """DQN on any vector env with Discrete actions.

    Args:
        config: the hyperparameters.
        env: the env family to make training envs from.
        network: the description of the action-value network.
        context: length, streams and device of the run.
    """

    def __init__(self, config: DQNConfig, env: Any, network: Any, context: Context) -> None:
        self.config, self.context = config, context
        self.experience = Experience(config, env, context, n_step=config.n_step, memory_map=config.memory_map)
        self.num_actions = int(self.experience.envs.action_space.n)
        shape = self.experience.envs.observation_space.shape
        torch.manual_seed(context.streams.integer("networks"))
        head = nn.Linear(network.features(shape), self.num_actions)
        self.q = Learner(nn.Sequential(network.build(shape), head).to(context.device), config.learning_rate)
        self.values = self.q.acting(context.dtype)
        self.loss = context.compiled(self._loss)

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
        return metrics

    def act(self) -> np.ndarray:
        """ε-greedy actions [N], each env on its own; all random until learning starts."""
        epsilon = 1.0 if self.experience.warming_up else self.epsilon
        obs = self.experience.normalized(self.experience.obs)
        return epsilon_greedy(self.values, obs, self.num_actions, epsilon, self.experience.action_rng)

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One gradient step; the loss and the mean action value."""
        with self.context.autocast():
            loss, q = self.loss(batch)
        self.q.step(loss)
        return {"td_loss": loss.detach(), "q_values": q.detach().mean()}

    def sync_target(self) -> None:
        """Let the target follow at every `target_network_frequency` env steps crossed."""
        for _ in range(self.experience.crossed(self.config.target_network_frequency)):
            self.q.follow(self.config.tau)

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The temporal-difference loss of a batch, and Q(s, a) [B]."""
        with torch.no_grad():
            online = self.q.network(batch.next_obs) if self.config.double_q else None
            following = next_action_values(self.q.target(batch.next_obs), online)
            target = td_target(batch.rewards, batch.discounts, batch.terminated, following)
        q = self.q.network(batch.obs).gather(1, batch.actions.unsqueeze(1)).squeeze(1)
        return (F.smooth_l1_loss if self.config.huber else F.mse_loss)(q.float(), target), q

    def policy(self) -> GreedyPolicy:
        """The present policy: greedy, or ε-greedy with `end_e` when sampled."""
        values = numpy_forward(self.q.network, dtype=self.context.dtype)
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
