"""Weights & Biases: online, offline (upload later with `wandb sync`) or disabled."""

from __future__ import annotations

import importlib.util
import logging
import netrc
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rl.errors import ConfigError
from rl.loggers import RunInfo, StepMeans

log = logging.getLogger(__name__)

MODES = ("online", "offline", "disabled")


@dataclass
class WandbLogger:
    """One W&B run for one run directory, under one id for as long as it is resumed.

    A run that an agent of a W&B sweep has started (`WANDB_SWEEP_ID` is set) belongs to that sweep: project,
    entity and id are those of the agent's environment, the display name is W&B's.
    """

    project: str
    entity: str | None
    group: str | None
    mode: str
    name: str | None
    notes: str | None
    _run: Any = field(default=None, init=False, repr=False)
    _id: str | None = field(default=None, init=False, repr=False)
    _sweep: dict[str, str | None] | None = field(default=None, init=False, repr=False)  # W&B's own, if any
    _pending: StepMeans = field(default_factory=StepMeans, init=False, repr=False)
    _next_step: int = field(default=0, init=False, repr=False)  # W&B drops what comes below

    def check(self) -> None:
        """Raises ConfigError for an unknown mode, without wandb, or online without any way to log in."""
        if self.mode not in MODES:
            raise ConfigError(f"logger.wandb.mode={self.mode}: must be one of {', '.join(MODES)}")
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError("logger=wandb needs the package wandb: pip install -e '.[wandb]'")
        if self.mode == "online" and not _has_api_key() and not sys.stdin.isatty():
            raise ConfigError(
                "logger.wandb.mode=online finds no API key: run `wandb login`, set WANDB_API_KEY, "
                "or use logger.wandb.mode=offline"
            )

    def open(self, run: RunInfo, state: dict[str, Any] | None) -> None:
        """Create the W&B run, or continue that of `state`; finishes one left open in this process."""
        import wandb

        self._id = state["id"] if state else None
        self._sweep = state.get("sweep") if state else None
        self._pending = StepMeans()
        self._run = wandb.init(
            **self._identity(run),
            mode=self.mode,  # type: ignore[arg-type]  # a string in YAML; check() knows the three
            notes=self.notes,
            tags=run.tags,
            config=run.config,
            dir=str(run.path),
            reinit="finish_previous",
            # The terminal belongs to our own progress display, and log.txt has what it showed.
            # (Without a key it must speak: it asks for one.)
            settings=wandb.Settings(silent=self.mode != "online" or _has_api_key(), console="off"),
        )
        self._id = self._run.id
        if _under_agent():
            self._sweep = {"project": self._run.project, "entity": self._run.entity or None}
        self._next_step = self._run.starting_step  # 0 unless the service knows of earlier steps
        if self.mode == "online":
            log.info("wandb: %s", self._run.url)
        elif self.mode == "offline":
            log.info("wandb: offline, upload with `wandb sync %s`", self._run.settings.sync_dir)

    def log(self, env_steps: int, metrics: dict[str, float]) -> None:
        """Record scalars at W&B step `env_steps`; of several values of one metric at one step, the mean."""
        finished = self._pending.add(env_steps, metrics)
        if finished is not None:
            self._send(*finished)

    def video(self, env_steps: int, path: Path) -> None:
        """Upload the mp4 as `eval/video`."""
        import wandb

        self.flush()
        self._send(env_steps, {"eval/video": wandb.Video(str(path), format="mp4")})

    def flush(self) -> None:
        """Hand what is pending to W&B's own process, which writes and uploads it."""
        metrics = self._pending.take()
        if metrics:
            self._send(self._pending.env_steps, metrics)

    def state_dict(self) -> dict[str, Any]:
        """`id`: the W&B run id. `sweep`: of a run of a W&B sweep, the sweep's `project` and `entity`; else
        None."""
        self.flush()
        return {"id": self._id, "sweep": self._sweep}

    def close(self, status: str) -> None:
        """Finish: completed as such, failed with exit code 1, anything else as preempted, to be resumed.

        A stopped run of a W&B sweep counts as failed: agents would take up a preempted one again, although
        its sweep may have stopped it for good.
        """
        if self._run is None:
            return
        self.flush()
        run, self._run = self._run, None
        if status not in ("completed", "failed") and self._sweep is None:
            run.mark_preempting()  # with a non-zero exit code: state "preempted" rather than "failed"
        run.finish(exit_code=0 if status == "completed" else 1)

    def _identity(self, run: RunInfo) -> dict[str, Any]:
        """What `wandb.init` is told of where the run belongs: project, entity, group, name, id, whether to
        continue it."""
        if _under_agent():  # wandb takes the rest from the environment, and would warn of ours
            return {"group": self.group, "name": self.name, "resume": "allow"}
        if self._sweep is not None:  # an agent's, continued without one
            return {
                **self._sweep,
                "group": self.group,
                "name": self.name,
                "id": self._id,
                "resume": "allow",
            }
        return {
            "project": self.project,
            "entity": self.entity,
            "group": self.group if self.group is not None else run.group,
            "name": self.name if self.name is not None else run.name,
            "id": self._id,
            "resume": "allow" if self._id else None,
        }

    def _send(self, env_steps: int, metrics: dict[str, Any]) -> None:
        """Log at `env_steps`, unless W&B has this step from before the run was resumed."""
        if env_steps >= self._next_step:
            self._next_step = env_steps
            self._run.log(metrics, step=env_steps)


def _under_agent() -> bool:
    """Whether an agent of a W&B sweep has started this process."""
    return bool(os.environ.get("WANDB_SWEEP_ID"))


def _has_api_key() -> bool:
    """Whether W&B will find credentials: in the environment or the netrc file (without importing wandb)."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = os.environ.get("NETRC")
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    for path in [Path(named).expanduser()] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            if netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
