"""The table of metrics, its growing header and its truncation."""

from __future__ import annotations

import csv
import logging
import math
from pathlib import Path

import pytest

from rl.loggers import RunInfo
from rl.loggers.csv import CSVLogger


def opened(path: Path, env_steps: int = 0, state: dict | None = None) -> CSVLogger:
    logger = CSVLogger("metrics.csv")
    logger.open(RunInfo(path, "run", {}, env_steps=env_steps), state)
    return logger


def lines(path: Path) -> list[str]:
    return (path / "metrics.csv").read_text().splitlines()


class TestRows:
    def test_columns_grow_and_earlier_rows_stay_empty_there(self, tmp_path: Path) -> None:
        logger = opened(tmp_path)
        logger.log(1, {"a": 1.0})
        logger.log(2, {"b": 0.1, "a": 2.0})
        logger.log(3, {"b": 3.0})
        logger.close("completed")
        logger.close("completed")
        assert lines(tmp_path) == ["env_steps,a,b", "1,1.0,", "2,2.0,0.1", "3,,3.0"]
        assert [file.name for file in tmp_path.iterdir()] == ["metrics.csv"]

    def test_nan_infinity_and_names_with_commas(self, tmp_path: Path) -> None:
        logger = opened(tmp_path)
        logger.log(1, {"a,b": math.nan, "c": math.inf})
        logger.log(2, {"d": -math.inf})
        logger.close("completed")
        with (tmp_path / "metrics.csv").open() as file:
            first, second = csv.DictReader(file)
        assert first == {"env_steps": "1", "a,b": "nan", "c": "inf", "d": ""}
        assert second["d"] == "-inf"

    def test_a_new_run_starts_an_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.csv").write_text("left over\n")
        opened(tmp_path).close("completed")
        assert lines(tmp_path) == ["env_steps"]


class TestResume:
    def test_rows_after_the_checkpoint_go(self, tmp_path: Path) -> None:
        killed = opened(tmp_path)
        killed.log(1, {"a": 1.0})
        killed.log(2, {"a": 2.0})
        state = killed.state_dict()
        assert state == {"rows": 2}
        assert len(lines(tmp_path)) == 3  # on disk as soon as they are counted
        killed.log(2, {"eval": 5.0})  # after the checkpoint, though at its step
        killed.log(3, {"a": 3.0})
        killed.flush()
        with (tmp_path / "metrics.csv").open("a") as file:
            file.write("4,")  # torn by the kill

        resumed = opened(tmp_path, 2, state)
        resumed.log(3, {"a": 30.0})
        assert resumed.state_dict() == {"rows": 3}
        resumed.close("completed")
        assert lines(tmp_path) == ["env_steps,a,eval", "1,1.0,", "2,2.0,", "3,30.0,"]

    def test_without_a_state_rows_up_to_the_resumed_step_stay(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.csv").write_text("env_steps,a\n1,1.0\n2,2.0\n30,3.0\n1")
        opened(tmp_path, 2).close("completed")
        assert lines(tmp_path) == ["env_steps,a", "1,1.0", "2,2.0"]

    def test_missing_rows_are_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "metrics.csv").write_text("env_steps,a\n1,1.0\n")
        with caplog.at_level(logging.WARNING, "rl"):
            opened(tmp_path, 5, {"rows": 4}).close("completed")
        assert "has 1 rows, expected 4" in caplog.text
