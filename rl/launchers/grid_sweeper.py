"""The default sweeper: every combination of the swept values, all of them handed to the launcher at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from rl.launchers.display import table
from rl.launchers.sweep import Sweep
from rl.launchers.sweep_launcher import SweepLauncher


class GridSweeper(Sweeper):
    """Hydra's basic sweeper, but that one failed job is no reason to lose the others' results.

    Args:
        params: swept values by key, as on the command line, which wins.
    """

    def __init__(self, params: Mapping[str, str] | None = None) -> None:
        self.params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra offers, and make the launcher."""
        self.config = config
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run the jobs; their ends in Hydra's terms.

        Raises:
            SystemExit: with 1 where a job failed, after the table that says which.
        """
        assert self.config is not None and self.launcher is not None
        folder = Path(str(self.config.hydra.sweep.dir))
        OmegaConf.save(self.config, folder / "multirun.yaml")
        results = self.launcher.launch(grid(self.params, arguments), initial_job_idx=0)
        if isinstance(self.launcher, SweepLauncher) and self.launcher.waits:
            print(table(self.launcher.sweep), end="")
        if any(result.status == JobStatus.FAILED for result in results):
            failed = any(job.state == "failed" for job in Sweep(folder).jobs().values())
            again = " (retry_failed=true runs those that failed again)" if failed else ""
            print(f"not every job is complete; go on with: python launch.py resume={folder}{again}")
            raise SystemExit(1)
        return [results]


def grid(params: Mapping[str, str], arguments: Sequence[str]) -> list[list[str]]:
    """The overrides of each job: every combination of the values swept in `arguments`, and in `params` where
    the former do not name the key."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    words = [*(f"{key}={value}" for key, value in params.items()), *arguments]
    parsed = OverridesParser.create().parse_overrides(words)
    return BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]
