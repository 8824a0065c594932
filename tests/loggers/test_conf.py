"""The `logger` group composes into a mapping of loggers."""

from __future__ import annotations

import shutil
from pathlib import Path

import hydra
import pytest

CONF = Path(__file__).parents[2] / "conf" / "logger"


class TestGroup:
    @pytest.mark.parametrize(
        ("overrides", "expected"),
        [
            ([], {"tensorboard": "TensorBoardLogger"}),
            (["logger=wandb"], {"wandb": "WandbLogger"}),
            (["logger=[tensorboard,csv]"], {"tensorboard": "TensorBoardLogger", "csv": "CSVLogger"}),
            (
                ["logger=[csv,wandb]", "logger.wandb.mode=offline"],
                {"csv": "CSVLogger", "wandb": "WandbLogger"},
            ),
            (["logger=none"], {}),
        ],
    )
    def test_composes(self, tmp_path: Path, overrides: list[str], expected: dict[str, str]) -> None:
        shutil.copytree(CONF, tmp_path / "logger")
        (tmp_path / "config.yaml").write_text(
            "defaults:\n  - _self_\n  - logger: [tensorboard]\nlogger: {}\n"
        )
        with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
            cfg = hydra.compose("config", overrides)
        loggers = hydra.utils.instantiate(cfg.logger, _convert_="all")
        assert {name: type(logger).__name__ for name, logger in loggers.items()} == expected
        for name, logger in loggers.items():
            if name != "wandb":
                logger.check()
