"""One job of Hydra's: from the composed configuration to a finished run."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from rl import resume, rundir
from rl.config import Config
from rl.launchers.sweep import is_sweep
from rl.machine import cpus

log = logging.getLogger(__name__)


def run_job(cfg: DictConfig) -> float | None:
    """Train what `cfg` describes in Hydra's output directory, or in that of the run it resumes.

    Returns:
        The objective: mean return of the final evaluation.

    Raises:
        SystemExit: a signal stopped the run; it is saved, and the exit code is 128 + the signal's number.
    """
    hydra = HydraConfig.get()
    output = Path(hydra.runtime.output_dir)
    plan = resume.plan(cfg, list(hydra.overrides.task), output)
    directory = plan.directory or output
    done = completed(plan, directory)
    if done is not None:
        return done
    limit_threads(plan.config)
    group = directory.parent.name if is_sweep(directory.parent) else None

    from rl.experiment import Experiment  # torch is imported here

    try:
        experiment = Experiment(plan.config, directory, plan.checkpoint, group)
    except Exception as error:
        rundir.update(directory, status="failed", error=f"{type(error).__name__}: {error}")
        raise
    outcome = experiment.run()
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)
    return outcome.objective


def completed(plan: resume.Plan, directory: Path) -> float | None:
    """The objective of a run that is complete already, with a line that says so; None while there is
    something to train."""
    if plan.checkpoint is None or not (directory / "run.json").exists():
        return None
    record = rundir.read(directory)
    if record.get("status") != "completed" or record["env_steps"] < plan.config.run.total_timesteps:
        return None
    print(
        f"{directory} is complete at step {record['env_steps']:,}; total_timesteps=N with a larger N "
        f"trains on"
    )
    return float(record["result"]["objective"])


def limit_threads(config: Config) -> None:
    """Set the thread counts of torch and of the BLAS under NumPy, before torch is imported where it is not
    yet."""
    threads = min(config.run.torch_threads or cpus(), cpus())
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, str(threads))
    if config.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    import torch

    from rl.optim import start_threads

    start_threads(threads)
    if config.run.deterministic and torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
