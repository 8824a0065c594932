"""Event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from rl.loggers import RunInfo
from rl.loggers.tensorboard import TensorBoardLogger


def read(path: Path) -> EventAccumulator:
    return EventAccumulator(str(path / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0}).Reload()


def points(path: Path, tag: str) -> list[tuple[int, float]]:
    """(step, value) of one tag, on which the plain reader and the one of TensorBoard's pages must agree."""
    plain, pages = read(path), plugin_event_accumulator.EventAccumulator(str(path / "tensorboard")).Reload()
    try:
        shown = [(event.step, float(make_ndarray(event.tensor_proto))) for event in pages.Tensors(tag)]
        found = [(event.step, event.value) for event in plain.Scalars(tag)]
    except KeyError:
        assert tag not in plain.Tags()["scalars"]
        return []
    np.testing.assert_equal(shown, found)
    return found


def opened(path: Path, env_steps: int = 0) -> TensorBoardLogger:
    logger = TensorBoardLogger(flush_secs=5.0)
    run = RunInfo(path, "run", {"algo": {"gamma": 0.99, "note": "a|b"}, "seed": 1}, env_steps=env_steps)
    logger.open(run, {} if env_steps else None)
    return logger


class TestPoints:
    def test_scalars_come_back(self, tmp_path: Path) -> None:
        logger = opened(tmp_path)
        logger.log(4, {"losses/value_loss": 0.5, "charts/SPS": 100.0})
        logger.log(8, {"losses/value_loss": 0.25})
        logger.close("completed")
        logger.close("completed")
        assert points(tmp_path, "losses/value_loss") == [(4, 0.5), (8, 0.25)]
        assert points(tmp_path, "charts/SPS") == [(4, 100.0)]

    def test_episodes_ending_together_are_one_point_with_their_mean(self, tmp_path: Path) -> None:
        logger = opened(tmp_path)
        for value in (1.0, 2.0, 6.0):
            logger.log(1000, {"charts/episodic_return": value})
        logger.close("completed")
        assert points(tmp_path, "charts/episodic_return") == [(1000, 3.0)]

    def test_what_is_not_finite_or_not_float32_is_logged(self, tmp_path: Path) -> None:
        logger = opened(tmp_path)
        logger.log(1, {"nan": math.nan, "inf": math.inf, "huge": 1e300})
        logger.close("failed")
        assert math.isnan(points(tmp_path, "nan")[0][1])
        assert points(tmp_path, "inf") == [(1, math.inf)]
        assert points(tmp_path, "huge") == [(1, math.inf)]

    def test_flushed_points_are_readable_while_the_run_goes_on(self, tmp_path: Path) -> None:
        logger = opened(tmp_path)
        logger.log(4, {"a": 1.0})
        assert logger.state_dict() == {}
        assert points(tmp_path, "a") == [(4, 1.0)]
        logger.close("completed")

    def test_config_is_a_markdown_table(self, tmp_path: Path) -> None:
        opened(tmp_path).close("completed")
        (event,) = read(tmp_path).Tensors("config")
        lines = event.tensor_proto.string_val[0].decode().splitlines()
        assert lines[2:] == ["| algo.gamma | 0.99 |", "| algo.note | a\\|b |", "| seed | 1 |"]


class TestResume:
    def test_points_after_the_checkpoint_are_not_shown_twice(self, tmp_path: Path) -> None:
        killed = opened(tmp_path)
        for step in (10, 20, 30, 40):
            killed.log(step, {"a": float(step), "only_after_30": 1.0} if step > 30 else {"a": float(step)})
        killed.flush()  # and no close: as after SIGKILL

        resumed = opened(tmp_path, env_steps=20)
        resumed.log(30, {"a": -30.0})
        resumed.close("completed")
        # 10 and 20 are from before the checkpoint; 30 is the resumed run's; 40 was not reached again.
        assert points(tmp_path, "a") == [(10, 10.0), (20, 20.0), (30, -30.0)]
        assert points(tmp_path, "only_after_30") == []

    def test_twice(self, tmp_path: Path) -> None:
        for start, value in ((0, 0.0), (10, 1.0), (20, 2.0)):
            logger = opened(tmp_path, env_steps=start)
            for step in (10, 20, 30):
                if step > start:
                    logger.log(step, {"a": value})
            logger.flush()
        assert points(tmp_path, "a") == [(10, 0.0), (20, 1.0), (30, 2.0)]

    def test_torn_last_record_is_skipped(self, tmp_path: Path) -> None:
        logger = opened(tmp_path)
        logger.log(10, {"a": 1.0})
        logger.log(20, {"a": 2.0})
        logger.close("completed")
        (file,) = (tmp_path / "tensorboard").iterdir()
        file.write_bytes(file.read_bytes()[:-3])
        resumed = opened(tmp_path, env_steps=10)
        resumed.log(20, {"a": 3.0})
        resumed.close("completed")
        assert points(tmp_path, "a") == [(10, 1.0), (20, 3.0)]


class TestImport:
    def test_neither_torch_nor_tensorboard_before_open(self) -> None:
        code = (
            "import sys\n"
            "from rl.loggers.tensorboard import TensorBoardLogger; TensorBoardLogger(1.0).check()\n"
            "sys.exit(any(name in sys.modules for name in ('torch', 'tensorboard.compat.proto')))"
        )
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0
