"""What holds for every algorithm: one test over all recipes, so that a new recipe is covered on the day it is
added."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from rl import checkpoint, cli, rundir
from rl.schemas import schema_of
from tests.conftest import (
    EXACT_BACKENDS,
    INEXACT_BACKENDS,
    RECIPES,
    ROOT,
    algorithm,
    assert_same,
    configure,
    episodes,
    family,
    final_state,
    launch,
    lines,
    small,
    steps,
    train,
)

STEPS = 1536  # env steps of a small run of ppo
EXACT = ("CartPole-v1", "LunarLander-v3", "HalfCheetah-v4")  # envs whose running episode a replay reproduces


def straight_and_resumed(tmp_path: Path, overrides: list[str], at: int) -> tuple[Path, Path]:
    """One run straight through, and one continued in a new object from the straight one's checkpoint at step
    `at`."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    overrides = [*overrides, f"checkpoint.every={at}", "checkpoint.keep=0"]
    train(straight, *overrides)
    middle = sorted((straight / "checkpoints").glob("step_*"))[1]
    resumed.mkdir()
    for name in ("metrics.jsonl", "episodes.csv", "evaluations.csv", "run.json"):
        (resumed / name).write_bytes((straight / name).read_bytes())
    rundir.update(
        resumed, status="running"
    )  # as a killed process leaves it, with lines beyond its last checkpoint
    train(resumed, *overrides, resumed_from=middle)
    return straight, resumed


