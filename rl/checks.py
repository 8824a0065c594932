"""Checks that several algorithms' configurations share; light, as they run before torch is imported."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Protocol

from rl.errors import ConfigError


class OffPolicyConfig(Protocol):
    """The keys that every off-policy algorithm has."""

    buffer_size: int
    batch_size: int
    gamma: float
    learning_starts: int
    train_frequency: int
    gradient_steps: int


def check_off_policy(config: OffPolicyConfig, run: Any, env: Any) -> None:
    """Raise ConfigError for a batch, buffer, start or normalisation that cannot work."""
    if config.batch_size > config.buffer_size:
        raise ConfigError(
            f"algo.batch_size={config.batch_size} is larger than algo.buffer_size={config.buffer_size}; "
            f"algo.batch_size={config.buffer_size} is the most"
        )
    if config.buffer_size < env.num_envs:
        raise ConfigError(
            f"algo.buffer_size={config.buffer_size} holds less than one step of env.num_envs={env.num_envs}"
        )
    if config.learning_starts >= run.total_timesteps:
        raise ConfigError(
            f"algo.learning_starts={config.learning_starts} is not before total_timesteps="
            f"{run.total_timesteps}, so nothing would be learnt; "
            f"algo.learning_starts={run.total_timesteps // 10} would do"
        )
    if env.normalize_reward:
        raise ConfigError(
            "env.normalize_reward=true would mix rewards of several scales in the replay buffer; "
            "env.normalize_reward=false"
        )


def check_replay_memory(config: OffPolicyConfig, observation_space: Any, action_space: Any) -> int:
    """The bytes of the replay buffer; ConfigError when the machine or the allocation has less to give."""
    action = 8 if not action_space.shape else 4 * math.prod(action_space.shape)
    needed = replay_bytes(config.buffer_size, observation_space.shape, observation_space.dtype, action)
    free = available_bytes()
    if needed > free:
        fits = int(config.buffer_size * 0.8 * free / needed)
        raise ConfigError(
            f"algo.buffer_size={config.buffer_size} needs {needed / 2**30:.2f} GiB, but "
            f"{free / 2**30:.2f} GiB are available; algo.buffer_size={fits} fits"
        )
    return needed


def replay_bytes(
    capacity: int, observation_shape: tuple[int, ...], observation_dtype: Any, action_bytes: int
) -> int:
    """Bytes that a replay buffer of `capacity` transitions takes."""
    observation = math.prod(observation_shape) * observation_dtype.itemsize
    return capacity * (2 * observation + action_bytes + 4 + 2)


def available_bytes() -> int:
    """Memory that this process may still take: the machine's, its cgroup's or its Slurm allocation's, the
    least."""
    import psutil

    limits = [psutil.virtual_memory().available]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        if Path(limit).exists() and Path(limit).read_text().strip().isdigit():
            limits.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    allocated = os.environ.get("SLURM_MEM_PER_NODE")  # MiB
    if allocated and allocated.isdigit():
        limits.append(int(allocated) * 2**20)
    return max(0, min(limits))
