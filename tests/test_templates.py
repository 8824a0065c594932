"""The ready-made sweeps of multirun_templates/: found from any folder, with the jobs that they promise, which
are right and run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rl import commandline, rundir
from rl.config import Config, check
from rl.launchers.templates import MultirunTemplates, TemplateSource
from rl.schemas import flatten
from tests.conftest import ROOT, launch, lines

Plugins.instance().register(MultirunTemplates)

FILES = {path.stem: path for path in sorted((ROOT / "multirun_templates").glob("*.yaml"))}
THREE = ("1", "2", "3")
GAMES = ("Pong", "BeamRider", "Breakout")
ROBOTS = (
    "HalfCheetah-v4",
    "Walker2d-v4",
    "Hopper-v4",
    "InvertedPendulum-v4",
    "Humanoid-v4",
    "Pusher-v5",
)
ABLATIONS = {  # the key that each option changes in PPO on CartPole-v1
    "no_annealing": "algo.anneal_lr",
    "no_advantage_normalization": "algo.norm_adv",
    "no_value_clipping": "algo.clip_vloss",
    "no_clipping": "algo.clip_coef",
    "no_gae": "algo.gae_lambda",
    "no_entropy_bonus": "algo.ent_coef",
    "no_gradient_clipping": "algo.max_grad_norm",
    "torch_adam_eps": "algo.adam_eps",
    "torch_initialization": "network.orthogonal",
    "no_truncation_bootstrap": "algo.bootstrap_truncated",
}
CONTINUOUS = {  # and those of PPO on HalfCheetah-v4
    "no_obs_normalization": "env.normalize_obs",
    "no_reward_normalization": "env.normalize_reward",
}
SWEPT: dict[str, dict[str, tuple[str, ...]]] = {  # the values that the jobs of each template take
    "seeds": {"seed": ("1", "2", "3", "4", "5")},
    "grid_lr": {"algo.learning_rate": ("0.0001", "0.00025", "0.0005", "0.001", "0.0025"), "seed": THREE},
    "benchmark_classic": {"env.id": ("CartPole-v1", "Acrobot-v1", "MountainCar-v0"), "seed": THREE},
    "benchmark_mujoco": {"env.id": ROBOTS, "seed": THREE},
    "benchmark_atari": {"env.id": tuple(f"{game}NoFrameskip-v4" for game in GAMES), "seed": THREE},
    "ablation_ppo": {"ablation_ppo": ("baseline", *ABLATIONS), "seed": THREE},
    "slurm_array": {"seed": tuple(str(seed) for seed in range(1, 11))},
}
STUDIES = ("optuna_ppo", "slurm_optuna")
_STEPS = ("algo.num_steps=64", "algo.update_epochs=1", "total_timesteps=512", "eval.episodes=1")
TINY: dict[
    str, tuple[str, ...]
] = {  # overrides that leave of each template jobs of moments: two, without a cluster
    "seeds": ("seed=1,2", *_STEPS),
    "grid_lr": ("algo.learning_rate=1e-4,1e-3", "seed=1", *_STEPS),
    "benchmark_classic": ("env.id=CartPole-v1,Acrobot-v1", "seed=1", *_STEPS),
    "benchmark_mujoco": ("env.id=Hopper-v4,InvertedPendulum-v4", "seed=1", *_STEPS),
    "benchmark_atari": (
        "env.id=PongNoFrameskip-v4,BreakoutNoFrameskip-v4",
        "seed=1",
        "env.num_envs=2",
        "env.max_episode_steps=200",
        "network.hidden_size=16",
        "torch_threads=1",
        *_STEPS,
    ),
    "ablation_ppo": ("ablation_ppo=baseline,no_gae", "seed=1", *_STEPS),
}
RECIPE = {"benchmark_mujoco": "ppo_continuous_action", "benchmark_atari": "ppo_atari"}


def composed(*overrides: str) -> DictConfig:
    """The configuration of a command line without sweeps, Hydra's node included."""
    args = commandline.parse(list(overrides))
    with commandline.composer(args) as compose:
        return compose(commandline.opened(args.overrides))


def checked(*overrides: str) -> Config:
    """The same as a job gets it."""
    cfg = composed(*overrides)
    return check(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]))


def params(cfg: DictConfig) -> list[Override]:
    """What the sweeper's own parameters sweep."""
    return OverridesParser.create().parse_overrides(
        [f"{key}={value}" for key, value in cfg.hydra.sweeper.params.items()]
    )


def jobs(*overrides: str) -> list[list[str]]:
    """The overrides of each job that Hydra's basic sweeper makes of a command line."""
    given = OverridesParser.create().parse_overrides(list(overrides))
    steady = [str(word.input_line) for word in given if not word.is_sweep_override()]
    batches = BasicSweeper.split_arguments([*params(composed(*steady)), *given], max_batch_size=None)
    return batches[0]


