"""Checks that several algorithms' configurations share; light, as they run before torch is imported."""

from __future__ import annotations

import math
import os
import shutil
from typing import Any, Protocol

from rl.errors import ConfigError
from rl.machine import available_bytes

EPISODE_STEPS = 200  # random play of Breakout lasts so long, the least of what replay of frames is used for


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


class OnPolicyConfig(Protocol):
    """The keys by which an on-policy algorithm divides its rollouts."""

    num_steps: int
    num_minibatches: int
    norm_adv: bool


def check_rollout(config: OnPolicyConfig, run: Any, env: Any) -> None:
    """Raise ConfigError for minibatches of one row or a run that is shorter than one rollout."""
    batch = env.num_envs * config.num_steps
    if config.norm_adv and batch == config.num_minibatches:
        raise ConfigError(
            f"algo.num_minibatches={config.num_minibatches} leaves minibatches of 1, whose advantages "
            f"cannot be normalised; use fewer, or algo.norm_adv=false"
        )
    if run.total_timesteps < batch:
        raise ConfigError(
            f"total_timesteps={run.total_timesteps} is below one batch of env.num_envs × algo.num_steps = "
            f"{batch}; total_timesteps={batch} is the least"
        )


def check_bounded(action_space: Any, env: Any) -> None:
    """Raise ConfigError for a Box of actions without bounds."""
    if not action_space.is_bounded():
        raise ConfigError(
            f"algo: it needs bounded actions, but env.id={env.id} has {action_space}; "
            "algo=ppo_continuous_action takes them"
        )


def check_vectors(observation_space: Any, env: Any) -> None:
    """Raise ConfigError for observations that are not vectors, to which critics could not join an action."""
    if len(observation_space.shape) != 1:
        raise ConfigError(
            f"algo: its critics take vectors, but env.id={env.id} has images of shape "
            f"{observation_space.shape}; algo=ppo network=nature_cnn takes them"
        )


def check_replay_memory(config: OffPolicyConfig, env: Any, observation_space: Any, action_space: Any) -> int:
    """The bytes of the replay buffer; ConfigError when the machine or the allocation has less to give, or the
    disk where `algo.memory_map` names a folder."""
    shape, dtype = observation_space.shape, observation_space.dtype
    action = 8 if not action_space.shape else 4 * math.prod(action_space.shape)
    folder = getattr(config, "memory_map", None)
    frames = stacks_frames(env, observation_space)
    if folder is not None:
        _check_memory_map(folder, frames)
    if frames:
        needed = frame_replay_bytes(config.buffer_size, env.num_envs, shape, dtype, action)
    else:
        needed = replay_bytes(config.buffer_size, shape, dtype, action)
    free = available_bytes() if folder is None else shutil.disk_usage(folder).free
    if free is not None and needed > free:
        fits = int(config.buffer_size * 0.8 * free / needed)
        where = "" if folder is None else f" in algo.memory_map={folder}"
        advice = f"algo.buffer_size={fits} fits"
        if frames and folder is None and hasattr(config, "memory_map"):
            advice += ", and algo.memory_map=<a folder on a local disk> keeps the frames out of memory"
        raise ConfigError(
            f"algo.buffer_size={config.buffer_size} needs {needed / 2**30:.2f} GiB, but "
            f"{free / 2**30:.2f} GiB are available{where}; {advice}"
        )
    return needed


def _check_memory_map(folder: str, frames: bool) -> None:
    """Raise ConfigError for a folder that cannot hold frames, or where there are none to hold."""
    if not frames:
        raise ConfigError(
            f"algo.memory_map={folder} is for stacked frames, and these observations are none; "
            "algo.memory_map=null"
        )
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"algo.memory_map={folder} is not a folder that can be written to; name one on a local disk, or "
            "algo.memory_map=null keeps the frames in memory"
        )


def stacks_frames(env: Any, observation_space: Any) -> bool:
    """Whether observations [C, H, W] are nothing but the newest `env.frame_stack` frames of one channel, so
    that replay can keep each frame once (`rl.frame_buffer`)."""
    shape = observation_space.shape
    return len(shape) == 3 and getattr(env, "frame_stack", None) == shape[0]


def replay_bytes(
    capacity: int, observation_shape: tuple[int, ...], observation_dtype: Any, action_bytes: int
) -> int:
    """Bytes that a replay buffer of `capacity` transitions takes."""
    observation = math.prod(observation_shape) * observation_dtype.itemsize
    return capacity * (2 * observation + action_bytes + 4 + 2)


def frame_replay_bytes(
    capacity: int,
    num_envs: int,
    observation_shape: tuple[int, ...],
    observation_dtype: Any,
    action_bytes: int,
) -> int:
    """Bytes that a `FrameReplayBuffer` takes: a frame, an action and 15 bytes a transition, and a whole stack
    for each episode, which are taken to last `EPISODE_STEPS` steps."""
    frames, *size = observation_shape
    frame = math.prod(size) * observation_dtype.itemsize
    slots = (capacity // num_envs + frames) * num_envs
    return slots * (frame + action_bytes + 4 + 2 + 1 + 8) + slots * (frames * frame + 8) // EPISODE_STEPS
