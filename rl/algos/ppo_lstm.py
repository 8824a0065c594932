"""Proximal policy optimisation with memory: PPO whose trunk remembers what it saw in the same episode.

As in ppo.py, but for the recurrent state, which goes on from one rollout to the next and is zeroed where an
episode starts, while acting and while learning. A minibatch is whole sequences of some envs, run again from
the state at the beginning of the rollout (Huang et al. 2022, "The 37 implementation details of PPO",
detail 32).

Where it differs from CleanRL's ppo_atari_lstm.py, beside what ppo.py says: V of the true successor of an
episode that a time limit cut comes from the state in which the episode was left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rl.algos.ppo import PPO, PPOConfig
from rl.checks import check_rollout
from rl.distributions import Distribution
from rl.errors import ConfigError
from rl.metrics import FinishedEpisode
from rl.networks.initialisers import layer_init
from rl.networks.recurrent import State
from rl.policies import RecurrentPolicy
from rl.rollout import Rollout, stepped

HOST = ("starts", "active")  # what of a batch stays on the CPU: shapes depend on it, and the host knows it


@dataclass
class RecurrentPPOConfig(PPOConfig):
    """The keys of `algo`, those of PPO."""

    recurrent: ClassVar[bool] = True

    def check(self, run: Any, env: Any) -> None:
        """Raise ConfigError where envs do not divide into minibatches or the run is shorter than a
        rollout."""
        if env.num_envs % self.num_minibatches:
            fits = max(n for n in range(1, self.num_minibatches) if env.num_envs % n == 0)
            raise ConfigError(
                f"algo.num_minibatches={self.num_minibatches} does not divide env.num_envs={env.num_envs}, "
                f"and a minibatch is whole sequences of some envs; algo.num_minibatches={fits} does"
            )
        check_rollout(self, run, env)


class RecurrentAgent(nn.Module):
    """Actor and critic, two heads on one trunk with memory."""

    def __init__(self, network: Any, observation_shape: tuple[int, ...], distribution: Distribution) -> None:
        super().__init__()
        features = network.features(observation_shape)
        self.trunk = network.build(observation_shape)
        self.actor = layer_init(nn.Linear(features, distribution.outputs), std=0.01)
        self.critic = layer_init(nn.Linear(features, 1), std=1.0)
        self.logstd = nn.Parameter(torch.zeros(distribution.outputs)) if distribution.has_logstd else None

    def forward(self, obs: Tensor, state: State, starts: Tensor) -> tuple[Tensor, Tensor, State]:
        """The actor's outputs [T, N, K] and values [T, N] of observations [T, N, …], and the state after
        them; `starts` [T, N]: which are the first of an episode."""
        hidden, state = self.trunk(obs, state, starts)
        return self.actor(hidden).float(), self.critic(hidden).squeeze(-1).float(), state


class RecurrentPPO(PPO):
    """PPO with a recurrent network on any vector env with Discrete, MultiDiscrete or Box actions.

    Args: see `PPO`; the network is one with memory.
    """

    def __init__(self, config: RecurrentPPOConfig, env: Any, network: Any, context: Any) -> None:
        super().__init__(config, env, network, context)
        self.state: State = self.agent.trunk.initial_state(self.num_envs)
        self.starts = np.ones(self.num_envs, bool)  # which of `obs` are the first of an episode

    def _agent(self, network: Any, observation_shape: tuple[int, ...]) -> RecurrentAgent:
        return RecurrentAgent(network, observation_shape, self.distribution)

    def collect(self) -> tuple[dict[str, Tensor], list[FinishedEpisode]]:
        """Act for `num_steps` in every env; the batch to learn from, and the episodes that finished."""
        steps = self.config.num_steps
        noise = self.distribution.noise(self.action_rng, (steps, self.num_envs))
        std = None if self.agent.logstd is None else self.agent.logstd.detach().exp().cpu().numpy()
        shape, dtype = self.distribution.action_shape, self.distribution.action_dtype
        rollout = Rollout(steps, self.obs, shape, dtype, self.device)
        starts = np.empty((steps + 1, self.num_envs), bool)
        starts[0] = self.starts
        first, self.state = self.state, (self.state[0].clone(), self.state[1].clone())
        cut_values = [torch.empty(0, device=self.device)]
        episodes: list[FinishedEpisode] = []

        def act(t: int, rows: slice) -> np.ndarray:
            state = (self.state[0][:, rows], self.state[1][:, rows])
            outputs, _, following = self._sequence(
                rollout.inputs[t : t + 1, rows], state, starts[t : t + 1, rows]
            )
            for whole, part in zip(self.state, following, strict=True):
                whole[:, rows] = part
            actions = self.distribution.sample(outputs[0].cpu().numpy(), noise[t, rows], std)
            rollout.actions[t, rows] = actions
            return rollout.actions[t, rows]

        before = self.env_steps
        for t, rows, step in stepped(self.envs, steps, act):
            self.env_steps = before + (t + 1) * self.num_envs
            starts[t + 1, rows] = step.terminated | step.truncated
            for i in rollout.add(t, rows, step, self._normalize(step.obs)):
                following = self._normalize(step.next_obs[i : i + 1], update=False)
                env = rows.start + i
                rollout.cut.append((t, env, following))
                left = (self.state[0][:, env : env + 1], self.state[1][:, env : env + 1])
                successor = torch.from_numpy(following[None]).to(self.device)
                cut_values.append(self._sequence(successor, left, np.zeros((1, 1), bool))[1][0])
            episodes += [FinishedEpisode(self.env_steps, *episode) for episode in step.episodes]
        if self.reward_normalizer is not None:
            rollout.normalize_rewards(self.reward_normalizer)
        self.obs, self.starts = rollout.obs[-1], starts[steps]
        return self._sequences(rollout, first, starts, torch.cat(cut_values).cpu().numpy()), episodes

    def _sequences(
        self, rollout: Rollout, first: State, starts: np.ndarray, cut_values: np.ndarray
    ) -> dict[str, Tensor]:
        """The rollout as tensors [T, N, …], and the state h, c [layers, N, H] at its beginning; those of
        `HOST` on the CPU."""
        outputs, v, _ = self._sequence(rollout.inputs, first, starts)
        actions = torch.from_numpy(rollout.actions).to(self.device)
        logprobs, _ = self.distribution.log_prob_and_entropy(
            outputs[:-1].flatten(0, 1), self.agent.logstd, actions.flatten(0, 1)
        )
        values = v.cpu().numpy()
        advantages = self._advantages(rollout, values, cut_values)
        return {
            "obs": rollout.inputs[:-1],
            "starts": torch.from_numpy(starts[:-1]),
            "h": first[0],
            "c": first[1],
            "active": torch.from_numpy(rollout.active),
            "actions": actions,
            "logprobs": logprobs.unflatten(0, v[:-1].shape),
            "values": v[:-1],
            "advantages": torch.from_numpy(advantages).to(self.device),
            "returns": torch.from_numpy(advantages + values[:-1]).to(self.device),
        }

    def _minibatches(self, batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """One epoch: the envs in random order, `num_minibatches` equal parts of them, each with its whole
        sequences; what is not fed to the network [B, …], in order of time and without who was not there."""
        order = torch.from_numpy(self.minibatch_rng.permutation(self.num_envs))
        parts = order.view(self.config.num_minibatches, -1)
        for host, envs in zip(parts, parts.to(self.device), strict=True):
            part = {name: x[:, host if name in HOST else envs] for name, x in batch.items()}
            part["rows"] = part.pop("active").flatten().nonzero().squeeze(1).to(self.device)
            for name in ("actions", "logprobs", "values", "advantages", "returns"):
                part[name] = part[name].flatten(0, 1)[part["rows"]]
            if self.config.norm_adv:
                advantages = part["advantages"]
                part["advantages"] = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            yield part

    def _evaluate(self, mb: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Actor outputs [B, K] and values [B] at a minibatch of sequences."""
        with self.context.autocast():
            outputs, values, _ = self.agent(mb["obs"], (mb["h"], mb["c"]), mb["starts"])
        rows = mb["rows"]
        return outputs.flatten(0, 1)[rows].float(), values.flatten(0, 1)[rows].float()

    @torch.no_grad()
    def _sequence(self, obs: Tensor, state: State, starts: np.ndarray) -> tuple[Tensor, Tensor, State]:
        """Outputs [T, N, K], values [T, N] and the state after observations [T, N, …], without gradients."""
        with self.context.autocast():
            outputs, values, state = self.agent(obs, state, torch.from_numpy(starts))
        return outputs.float(), values.float(), state

    def policy(self) -> RecurrentPolicy:
        """The present policy, its weights and normaliser copied."""
        return RecurrentPolicy(self.agent, self.distribution, self.obs_normalizer, self.context.autocast)

    def state_dict(self) -> dict[str, Any]:
        """What PPO has, the recurrent state, and which envs start an episode."""
        h, c = self.state
        return {**super().state_dict(), "memory": {"h": h, "c": c, "starts": self.starts}}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Continue from a saved state; a note for each env whose running episode could not be restored."""
        memory = state["memory"]
        self.state = memory["h"].to(self.device), memory["c"].to(self.device)
        self.starts = memory["starts"].astype(bool)
        return super().load_state_dict(state)

    def _restarted(self, envs: np.ndarray) -> None:
        super()._restarted(envs)
        self.starts = self.starts | envs
