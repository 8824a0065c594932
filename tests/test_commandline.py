"""Mistakes on the command line: one plain line, exit code 2, nothing left behind, and no torch imported
before it."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rl.commandline import job_folder, safe
from rl.config import RunConfig
from rl.errors import ConfigError
from rl.schemas import schema_of, typed
from tests.conftest import RECIPES, ROOT, configure, launch

MISTAKES = {
    "algo.learning_rat=1": ["algo.learning_rat", "algo.learning_rate"],
    "learning_rate=1e-3": ["learning_rate", "algo.learning_rate"],
    "algo=pp": ["algo=pp", "ppo", "ppo_continuous_action"],
    "env=atary": ["env=atary", "classic", "mujoco"],
    "netwrk=mlp": ["netwrk", "did you mean network (e.g. network=mlp)?"],
    "hydra/lancher=slurm": ["hydra/lancher", "hydra/launcher=local"],
    "network@network.encoder=mlp": ["network@network.encoder", "network=lstm"],
    "--algo.learning_rate=1e-3": ["no dashes", "write algo.learning_rate=1e-3"],
    "--mulitrun": ["--mulitrun", "--multirun"],
    "hydra.ouput_subdir=x": ["hydra.ouput_subdir", "hydra.output_subdir"],
    "seed=abc": ["seed", "abc", "integer"],
    "seed=1.5": ["seed", "1.5", "integer"],
    "seed=-1": ["seed=-1", "at least 0"],
    "algo.gamma=abc": ["algo.gamma", "abc", "number"],
    "algo.gamma=1.5": ["algo.gamma=1.5", "at least 0 and at most 1"],
    "algo.gamma=nan": ["algo.gamma", "finite"],
    "algo.anneal_lr=maybe": ["algo.anneal_lr", "maybe"],
    "algo.num_steps=null": ["algo.num_steps", "null"],
    "env.num_envs=0": ["env.num_envs", "1"],
    "env.id=CartPol-v1": ["CartPol-v1", "CartPole-v1"],
    "env.id=CartPole-v9": ["CartPole-v9", "CartPole-v1"],
    "env.id=no_such_pkg:Foo-v0": ["no_such_pkg"],
    "env.kwargs={gravty: 1}": ["gravty"],
    "env.backend=asink": ["env.backend", "async"],
    "env.num_env=3": ["env.num_env", "env.num_envs"],
    "device=cuda": ["device=cuda", "cpu"],
    "device=gpu": ["device=gpu", "cuda"],
    "precision=fp16": ["precision", "fp32", "bf16"],
    "network.activation=tahn": ["network.activation", "tanh"],
    "network.hidden_sizes=[64,0]": ["network.hidden_sizes", "at least 1"],
    "algo.num_minibatches=3": ["algo.num_minibatches=3", "algo.num_minibatches=2"],
    "total_timesteps=100": ["total_timesteps=100", "512"],
    "seed=1,2": ["seed=1,2", "-m"],
    "algo.gamma=": ["algo.gamma"],
    "resume=runs/nowhere": ["resume=runs/nowhere"],
    "warm_start=runs/nowhere": ["warm_start=runs/nowhere"],
    "+algo.foo=1": ["algo.foo"],
    "env.kwargs={a: [}": ["env.kwargs"],
    "logger=tensorbord": ["tensorbord", "tensorboard"],
    "experiment=none_such": ["experiment"],
    "eval.episodes=0": ["eval.episodes=0", "at least 1"],
    "env.id=CarRacing-v3": ["network", "96x96x3"],
}


class TestMistakes:
    @pytest.mark.parametrize("mistake", MISTAKES)
    def test_one_line_that_names_key_and_remedy(self, mistake: str, tmp_path: Path) -> None:
        if mistake == "device=cuda" and Path("/proc/driver/nvidia").exists():
            pytest.skip("this machine has a CUDA device")
        result = launch(mistake, cwd=tmp_path)
        assert result.returncode == 2, result.stderr
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1, result.stderr
        for word in MISTAKES[mistake]:
            assert word in result.stderr
        assert list(tmp_path.iterdir()) == [], "nothing is left behind"

    @pytest.mark.parametrize(
        ("mistake", "remedy"),
        [
            ("network@network.encodr=mlp", "network@network.encoder=nature_cnn"),
            ("network@network.encoder=natur_cnn", "network@network.encoder=natur_cnn: choose one of"),
        ],
    )
    def test_of_an_option_within_an_option(self, mistake: str, remedy: str, tmp_path: Path) -> None:
        result = launch("algo=ppo_atari_lstm", mistake, cwd=tmp_path)
        assert result.returncode == 2 and remedy in result.stderr

    def test_in_a_sweep_nothing_starts(self, tmp_path: Path) -> None:
        result = launch("-m", "algo.num_minibatches=4,3", "seed=1,2", cwd=tmp_path)
        assert result.returncode == 2
        assert "algo.num_minibatches=3" in result.stderr
        assert list(tmp_path.iterdir()) == []

    def test_a_missing_package_is_named_with_its_install_line(self, tmp_path: Path) -> None:
        blocked = tmp_path / "blocked" / "wandb"
        blocked.mkdir(parents=True)
        (tmp_path / "blocked" / "sitecustomize.py").write_text("import sys\nsys.modules['mujoco'] = None\n")
        result = launch(
            "algo=ppo_continuous_action", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "blocked")}
        )
        assert result.returncode == 2
        assert "pip install -e '.[mujoco]'" in result.stderr
        assert result.stderr.count("\n") == 1

    def test_answers_before_torch_is_imported(self, tmp_path: Path) -> None:
        """A torch that cannot be imported does not keep a mistake, --help or --cfg from being answered."""
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
        env = {"PYTHONPATH": str(tmp_path)}
        for arguments in (
            ["algo.learning_rat=1"],
            ["env.id=CartPol-v1"],
            ["total_timesteps=1"],
            ["--help"],
            ["--cfg", "job"],
        ):
            result = launch(*arguments, cwd=tmp_path, env=env)
            assert "torch was imported" not in result.stderr + result.stdout, arguments
            assert result.returncode == (0 if arguments[0].startswith("--") else 2)

    def test_a_mistake_is_answered_much_sooner_than_torch_loads(self, tmp_path: Path) -> None:
        import subprocess

        def seconds(*command: str) -> float:
            start = time.perf_counter()
            subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
            return time.perf_counter() - start

        answer = min(seconds(sys.executable, "launch.py", "algo.learning_rat=1") for _ in range(3))
        torch = min(seconds(sys.executable, "-c", "import torch, hydra, gymnasium") for _ in range(3))
        assert answer < torch


class TestNumbers:
    @pytest.mark.parametrize("text", ["20000", "2e4", "20_000", "2.0e4"])
    def test_integers_however_written(self, text: str) -> None:
        config = configure(f"total_timesteps={text}", f"checkpoint.every={text}")
        assert (config.run.total_timesteps, config.run.checkpoint.every) == (20000, 20000)
        assert type(config.resolved["total_timesteps"]) is int

    def test_integers_of_an_algorithm(self) -> None:
        config = configure("algo.num_steps=1.28e2", "env.num_envs=1e1")
        assert (config.algo.num_steps, config.env.num_envs) == (128, 10)
        assert type(config.resolved["algo"]["num_steps"]) is int

    def test_in_a_yaml_file(self, tmp_path: Path) -> None:
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment" / "mine.yaml").write_text(
            "# @package _global_\ntotal_timesteps: 1e6\nalgo: {learning_rate: 1e-5}\n"
        )
        result = launch("--config-dir", str(tmp_path), "experiment=mine", "--cfg", "job", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        composed = OmegaConf.create(result.stdout)
        assert (composed.total_timesteps, composed.algo.learning_rate) == (1_000_000, 1e-5)

    def test_in_a_sweep(self, tmp_path: Path) -> None:
        result = launch(
            "-m",
            "total_timesteps=5.12e2,1_024",
            "logger=none",
            "eval.episodes=1",
            "algo.learning_rate=1e-5",
            cwd=tmp_path,
        )
        assert result.returncode == 0, result.stderr
        records = sorted((tmp_path / "multirun").rglob("run.json"))
        assert [json.loads(r.read_text())["env_steps"] for r in records] == [512, 1024]
        assert records[0].parent.name.startswith("0000_") and "total_timesteps=" in records[0].parent.name


class TestPrecedence:
    """command line > debug > local > template > experiment > algo recipe > env, network > root."""

    def compose(self, tmp_path: Path, *arguments: str) -> OmegaConf:
        files = {
            "experiment/study.yaml": "# @package _global_\nseed: 11\nenv: {num_envs: 6}\nalgo: "
            "{gamma: 0.5}\ntags: [study]\n",
            "local/default.yaml": "# @package _global_\ntags: [here]\nalgo: {gae_lambda: 0.25}\n",
            "debug/mine.yaml": "# @package _global_\nalgo: {gae_lambda: 0.125, clip_coef: 0.3}\n",
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        result = launch("--config-dir", str(tmp_path), "--cfg", "job", *arguments, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return OmegaConf.create(result.stdout)

    def test_recipe_over_env_and_root(self, tmp_path: Path) -> None:
        cfg = self.compose(tmp_path, "algo=ppo_continuous_action")
        assert (cfg.env.num_envs, cfg.env.id, cfg.total_timesteps) == (1, "HalfCheetah-v4", 1_000_000)

    def test_experiment_over_recipe_and_keeps_its_seed(self, tmp_path: Path) -> None:
        cfg = self.compose(tmp_path, "algo=ppo_continuous_action", "experiment=study")
        assert (cfg.seed, cfg.env.num_envs, cfg.algo.gamma) == (11, 6, 0.5)

    def test_local_over_experiment(self, tmp_path: Path) -> None:
        cfg = self.compose(tmp_path, "experiment=study")
        assert (cfg.tags, cfg.algo.gae_lambda) == (["here"], 0.25)

    def test_debug_over_local(self, tmp_path: Path) -> None:
        cfg = self.compose(tmp_path, "experiment=study", "debug=mine")
        assert (cfg.algo.gae_lambda, cfg.algo.clip_coef) == (0.125, 0.3)

    def test_command_line_over_all(self, tmp_path: Path) -> None:
        cfg = self.compose(
            tmp_path, "experiment=study", "debug=mine", "algo.gae_lambda=0.75", "seed=3", "network=mlp"
        )
        assert (cfg.algo.gae_lambda, cfg.seed) == (0.75, 3)


class TestComposition:
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_every_recipe_shows_resolved(self, recipe: str, tmp_path: Path) -> None:
        result = launch(f"algo={recipe}", "--cfg", "job", "--resolve", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert OmegaConf.create(result.stdout).algo._target_.startswith("rl.algos.")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("debug", sorted(p.stem for p in (ROOT / "conf" / "debug").glob("*.yaml")))
    def test_every_debug_option_composes(self, debug: str) -> None:
        assert configure(f"debug={debug}").loggers == {}

    def test_a_users_own_algorithm(self, tmp_path: Path) -> None:
        """A copy of ppo.py in the user's package, with a key more, found through their own conf folder."""
        package = tmp_path / "my_package"
        package.mkdir()
        (package / "__init__.py").touch()
        source = (ROOT / "rl" / "algos" / "ppo.py").read_text()
        extended = source.replace(
            "    adam_eps: float", "    my_own_key: float = bounded(ge=0, le=2)\n    adam_eps: float"
        )
        (package / "my_ppo.py").write_text(extended)
        (tmp_path / "my_conf" / "algo").mkdir(parents=True)
        yaml = (
            (ROOT / "conf" / "algo" / "ppo.yaml")
            .read_text()
            .replace("rl.algos.ppo.PPO", "my_package.my_ppo.PPO")
        )
        (tmp_path / "my_conf" / "algo" / "my_ppo.yaml").write_text(yaml + "my_own_key: 1.0\n")
        arguments = [
            "--config-dir",
            "my_conf",
            "algo=my_ppo",
            "total_timesteps=512",
            "logger=none",
            "eval.episodes=1",
        ]
        env = {"PYTHONPATH": str(tmp_path)}
        wrong = launch(*arguments, "algo.my_own_key=3", cwd=tmp_path, env=env)
        assert wrong.returncode == 2
        assert "algo.my_own_key=3.0: must be at least 0 and at most 2" in wrong.stderr
        right = launch(*arguments, cwd=tmp_path, env=env)
        assert right.returncode == 0, right.stderr
        assert len(list((tmp_path / "runs").rglob("run.json"))) == 1

    def test_types_of_a_schema(self) -> None:
        values = typed(
            schema_of("rl.networks.mlp.MLP"),
            {"hidden_sizes": [8], "activation": "relu", "shared": "true", "orthogonal": False},
            "network",
        )
        assert values == {"hidden_sizes": [8], "activation": "relu", "shared": True, "orthogonal": False}
        with pytest.raises(ConfigError, match=r"network.activaton.*network.activation"):
            typed(schema_of("rl.networks.mlp.MLP"), {"activaton": "relu"}, "network")
        with pytest.raises(ConfigError, match="_target_"):
            schema_of("os.system")
        assert RunConfig.__dataclass_fields__.keys() >= {"seed", "resume"}


