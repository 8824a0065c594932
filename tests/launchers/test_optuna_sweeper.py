"""The Optuna sweeper: Hydra's sweeps as distributions, trials that end, are pruned, fail or go on later."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from rl.errors import ConfigError
from rl.launchers.ledger import Job
from rl.launchers.optuna_sweeper import check_settings, sampler
from rl.launchers.search_space import Search, assignment, command, distribution
from rl.launchers.sweep import Sweep
from rl.launchers.trials import Trials, mean_evaluations
from tests.conftest import ROOT, launch
from tests.launchers.test_commands import rl
from tests.sweeps import only_sweep, states

optuna.logging.set_verbosity(optuna.logging.ERROR)

STUDY = ("-m", "hydra/sweeper=optuna", "hydra/launcher=local")
QUICK = ("algo.num_steps=64", "algo.update_epochs=1", "total_timesteps=512", "eval.episodes=1", "logger=none")
GAMMA = {"algo.gamma": FloatDistribution(0.9, 1.0)}


def distribution_of(text: str) -> Any:
    return distribution(OverridesParser.create().parse_override(text))


def study_of(sweep: Sweep) -> optuna.Study:
    return optuna.load_study(study_name=sweep.folder.name, storage=f"sqlite:///{sweep.folder / 'optuna.db'}")


class TestDistributions:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("a=interval(0.9, 1.0)", FloatDistribution(0.9, 1.0)),
            ("a=tag(log, interval(1e-5, 1e-2))", FloatDistribution(1e-5, 1e-2, log=True)),
            ("a=int(interval(1, 8))", IntDistribution(1, 8)),
            ("a=tag(log, int(interval(1, 8)))", IntDistribution(1, 8, log=True)),
            ("a=range(1, 6)", IntDistribution(1, 5)),
            ("a=range(0, 7, 3)", IntDistribution(0, 6, step=3)),
            ("a=range(0.5, 2, 0.5)", FloatDistribution(0.5, 1.5, step=0.5)),
            ("a=1,0.5,true,null", CategoricalDistribution([1, 0.5, True, None])),
            ("a=relu,tanh", CategoricalDistribution(["relu", "tanh"])),
            ("a=choice([64,64],[256])", CategoricalDistribution(["[64,64]", "[256]"])),
        ],
    )
    def test_a_sweep_of_hydras(self, text: str, expected: Any) -> None:
        assert distribution_of(text) == expected

    @pytest.mark.parametrize(
        "text", ["a=interval(1.0, 0.9)", "a=tag(log, interval(0, 1))", "a=range(5, 5)", "a=glob(*)"]
    )
    def test_what_cannot_be_searched_is_named(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"^a="):
            distribution_of(text)

    @pytest.mark.parametrize("value", [0.1 + 0.2, 1e-05, 3, True, None])
    def test_a_value_survives_the_override(self, value: Any) -> None:
        assert OverridesParser.create().parse_override(assignment("a", value)).value() == value


class TestSearch:
    def test_the_command_line_wins(self) -> None:
        params = {"algo.gamma": "interval(0.9, 1.0)", "algo.clip_coef": "choice(0.1, 0.2)"}
        search = Search.of(params, ["algo.gamma=range(0.5, 2, 0.5)", "algo.clip_coef=0.3", "seed=7"], 3, 7)
        assert search.distributions == {"algo.gamma": FloatDistribution(0.5, 1.5, step=0.5)}
        assert search.fixed == ["algo.clip_coef=0.3"]
        assert search.seeds == [7, 8, 9]

    def test_swept_seeds_are_those_of_each_trial(self) -> None:
        search = Search.of({"algo.gamma": "interval(0.9, 1.0)"}, ["seed=3,9"], 5, 1)
        assert search.seeds == [3, 9] and list(search.distributions) == ["algo.gamma"]

    def test_nothing_to_search(self) -> None:
        with pytest.raises(ConfigError, match="nothing to search"):
            Search.of({}, ["algo.gamma=0.9"], 1, 1)

    def test_other_choices_than_earlier_trials_had(self) -> None:
        earlier = create_trial(value=1, params={"a": 1}, distributions={"a": CategoricalDistribution([1, 2])})
        with pytest.raises(ConfigError, match=r"^a: earlier trials"):
            Search.of({"a": "choice(1, 2, 3)"}, [], 1, 1).check_against([earlier])

    def test_command_of_a_template_runs_once_and_here(self) -> None:
        search = Search.of({"algo.gamma": "interval(0.9, 1.0)"}, ["multirun_templates=slurm_optuna"], 2, 4)
        assert command([], search, {"algo.gamma": 0.95}) == (
            "python launch.py multirun_templates=slurm_optuna algo.gamma=0.95 hydra.mode=RUN "
            "hydra/launcher=local seed=4"
        )


SETTINGS = {
    "n_trials": 1,
    "n_seeds": 1,
    "n_parallel": None,
    "seed": 1,
    "direction": "maximize",
    "sampler": "tpe",
    "pruner": "none",
}


class TestSettings:
    def test_good_ones_pass(self) -> None:
        check_settings(SETTINGS)

    @pytest.mark.parametrize(
        ("key", "value"), [("n_trials", 0), ("n_parallel", 1.5), ("sampler", "tpa"), ("seed", -1)]
    )
    def test_wrong_ones_are_named(self, key: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=f"hydra.sweeper.{key}={value}"):
            check_settings({**SETTINGS, key: value})

    def test_a_continued_study_draws_other_values(self) -> None:
        def first(trials: int) -> float:
            study = optuna.create_study(sampler=sampler("random", 1, trials))
            return float(study.ask(dict(GAMMA)).params["algo.gamma"])

        assert first(0) == first(0) != first(1)


class FakeLauncher:
    """Runs jobs in no time: each poll gives every running job its next evaluation, then its objective.

    Args:
        returns: what the evaluations of a job give, from its gamma; the last is the objective.
        cut: polls after which the process gets SIGTERM.
    """

    waits = True

    def __init__(self, sweep: Sweep, returns: Any, retry_failed: bool = False, cut: int = -1) -> None:
        self.sweep, self.returns, self.cut = sweep, returns, cut
        self.config = OmegaConf.create(
            {"eval": {"every": 100, "episodes": 1}, "retry_failed": retry_failed, "fail_fast": False}
        )
        self.running: list[int] = []
        self.started: list[int] = []

    def settle(self) -> None:
        self.sweep.settle()

    def job(self, overrides: Sequence[str]) -> Job:
        known = self.sweep.find(overrides)
        if known is None:
            number = len(self.sweep.jobs())
            (self.sweep.folder / str(number)).mkdir()
            self.sweep.ledger.append(number, "pending", folder=str(number), overrides=list(overrides))
            known = self.sweep.jobs()[number]
        return known

    def is_due(self, job: Job) -> bool:
        return job.state in ("pending", "preempted") or (
            job.state == "failed" and bool(self.config.retry_failed)
        )

    def start(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.started.append(job.number)
            self.running.append(job.number)
            self.sweep.ledger.append(job.number, "running", attempt=job.attempt + 1)
            (job.path / "run.json").write_text(json.dumps({"total_timesteps": 300}))

    def poll(self) -> None:
        if self.cut == 0:
            signal.raise_signal(signal.SIGTERM)
            return
        self.cut -= 1
        for job in [self.sweep.jobs()[number] for number in self.running]:
            path = job.path / "evaluations.csv"
            before = path.read_text() if path.exists() else "env_steps,episode,return,length\n"
            count = before.count("\n") - 1
            result = self.returns(job)[count]
            if result == "error":
                self._end(job, "failed", error="bad luck")
            elif count == 2:
                self._end(job, "completed", objective=result)
            else:
                path.write_text(f"{before}{(count + 1) * 100 + 7},0,{result},1\n")

    def stop(self, jobs: Sequence[Job], number: signal.Signals = signal.SIGTERM) -> None:
        for job in jobs:
            self._end(job, "preempted")

    def unfinished(self, jobs: Sequence[Job]) -> list[Job]:
        return [job for job in jobs if job.number in self.running]

    def _end(self, job: Job, state: Any, **facts: Any) -> None:
        self.running.remove(job.number)
        self.sweep.ledger.append(job.number, state, **facts)


def new_study(pruner: Any = None) -> optuna.Study:
    return optuna.create_study(
        direction="maximize", sampler=sampler("random", 1, 0), pruner=pruner or optuna.pruners.NopPruner()
    )


def trials(study: optuna.Study, launcher: Any, n_trials: int, parallel: int = 1) -> Trials:
    return Trials(study, Search(dict(GAMMA), [], [1, 2]), launcher, n_trials, parallel)


def seed_of(job: Job) -> int:
    return int(job.overrides[-1].split("=")[1])


class TestTrials:
    def test_the_value_is_the_mean_over_the_seeds(self, tmp_path: Path) -> None:
        study = new_study()
        launcher = FakeLauncher(Sweep(tmp_path), lambda job: [0.0, 0.0, 10.0 * seed_of(job)])
        assert trials(study, launcher, n_trials=3, parallel=2).follow() is None
        assert [t.value for t in study.trials] == [15.0] * 3  # (10 + 20) / 2
        assert study.trials[0].intermediate_values == {100: 0.0, 200: 0.0}
        assert states(launcher.sweep) == ["completed"] * 6

    @pytest.mark.parametrize("ending", ["error", float("nan"), None])
    def test_a_failed_job_fails_the_trial_and_no_other(self, tmp_path: Path, ending: Any) -> None:
        study = new_study()
        bad = lambda job: [0, 0, ending if job.number == 1 else 5.0]  # noqa: E731
        launcher = FakeLauncher(Sweep(tmp_path), bad)
        trials(study, launcher, n_trials=2).follow()
        assert [t.state for t in study.trials] == [TrialState.FAIL, TrialState.COMPLETE]
        assert "job 1" in study.trials[0].user_attrs["error"]

    def test_the_other_jobs_of_a_failed_trial_are_stopped(self, tmp_path: Path) -> None:
        launcher = FakeLauncher(Sweep(tmp_path), lambda job: ["error" if job.number == 1 else 0, 0, 0])
        trials(new_study(), launcher, n_trials=1).follow()
        assert states(launcher.sweep) == ["preempted", "failed"]

    def test_failed_trials_are_tried_again_on_request(self, tmp_path: Path) -> None:
        study, sweep = new_study(), Sweep(tmp_path)
        trials(study, FakeLauncher(sweep, lambda job: ["error"]), n_trials=1).follow()
        again = FakeLauncher(sweep, lambda job: [0, 0, 4.0], retry_failed=True)
        trials(study, again, n_trials=1).follow()
        first, second = study.trials
        assert first.state == TrialState.FAIL and second.value == 4.0
        assert first.params == second.params and states(sweep) == ["completed"] * 2

    def test_a_poor_trial_is_pruned_once_all_seeds_have_the_evaluation(self, tmp_path: Path) -> None:
        study = new_study(optuna.pruners.MedianPruner(n_startup_trials=1))
        launcher = FakeLauncher(Sweep(tmp_path), lambda job: [9 if job.number < 2 else job.number, 9, 9])
        trials(study, launcher, n_trials=2).follow()
        assert [t.state for t in study.trials] == [TrialState.COMPLETE, TrialState.PRUNED]
        assert study.trials[1].intermediate_values == {100: 2.5}  # jobs 2 and 3
        assert states(launcher.sweep) == ["completed"] * 2 + ["pruned"] * 2

    def test_goes_on_with_what_a_signal_stopped(self, tmp_path: Path) -> None:
        study, sweep = new_study(), Sweep(tmp_path)
        results = lambda job: [1, 2, 3.0]  # noqa: E731
        assert trials(study, FakeLauncher(sweep, results, cut=1), n_trials=2).follow() == signal.SIGTERM
        assert [t.state for t in study.trials] == [TrialState.RUNNING]
        assert states(sweep) == ["preempted"] * 2
        later = FakeLauncher(sweep, results)
        assert trials(study, later, n_trials=2).follow() is None
        assert [t.value for t in study.trials] == [3.0, 3.0]
        assert later.started == [0, 1, 2, 3] and sweep.jobs()[0].attempt == 2

    def test_a_trial_without_jobs_does_not_count(self, tmp_path: Path) -> None:
        study = new_study()
        study.ask(dict(GAMMA))  # as a process leaves it that was killed before it had frozen the jobs
        trials(study, FakeLauncher(Sweep(tmp_path), lambda job: [0, 0, 1.0]), n_trials=1).follow()
        assert [t.state for t in study.trials] == [TrialState.FAIL, TrialState.COMPLETE]

    def test_more_trials_may_be_asked_for(self, tmp_path: Path) -> None:
        study, launcher = new_study(), FakeLauncher(Sweep(tmp_path), lambda job: [0, 0, 1.0])
        for total in (1, 1, 3):
            trials(study, launcher, n_trials=total).follow()
            assert len(study.trials) == total


def test_means_are_of_whole_periodic_evaluations_that_all_runs_have(tmp_path: Path) -> None:
    rows = {"a": ["104,0,1,9", "104,1,3,9", "208,0,5,9"], "b": ["128,0,4,9", "128,1,8,9", "300,0,7,9"]}
    for name, lines in rows.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text('{"total_timesteps": 300}')
        (tmp_path / name / "evaluations.csv").write_text(
            "\n".join(["env_steps,episode,return,length", *lines, "torn"])
        )
    runs = [tmp_path / "a", tmp_path / "b"]
    assert mean_evaluations(runs, 100, 2) == {100: 4.0}  # (2 + 6) / 2
    assert mean_evaluations([*runs, tmp_path / "not started"], 100, 2) == {}
    assert mean_evaluations(runs, 0, 2) == {}


@pytest.mark.slow
class TestReal:
    def test_a_study_with_a_bad_value(self, tmp_path: Path) -> None:
        """Of the two values of num_minibatches one divides no batch."""
        sweeper = [
            f"hydra.sweeper.{word}" for word in ("n_trials=2", "n_seeds=2", "sampler=random", "seed=3")
        ]
        done = launch(*STUDY, *sweeper, *QUICK, "algo.num_minibatches=choice(4,7)", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        study = study_of(only_sweep(tmp_path))
        drawn = [(trial.params["algo.num_minibatches"], trial.state) for trial in study.trials]
        assert drawn == [(4, TrialState.COMPLETE), (7, TrialState.FAIL)]
        assert "best trial" in done.stdout and "algo.num_minibatches=4" in done.stdout
        line = next(line for line in done.stdout.splitlines() if line.startswith("train it with: "))
        assert line.endswith("algo.num_minibatches=4 seed=1")

    def test_pruned_and_then_continued(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 'study.db'}"
        study = optuna.create_study(storage=url, study_name="s", direction="maximize")
        for _ in range(5):  # so good that what comes is pruned at its first evaluation
            study.add_trial(
                create_trial(
                    value=1e4,
                    params={"algo.gamma": 0.95},
                    distributions=dict(GAMMA),
                    intermediate_values={1000: 1e4},
                )
            )
        sweeper = [f"hydra.sweeper.{word}" for word in (f"storage='{url}'", "study_name=s", "n_trials=6")]
        searched = ("total_timesteps=1e7", "eval.every=1000", "algo.gamma=interval(0.9, 1.0)")
        done = launch(*STUDY, *sweeper, *QUICK, *searched, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert study.trials[-1].state == TrialState.PRUNED
        assert states(only_sweep(tmp_path)) == ["pruned"]

    @pytest.mark.parametrize("way", ["SIGTERM", "rl cancel"])
    def test_stopped_and_continued(self, tmp_path: Path, way: str) -> None:
        """No further trial is chosen, and the one that ran goes on."""
        arguments = [
            *STUDY, "hydra.sweeper.n_trials=2", "hydra.sweeper.n_seeds=2", *QUICK, "total_timesteps=40_000",
            "algo.gamma=interval(0.9, 1.0)", "hydra.launcher.n_jobs=2",
        ]  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "launch.py"), *arguments],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        end = time.monotonic() + 60
        while not [p for p in tmp_path.glob("multirun/*/*/*/metrics.jsonl") if p.stat().st_size]:
            assert time.monotonic() < end
            time.sleep(0.05)
        sweep = only_sweep(tmp_path)
        if way == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        else:
            cancelled = rl("cancel", sweep.folder, cwd=tmp_path)
            assert cancelled.returncode == 0, cancelled.stderr
            assert f"continue with: python launch.py resume={sweep.folder}" in cancelled.stdout
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 128 + signal.SIGTERM
        assert f"python launch.py resume={sweep.folder}" in output
        assert [t.state for t in study_of(sweep).trials] == [TrialState.RUNNING]
        assert not list(sweep.folder.glob("leader*"))
        done = launch(f"resume={sweep.folder}", "hydra.sweeper.n_trials=1", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert [t.state for t in study_of(sweep).trials] == [TrialState.COMPLETE]
        assert states(sweep) == ["completed"] * 2
