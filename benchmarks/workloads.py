"""What benchmarks/throughput.py trains: our recipes, and SB3's algorithms with the same hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Workload:
    """One recipe of ours and the SB3 algorithm with the same hyperparameters."""

    env_id: str
    num_envs: int
    steps: int
    """Env steps of one measurement: long enough that our evaluations (`eval.every`) weigh in proportion."""
    sb3_class: str
    sb3_kwargs: dict[str, Any]
    """Arguments of the SB3 class. `learning_rate` is annealed linearly to 0 where `anneal_lr` says so."""
    normalize: bool = False
    """Running normalisation of observations and rewards, clipped to ±10."""
    anneal_lr: bool = True
    atari: bool = False
    """SB3's `make_atari_env` and four stacked frames, which is the preprocessing of our `env=atari`."""
    overrides: tuple[str, ...] = ()
    """What our side needs besides `algo=<name of the workload>`."""


PPO: dict[str, Any] = {
    "policy": "MlpPolicy",
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "clip_range_vf": 0.2,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
    "normalize_advantage": True,
    "net_arch": [64, 64],
    "adam_eps": 1e-5,
}

STARTS = (
    1000  # env steps before the first update, of the off-policy workloads: most of a run has them behind it
)

CONTINUOUS: dict[str, Any] = {
    "policy": "MlpPolicy",
    "gamma": 0.99,
    "buffer_size": 1_000_000,
    "learning_starts": STARTS,
    "batch_size": 256,
    "tau": 0.005,
    "train_freq": 1,
    "gradient_steps": 1,
    "learning_rate": 3e-4,
    "net_arch": [256, 256],
    "activation": "ReLU",
}


def continuous(sb3_class: str, **kwargs: Any) -> Workload:
    """An off-policy workload on HalfCheetah-v4, with as many threads as there are on either side."""
    return Workload(
        env_id="HalfCheetah-v4",
        num_envs=1,
        steps=STARTS + 4000,
        sb3_class=sb3_class,
        sb3_kwargs=CONTINUOUS | kwargs,
        anneal_lr=False,
        overrides=(f"algo.learning_starts={STARTS}", "torch_threads=null"),
    )


WORKLOADS: dict[str, Workload] = {
    "ppo": Workload(
        env_id="CartPole-v1",
        num_envs=4,
        steps=200 * 4 * 128,
        sb3_class="PPO",
        sb3_kwargs=PPO
        | {"n_steps": 128, "batch_size": 128, "n_epochs": 4, "learning_rate": 2.5e-4, "ent_coef": 0.01},
    ),
    "ppo_continuous_action": Workload(
        env_id="HalfCheetah-v4",
        num_envs=1,
        steps=50 * 2048,
        sb3_class="PPO",
        sb3_kwargs=PPO
        | {"n_steps": 2048, "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-4, "ent_coef": 0.0},
        normalize=True,
    ),
    "dqn": Workload(
        env_id="CartPole-v1",
        num_envs=1,
        steps=50_000,
        sb3_class="DQN",
        sb3_kwargs={
            "policy": "MlpPolicy",
            "gamma": 0.99,
            "buffer_size": 10_000,
            "learning_starts": STARTS,
            "batch_size": 128,
            "train_freq": 10,
            "gradient_steps": 1,
            "target_update_interval": 500,
            "exploration_fraction": 0.5,
            "exploration_final_eps": 0.05,
            "max_grad_norm": float("inf"),
            "learning_rate": 2.5e-4,
            "net_arch": [120, 84],
            "activation": "ReLU",
        },
        anneal_lr=False,
        overrides=(f"algo.learning_starts={STARTS}",),
    ),
    # As CleanRL has them, delayed policies included; DDPG is SB3's TD3 with one critic and no smoothing.
    "ddpg_continuous_action": continuous(
        "TD3", policy_delay=2, target_policy_noise=1e-9, n_critics=1, action_noise=0.1
    ),
    "td3_continuous_action": continuous("TD3", policy_delay=2, action_noise=0.1),
    "sac_continuous_action": continuous("SAC"),
    # A run of ten million steps has an evaluation every 500k; here one game is enough for their share.
    "ppo_atari": Workload(
        env_id="BreakoutNoFrameskip-v4",
        num_envs=8,
        steps=8 * 8 * 128,
        sb3_class="PPO",
        sb3_kwargs=PPO
        | {
            "policy": "CnnPolicy",
            "n_steps": 128,
            "batch_size": 256,
            "n_epochs": 4,
            "clip_range": 0.1,
            "clip_range_vf": 0.1,
            "learning_rate": 2.5e-4,
            "ent_coef": 0.01,
            "net_arch": [],
        },
        atari=True,
        overrides=("eval.episodes=1",),
    ),
    "dqn_atari": Workload(
        env_id="BreakoutNoFrameskip-v4",
        num_envs=1,
        steps=STARTS + 6000,
        sb3_class="DQN",
        sb3_kwargs={
            "policy": "CnnPolicy",
            "gamma": 0.99,
            "buffer_size": 20_000,
            "learning_starts": STARTS,
            "batch_size": 32,
            "train_freq": 4,
            "gradient_steps": 1,
            "target_update_interval": 1000,
            "exploration_fraction": 0.1,
            "exploration_final_eps": 0.01,
            "max_grad_norm": float("inf"),
            "learning_rate": 1e-4,
            "net_arch": [],
            "activation": "ReLU",
        },
        anneal_lr=False,
        atari=True,
        overrides=(f"algo.learning_starts={STARTS}", "algo.buffer_size=20000", "eval.episodes=1"),
    ),
}
