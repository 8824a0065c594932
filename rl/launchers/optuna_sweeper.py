"""A sweeper that chooses the values as it goes, with Optuna.

A trial is one choice of values; it trains once for each of `n_seeds` seeds, and its value is the mean of
their objectives. There are no batches: as soon as a trial is over, the next is chosen. The study lies in the
sweep's folder, beside the ledger; a trial that was cut off is still running there, with the numbers of its
jobs, and `python launch.py resume=<sweep folder>` goes on with it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from rl.errors import ConfigError, one_line
from rl.launchers.display import table
from rl.launchers.search_space import Search, assignment, command
from rl.launchers.sweep_launcher import SweepLauncher, SweepStopped, check_whole
from rl.launchers.trials import Trials
from rl.schemas import nearest

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

OPTIONS = {
    "direction": ("maximize", "minimize"),
    "sampler": ("tpe", "random"),
    "pruner": ("median", "hyperband", "none"),
}


class OptunaSweeper(Sweeper):
    """Searches for the values with the best mean objective.

    Args:
        n_trials: trials of the study, those of earlier commands included.
        n_seeds: jobs a trial: the configuration's seed and those that follow it.
        n_parallel: trials at a time; None: as many as the launcher has room for.
        direction: maximize or minimize.
        sampler: tpe or random.
        pruner: median, hyperband or none.
        storage: Optuna's storage URL; None: optuna.db in the sweep's folder.
        study_name: None: the name of the sweep's folder.
        seed: of the sampler.
        params: what to search by key, in Hydra's words for sweeps; what the command line says of a key wins.
    """

    def __init__(
        self,
        n_trials: int = 20,
        n_seeds: int = 1,
        n_parallel: int | None = None,
        direction: str = "maximize",
        sampler: str = "tpe",
        pruner: str = "median",
        storage: str | None = None,
        study_name: str | None = None,
        seed: int = 1,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        self.n_trials, self.n_seeds, self.n_parallel = n_trials, n_seeds, n_parallel
        self.direction, self.sampler, self.pruner = direction, sampler, pruner
        self.storage, self.study_name, self.seed = storage, study_name, seed
        self.params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra offers, and make the launcher. Raises ConfigError for values that cannot be."""
        check_settings(vars(self))
        self.config = config
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run the study to its end.

        Returns:
            The best trial: its `trial` number, `value`, `params` and the numbers of its `jobs`.

        Raises:
            ConfigError: the launcher or the search cannot be.
            SweepStopped: a signal came; the running jobs have saved.
            SystemExit: with 1 where no trial is complete, or `fail_fast` ended the study.
        """
        assert self.config is not None
        if not isinstance(self.launcher, SweepLauncher):
            name = self.config.hydra.runtime.choices["hydra/launcher"]
            raise ConfigError(
                f"hydra/launcher={name}: the Optuna sweeper cannot stop its jobs; use hydra/launcher=local"
            )
        folder = self.launcher.sweep.folder
        OmegaConf.save(self.config, folder / "multirun.yaml")
        search = Search.of(self.params, arguments, self.n_seeds, int(self.config.seed))
        parallel = self.n_parallel or max(1, self.launcher.slots // len(search.seeds))
        trials = Trials(self._study(folder, search), search, self.launcher, self.n_trials, parallel)
        trials.private = self.storage is None
        try:
            stopped = trials.follow()
        finally:
            self.launcher.close()
        print(table(self.launcher.sweep), end="")
        if stopped is not None:
            print(f"stopped; continue with: python launch.py resume={folder}")
            raise SweepStopped(128 + stopped)
        return self._result(trials)

    def _study(self, folder: Path, search: Search) -> Study:
        """The study in its storage, a new one where there is none."""
        import optuna

        assert self.config is not None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        url = self.storage or f"sqlite:///{folder / 'optuna.db'}"
        try:
            study = optuna.create_study(
                storage=url,
                study_name=self.study_name or folder.name,
                direction=optuna.study.StudyDirection[self.direction.upper()],
                load_if_exists=True,
                pruner=pruner(self.pruner, self.config.eval.every, self.config.total_timesteps),
            )
        except Exception as error:
            raise ConfigError(
                f"hydra.sweeper.storage={url}: {one_line(error)}; null keeps the study in the sweep's folder"
            ) from error
        if study.direction.name.lower() != self.direction:
            raise ConfigError(
                f"hydra.sweeper.direction={self.direction}: the study {study.study_name} is there already, "
                f"and has direction={study.direction.name.lower()}"
            )
        study.sampler = sampler(self.sampler, self.seed, len(study.get_trials(deepcopy=False)))
        search.check_against(study.get_trials(deepcopy=False))
        return study

    def _result(self, trials: Trials) -> dict[str, Any]:
        """Print the best trial, and give it."""
        folder = trials.sweep.folder
        if trials.failed_fast:
            print(f"fail_fast ended the study; go on with: python launch.py resume={folder}")
            raise SystemExit(1)
        try:
            best = trials.study.best_trial
        except ValueError:  # Optuna's word for a study without a complete trial
            print(
                f"no trial is complete; go on with: python launch.py resume={folder} (retry_failed=true for "
                f"those that failed, hydra.sweeper.n_trials=N for more)"
            )
            raise SystemExit(1) from None
        numbers = best.user_attrs.get("jobs", []) if best.user_attrs.get("sweep") == folder.name else []
        print(f"best trial {best.number}: {best.value:,.2f}")
        for key, value in best.params.items():
            print(f"  {assignment(key, value)}")
        jobs = trials.sweep.jobs()
        for number in numbers:
            print(f"  {jobs[number].path}")
        options = [word for word in trials.sweep.record["options"] if word not in ("-m", "--multirun")]
        print(f"train it with: {command(options, trials.search, best.params)}")
        return {"trial": best.number, "value": best.value, "params": best.params, "jobs": numbers}


# --- the settings -----------------------------------------------------------------------------------


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the sweeper's settings can be, and Optuna is installed."""
    for key in ("n_trials", "n_seeds", "n_parallel"):
        check_whole(f"hydra.sweeper.{key}", settings[key], 1, or_null=key == "n_parallel")
    check_whole("hydra.sweeper.seed", settings["seed"], 0)
    for key, known in OPTIONS.items():
        if settings[key] not in known:
            hint = nearest(str(settings[key]), known)
            raise ConfigError(f"hydra.sweeper.{key}={settings[key]}: choose one of {', '.join(known)}{hint}")
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("hydra/sweeper=optuna needs the package optuna: pip install -e '.[optuna]'")


def sampler(name: str, seed: int, trials: int) -> BaseSampler:
    """The sampler of that name. A study that goes on after `trials` trials draws other values than it did at
    first."""
    import numpy as np
    from optuna.samplers import RandomSampler, TPESampler

    drawn = int(np.random.SeedSequence([seed, trials]).generate_state(1)[0])
    if name == "random":
        return RandomSampler(seed=drawn)
    return TPESampler(seed=drawn, constant_liar=True)  # trials run side by side: keep them apart


def pruner(name: str, every: int, total: int) -> BasePruner:
    """The pruner of that name, for evaluations each `every` of `total` env steps."""
    from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner

    if name == "none" or every == 0:
        return NopPruner()
    if name == "hyperband":
        return HyperbandPruner(min_resource=every, max_resource=max(every, total))
    return MedianPruner()
