"""Sweeps: launchers that run many jobs, sweepers that choose them, and the folder that remembers them."""

from __future__ import annotations

PREFIX = "hydra_plugins.rl."
"""What Hydra has to find in the `_target_` of ours."""


def register() -> None:
    """Make our plugins known to Hydra, which takes launchers and sweepers from `hydra_plugins` alone."""
    from hydra.core.plugins import Plugins

    from rl.launchers.grid_sweeper import GridSweeper
    from rl.launchers.local import LocalLauncher
    from rl.launchers.optuna_sweeper import OptunaSweeper
    from rl.launchers.ray_launcher import RayLauncher
    from rl.launchers.slurm import SlurmLauncher
    from rl.launchers.templates import MultirunTemplates

    plugins = Plugins.instance()
    plugins.register(MultirunTemplates)
    for plugin in (GridSweeper, OptunaSweeper, LocalLauncher, RayLauncher, SlurmLauncher):
        plugins.class_name_to_class[f"{PREFIX}{plugin.__name__}"] = plugin