def trials(cfg: DictConfig) -> Iterator[list[str]]:
    """Trials at the ends of a study's ranges: all lowest, all highest, and each highest on its own."""
    ends = {}
    for param in params(cfg):
        sweep = param.value()
        if isinstance(sweep, IntervalSweep):
            ends[param.key_or_group] = (str(sweep.start), str(sweep.end))
        else:
            values = list(param.sweep_string_iterator())
            ends[param.key_or_group] = (values[0], values[-1])
    yield [f"{key}={highest}" for key, (_, highest) in ends.items()]
    for risen in (None, *ends):
        yield [f"{key}={high if key == risen else low}" for key, (low, high) in ends.items()]


def changes(one: Config, other: Config) -> set[str]:
    """The keys in which two configurations differ."""
    a, b = dict(flatten(one.resolved)), dict(flatten(other.resolved))
    return {
        key for key in a.keys() | b.keys() if a.get(key) != b.get(key) and not isinstance(a.get(key), Mapping)
    }


def test_every_template_is_tested() -> None:
    assert set(FILES) == {*SWEPT, *STUDIES}


@pytest.mark.parametrize("name", FILES)
class TestEveryTemplate:
    def test_says_its_command_which_the_readme_lists(self, name: str) -> None:
        header, command = FILES[name].read_text().splitlines()[:2]
        assert header == "# @package _global_"
        assert command.startswith(f"# python launch.py multirun_templates={name}")
        rows = [row for row in (ROOT / "README.md").read_text().splitlines() if row.startswith("|")]
        assert any(f"`{command[2:]}`" in row for row in rows), f"README.md: a row for {command[2:]}"

    def test_is_a_sweep_wherever_it_is_asked_for(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        cfg = composed(f"multirun_templates={name}")
        assert cfg.hydra.mode == RunMode.MULTIRUN
        assert cfg.hydra.runtime.choices.algo == RECIPE.get(name, "ppo")

    def test_sets_keys_that_launcher_and_sweeper_have(self, name: str) -> None:
        """Hydra would take any other and say nothing."""
        cfg = composed(f"multirun_templates={name}")
        for part in ("launcher", "sweeper"):
            choice = cfg.hydra.runtime.choices[f"hydra/{part}"]
            plain = composed(f"hydra/{part}={choice}")
            assert set(cfg.hydra[part]) == set(plain.hydra[part])

    def test_its_command_is_right(self, name: str) -> None:
        command = FILES[name].read_text().splitlines()[1].removeprefix("# python launch.py ").split()
        words = command if name in STUDIES else jobs(*command)[-1]
        checked(*words)


@pytest.mark.parametrize("name", SWEPT)
class TestJobs:
    def test_are_the_product_of_the_values(self, name: str) -> None:
        template = f"multirun_templates={name}"
        product = itertools.product(*([f"{k}={v}" for v in values] for k, values in SWEPT[name].items()))
        assert sorted(jobs(template)) == sorted([*job, template] for job in product)

    def test_each_is_a_right_configuration_of_its_own(self, name: str) -> None:
        one_seed = [job for job in jobs(f"multirun_templates={name}") if name == "seeds" or "seed=1" in job]
        configs = [checked(*job) for job in one_seed]
        assert all(changes(a, b) for a, b in itertools.combinations(configs, 2))


@pytest.mark.parametrize("name", TINY)
class TestTinyForm:
    def test_runs(self, name: str, tmp_path: Path) -> None:
        words = (f"multirun_templates={name}", *TINY[name], "debug=fast", "hydra.sweep.dir=sweep")
        swept = launch(*words, cwd=tmp_path)
        assert swept.returncode == 0, swept.stderr
        runs = sorted(path.parent for path in (tmp_path / "sweep").glob("*/run.json"))
        assert [rundir.read(run)["status"] for run in runs] == ["completed"] * 2
        configs = [OmegaConf.load(run / "config.yaml") for run in runs]
        assert configs[0] != configs[1]
        assert all(lines(run)[-1]["env_steps"] == 512 for run in runs)


class TestCommandLine:
    def test_beats_the_values_of_the_template(self) -> None:
        assert [job[0] for job in jobs("multirun_templates=seeds", "seed=7,8")] == ["seed=7", "seed=8"]
        assert [job[0] for job in jobs("multirun_templates=seeds", "seed=7")] == ["seed=7"]

    def test_beats_the_recipe_of_the_template(self) -> None:
        job = jobs("multirun_templates=benchmark_mujoco", "algo=sac_continuous_action", "env.id=Hopper-v4")[0]
        config = checked(*job)
        assert (config.algo_target, config.env.id) == ("rl.algos.sac.SAC", "Hopper-v4")

    def test_adds_its_own_sweeps(self) -> None:
        both = jobs("multirun_templates=seeds", "algo=ppo,dqn")
        assert len(both) == 2 * 5
        assert {checked(*job).algo_target for job in both[:2]} == {"rl.algos.ppo.PPO", "rl.algos.dqn.DQN"}


class TestAblation:
    @pytest.mark.parametrize(
        ("recipe", "option", "key"),
        [
            *(("ppo", option, key) for option, key in ABLATIONS.items()),
            *(("ppo_continuous_action", option, key) for option, key in CONTINUOUS.items()),
        ],
    )
    def test_an_option_changes_one_thing(self, recipe: str, option: str, key: str) -> None:
        template = ("multirun_templates=ablation_ppo", f"algo={recipe}")
        assert changes(checked(*template), checked(*template, f"ablation_ppo={option}")) == {key}

    def test_the_baseline_is_the_recipe(self) -> None:
        assert not changes(checked(), checked("multirun_templates=ablation_ppo"))

    def test_every_option_is_tested(self) -> None:
        options = {path.stem for path in (ROOT / "conf" / "ablation_ppo").glob("*.yaml")}
        assert options == {"baseline", *ABLATIONS, *CONTINUOUS}


@pytest.mark.parametrize("name", STUDIES)
class TestStudies:
    def test_trials_at_the_ends_of_the_ranges_are_right(self, name: str) -> None:
        cfg = composed(f"multirun_templates={name}")
        for trial in trials(cfg):
            checked(f"multirun_templates={name}", *trial)

    def test_maximises_the_mean_of_three_seeds(self, name: str) -> None:
        sweeper = composed(f"multirun_templates={name}").hydra.sweeper
        assert (sweeper.direction, sweeper.n_seeds) == ("maximize", 3)


class TestCluster:
    @pytest.mark.parametrize("name", ["slurm_array", "slurm_optuna"])
    def test_goes_to_slurm(self, name: str) -> None:
        assert composed(f"multirun_templates={name}").hydra.runtime.choices["hydra/launcher"] == "slurm"

    def test_is_the_study_on_slurm(self) -> None:
        here, there = (composed(f"multirun_templates={name}").hydra.sweeper for name in STUDIES)
        assert here.params == there.params


class TestAnotherLauncherOrSweeper:
    def test_the_launcher_takes_none_of_what_the_template_sets_for_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        arguments, _ = commandline.prepare(["multirun_templates=slurm_array", "hydra/launcher=local"])
        assert "~hydra.launcher.timeout_min" in arguments

    @pytest.mark.parametrize(
        ("words", "key"),
        [
            (["multirun_templates=optuna_ppo", "hydra/sweeper=grid"], "hydra.sweeper.direction"),
            (["multirun_templates=mine", "hydra/launcher=local"], "hydra.launcher.partitoin"),
        ],
    )
    def test_a_key_that_it_cannot_have_is_refused(self, words: list[str], key: str, tmp_path: Path) -> None:
        (tmp_path / "multirun_templates").mkdir()
        (tmp_path / "multirun_templates" / "mine.yaml").write_text(
            "# @package _global_\nhydra:\n  mode: MULTIRUN\n  launcher:\n    partitoin: cpu\n"
        )
        done = launch("--config-dir", str(tmp_path), *words, cwd=tmp_path)
        assert done.returncode == 2
        assert [path.name for path in tmp_path.iterdir()] == ["multirun_templates"]
        assert done.stderr.startswith(f"{key}: {words[1]} has no such key"), done.stderr
        assert "; it has " in done.stderr


class TestSearchPath:
    def test_shows_the_templates_and_no_other_folder_of_the_root(self) -> None:
        with commandline.composer(commandline.parse([])):
            groups = GlobalHydra.instance().config_loader().list_groups("")
        ours = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()}
        assert set(groups) == ours | {"multirun_templates"}

    def test_source_of_a_folder_without_templates(self, tmp_path: Path) -> None:
        (tmp_path / "tests").mkdir()
        source = TemplateSource("rl", f"templates://{tmp_path}")
        assert not source.available()
        assert source.list("", ObjectType.GROUP) == []
        assert not source.exists("tests")

    def test_source_lists_templates(self) -> None:
        source = TemplateSource("rl", f"templates://{ROOT}")
        assert source.list("", None) == source.list("", ObjectType.GROUP) == ["multirun_templates"]
        assert source.list("", ObjectType.CONFIG) == []
        assert source.list("multirun_templates", ObjectType.CONFIG) == list(FILES)
        assert not source.is_config("multirun_templates/none_such")

    def test_a_folder_of_the_users_adds_to_them(self, tmp_path: Path) -> None:
        (tmp_path / "multirun_templates").mkdir()
        mine = "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {algo.gamma: '0.9,0.95'}}}\n"
        (tmp_path / "multirun_templates" / "mine.yaml").write_text(mine)
        cfg = composed("--config-dir", str(tmp_path), "multirun_templates=mine")
        assert cfg.hydra.sweeper.params == {"algo.gamma": "0.9,0.95"}

    def test_launch_finds_them_from_any_folder(self, tmp_path: Path) -> None:
        shown = launch("multirun_templates=seeds", "--cfg", "hydra", cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr
        cfg: Any = OmegaConf.create(shown.stdout)
        assert cfg.hydra.sweeper.params == {"seed": "range(1,6)"}

    def test_a_mistyped_template_is_one_line(self, tmp_path: Path) -> None:
        wrong = launch("multirun_templates=sedes", cwd=tmp_path)
        assert wrong.returncode == 2
        assert "did you mean seeds?" in wrong.stderr and wrong.stderr.count("\n") == 1
        assert list(tmp_path.iterdir()) == []