@pytest.mark.parametrize("recipe", RECIPES)
class TestEveryRecipe:
    def test_same_config_twice_is_bit_identical(self, recipe: str, tmp_path: Path) -> None:
        for name in ("a", "b"):
            train(tmp_path / name, *small(recipe, f"total_timesteps={steps(recipe)}", "eval.episodes=2"))
        assert lines(tmp_path / "a") == lines(tmp_path / "b")
        assert episodes(tmp_path / "a") == episodes(tmp_path / "b")
        assert_same(final_state(tmp_path / "a"), final_state(tmp_path / "b"))

    def test_another_seed_is_another_run(self, recipe: str, tmp_path: Path) -> None:
        for seed in (0, 1):
            train(
                tmp_path / str(seed),
                *small(recipe, f"total_timesteps={steps(recipe)}", f"seed={seed}", "eval.episodes=1"),
            )
        assert lines(tmp_path / "0")[0] != lines(tmp_path / "1")[0]

    def test_evaluation_changes_nothing_in_training(self, recipe: str, tmp_path: Path) -> None:
        train(
            tmp_path / "without",
            *small(recipe, f"total_timesteps={steps(recipe)}", "eval.every=0", "eval.episodes=1"),
        )
        train(
            tmp_path / "with",
            *small(
                recipe,
                f"total_timesteps={steps(recipe)}",
                f"eval.every={steps(recipe) // 5}",
                "eval.episodes=2",
                "eval.deterministic=false",
            ),
        )
        evaluations = [line for line in lines(tmp_path / "with") if "eval/episodic_return" in line]
        assert len(evaluations) >= 2, "it did evaluate while training"
        training = [
            [x for x in lines(tmp_path / n) if "eval/episodic_return" not in x] for n in ("with", "without")
        ]
        assert training[0] == training[1]
        assert_same(final_state(tmp_path / "with"), final_state(tmp_path / "without"))

    @pytest.mark.parametrize("backend", ["sync", "async"])
    def test_resumed_is_bit_identical_to_straight(self, recipe: str, backend: str, tmp_path: Path) -> None:
        if backend not in EXACT_BACKENDS[family(recipe)]:
            pytest.skip(f"{family(recipe)} cannot save a running episode on {backend}, or has none such")
        overrides = small(
            recipe,
            f"total_timesteps={steps(recipe)}",
            f"env.backend={backend}",
            "env.num_envs=2",
            f"eval.every={steps(recipe) // 3}",
            "eval.episodes=2",
        )
        straight, resumed = straight_and_resumed(tmp_path, overrides, at=steps(recipe) // 2)
        assert_same(final_state(straight), final_state(resumed))
        assert lines(straight) == lines(resumed)
        assert episodes(straight) == episodes(resumed)
        assert (straight / "evaluations.csv").read_text() == (resumed / "evaluations.csv").read_text()

    def test_resume_without_saved_episodes_loses_no_step_and_says_so(
        self, recipe: str, tmp_path: Path
    ) -> None:
        if family(recipe) not in INEXACT_BACKENDS:
            pytest.skip(f"every backend of {family(recipe)} can save a running episode")
        backend = INEXACT_BACKENDS[family(recipe)]
        overrides = small(
            recipe, f"total_timesteps={steps(recipe)}", f"env.backend={backend}", "eval.episodes=1"
        )
        _, resumed = straight_and_resumed(tmp_path, overrides, at=steps(recipe) // 2)
        notes = rundir.read(resumed)["starts"][-1]["notes"]
        assert [note.split(":")[0] for note in notes] == ["env 0", "env 1"]
        assert lines(resumed)[-1]["env_steps"] == steps(recipe)

    def test_warm_start_takes_over_the_policy_and_nothing_else(self, recipe: str, tmp_path: Path) -> None:
        overrides = small(recipe, f"total_timesteps={steps(recipe)}", "eval.episodes=1")
        train(tmp_path / "first", *overrides)
        config = configure(*overrides, f"warm_start={tmp_path / 'first'}", "seed=7")
        from rl.experiment import Experiment

        (tmp_path / "second").mkdir()
        Experiment(config, tmp_path / "second").run()
        start = checkpoint.load(tmp_path / "second" / "checkpoints" / "step_000000000")[0]["algorithm"]
        assert_same(start["networks"], final_state(tmp_path / "first")["networks"])
        assert start["counters"]["env_steps"] == 0

    def test_policy_is_a_snapshot(self, recipe: str) -> None:
        algo = algorithm(*small(recipe))
        space, actions = configure(f"algo={recipe}").env.check(render=False)
        rng = np.random.default_rng(0)
        obs = rng.normal(size=(8, *space.shape)).astype(np.float32)
        if space.dtype == np.uint8:
            obs = rng.integers(0, 256, obs.shape).astype(np.uint8)
        policy = algo.policy()
        before = policy(obs, policy.initial_state(8), np.random.default_rng(1))[0]
        for _ in range(3):
            algo.iterate()
        after = policy(obs, policy.initial_state(8), np.random.default_rng(1))[0]
        now = algo.policy()(obs, policy.initial_state(8), np.random.default_rng(1))[0]
        algo.close()
        np.testing.assert_array_equal(before, after)
        if actions.shape:
            assert not np.array_equal(after, now)

    def test_evaluates_and_films_from_the_checkpoint_alone(self, recipe: str, tmp_path: Path) -> None:
        overrides = (f"total_timesteps={steps(recipe)}", "eval.episodes=1", "env.max_episode_steps=40")
        train(tmp_path / "run", *small(recipe, *overrides))
        newest = checkpoint.newest(tmp_path / "run" / "checkpoints")
        assert newest is not None
        alone = tmp_path / "elsewhere" / "any_name"
        alone.parent.mkdir()
        newest.rename(alone)
        results = [cli.evaluate_checkpoint(alone, 3, True, 5, "cpu", videos=None) for _ in range(2)]
        assert results[0] == results[1]
        assert [e["episode"] for e in results[0]["episodes"]] == [0, 1, 2]
        one = cli.evaluate_checkpoint(alone, 1, True, 5, "cpu", videos=None)
        filmed = cli.evaluate_checkpoint(alone, 1, True, 5, "cpu", videos=tmp_path / "videos")
        assert Path(filmed["videos"][0]).stat().st_size > 1000
        assert filmed["episodes"] == one["episodes"], "filming changes nothing"

    def test_every_key_is_read_somewhere(self, recipe: str) -> None:
        config = configure(f"algo={recipe}", "logger=[tensorboard,csv,wandb]", "logger.wandb.mode=offline")
        source = "\n".join(p.read_text() for p in (ROOT / "rl").rglob("*.py"))
        for section in (config.algo, config.env, config.network, *config.loggers.values()):
            keys = [f.name for f in fields(section) if f.init]
            unread = [key for key in keys if f".{key}" not in source]
            assert not unread, f"{type(section).__name__}: nothing reads {unread}"

    def test_schema_needs_no_torch(self, recipe: str) -> None:
        target = configure(f"algo={recipe}").algo_target
        code = (
            f"import sys; from rl.schemas import schema_of; schema_of({target!r}); assert 'torch' not "
            f"in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
        assert schema_of(target).__name__.endswith("Config")


class TestOneEnvAgainstSeveral:
    def test_the_first_env_starts_the_same(self) -> None:
        alone, several = algorithm("env.num_envs=1"), algorithm("env.num_envs=4")
        np.testing.assert_array_equal(alone.obs[0], several.obs[0])
        alone.close()
        several.close()

    def test_sync_and_async_train_alike(self, tmp_path: Path) -> None:
        for backend in ("sync", "async"):
            train(
                tmp_path / backend,
                *small("ppo", f"total_timesteps={STEPS}", f"env.backend={backend}", "eval.episodes=1"),
            )
        assert lines(tmp_path / "sync") == lines(tmp_path / "async")


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize("env_id", EXACT)
class TestKilled:
    def test_killed_at_any_moment_and_resumed(self, env_id: str, backend: str, tmp_path: Path) -> None:
        """train(2k) ≡ train(1k) + SIGKILL at an arbitrary moment + resume, bit for bit, in separate
        processes."""
        recipe = "ppo_continuous_action" if "Cheetah" in env_id else "ppo"
        overrides = [
            *small(recipe),
            f"env.id={env_id}",
            f"env.backend={backend}",
            "env.num_envs=2",
            "total_timesteps=20480",
            "eval.every=6000",
            "eval.episodes=2",
            "checkpoint.every=2000",
            "checkpoint.keep=2",
            "logger=csv",
        ]
        straight = launch(*overrides, "hydra.run.dir=straight", cwd=tmp_path)
        assert straight.returncode == 0, straight.stderr
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "launch.py"), *overrides, "hydra.run.dir=killed"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for_checkpoint(tmp_path / "killed", process, after=1)
        time.sleep(random.uniform(0, 0.3))
        process.kill()
        process.wait()
        assert cli.standing(tmp_path / "killed")["status"] in ("killed", "completed")
        resumed = launch("resume=killed", cwd=tmp_path)
        assert resumed.returncode == 0, resumed.stderr
        assert rundir.read(tmp_path / "killed")["starts"][-1]["notes"] == []
        assert_same(final_state(tmp_path / "straight"), final_state(tmp_path / "killed"))
        assert lines(tmp_path / "straight") == lines(tmp_path / "killed")
        assert episodes(tmp_path / "straight") == episodes(tmp_path / "killed")


def wait_for_checkpoint(run: Path, process: subprocess.Popen[bytes], after: int) -> None:
    """Return once the run has a checkpoint of at least `after` env steps."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if any(int(p.name[5:]) >= after for p in (run / "checkpoints").glob("step_*")):
            return
        time.sleep(0.02)
    raise AssertionError(f"no checkpoint in {run} (exit code {process.poll()})")


class TestSignals:
    @pytest.mark.parametrize(
        ("number", "status", "code"),
        [
            (signal.SIGTERM, "preempted", 143),
            (signal.SIGUSR2, "preempted", 140),
            (signal.SIGINT, "interrupted", 130),
        ],
    )
    def test_saves_and_leaves(self, number: signal.Signals, status: str, code: int, tmp_path: Path) -> None:
        process = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "launch.py"),
                "total_timesteps=10_000_000",
                "hydra.run.dir=run",
                "logger=none",
                "env.backend=async",
            ],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        wait_for_checkpoint(tmp_path / "run", process, after=0)
        time.sleep(random.uniform(0.2, 1.0))
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == code, errors.decode()
        record = rundir.read(tmp_path / "run")
        assert record["status"] == status
        assert record["env_steps"] > 0
        newest = checkpoint.newest(tmp_path / "run" / "checkpoints")
        assert newest is not None and int(newest.name[5:]) == record["env_steps"]
        assert b"python launch.py resume=" in errors

    def test_during_an_evaluation_which_is_then_done_on_resume(self, tmp_path: Path) -> None:
        """An evaluation that a signal cuts short leaves no line, and the resumed run equals the straight
        one."""
        overrides = small("ppo", f"total_timesteps={STEPS}", "eval.every=500", "eval.episodes=2")
        train(tmp_path / "straight", *overrides)
        from rl import evaluation, experiment

        stopped = experiment.Experiment(configure(*overrides), _made(tmp_path / "stopped"))
        original = evaluation.evaluate

        def interrupted(*args: object, **kwargs: object) -> object:
            os.kill(os.getpid(), signal.SIGTERM)
            return original(*args, **kwargs)  # type: ignore[arg-type]

        evaluation.evaluate = interrupted  # type: ignore[assignment]
        try:
            outcome = stopped.run()
        finally:
            evaluation.evaluate = original
        assert outcome.status == "preempted"
        assert not any("eval/episodic_return" in line for line in lines(tmp_path / "stopped"))
        train(
            tmp_path / "stopped",
            *overrides,
            resumed_from=checkpoint.newest(tmp_path / "stopped" / "checkpoints"),
        )
        assert lines(tmp_path / "straight") == lines(tmp_path / "stopped")

    def test_a_second_interrupt_leaves_at_once(self, tmp_path: Path) -> None:
        process = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "launch.py"),
                "hydra.run.dir=run",
                "logger=none",
                "env.id=tests.probes:Sleeper-v0",
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        wait_for_checkpoint(tmp_path / "run", process, after=0)
        time.sleep(0.3)  # into the step that takes a minute
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None, "the first one waits for the iteration"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 130
        assert rundir.read(tmp_path / "run")["status"] == "interrupted"


def _made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


class TestRestoring:
    def test_an_env_that_cannot_be_replayed_starts_a_new_episode_and_says_so(self, tmp_path: Path) -> None:
        overrides = small(
            "ppo", "env.id=tests.probes:OwnGenerator-v0", f"total_timesteps={STEPS}", "eval.episodes=1"
        )
        _, resumed = straight_and_resumed(tmp_path, overrides, at=STEPS // 2)
        notes = rundir.read(resumed)["starts"][-1]["notes"]
        assert [note.split(":")[0] for note in notes] == ["env 0", "env 1", "env 2", "env 3"]
        assert lines(resumed)[-1]["env_steps"] == STEPS, "no step is lost from the count"

    def test_a_torn_newest_checkpoint_is_named_and_the_previous_one_used(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        train(
            tmp_path / "run",
            *small("ppo", f"total_timesteps={STEPS}", "checkpoint.every=512", "eval.episodes=1"),
        )
        newest, previous = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))[:-3:-1]
        file = next(newest.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-10])
        assert checkpoint.newest(tmp_path / "run" / "checkpoints") == previous
        assert newest.name in caplog.text

    def test_failures_keep_the_last_checkpoint(self, tmp_path: Path) -> None:
        result = launch(
            "env.id=tests.probes:RaisesAfter-v0",
            "env.kwargs={steps: 2000}",
            "env.backend=async",
            "checkpoint.every=512",
            "hydra.run.dir=run",
            "logger=none",
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT)},
        )
        assert result.returncode == 1
        assert "ValueError: the probe broke on step 2000" in result.stderr
        assert "tests/probes.py" in result.stderr, "the env's own traceback"
        record = rundir.read(tmp_path / "run")
        assert record["status"] == "failed"
        assert "the probe broke" in record["error"]
        newest = checkpoint.newest(tmp_path / "run" / "checkpoints")
        assert newest is not None and int(newest.name[5:]) > 6000

    def test_nan_stops_the_run_with_the_step_and_its_name(self, tmp_path: Path) -> None:
        result = launch(
            "env.id=tests.probes:NaNAfter-v0",
            "env.kwargs={steps: 700, where: reward}",
            "checkpoint.every=512",
            "hydra.run.dir=run",
            "logger=none",
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT)},
        )
        assert result.returncode == 1
        last = result.stderr.strip().splitlines()[-1]
        assert "reward" in last and "env step 2796" in last and "step_000002560" in last
        assert "Traceback" not in result.stderr
        assert rundir.read(tmp_path / "run")["status"] == "failed"
