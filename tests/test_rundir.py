"""A run's directory is its own, its files hold whole lines only, and run.json is never half-written."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rl import rundir
from rl.rundir import RunFiles

ROOT = Path(__file__).resolve().parent.parent
NAMES = ["metrics.jsonl", "episodes.csv", "evaluations.csv"]


def contents(path: Path) -> list[str]:
    return [(path / name).read_text() for name in NAMES]


class TestCreate:
    def test_no_two_alike(self, tmp_path: Path) -> None:
        paths = [rundir.create(tmp_path / "a" / "b", "15-04-05_ppo_CartPole-v1_s1") for _ in range(300)]
        assert len(set(paths)) == 300 and all(path.is_dir() for path in paths)
        suffix = paths[0].name.removeprefix("15-04-05_ppo_CartPole-v1_s1_")
        assert len(suffix) == 4 and int(suffix, 16) >= 0

    def test_a_name_that_is_taken_is_not_shared(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn = iter(["0001", "0001", "0001", "0002"])
        monkeypatch.setattr("secrets.token_hex", lambda size: next(drawn))
        assert [rundir.create(tmp_path, "s").name for _ in range(2)] == ["s_0001", "s_0002"]

    def test_seeded_generators_are_left_alone(self, tmp_path: Path) -> None:
        random.seed(1)
        before = random.getstate()
        assert rundir.create(tmp_path, "s") != rundir.create(tmp_path, "s")
        assert random.getstate() == before

    def test_a_slash_in_an_env_id(self, tmp_path: Path) -> None:
        assert rundir.create(tmp_path, "ppo_ALE/Pong-v5_s1").parent == tmp_path


class TestRunFiles:
    def test_lines(self, tmp_path: Path) -> None:
        with RunFiles(tmp_path) as files:
            files.metrics(
                512, {"charts/SPS": 0.1, "losses/a": np.float32(0.5), "b": torch.tensor(2.0), "c": 3}
            )
            files.episode(np.int64(7), 0, np.float32(-0.1), 9, np.float64(1.5))
            files.evaluation(8, 1, np.float64(0.1), np.int32(3))
        metrics, episodes, evaluations = contents(tmp_path)
        assert metrics == '{"env_steps": 512, "charts/SPS": 0.1, "losses/a": 0.5, "b": 2.0, "c": 3}\n'
        # float32(-0.1) is exactly -0.10000000149011612
        assert episodes == "env_steps,env,return,length,seconds\n7,0,-0.10000000149011612,9,1.5\n"
        assert evaluations == "env_steps,episode,return,length\n8,1,0.1,3\n"

    def test_what_json_lacks_is_null(self, tmp_path: Path) -> None:
        with RunFiles(tmp_path) as files:
            files.metrics(
                1, {"nan": math.nan, "inf": np.float32(-math.inf), "tensor": torch.tensor(math.nan), "x": 1.0}
            )
        text = (tmp_path / "metrics.jsonl").read_text()
        assert text == '{"env_steps": 1, "nan": null, "inf": null, "tensor": null, "x": 1.0}\n'

    def test_floats_survive_exactly(self, tmp_path: Path) -> None:
        values = [0.1 + 0.2, 1e-308, -0.0, 123456789.123456789, math.nan]
        with RunFiles(tmp_path) as files:
            for value in values:
                files.episode(1, 0, value, 1, value)
        with open(tmp_path / "episodes.csv", newline="") as file:
            assert [repr(float(row["return"])) for row in csv.DictReader(file)] == [
                repr(value) for value in values
            ]

    def test_opening_again_appends_under_one_header(self, tmp_path: Path) -> None:
        for step in (1, 2):
            with RunFiles(tmp_path) as files:
                files.evaluation(step, 0, 0.0, 1)
        assert contents(tmp_path)[2] == "env_steps,episode,return,length\n1,0,0.0,1\n2,0,0.0,1\n"

    @pytest.mark.parametrize("size", [1, 20, 36, 37, 45, 52, 53])
    def test_a_torn_last_line_is_cut(self, tmp_path: Path, size: int) -> None:
        with RunFiles(tmp_path) as files:
            files.episode(1, 0, 1.0, 5, 0.5)
        whole = (tmp_path / "episodes.csv").read_text()
        assert (len("env_steps,env,return,length,seconds\n"), len(whole)) == (36, 50)
        (tmp_path / "episodes.csv").write_text((whole + "2,0,1.0,5,0.5\n")[:size])
        (tmp_path / "metrics.jsonl").write_text('{"env_steps": 1}\n' + "x" * 10_000)
        RunFiles(tmp_path).close()
        assert contents(tmp_path)[:2] == ['{"env_steps": 1}\n', whole if size >= 50 else whole[:36]]

    def test_flushed_lines_survive_a_kill(self, tmp_path: Path) -> None:
        code = (
            "import os, pathlib, signal, sys; from rl.rundir import RunFiles;"
            "f = RunFiles(pathlib.Path(sys.argv[1]));"
            "f.metrics(1, {}); f.episode(1, 0, 1.0, 1, 1.0); f.flush(); f.metrics(2, {});"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
        assert done.returncode == -signal.SIGKILL
        assert contents(tmp_path)[0] == '{"env_steps": 1}\n' and "1,0,1.0,1,1.0\n" in contents(tmp_path)[1]


class TestRewind:
    def write(self, files: RunFiles, step: int) -> None:
        files.metrics(step, {"x": step / 3})
        files.episode(step, 0, step / 3, 1, 0.0)
        files.evaluation(step, 0, step / 3, 1)

    def test_a_resumed_run_repeats_no_line(self, tmp_path: Path) -> None:
        with RunFiles(tmp_path / ".") as files:
            for step in range(6):
                self.write(files, step)
        expected = contents(tmp_path)
        for file in NAMES:
            (tmp_path / file).unlink()
        with RunFiles(tmp_path) as files:
            for step in range(3):
                self.write(files, step)
            positions = json.loads(json.dumps(files.positions()))
            for step in range(3, 5):
                self.write(files, step)
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write('{"env_st')  # torn by a kill
        with RunFiles(tmp_path) as files:
            files.rewind(positions)
            for step in range(3, 6):
                self.write(files, step)
        assert contents(tmp_path) == expected

    def test_within_one_process(self, tmp_path: Path) -> None:
        with RunFiles(tmp_path) as files:
            self.write(files, 1)
            positions = files.positions()
            assert positions == {name: (tmp_path / name).stat().st_size for name in NAMES}
            before = contents(tmp_path)
            self.write(files, 2)
            files.rewind(positions)
            assert contents(tmp_path) == before and files.positions() == positions

    def test_files_unknown_to_the_checkpoint_start_afresh(self, tmp_path: Path) -> None:
        with RunFiles(tmp_path) as files:
            empty = contents(tmp_path)
            self.write(files, 1)
            files.rewind({})
            assert contents(tmp_path) == empty == ["", *(text.splitlines()[0] + "\n" for text in empty[1:])]

    def test_a_file_shorter_than_its_position(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with RunFiles(tmp_path) as files:
            self.write(files, 1)
            positions = files.positions()
            expected = contents(tmp_path)
            with caplog.at_level(logging.WARNING):
                files.rewind({**positions, "metrics.jsonl": positions["metrics.jsonl"] + 1000})
        assert contents(tmp_path) == expected and "metrics.jsonl ends at byte" in caplog.text


class TestRunJson:
    def test_update_merges_top_level_fields(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            rundir.read(tmp_path)
        rundir.update(
            tmp_path, status="running", result={"a": 1, "b": 2}, env_steps=np.int64(3), path=tmp_path
        )
        rundir.update(tmp_path, status="completed", result={"a": math.nan})
        assert rundir.read(tmp_path) == {
            "status": "completed",
            "result": {"a": None},
            "env_steps": 3,
            "path": str(tmp_path),
        }
        assert [path.name for path in tmp_path.iterdir()] == ["run.json"]

    def test_mistakes(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="'complete' is not one of running, completed"):
            rundir.update(tmp_path, status="complete")
        (tmp_path / "run.json").write_text("{")
        with pytest.raises(ValueError, match=r"run\.json is not JSON"):
            rundir.read(tmp_path)

    def test_a_full_disk_leaves_the_old_one(self, tmp_path: Path) -> None:
        rundir.update(tmp_path, status="running")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(OSError):
                rundir.update(tmp_path, status="completed", text="x" * 5000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert rundir.read(tmp_path) == {"status": "running"}
        assert [path.name for path in tmp_path.iterdir()] == ["run.json"]

    def test_a_reader_never_sees_half_of_it(self, tmp_path: Path) -> None:
        code = (
            "import pathlib, sys; from rl import rundir\n"
            "for i in range(10**9):\n"
            "    rundir.update(pathlib.Path(sys.argv[1]), status='running', n=i, text='x' * (i % 9000))"
        )
        rundir.update(tmp_path, status="running", n=0, text="")
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT) as writer:
            try:
                seen = set()
                while len(seen) < 50:
                    record = rundir.read(tmp_path)
                    assert len(record["text"]) == record["n"] % 9000
                    seen.add(record["n"])
            finally:
                writer.kill()
        rundir.update(tmp_path, status="failed")
        assert [path.name for path in tmp_path.iterdir()] == ["run.json"]  # what the kill left is gone


class TestAlive:
    def test_this_process(self) -> None:
        record = {"status": "running", **rundir.process_identity()}
        assert json.loads(json.dumps(record)) == record and rundir.is_alive(record)
        assert not rundir.is_alive({**record, "status": "completed"})
        assert not rundir.is_alive({"status": "running"})
        assert rundir.is_alive({**record, "host": "another", "pid": 4194304})
        assert not rundir.is_alive({**record, "pid": 4194304})

    def test_a_number_that_another_process_has_now(self) -> None:
        record = {"status": "running", **rundir.process_identity()}
        assert not rundir.is_alive({**record, "process_started": record["process_started"] - 60})

    def test_a_killed_process_even_before_it_is_waited_for(self) -> None:
        code = (
            "import json; from rl.rundir import *; print(json.dumps(process_identity()), flush=True); input()"
        )
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdin=pipe, stdout=pipe, text=True
        ) as child:
            assert child.stdout is not None
            record = {"status": "running", **json.loads(child.stdout.readline())}
            assert record["pid"] == child.pid and rundir.is_alive(record)
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the process table
            assert not rundir.is_alive(record)
        assert not rundir.is_alive(record)
