"""Sweeps: launchers that run many jobs, sweepers that choose them, and the folder that remembers them."""

from __future__ import annotations

from hydra.core.plugins import Plugins


def register() -> None:
    """Make our plugins known to Hydra, which takes launchers and sweepers from `hydra_plugins` alone."""
    from rl.launchers.grid_sweeper import GridSweeper
    from rl.launchers.local import LocalLauncher
    from rl.launchers.optuna_sweeper import OptunaSweeper
    from rl.launchers.slurm import SlurmLauncher
    from rl.launchers.templates import MultirunTemplates

    plugins = Plugins.instance()
    plugins.register(MultirunTemplates)
    for plugin in (GridSweeper, OptunaSweeper, LocalLauncher, SlurmLauncher):
        plugins.class_name_to_class[f"hydra_plugins.rl.{plugin.__name__}"] = plugin
