"""The experiment: everything one run holds, and the one training loop."""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from rl import checkpoint, evaluation, machine, provenance, rundir
from rl.algos import Algorithm
from rl.build import build_algorithm, device, warm_start
from rl.config import Config
from rl.errors import DiskFullError, NonFiniteError
from rl.loggers import Logger, RunInfo
from rl.metrics import Metrics
from rl.progress import Progress
from rl.seeding import Streams, global_generators_state, seed_global_generators, set_global_generators_state
from rl.signals import StopSignals

log = logging.getLogger(__name__)

RECENT = 100  # episodes in the mean that is shown


@dataclass
class Outcome:
    """How a process left its run: the status, and the objective where the run is complete."""

    status: str
    env_steps: int
    objective: float | None = None
    exit_code: int = 0


@dataclass
class Experiment:
    """One run: an algorithm on its envs, in a directory, with loggers, checkpoints and evaluations.

    Args:
        config: the checked configuration.
        directory: the run directory; it exists.
        resumed_from: the checkpoint to continue from, None to start afresh.
        group: the sweep that the run belongs to, for trackers that group runs.
    """

    config: Config
    directory: Path
    resumed_from: Path | None = None
    group: str | None = None
    algo: Algorithm = field(init=False)

    def __post_init__(self) -> None:
        run = self.config.run
        self.streams = Streams(run.seed)
        seed_global_generators(self.streams)
        self.device = device(run.device)
        self.algo = build_algorithm(self.config, self.streams, self.device)
        self.loggers: dict[str, Logger] = self.config.loggers
        self.branched = self.resumed_from is not None and self.resumed_from.parent.parent != self.directory
        if self.branched:
            self._copy_history()
        self.files = rundir.RunFiles(self.directory)
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.seconds_before = 0.0  # trained by earlier processes
        self.started = time.perf_counter()
        self.next_checkpoint = 0
        self.next_evaluation = run.eval.every

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Train to the end or to a signal; whatever happens, the record says how the run stands and the sinks
        are closed."""
        status = "failed"
        try:
            with StopSignals() as self.signals:
                self._start()
                with Progress(self.config.run.total_timesteps, self.algo.env_steps) as self.progress:
                    log.info("run directory: %s", self.directory)
                    for earlier in self.recent:
                        self.progress.update(self.algo.env_steps, earlier)
                    self._train()
                    episodes = None if self.signals.requested else self._final_evaluation()
                    outcome = self._finish(episodes)
                status = outcome.status
                return outcome
        except KeyboardInterrupt:
            status = "interrupted"
            rundir.update(self.directory, status=status)
            log.warning("interrupted at once, nothing saved since the last checkpoint: %s", self._advice())
            raise
        except Exception as error:
            self._record_failure(error)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFullError(f"no space left below {self.directory}: {self._advice()}") from error
            if isinstance(error, NonFiniteError):
                raise NonFiniteError(
                    f"{error} at env step {self.algo.env_steps}: {self._advice()}"
                ) from error
            raise
        finally:
            self._close(status)

    def _train(self) -> None:
        """Iterate; log, evaluate, checkpoint and heed signals between iterations, nowhere else."""
        total = self.config.run.total_timesteps
        machine.keep_freed_memory()
        self.started = time.perf_counter()
        while True:
            if 0 < self.next_evaluation <= self.algo.env_steps < total:
                self._periodic_evaluation()
            stop = self.algo.env_steps >= total or self.signals.requested is not None
            if stop or self.algo.env_steps >= self.next_checkpoint:
                self._save()
            if stop:
                return
            self._log(self.algo.iterate())

    @property
    def seconds(self) -> float:
        """Wall seconds of training so far, over all processes of the run."""
        return self.seconds_before + time.perf_counter() - self.started

    def _log(self, metrics: Metrics) -> None:
        """Hand one iteration to the files, the loggers and the progress display."""
        steps, seconds, scalars = self.algo.env_steps, self.seconds, metrics.scalars
        scalars["charts/SPS"] = steps / seconds
        for episode in metrics.episodes:
            self.files.episode(
                episode.env_steps, episode.env, episode.episodic_return, episode.length, seconds
            )
            self.recent.append(episode.episodic_return)
            self.progress.update(episode.env_steps, episode.episodic_return)
            charts = {
                "charts/episodic_return": episode.episodic_return,
                "charts/episodic_length": float(episode.length),
            }
            for logger in self.loggers.values():
                logger.log(episode.env_steps, charts)
        for logger in self.loggers.values():
            logger.log(steps, scalars)
        if metrics.episodes:
            scalars["charts/episodic_return"] = float(np.mean([e.episodic_return for e in metrics.episodes]))
            scalars["charts/episodic_length"] = float(np.mean([e.length for e in metrics.episodes]))
        self.files.metrics(steps, scalars)
        self.files.flush()
        self.progress.update(steps)

    # --- evaluation -------------------------------------------------------------------------------

    def _periodic_evaluation(self) -> None:
        """Evaluate unless a signal cuts it short: then it is done when the run is resumed."""
        if self._evaluate() is not None:
            self.next_evaluation = next_multiple(self.config.run.eval.every, self.algo.env_steps)

    def _evaluate(self) -> list[evaluation.EvaluationEpisode] | None:
        """Play and record the evaluation that belongs to this env step; its seed is a function of the step
        alone."""
        run, steps, start = self.config.run, self.algo.env_steps, time.perf_counter()
        video = self.directory / "videos" / f"step_{steps:09d}.mp4"
        generators = global_generators_state()
        episodes = evaluation.evaluate(
            self.algo.policy(),
            self.config.env,
            self.streams.sequence("evaluation", steps),
            episodes=run.eval.episodes,
            deterministic=run.eval.deterministic,
            videos={0: video} if run.capture_video else None,
            stop=lambda: self.signals.requested is not None,
        )
        set_global_generators_state(generators)
        if episodes is None:
            return None
        scalars = {**evaluation.summary(episodes), "time/eval": time.perf_counter() - start}
        for episode in episodes:
            self.files.evaluation(steps, *episode)
        self.files.metrics(steps, scalars)
        for logger in self.loggers.values():
            logger.log(steps, scalars)
            if run.capture_video:
                logger.video(steps, video)
        log.info(
            "evaluation at step %s: return %.2f ± %.2f over %d episodes",
            f"{steps:,}", scalars["eval/episodic_return"], scalars["eval/episodic_return_std"], len(episodes),
        )  # fmt: skip
        return episodes

    def _final_evaluation(self) -> list[evaluation.EvaluationEpisode] | None:
        """The evaluation that gives the objective."""
        self.trained_seconds = self.seconds
        return self._evaluate()

    # --- starting and stopping --------------------------------------------------------------------

    def _start(self) -> None:
        """Open the directory, the state to continue from, and the sinks."""
        record = rundir.read(self.directory) if (self.directory / "run.json").exists() else {}
        self.provenance = provenance.collect()
        started = {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "env_steps": 0,
            "command": self.provenance["command"],
            "notes": [],
        }
        logger_states: dict[str, Any] = {}
        if self.resumed_from is not None:
            state, manifest = checkpoint.load(self.resumed_from)
            started["notes"] = self.algo.load_state_dict(state["algorithm"])
            started["env_steps"] = self.algo.env_steps
            logger_states = self._restore(state["experiment"], record, manifest["env_steps"])
            if self.branched:  # a run of its own, for the trackers too
                started["branched_from"], logger_states = str(self.resumed_from), {}
            log.info("resumed at step %s from %s", f"{self.algo.env_steps:,}", self.resumed_from)
        else:
            self.files.rewind({})
            if self.config.run.warm_start is not None:
                warm_start(self.algo, self.config.run.warm_start)
        for note in started["notes"]:
            log.warning(note)
        self._record_start(record, started)
        info = RunInfo(
            path=self.directory,
            name=self.directory.name,
            config=self.config.resolved,
            tags=list(self.config.run.tags),
            group=self.group,
            env_steps=self.algo.env_steps,
        )
        for name, logger in self.loggers.items():
            logger.open(info, logger_states.get(name))

    def _copy_history(self) -> None:
        """Take along what the other run measured up to its checkpoint; `_restore` cuts off what came
        after."""
        assert self.resumed_from is not None
        for name in rundir.HEADERS:
            source = self.resumed_from.parent.parent / name
            if source.exists() and not (self.directory / name).exists():
                shutil.copyfile(source, self.directory / name)

    def _record_start(self, record: dict[str, Any], started: dict[str, Any]) -> None:
        """Write what identifies and reproduces the run: configuration, provenance, the code's difference from
        its commit."""
        from omegaconf import OmegaConf

        rundir.replace_text(
            self.directory / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(self.config.resolved))
        )
        difference = provenance.diff()
        if difference:
            rundir.replace_text(self.directory / f"code_{len(record.get('starts', []))}.diff", difference)
        rundir.update(
            self.directory,
            status="running",
            env_steps=self.algo.env_steps,
            total_timesteps=self.config.run.total_timesteps,
            algo=self.config.algo_target.rpartition(".")[2],
            env_id=self.config.env.id,
            seed=self.config.run.seed,
            tags=list(self.config.run.tags),
            device=str(self.device),
            starts=[*record.get("starts", []), started],
            error=None,
            provenance=self.provenance,
            **rundir.process_identity(),
        )

    def _restore(self, saved: dict[str, Any], record: dict[str, Any], env_steps: int) -> dict[str, Any]:
        """Continue this object's own counters and files; returns the loggers' states."""
        positions = saved["positions"]
        if record.get("status") == "completed" and record.get("env_steps") == env_steps:
            positions = record["positions"]  # keep what the final evaluation wrote after the last checkpoint
        self.files.rewind(positions)
        self.recent.extend(saved["recent_returns"])
        self.seconds_before = saved["seconds"]
        every = self.config.run.eval.every
        same = every == saved["eval_every"]
        self.next_evaluation = saved["next_evaluation"] if same else next_multiple(every, env_steps)
        self.next_checkpoint = next_multiple(self.config.run.checkpoint.every, env_steps)
        set_global_generators_state(saved["generators"])
        return dict(saved["loggers"])

    def _save(self) -> None:
        """Write a checkpoint of this moment and say in the record how far the run is."""
        run, steps = self.config.run, self.algo.env_steps
        algorithm = self.algo.state_dict()
        if not run.checkpoint.replay:
            algorithm.pop("replay", None)
        state = {
            "algorithm": algorithm,
            "experiment": {
                "positions": self.files.positions(),
                "loggers": {name: logger.state_dict() for name, logger in self.loggers.items()},
                "recent_returns": list(self.recent),
                "seconds": self.seconds,
                "next_evaluation": self.next_evaluation,
                "eval_every": run.eval.every,
                "generators": global_generators_state(),
            },
        }
        path = checkpoint.save(
            self.directory / "checkpoints",
            state,
            env_steps=steps,
            config=self.config.resolved,
            keep=run.checkpoint.keep,
        )
        self.next_checkpoint = next_multiple(run.checkpoint.every, steps)
        rundir.update(self.directory, env_steps=steps, train_seconds=self.seconds, checkpoint=path.name)
        for logger in self.loggers.values():
            logger.flush()

    def _finish(self, episodes: list[evaluation.EvaluationEpisode] | None) -> Outcome:
        """Record how the run ended."""
        steps = self.algo.env_steps
        if episodes is None:
            status, exit_code = self.signals.status, self.signals.exit_code
            assert status is not None and exit_code is not None
            rundir.update(self.directory, status=status, env_steps=steps)
            log.info(
                "%s at step %s, saved; continue with: python launch.py resume=%s",
                status,
                f"{steps:,}",
                self.directory,
            )
            return Outcome(status, steps, exit_code=exit_code)
        result = evaluation.summary(episodes)
        objective = result["eval/episodic_return"]
        training = float(np.mean(self.recent)) if self.recent else None
        rundir.update(
            self.directory,
            status="completed",
            env_steps=steps,
            train_seconds=self.trained_seconds,
            positions=self.files.positions(),
            result={"objective": objective, **result, "recent_training_return": training},
        )
        log.info(
            "completed: %s steps in %.0f s, objective %.2f; %s",
            f"{steps:,}", self.trained_seconds, objective, self.directory,
        )  # fmt: skip
        return Outcome("completed", steps, objective)

    def _record_failure(self, error: Exception) -> None:
        """Say in the record what went wrong and where; the disk may be what failed, so this must not hide the
        error."""
        steps = self.algo.env_steps
        log.error("failed at step %s: %s: %s", f"{steps:,}", type(error).__name__, error)
        try:
            rundir.update(
                self.directory, status="failed", error=f"{type(error).__name__}: {error}", failed_at=steps
            )
        except OSError as second:
            log.error("run.json could not be updated: %s", second)

    def _advice(self) -> str:
        """Where a run that failed can be taken up again."""
        return f"its last good checkpoint is {checkpoint.newest(self.directory / 'checkpoints')}"

    def _close(self, status: str) -> None:
        """Close sinks, files and envs, each of them whatever happens to the others."""
        try:
            with ExitStack() as stack:
                stack.callback(self.algo.close)
                stack.callback(self.files.close)
                for logger in self.loggers.values():
                    stack.callback(logger.close, status)
        except Exception as error:
            if status != "failed":
                raise
            log.error("while closing after the failure: %s", error)  # which is the one to be shown


def next_multiple(every: int, steps: int) -> int:
    """The first multiple of `every` beyond `steps`: when what happens every so often is due; 0 for never."""
    return (steps // every + 1) * every if every else 0
