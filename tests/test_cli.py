"""The `rl` command as a user types it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT, launch, small, train


def rl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`rl <arguments>` in a process of its own."""
    code = "import sys; sys.argv[0] = 'rl'; from rl.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "COLUMNS": "120", "SDL_VIDEODRIVER": "dummy"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run in `runs/one`."""
    folder = tmp_path_factory.mktemp("cli")
    overrides = small(
        "ppo", "total_timesteps=1024", "checkpoint.every=512", "eval.every=500", "eval.episodes=2"
    )
    train(folder / "runs" / "one", *overrides, "tags=[first,try]")
    return folder


class TestEval:
    def test_prints_mean_deviation_and_each_return(self, runs: Path) -> None:
        result = rl("eval", "runs/one", "--episodes", "3", cwd=runs)
        assert result.returncode == 0, result.stderr
        assert "over 3 deterministic episodes" in result.stdout
        assert "CartPole-v1 at step 1,024" in result.stdout

    def test_json_agrees_with_itself_and_repeats(self, runs: Path) -> None:
        first, second = (
            rl("eval", "runs/one", "--episodes", "5", "--sampled", "--json", cwd=runs) for _ in range(2)
        )
        assert first.stdout == second.stdout
        figures = json.loads(first.stdout)
        returns = [episode["return"] for episode in figures["episodes"]]
        assert len(returns) == 5
        assert figures["mean"] == pytest.approx(np.mean(returns))
        assert figures["std"] == pytest.approx(np.std(returns))
        assert figures["deterministic"] is False

    def test_a_checkpoint_by_name_and_a_video(self, runs: Path) -> None:
        path = "runs/one/checkpoints/step_000000512"
        result = rl("eval", path, "--episodes", "1", "--video", "--json", cwd=runs)
        assert result.returncode == 0, result.stderr
        figures = json.loads(result.stdout)
        assert figures["env_steps"] == 512
        assert Path(figures["videos"][0]).parent == runs / "runs" / "one" / "videos"
        assert Path(figures["videos"][0]).stat().st_size > 1000

    def test_leaves_the_run_as_it_is(self, runs: Path) -> None:
        before = {p: p.stat().st_mtime_ns for p in (runs / "runs").rglob("*") if p.is_file()}
        rl("eval", "runs/one", "--episodes", "1", cwd=runs)
        assert {p: p.stat().st_mtime_ns for p in (runs / "runs").rglob("*") if p.is_file()} == before

    def test_a_run_that_is_being_trained(self, tmp_path: Path) -> None:
        process = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "launch.py"),
                "hydra.run.dir=run",
                "logger=none",
                "total_timesteps=1e7",
            ],
            cwd=tmp_path,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "run" / "checkpoints" / "latest").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            result = rl("eval", "run", "--episodes", "1", "--json", cwd=tmp_path)
            assert result.returncode == 0, result.stderr
            assert json.loads(rl("show", "run", "--json", cwd=tmp_path).stdout)["status"] == "running"
            refused = launch("resume=run", cwd=tmp_path)
            assert refused.returncode == 2
            assert f"process {process.pid}" in refused.stderr
        finally:
            process.kill()
            process.wait()
        assert json.loads(rl("show", "run", "--json", cwd=tmp_path).stdout)["status"] == "killed"

    @pytest.mark.parametrize("path", ["nowhere", "runs"])
    def test_nothing_to_evaluate(self, path: str, runs: Path) -> None:
        result = rl("eval", path, cwd=runs)
        assert result.returncode == 2
        assert result.stderr.count("\n") == 1 and f"RUN={path}" in result.stderr


class TestShow:
    def test_what_a_run_is_and_how_it_stands(self, runs: Path) -> None:
        result = rl("show", "runs/one", cwd=runs)
        assert result.returncode == 0, result.stderr
        for fact in (
            "completed",
            "PPO on CartPole-v1, seed 1",
            "1,024 of 1,024 (100%)",
            "first, try",
            "step_000000512",
        ):
            assert fact in result.stdout

    def test_return_is_that_of_the_episodes(self, runs: Path) -> None:
        facts = json.loads(rl("show", "runs/one", "--json", cwd=runs).stdout)
        rows = list(csv.DictReader((runs / "runs" / "one" / "episodes.csv").read_text().splitlines()))
        assert facts["episodes"] == len(rows)
        assert facts["recent_return"] == pytest.approx(np.mean([float(row["return"]) for row in rows[-100:]]))
        assert set(facts["evaluations"]) == {"512", "1024"}

    def test_a_folder_of_runs(self, runs: Path) -> None:
        result = rl("show", cwd=runs)
        assert result.returncode == 0
        assert "runs/one" in result.stdout and "completed" in result.stdout

    def test_nothing_to_show(self, tmp_path: Path) -> None:
        result = rl("show", "nowhere", cwd=tmp_path)
        assert result.returncode == 2
        assert "RUN=nowhere" in result.stderr
