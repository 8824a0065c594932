"""What a checkpoint of a full replay buffer costs: seconds that training waits, and bytes written.

python benchmarks/checkpoints.py                                  TD3 on HalfCheetah-v4, a million transitions
python benchmarks/checkpoints.py algo=dqn algo.buffer_size=1e6    any off-policy recipe, with overrides

The buffer is filled with random transitions. The first checkpoint of a full buffer writes all of it; those of
a run write what `checkpoint.every` env steps added, and link the rest. The folder lies under the current
directory, so that it is the disk that runs would be written to.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Table

from rl import checkpoint
from rl.build import build_algorithm
from rl.commandline import CONF, opened
from rl.config import check, register_schema
from rl.envs.vector import Step
from rl.seeding import Streams

ROUNDS = 3


def fill(buffer: Any, rows: int, rng: np.random.Generator) -> None:
    """Add `rows` vector steps of random numbers."""
    arrays = buffer.arrays
    observations = rng.integers(0, 200, (64, *arrays["obs"].shape[1:])).astype(arrays["obs"].dtype)
    actions = rng.integers(0, 2, (64, *arrays["actions"].shape[1:])).astype(arrays["actions"].dtype)
    rewards = rng.random((64, buffer.num_envs), np.float32)
    ended = np.zeros(buffer.num_envs, np.bool_)
    for row in range(rows):
        obs, next_obs = observations[row % 64], observations[(row + 1) % 64]
        buffer.add(obs, actions[row % 64], Step(next_obs, rewards[row % 64], ended, ended, next_obs, []))


def written(path: Path) -> int:
    """Bytes of the files in a checkpoint that no earlier one holds."""
    return sum(file.stat().st_size for file in path.iterdir() if file.stat().st_nlink == 1)


def main(overrides: list[str]) -> None:
    """Fill the buffer of the recipe, then time checkpoints and a resume."""
    register_schema()
    if not any(override.startswith("algo=") for override in overrides):
        overrides = ["algo=td3_continuous_action", *overrides]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = check(compose("config", opened(overrides)))
    algo: Any = build_algorithm(config, Streams(1), torch.device("cpu"))
    buffer, rng = algo.experience.buffer, np.random.default_rng(1)
    every = config.run.checkpoint.every // buffer.num_envs
    fill(buffer, buffer.rows, rng)
    folder = Path(tempfile.mkdtemp(prefix=".checkpoints_", dir="."))
    table = Table("checkpoint", "seconds", "written, MB")
    try:
        for number in range(1 + ROUNDS):
            if number:
                fill(buffer, every, rng)
            start = time.perf_counter()
            newest = checkpoint.save(folder, algo.state_dict(), env_steps=number + 1, config={}, keep=3)
            seconds = time.perf_counter() - start
            what = f"{every * buffer.num_envs:,} new steps" if number else f"all {len(buffer):,} transitions"
            table.add_row(what, f"{seconds:.2f}", f"{written(newest) / 1e6:.1f}")
        start = time.perf_counter()
        algo.load_state_dict(checkpoint.load(folder / f"step_{1 + ROUNDS:09d}")[0])
        table.add_row("read it and resume", f"{time.perf_counter() - start:.2f}", "")
    finally:
        shutil.rmtree(folder)
        algo.close()
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
