"""An algorithm from its configuration, on a device, and the weights of a checkpoint into it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from rl import checkpoint
from rl.algos import Algorithm, Context
from rl.config import Config, algorithm_class
from rl.resume import locate
from rl.seeding import Streams

log = logging.getLogger(__name__)


def device(name: str) -> torch.device:
    """The torch device for `auto`, `cpu`, `cuda` or `cuda:N`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def build_algorithm(config: Config, streams: Streams, where: torch.device) -> Algorithm:
    """The algorithm that the configuration names, on its training envs."""
    run = config.run
    if run.precision == "bf16" and where.type == "cpu" and not cpu_computes_bf16():
        log.warning("precision=bf16: this CPU has neither AMX nor AVX512-bf16; precision=fp32 will be faster")
    context = Context(run.total_timesteps, streams, where, run.precision, run.compile)
    algorithm: Algorithm = algorithm_class(config.algo_target)(
        config.algo, config.env, config.network, context
    )
    return algorithm


def cpu_computes_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU has instructions for bfloat16: AMX, AVX512-bf16 or Arm's; True where the system does
    not tell."""
    if not cpuinfo.exists():
        return True
    flags = set(cpuinfo.read_text().split())
    return bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})


def warm_start(algo: Algorithm, path: str) -> None:
    """Take over networks and normalisers, and nothing else, from a run directory or checkpoint."""
    load_weights(algo, checkpoint.load(locate(path, key="warm_start")[1], rings=False)[0])


def load_weights(algo: Algorithm, state: dict[str, Any]) -> None:
    """Put the networks and normalisers of a checkpoint's state into `algo`, leaving its other state as it
    is."""
    own = algo.state_dict()
    own.pop("replay", None)  # there is nothing in it yet
    saved = state["algorithm"]
    algo.load_state_dict({**own, "networks": saved["networks"], "normalizers": saved["normalizers"]})
