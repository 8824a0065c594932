"""Where a run starts: afresh, where an earlier process of it stopped, or as a branch of another run's
checkpoint.

`resume=auto` continues in a run directory that already has a checkpoint; `resume=<run>` continues that run;
`resume=<checkpoint>` continues in place when it is the run's newest and otherwise branches into a directory
of its own, so that what was trained after that checkpoint is kept. The configuration is the run's; only
MUTABLE keys may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from rl import checkpoint, rundir
from rl.config import Config, check
from rl.errors import ConfigError
from rl.schemas import flatten

MUTABLE = ("total_timesteps", "logger", "eval", "checkpoint", "device", "torch_threads", "capture_video")
# They say where to start and how to name it, not what to train.
UNRECORDED = ("resume", "warm_start", "run_name", "tags", "fail_fast", "retry_failed")


@dataclass
class Plan:
    """What a process is to run, from which checkpoint (None: afresh), and in which directory (None: a new
    one)."""

    config: Config
    checkpoint: Path | None = None
    directory: Path | None = None


def plan(cfg: DictConfig, overrides: list[str], directory: Path | None) -> Plan:
    """Decide where the run that `cfg` describes starts.

    Args:
        cfg: the composed configuration, without Hydra's own node.
        overrides: what stood on the command line, `key=value` each.
        directory: the run directory, where it has been chosen already.

    Raises:
        ConfigError: the path to resume from is not there, holds no usable checkpoint or is being trained
            right now; or a key was changed that a resumed run may not change.
    """
    resume = str(cfg.resume)
    if resume == "never" or (resume == "auto" and directory is None):
        return Plan(_with_warm_start(check(cfg)), directory=directory)
    if resume == "auto":
        assert directory is not None
        newest = checkpoint.newest(directory / "checkpoints")
        if newest is None:
            return Plan(_with_warm_start(check(cfg)), directory=directory)
        refuse_if_alive(directory)
        return Plan(_continued(newest, cfg, None), newest, directory)
    run, chosen = locate(resume)
    config = _continued(chosen, cfg, overrides)
    if run is not None and chosen == checkpoint.newest(run / "checkpoints"):
        refuse_if_alive(run)
        return Plan(config, chosen, run)
    return Plan(config, chosen, directory)


def _with_warm_start(config: Config) -> Config:
    if config.run.warm_start is not None:
        locate(config.run.warm_start, key="warm_start")
    return config


def locate(path: str, key: str = "resume") -> tuple[Path | None, Path]:
    """The run directory (None for a checkpoint that lies on its own) and the checkpoint that `path` names.

    Raises:
        ConfigError: nothing is there, or nothing that can be loaded.
    """
    given = Path(path).expanduser().resolve()
    what = "run, checkpoint or sweep" if key == "resume" else "run or checkpoint"
    if not given.exists():
        raise ConfigError(
            f"{key}={path}: there is no such {what}; `rl show` on a folder below runs/ lists what is there"
        )
    if (given / "manifest.json").exists():
        try:
            checkpoint.manifest(given)
        except checkpoint.CheckpointError as error:
            raise ConfigError(
                f"{key}={path}: {error}; {key}={given.parent.parent} takes the newest usable one"
            ) from error
        inside_run = given.parent.name == "checkpoints" and (given.parent.parent / "run.json").exists()
        return (given.parent.parent if inside_run else None), given
    newest = checkpoint.newest(given / "checkpoints")
    if newest is None:
        raise ConfigError(
            f"{key}={path}: no usable checkpoint below {given / 'checkpoints'}; name a run directory that "
            f"has one{', or the folder of a sweep, which has a sweep.json' if key == 'resume' else ''}"
        )
    return given, newest


def refuse_if_alive(run: Path) -> None:
    """Raise ConfigError when another process is training the run at this moment."""
    record = rundir.read(run) if (run / "run.json").exists() else {}
    if record.get("status") == "running" and rundir.process_exists(record):
        raise ConfigError(
            f"resume={run}: it is being trained by process {record['pid']} on {record['host']}; stop "
            f"that one first"
        )


def _continued(path: Path, cfg: DictConfig, overrides: list[str] | None) -> Config:
    """The saved configuration with the mutable keys that were given: by `overrides`, or (None) wherever `cfg`
    differs."""
    saved: dict[str, Any] = checkpoint.manifest(path)["config"]
    composed: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    if overrides is None:
        composed = check(cfg).resolved
        keys = [key for key in _leaves(composed) if _select(composed, key) != _select(saved, key)]
        keys += [key for key in _leaves(saved) if key not in dict(flatten(composed))]
    else:
        keys = [override.key_or_group for override in OverridesParser.create().parse_overrides(overrides)]
    for key in keys:
        root = key.split(".")[0]
        if root in UNRECORDED or root == "hydra":
            continue
        if root not in MUTABLE:
            raise ConfigError(
                f"{key} cannot change in a resumed run (it has {key}={_select(saved, key)}); "
                f"{', '.join(MUTABLE)} can, and warm_start={path} starts a new run from its networks"
            )
        if root == "logger":
            saved["logger"] = composed["logger"]
        elif "." in key:
            saved[root] = {**saved[root], key.split(".", 1)[1]: _select(composed, key)}
        else:
            saved[root] = composed[root]
    return check(saved)


def _leaves(tree: Mapping[str, Any]) -> list[str]:
    return [key for key, value in flatten(tree) if not (isinstance(value, Mapping) and value)]


def _select(tree: Mapping[str, Any], key: str) -> Any:
    return dict(flatten(tree)).get(key)