class TestRunDirectories:
    def test_five_launches_in_one_second(self, tmp_path: Path) -> None:
        arguments = ("total_timesteps=512", "logger=none", "eval.episodes=1", "algo.update_epochs=1")
        with ThreadPoolExecutor(5) as pool:
            results = list(pool.map(lambda _: launch(*arguments, cwd=tmp_path), range(5)))
        assert [r.returncode for r in results] == [0] * 5
        records = list((tmp_path / "runs").rglob("run.json"))
        assert len(records) == 5
        assert all(json.loads(r.read_text())["status"] == "completed" for r in records)

    def test_names(self) -> None:
        assert safe("ppo_ALE/Breakout-v5_s1") == "ppo_ALE-Breakout-v5_s1"
        assert job_folder(3, "algo=ppo,seed=3") == "0003_algo=ppo,seed=3"
        long = job_folder(3, ",".join(f"key{i}=value{i}" for i in range(40)))
        assert len(long) < 100 and long.startswith("0003_key0=value0")

    def test_working_directory_is_never_changed(self, tmp_path: Path) -> None:
        result = launch("total_timesteps=512", "logger=none", "eval.episodes=1", cwd=tmp_path)
        assert result.returncode == 0
        assert os.listdir(tmp_path) == ["runs"]


class TestResumeKeys:
    @pytest.fixture(scope="class")
    def run(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("resume")
        result = launch(
            "total_timesteps=1024",
            "checkpoint.every=512",
            "checkpoint.keep=0",
            "logger=none",
            "eval.episodes=1",
            "hydra.run.dir=run",
            cwd=folder,
        )
        assert result.returncode == 0, result.stderr
        return folder

    def test_a_key_that_may_not_change_is_refused(self, run: Path) -> None:
        result = launch("resume=run", "algo.gamma=0.9", cwd=run)
        assert result.returncode == 2
        assert "algo.gamma cannot change" in result.stderr and "algo.gamma=0.99" in result.stderr

    def test_a_mistake_is_answered_before_torch_is_imported(self, run: Path, tmp_path: Path) -> None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
        for resume in ("run", "run/checkpoints/step_000000512"):
            result = launch(f"resume={resume}", "algo.gamma=0.9", cwd=run, env={"PYTHONPATH": str(tmp_path)})
            assert result.returncode == 2
            assert "algo.gamma cannot change" in result.stderr

    def test_a_complete_run_says_so(self, run: Path) -> None:
        result = launch("resume=run", cwd=run)
        assert result.returncode == 0
        assert "complete at step 1,024" in result.stdout

    def test_the_same_command_in_the_same_directory_continues(self, run: Path) -> None:
        same = [
            "total_timesteps=1024",
            "checkpoint.every=512",
            "checkpoint.keep=0",
            "logger=none",
            "eval.episodes=1",
            "hydra.run.dir=run",
        ]
        assert "complete at step 1,024" in launch(*same, cwd=run).stdout
        other = launch(*same, "algo.gamma=0.9", cwd=run)
        assert other.returncode == 2 and "algo.gamma cannot change" in other.stderr

    def test_more_steps_train_on_and_keep_what_was_written(self, run: Path) -> None:
        before = (run / "run" / "evaluations.csv").read_text()
        result = launch("resume=run", "total_timesteps=2048", cwd=run)
        assert result.returncode == 0, result.stderr
        record = json.loads((run / "run" / "run.json").read_text())
        assert (record["env_steps"], record["total_timesteps"], len(record["starts"])) == (2048, 2048, 2)
        assert (run / "run" / "evaluations.csv").read_text().startswith(before)

    def test_an_older_checkpoint_branches_into_a_run_of_its_own(self, run: Path) -> None:
        before = (run / "run" / "metrics.jsonl").read_text()
        result = launch("resume=run/checkpoints/step_000000512", cwd=run)
        assert result.returncode == 0, result.stderr
        assert (run / "run" / "metrics.jsonl").read_text() == before
        branches = list((run / "runs").rglob("run.json"))
        assert len(branches) == 1
        steps = [
            json.loads(line)["env_steps"]
            for line in (branches[0].parent / "metrics.jsonl").read_text().splitlines()
        ]
        assert steps[0] == 512, "the branch has the metrics that led to it"


class TestSweeps:
    def test_each_job_is_a_tracker_run_of_its_own(self, tmp_path: Path) -> None:
        result = launch(
            "-m",
            "seed=1,2",
            "total_timesteps=512",
            "eval.episodes=1",
            "logger=[csv,wandb]",
            "logger.wandb.mode=offline",
            cwd=tmp_path,
        )
        assert result.returncode == 0, result.stderr
        jobs = sorted(p.parent for p in (tmp_path / "multirun").rglob("run.json"))
        assert [job.name for job in jobs] == ["0000_seed=1", "0001_seed=2"]
        ids = {next(iter((job / "wandb").glob("offline-run-*"))).name.rpartition("-")[2] for job in jobs}
        assert len(ids) == 2
        assert all((job / "metrics.csv").exists() for job in jobs)
