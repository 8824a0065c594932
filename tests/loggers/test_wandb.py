"""Weights & Biases, offline and disabled (the real client), and what is refused before it is imported."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.errors import ConfigError
from rl.loggers import RunInfo
from rl.loggers.wandb import WandbLogger
from tests.loggers.wandb_records import folders, history, records, run_record

needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")


def make(mode: str = "offline", group: str | None = None) -> WandbLogger:
    return WandbLogger(project="test", entity=None, group=group, mode=mode, name=None, notes="a note")


def run_info(path: Path, env_steps: int = 0) -> RunInfo:
    path.mkdir(exist_ok=True)
    return RunInfo(path, path.name, {"algo": {"gamma": 0.9}}, ["t1", "t2"], "sweep", env_steps)


@needs_wandb
class TestOffline:
    def test_run_carries_name_config_tags_group_and_points(self, tmp_path: Path, capfd: Any) -> None:
        logger = make()
        logger.open(run_info(tmp_path / "run"), None)
        for value in (1.0, 3.0):
            logger.log(8, {"charts/episodic_return": value})
        logger.log(16, {"losses/value_loss": float("nan")})
        logger.log(24, {"losses/value_loss": 2.0})
        logger.close("completed")
        logger.close("completed")
        (folder,) = folders(tmp_path / "run")
        rows = history(folder)
        assert [row["_step"] for row in rows] == [8, 16, 24]
        assert rows[0]["charts/episodic_return"] == 2.0  # the mean of 1 and 3
        assert rows[2]["losses/value_loss"] == 2.0
        run = next(record.run for record in records(folder) if record.HasField("run"))
        assert (run.display_name, run.run_group, list(run.tags)) == ("run", "sweep", ["t1", "t2"])
        assert (run.project, run.notes) == ("test", "a note")
        assert any(item.key == "algo" and "0.9" in item.value_json for item in run.config.update)
        assert capfd.readouterr() == ("", "")

    def test_resume_continues_the_id_in_a_second_folder(self, tmp_path: Path) -> None:
        first = make()
        first.open(run_info(tmp_path / "run"), None)
        first.log(8, {"a": 1.0})
        state = json.loads(json.dumps(first.state_dict()))
        first.close("preempted")
        second = make()
        second.open(run_info(tmp_path / "run", 8), state)
        second.log(16, {"a": 2.0})
        assert second.state_dict() == state
        second.close("completed")
        files = [file.name for folder in folders(tmp_path / "run") for file in folder.glob("*.wandb")]
        assert files == [f"run-{state['id']}.wandb"] * 2
        rows = [row for folder in folders(tmp_path / "run") for row in history(folder)]
        assert [(row["_step"], row["a"]) for row in rows] == [(8, 1.0), (16, 2.0)]

    def test_two_runs_of_one_process_are_two(self, tmp_path: Path) -> None:
        ids = []
        for name in ("one", "two"):
            logger = make()
            logger.open(run_info(tmp_path / name), None)
            logger.log(1, {"a": 1.0})
            ids.append(logger.state_dict()["id"])
            if name == "two":
                logger.close("completed")  # the first is left open, as by a job that died
        assert ids[0] != ids[1]
        assert [len(folders(tmp_path / name)) for name in ("one", "two")] == [1, 1]

    def test_a_group_of_the_users_own_comes_before_the_sweeps(self, tmp_path: Path) -> None:
        logger = make(group="mine")
        logger.open(run_info(tmp_path / "run"), None)
        logger.close("completed")
        assert run_record(folders(tmp_path / "run")[0]).run_group == "mine"

    @pytest.mark.parametrize(
        ("status", "exit_code", "preempting"),
        [("completed", 0, False), ("failed", 1, False), ("preempted", 1, True), ("interrupted", 1, True)],
    )
    def test_status(self, tmp_path: Path, status: str, exit_code: int, preempting: bool) -> None:
        logger = make()
        logger.open(run_info(tmp_path / "run"), None)
        logger.log(1, {"a": 1.0})
        logger.close(status)
        found = records(folders(tmp_path / "run")[0])
        assert [record.exit.exit_code for record in found if record.HasField("exit")] == [exit_code]
        assert any(record.HasField("preempting") for record in found) is preempting

    def test_steps_that_the_service_already_has_are_left_out(self, tmp_path: Path) -> None:
        logger = make()
        logger.open(run_info(tmp_path / "run", 8), {"id": "abcd1234"})
        logger._next_step = 17  # what an online run reports as its starting step: it has step 16
        for step in (12, 16, 20):
            logger.log(step, {"a": float(step)})
        logger.close("completed")
        assert [row["_step"] for row in history(folders(tmp_path / "run")[0])] == [20]

    def test_video(self, tmp_path: Path) -> None:
        pytest.importorskip("imageio_ffmpeg")
        from rl.video import VideoWriter

        with VideoWriter(tmp_path / "v.mp4", fps=10) as video:
            video.add(np.zeros((16, 16, 3), np.uint8))
        logger = make()
        logger.open(run_info(tmp_path / "run"), None)
        logger.log(8, {"a": 1.0})
        logger.video(8, tmp_path / "v.mp4")
        logger.close("completed")
        (row,) = history(folders(tmp_path / "run")[0])
        assert row["a"] == 1.0 and row["eval/video/_type"] == "video-file"

    def test_one_line_says_where_it_is(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        logger = make()
        with caplog.at_level(logging.INFO, "rl"):
            logger.open(run_info(tmp_path / "run"), None)
            logger.close("completed")
        (message,) = [r.getMessage() for r in caplog.records if r.name.startswith("rl")]
        assert message == f"wandb: offline, upload with `wandb sync {folders(tmp_path / 'run')[0]}`"


@needs_wandb
class TestDisabled:
    def test_everything_can_be_called_and_nothing_is_written(self, tmp_path: Path) -> None:
        logger = make("disabled")
        logger.open(run_info(tmp_path / "run"), None)
        logger.log(1, {"a": 1.0})
        logger.flush()
        logger.close("interrupted")
        assert list((tmp_path / "run").iterdir()) == []


class TestCheck:
    @pytest.fixture(autouse=True)
    def nothing_set(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        monkeypatch.setattr(sys, "stdin", io.StringIO())  # not a terminal

    def test_unknown_mode(self) -> None:
        with pytest.raises(ConfigError, match=r"logger\.wandb\.mode=onlin: must be one of online, offline"):
            make("onlin").check()

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"pip install -e '\.\[wandb\]'"):
            make().check()

    @needs_wandb
    def test_online_without_a_key_names_two_ways_out(self) -> None:
        with pytest.raises(ConfigError, match=r"`wandb login`.*logger\.wandb\.mode=offline"):
            make("online").check()
        make("offline").check()
        make("disabled").check()

    @needs_wandb
    def test_online_with_a_key(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
        make("online").check()
        monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")  # the entry is for another host
        with pytest.raises(ConfigError):
            make("online").check()
        monkeypatch.setenv("WANDB_API_KEY", "secret")
        make("online").check()
