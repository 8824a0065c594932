"""Where Hydra finds the group `multirun_templates`: at the repository root, whatever folder one works in.

The root as a plain entry of the search path would make a group of every folder in it. So this entry has a
scheme of its own, which shows one folder only.
"""

from __future__ import annotations

from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

ROOT = Path(__file__).resolve().parent.parent.parent
GROUP = "multirun_templates"


class TemplateSource(FileConfigSource):
    """The folder `multirun_templates` of the folder that `templates://` names, and nothing beside it."""

    @staticmethod
    def scheme() -> str:
        """The part before `://` of its entry in the search path."""
        return "templates"

    def is_group(self, config_path: str) -> bool:
        """Whether this is the top, the group or a folder in it."""
        return (not config_path or _inside(config_path)) and super().is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        """Whether this is a file of the group."""
        return _inside(config_path) and super().is_config(config_path)

    def available(self) -> bool:
        """Whether the group is there."""
        return self.is_group(GROUP)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The names in a folder, sorted; at the top that of the group, if it is there."""
        if config_path:
            return super().list(config_path, results_filter)
        return [GROUP] if self.available() and results_filter != ObjectType.CONFIG else []


class MultirunTemplates(SearchPathPlugin):
    """Adds the group `multirun_templates` to the search path; to be registered with Hydra's `Plugins`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra for every search path that it makes."""
        Plugins.instance().register(TemplateSource)
        search_path.append("rl", f"{TemplateSource.scheme()}://{ROOT}")


def _inside(config_path: str) -> bool:
    return config_path.split("/")[0] == GROUP
