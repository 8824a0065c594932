"""What tests share: composing a configuration as the command line does, training it in this process, reading
what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rl import checkpoint, commandline, resume
from rl.build import build_algorithm
from rl.config import Config, check, register_schema
from rl.experiment import Experiment, Outcome
from rl.ring_files import Rows
from rl.seeding import Streams, seed_global_generators

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(path.stem for path in (ROOT / "conf" / "algo").glob("*.yaml"))

# How to make two iterations of an algorithm take moments: overrides by the name of its class.
_OFF_POLICY = (
    "algo.learning_starts=200",
    "algo.buffer_size=600",
    "algo.batch_size=16",
    "algo.train_frequency=10",
)
_ON_POLICY = ("algo.num_steps=64", "algo.num_minibatches=2", "algo.update_epochs=2")
SMALL = {
    **dict.fromkeys(("PPO", "RecurrentPPO"), _ON_POLICY),
    **dict.fromkeys(("DQN", "C51", "DDPG", "TD3", "SAC", "DiscreteSAC"), _OFF_POLICY),
}
# The same by the env family, where its recipes take many envs or pixels.
_PIXELS = ("env.num_envs=2", "network.hidden_size=16", "env.max_episode_steps=200", "torch_threads=1")
SMALL_ENV = {
    "GymnasiumEnvs": (),
    "AtariEnvs": _PIXELS,
    "PettingZooEnvs": (*_PIXELS, "env.noop_max=3"),
    "ProcgenEnvs": _PIXELS,
}
# The backends of each family that can save a running episode, and one that cannot.
EXACT_BACKENDS = {
    "GymnasiumEnvs": ("sync", "async"),
    "AtariEnvs": ("sync",),
    "PettingZooEnvs": ("sync",),
    "ProcgenEnvs": (),
}
INEXACT_BACKENDS = {"AtariEnvs": "ale", "ProcgenEnvs": "envpool"}

register_schema()
OmegaConf.register_new_resolver("job_folder", commandline.job_folder, replace=True)
torch.set_num_threads(1)


def configure(*overrides: str) -> Config:
    """The checked configuration that `python launch.py <overrides>` would run, without trackers unless asked
    for."""
    quiet = [] if any(o.startswith("logger=") for o in overrides) else ["logger=none"]
    with initialize_config_dir(str(commandline.CONF), version_base="1.3"):
        return check(compose("config", commandline.opened([*quiet, *overrides])))


def small(recipe: str, *overrides: str) -> list[str]:
    """Overrides that shrink a recipe to iterations of moments."""
    name = configure(f"algo={recipe}").algo_target.rpartition(".")[2]
    assert name in SMALL, f"tests/conftest.py: SMALL needs the overrides that shrink {name}"
    return [f"algo={recipe}", *SMALL[name], *SMALL_ENV[family(recipe)], *overrides]


def family(recipe: str) -> str:
    """The class of the env family that a recipe is for."""
    return type(configure(f"algo={recipe}").env).__name__


def steps(recipe: str) -> int:
    """Env steps of a small run: a few iterations of the recipe."""
    config = configure(f"algo={recipe}")
    rollouts = hasattr(config.algo, "num_steps") and family(recipe) != "GymnasiumEnvs"
    return 640 if rollouts else 1536


def algorithm(*overrides: str, device: str = "cpu") -> Any:
    """The algorithm of a configuration, ready to iterate; the caller closes it."""
    config = configure(*overrides)
    streams = Streams(config.run.seed)
    seed_global_generators(streams)
    return build_algorithm(config, streams, torch.device(device))


def train(directory: Path, *overrides: str, resumed_from: Path | None = None) -> Outcome:
    """Run a configuration to its end in `directory`, in this process."""
    directory.mkdir(parents=True, exist_ok=True)
    return Experiment(configure(*overrides), directory, resumed_from).run()


def launch(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """`python launch.py <arguments>` as a user runs it."""
    return subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *arguments],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def lines(directory: Path) -> list[dict[str, Any]]:
    """The metric lines of a run without what a clock measured."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "charts/SPS"} for row in rows]


def episodes(directory: Path) -> list[str]:
    """The rows of episodes.csv without their last column, the seconds."""
    return [row.rpartition(",")[0] for row in (directory / "episodes.csv").read_text().splitlines()]


def final_state(directory: Path) -> dict[str, Any]:
    """The algorithm's state in the newest checkpoint, the rows of a replay buffer included."""
    newest = checkpoint.newest(directory / "checkpoints")
    assert newest is not None
    state: dict[str, Any] = checkpoint.load(newest)[0]["algorithm"]
    return {**state, "replay": {name: rows_of(ring) for name, ring in state.get("replay", {}).items()}}


def rows_of(ring: Rows | None) -> Any:
    """What a checkpoint holds of a ring: its id, first and last row, and the rows by name."""
    from safetensors.numpy import load_file

    if ring is None:
        return None
    arrays: dict[str, list[Any]] = defaultdict(list)
    for segment in ring.segments:
        for name, rows in load_file(ring.folder / segment.file).items():
            first = max(ring.start, segment.start) - segment.start
            arrays[name].append(rows[first : min(ring.end, segment.end) - segment.start])
    return ring.id, ring.start, ring.end, {name: np.concatenate(parts) for name, parts in arrays.items()}


def assert_same(a: Any, b: Any, at: str = "state") -> None:
    """Fail, naming the place, unless two nested states are equal bit for bit."""
    assert type(a) is type(b), f"{at}: {type(a)} against {type(b)}"
    if isinstance(a, dict):
        assert a.keys() == b.keys(), f"{at}: other keys"
        for key in a:
            assert_same(a[key], b[key], f"{at}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), f"{at}: {len(a)} against {len(b)} entries"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{at}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), f"{at} differs"
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and np.array_equal(a, b), f"{at} differs"
    else:
        assert a == b, f"{at}: {a} against {b}"


@pytest.fixture(autouse=True)
def _no_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reaches a tracking service."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


__all__ = [
    "EXACT_BACKENDS",
    "INEXACT_BACKENDS",
    "RECIPES",
    "ROOT",
    "algorithm",
    "assert_same",
    "configure",
    "episodes",
    "family",
    "final_state",
    "launch",
    "lines",
    "resume",
    "small",
    "steps",
    "train",
]
