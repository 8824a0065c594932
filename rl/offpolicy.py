"""What the off-policy algorithms share: stepping envs into a replay buffer, and counting the updates that are
due.

Schedules are in env steps over all envs, or in gradient steps, never in loop turns, so they hold for any
`env.num_envs`: from `learning_starts` on, every `train_frequency` env steps crossed owe `gradient_steps`
updates.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl.algos import Context
from rl.buffers import ReplayBuffer
from rl.checks import OffPolicyConfig, stacks_frames
from rl.envs.normalization import ObsNormalizer
from rl.frame_buffer import FrameReplayBuffer
from rl.metrics import FinishedEpisode, Metrics
from rl.optim import flushed_denormals
from rl.seeding import generator_state, set_generator_state

CHUNK = 1000  # env steps of an iteration


class Batch(NamedTuple):
    """A sampled batch as tensors on the device: see `rl.buffers.Transitions`."""

    obs: Tensor
    actions: Tensor
    rewards: Tensor
    next_obs: Tensor
    terminated: Tensor
    discounts: Tensor


class Experience:
    """Envs stepped into a replay buffer.

    Args:
        config: the keys of `OffPolicyConfig`.
        env: the env family.
        context: streams and device of the run.
        n_step: steps in a return.
        memory_map: a folder for the frames of a replay buffer of stacked frames; None: in memory.
    """

    def __init__(
        self,
        config: OffPolicyConfig,
        env: Any,
        context: Context,
        *,
        n_step: int = 1,
        memory_map: str | None = None,
    ) -> None:
        self.config, self.context = config, context
        self.envs = env.make()
        self.num_envs = self.envs.num_envs
        space, actions = self.envs.observation_space, self.envs.action_space
        description: Any = (
            config.buffer_size,
            self.num_envs,
            space.shape,
            space.dtype,
            (math.prod(actions.shape),) if actions.shape else (),
            np.float32 if actions.shape else np.int64,
        )
        self.buffer: ReplayBuffer | FrameReplayBuffer
        if stacks_frames(env, space):
            self.buffer = FrameReplayBuffer(
                *description, n_step=n_step, gamma=config.gamma, memory_map=memory_map
            )
        else:
            self.buffer = ReplayBuffer(*description, n_step=n_step, gamma=config.gamma)
        self.normalizer = ObsNormalizer(space.shape, env.clip_obs) if env.normalize_obs else None
        self.action_rng = context.streams.generator("actions")
        self.replay_rng = context.streams.generator("replay")
        self.env_steps = 0
        self.gradient_steps = 0
        self.starts = config.learning_starts  # env steps from which updates are owed
        self.owed_before = 0  # gradient steps taken before `starts` was last moved
        self.obs = self.envs.reset(context.streams.sequence("envs"))
        self._learn(self.obs)

    def _turns(self) -> range:
        """The vector steps of an iteration: `CHUNK` env steps, fewer at the end of the run."""
        left = max(1, self.context.total_timesteps - self.env_steps)
        return range(math.ceil(min(CHUNK, left) / self.num_envs))

    def run(
        self,
        act: Callable[[], np.ndarray],
        update: Callable[[Batch], dict[str, Tensor]],
        after_step: Callable[[], None] = lambda: None,
    ) -> Metrics:
        """One iteration: env steps with `act()`, the updates they owe, and the mean of what the updates
        report.

        Args:
            act: actions [N, …] for `self.obs`.
            update: one gradient step on a batch; detached scalars by name, without a device synchronisation.
            after_step: called after every vector step and its updates.
        """
        start, updating = time.perf_counter(), 0.0
        metrics = Metrics()
        reported: dict[str, list[Tensor]] = defaultdict(list)
        for _ in self._turns():
            metrics.episodes += self.step(act())
            due = self.due()
            if due:
                before = time.perf_counter()
                with flushed_denormals():
                    for _ in range(due):
                        for name, value in update(self.sample()).items():
                            reported[name].append(value)
                updating += time.perf_counter() - before
            after_step()
        if reported:
            means = torch.stack([torch.stack(values).mean() for values in reported.values()]).tolist()
            metrics.scalars |= {f"losses/{n}": v for n, v in zip(reported, means, strict=True)}
        metrics.scalars["charts/update_to_data"] = self.update_to_data()
        metrics.scalars["time/update"] = updating
        metrics.scalars["time/collect"] = time.perf_counter() - start - updating
        return metrics

    @property
    def warming_up(self) -> bool:
        """Whether actions are still drawn at random."""
        return self.env_steps < self.config.learning_starts

    def step(self, actions: np.ndarray) -> list[FinishedEpisode]:
        """Take actions [N, …], store what came of it, and return the episodes that finished."""
        step = self.envs.step(actions)
        self.buffer.add(self.obs, actions, step)
        self.obs = step.obs
        self._learn(step.obs)
        self.env_steps += self.num_envs
        return [FinishedEpisode(self.env_steps, *episode) for episode in step.episodes]

    def due(self) -> int:
        """How many gradient steps are owed at this env step."""
        intervals = max(0, self.env_steps - self.starts) // self.config.train_frequency
        owed = self.owed_before + intervals * self.config.gradient_steps
        return max(0, owed - self.gradient_steps)

    def crossed(self, interval: int) -> int:
        """How many multiples of `interval` env steps the latest vector step reached or passed."""
        return self.env_steps // interval - (self.env_steps - self.num_envs) // interval

    def normalized(self, obs: np.ndarray) -> np.ndarray:
        """Observations [N, …] as networks take them."""
        return obs if self.normalizer is None else self.normalizer(obs, update=False)

    def sample(self) -> Batch:
        """A batch for one gradient step, which it counts."""
        self.gradient_steps += 1
        drawn = self.buffer.sample(self.config.batch_size, self.replay_rng)
        drawn = drawn._replace(obs=self.normalized(drawn.obs), next_obs=self.normalized(drawn.next_obs))
        columns = drawn._asdict().items()
        return Batch(**{name: torch.from_numpy(x).to(self.context.device) for name, x in columns})

    def update_to_data(self) -> float:
        """Gradient steps per env step since learning started."""
        return (self.gradient_steps - self.owed_before) / max(1, self.env_steps - self.starts)

    def _learn(self, obs: np.ndarray) -> None:
        if self.normalizer is not None:
            self.normalizer(obs, update=True)

    def state_dict(self) -> dict[str, Any]:
        """Normaliser, buffer, envs, streams and counters."""
        return {
            "normalizers": {} if self.normalizer is None else {"obs": self.normalizer.state_dict()},
            "replay": self.buffer.state_dict(),
            "envs": self.envs.state_dict(),
            "streams": {
                "actions": generator_state(self.action_rng),
                "replay": generator_state(self.replay_rng),
            },
            "counters": {
                "env_steps": self.env_steps,
                "gradient_steps": self.gradient_steps,
                "starts": self.starts,
                "owed_before": self.owed_before,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Continue from a saved state; notes on what could not be restored."""
        if self.normalizer is not None:
            self.normalizer.load_state_dict(state["normalizers"]["obs"])
        set_generator_state(self.action_rng, state["streams"]["actions"])
        set_generator_state(self.replay_rng, state["streams"]["replay"])
        for name, value in state["counters"].items():
            setattr(self, name, value)
        restored = self.envs.load_state_dict(state["envs"])
        self.obs = restored.obs
        notes = restored.notes()
        if state.get("replay", {}).get("ring") is not None:
            self.buffer.load_state_dict(state["replay"])
        elif self.env_steps > 0:
            refill = min(max(self.config.learning_starts, self.config.batch_size), self.config.buffer_size)
            self.starts, self.owed_before = self.env_steps + refill, self.gradient_steps
            self.buffer.clear(self.env_steps)
            notes.append(
                f"the replay buffer was not saved (checkpoint.replay=false): it is filled with {refill:,} "
                "steps of the present policy before learning goes on"
            )
        return notes


def critic_report(losses: Tensor, values: Tensor) -> dict[str, Tensor]:
    """What an update reports of its critics' losses [E] and mean values [E], under CleanRL's names."""
    losses, values = losses.detach(), values.detach()
    report = {"qf_loss": losses.mean()}
    for i in range(len(losses)):
        report |= {f"qf{i + 1}_loss": losses[i], f"qf{i + 1}_values": values[i]}
    return report
