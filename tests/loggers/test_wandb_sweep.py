"""W&B and sweeps, offline: jobs of ours are runs of one group, and an agent of a W&B sweep starts runs."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rl import checkpoint
from rl.launchers.sweep import Sweep
from rl.loggers import RunInfo
from rl.loggers.wandb import WandbLogger
from tests.conftest import ROOT, configure, launch
from tests.loggers.wandb_records import config, folders, history, records, run_record

pytestmark = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")

SWEEP: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "wandb_sweep.yaml").read_text())
SERVICE = ("logger.wandb.mode=offline", "torch_threads=1")
SHORT = ("total_timesteps=4096", "eval.episodes=1", "eval.every=2048")
LONG = ("total_timesteps=1e8", "eval.episodes=1", "checkpoint.every=4096")


@pytest.fixture
def own_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process that the test starts has a W&B service of its own, as from a shell; that of this process
    would keep the runs of killed ones open."""
    monkeypatch.delenv("WANDB_SERVICE", raising=False)


def wait_until(condition: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def trained(run: Path) -> bool:
    """Whether the run has a checkpoint beyond its start."""
    return any(path.name > "step_000000000" for path in (run / "checkpoints").glob("step_*"))


@pytest.mark.usefixtures("own_service")
class TestOurSweep:
    def test_jobs_are_runs_of_one_group_and_killed_ones_keep_their_ids(self, tmp_path: Path) -> None:
        sweep, arguments = Sweep(tmp_path / "study"), (
            *SERVICE, "logger=wandb", "algo=ppo", "total_timesteps=40960", "checkpoint.every=2048",
            "eval.episodes=1", "eval.every=0", "seed=1,2", "hydra.launcher.n_jobs=2",
            f"hydra.sweep.dir={tmp_path / 'study'}",
        )  # fmt: skip
        with psutil.Popen(
            [sys.executable, str(ROOT / "launch.py"), "-m", *arguments], cwd=tmp_path
        ) as running:
            try:
                for number in (0, 1):  # each is killed as soon as it has something to continue from
                    wait_until(lambda n=number: n in sweep.jobs() and trained(sweep.jobs()[n].path))  # type: ignore[misc]
                    os.kill(sweep.jobs()[number].pid or 0, signal.SIGKILL)
                assert running.wait(timeout=60) == 1
            finally:
                if running.is_running():
                    running.terminate()
        runs = [job.path for job in sweep.jobs().values()]
        assert [job.state for job in sweep.jobs().values()] == ["killed", "killed"]
        before = [file.name for run in runs for folder in folders(run) for file in folder.glob("*.wandb")]
        assert len(before) == len(set(before)) == 2

        done = launch(f"resume={sweep.folder}", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        for run, earlier in zip(runs, before, strict=True):
            first, second = folders(run)
            made = run_record(second)
            assert [file.name for file in first.glob("*.wandb")] == [earlier] == [f"run-{made.run_id}.wandb"]
            assert (made.run_group, made.display_name) == ("study", run.name)
            assert history(second)[-1]["_step"] == 40960


class TestAgentsWords:
    """What W&B's own code makes of a sweep's values, as launch.py reads it."""

    @pytest.mark.parametrize(
        ("key", "value", "read"),
        [
            ("algo.anneal_lr", True, True),
            ("algo.anneal_lr", False, False),
            ("algo.learning_rate", 1e-05, 1e-5),
            ("algo.ent_coef", 0, 0.0),
            ("algo.num_steps", 256.0, 256),  # the quantised distributions draw floats
            ("total_timesteps", 2e16, 2 * 10**16),
            ("network.hidden_sizes", [64, 32], [64, 32]),
            ("network.activation", "relu", "relu"),
            ("algo.target_kl", "null", None),
            ("run_name", "two words", "two words"),
            ("run_name", "'a, b'", "a, b"),
            ("tags", ["a b", "c"], ["a b", "c"]),
            ("env.kwargs.gravity", 9.8, 9.8),
        ],
    )
    def test_a_value(self, key: str, value: Any, read: Any) -> None:
        assert selected(configure(*words({key: value})).resolved, key) == read

    def test_both_ends_of_every_parameter_of_the_example(self) -> None:
        drawn = [{key: value} for key, spec in SWEEP["parameters"].items() for value in ends(spec)]
        assert len(drawn) == 18
        for parameters in drawn:
            ((key, value),) = parameters.items()
            read = selected(configure("algo=ppo", *words(parameters)).resolved, key)
            assert read == (None if value == "null" else value), key


@pytest.mark.usefixtures("own_service")
class TestAgent:
    @pytest.fixture
    def agent(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        """W&B's agent, told what to run by the test instead of the service."""
        from wandb.wandb_agent import Agent

        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        for name, value in {"ENTITY": "team", "PROJECT": "studies", "SWEEP_ID": "abc123"}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        for name in ("DIR", "RUN_ID", "SWEEP_PARAM_PATH"):  # which it sets; so that they are unset afterwards
            monkeypatch.setenv(f"WANDB_{name}", str(tmp_path))
        agent = Agent(api=None, queue=None, sweep_id="abc123")
        yield agent
        for process in agent._run_processes.values():
            if process.poll() is None:
                process.kill()

    @pytest.mark.parametrize("end", [0, -1])
    def test_a_trial_has_the_drawn_values_and_the_metric(self, end: int, agent: Any, tmp_path: Path) -> None:
        drawn = {key: ends(spec)[end] for key, spec in SWEEP["parameters"].items()}
        start(agent, "trial1", drawn, *SERVICE, *SHORT)
        assert agent._run_processes["trial1"].wait() == 0
        run = tmp_path / "runs" / "wandb" / "abc123" / "trial1"
        (folder,) = folders(run)
        made = run_record(folder)
        assert (made.run_id, made.sweep_id, made.project, made.entity) == (
            "trial1",
            "abc123",
            "studies",
            "team",
        )
        assert (made.display_name, made.run_group) == ("", "")  # W&B finds a name, and groups by sweep
        values = config(folder)
        assert {key: values[key] for key in drawn} == drawn
        for key, value in drawn.items():
            assert selected(values, key) == (None if value == "null" else value)
        name = SWEEP["metric"]["name"]
        evaluations = [row for row in history(folder) if name in row]
        assert [row["_step"] for row in evaluations] == [2048, 4096]
        objective = json.loads((run / "run.json").read_text())["result"]["objective"]
        assert evaluations[-1][name] == objective
        assert summary(folder)[name] == objective

    def test_a_stopped_trial_is_saved_and_goes_on_when_an_agent_takes_it_up(
        self, agent: Any, tmp_path: Path
    ) -> None:
        run = tmp_path / "runs" / "wandb" / "abc123" / "trial2"
        drawn = {"algo.num_steps": 128, "algo.learning_rate": 3e-05}
        start(agent, "trial2", drawn, *SERVICE, *LONG)
        wait_until(lambda: trained(run))
        agent._command_stop({"run_id": "trial2"})
        assert agent._run_processes["trial2"].wait() == 128 + signal.SIGTERM
        record = json.loads((run / "run.json").read_text())
        newest = checkpoint.newest(run / "checkpoints")
        assert newest is not None and record["status"] == "preempted"
        assert not any(
            r.HasField("preempting") for r in records(folders(run)[0])
        )  # or agents would go on with it

        total = record["env_steps"] + 1024
        start(agent, "trial2", drawn, *SERVICE, *LONG, f"total_timesteps={total}")
        assert agent._run_processes["trial2"].wait() == 0
        first, second = folders(run)
        assert run_record(second).run_id == "trial2"
        assert history(second)[0]["_step"] > history(first)[-1]["_step"]
        starts = json.loads((run / "run.json").read_text())["starts"]
        assert [begun["env_steps"] for begun in starts] == [0, record["env_steps"]]


class TestLoggerUnderAnAgent:
    """Which run is opened; the client itself, offline."""

    def open(self, path: Path, state: dict[str, Any] | None = None, group: str | None = None) -> Any:
        """The record of the W&B run that a logger opens in `path`, and what the logger saves."""
        import wandb

        wandb.teardown()  # the client reads its environment once a process
        path.mkdir(exist_ok=True)
        logger = WandbLogger(project="ours", entity="us", group=group, mode="offline", name=None, notes=None)
        logger.open(RunInfo(path, path.name, {}, [], "our_sweep", 8 if state else 0), state)
        logger.log(16, {"a": 1.0})
        saved = json.loads(json.dumps(logger.state_dict()))
        logger.close("preempted")
        return run_record(folders(path)[-1]), saved

    @pytest.fixture(autouse=True)
    def torn_down(self) -> Any:
        """No later test sees a client that has read this one's environment."""
        import wandb

        yield
        wandb.teardown()

    @pytest.fixture
    def under_agent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.set(monkeypatch, "trial3")

    def set(self, monkeypatch: pytest.MonkeyPatch, run_id: str) -> None:
        sent = {"SWEEP_ID": "abc123", "RUN_ID": run_id, "PROJECT": "studies", "ENTITY": "team"}
        for name, value in sent.items():
            monkeypatch.setenv(f"WANDB_{name}", value)

    def test_the_agent_says_which_run(self, under_agent: None, tmp_path: Path, capfd: Any) -> None:
        made, saved = self.open(tmp_path / "run")
        assert (made.run_id, made.project, made.entity, made.sweep_id) == (
            "trial3",
            "studies",
            "team",
            "abc123",
        )
        assert (made.run_group, made.display_name) == ("", "")
        assert saved == {"id": "trial3", "sweep": {"project": "studies", "entity": "team"}}
        assert capfd.readouterr() == ("", "")  # no warning of keys that are not heeded

    def test_a_multirun_is_refused(self, under_agent: None, tmp_path: Path) -> None:
        """All of its jobs would be the one run that the agent has named."""
        sweep = ("-m", "seed=1,2", "algo=ppo", f"hydra.sweep.dir={tmp_path / 'study'}")
        refused = launch(*sweep, "logger=wandb", "logger.wandb.mode=offline", cwd=tmp_path)
        assert refused.returncode == 2 and not (tmp_path / "study").exists()
        (line,) = refused.stderr.splitlines()
        assert "-m" in line and "leave" in line

    def test_a_group_of_the_users_own_is_kept(self, under_agent: None, tmp_path: Path) -> None:
        assert self.open(tmp_path / "run", group="mine")[0].run_group == "mine"

    def test_the_agent_comes_before_a_saved_id(self, under_agent: None, tmp_path: Path) -> None:
        made, saved = self.open(tmp_path / "run", {"id": "older", "sweep": None})
        assert made.run_id == saved["id"] == "trial3"

    def test_resumed_without_an_agent_it_is_the_same_run_in_the_same_project(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as agent:
            self.set(agent, "trial4")
            _, saved = self.open(tmp_path / "run")
        made, again = self.open(tmp_path / "run", saved)
        assert (made.run_id, made.project, made.entity) == ("trial4", "studies", "team")
        assert again == saved
        for folder in folders(tmp_path / "run"):
            assert not any(record.HasField("preempting") for record in records(folder))

    def test_elsewhere_it_is_a_run_of_ours(self, tmp_path: Path) -> None:
        made, saved = self.open(tmp_path / "run")
        assert (made.project, made.entity, made.sweep_id) == ("ours", "us", "")
        assert (made.run_group, made.display_name) == ("our_sweep", "run")
        assert saved == {"id": made.run_id, "sweep": None}

    def test_a_checkpoint_from_before_sweeps_were_known_is_continued(self, tmp_path: Path) -> None:
        made, saved = self.open(tmp_path / "run", {"id": "older"})
        assert made.run_id == "older" and saved == {"id": "older", "sweep": None}


def words(parameters: dict[str, Any]) -> list[str]:
    """The command line words that W&B's agent makes of drawn parameters."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    drawn = {"args": {key: {"value": value} for key, value in parameters.items()}}
    made: list[str] = create_sweep_command_args(drawn)["args_no_hyphens"]
    return made


def ends(spec: dict[str, Any]) -> list[Any]:
    """The values of a parameter, or the least and the greatest of its distribution: floats, except of
    int_uniform."""
    if "values" in spec:
        return list(spec["values"])
    kind = int if spec["distribution"] == "int_uniform" else float
    return [kind(spec["min"]), kind(spec["max"])]


def start(agent: Any, run_id: str, drawn: dict[str, Any], *more: str) -> None:
    """Have the agent start a trial of the example with `more` words behind its command."""
    agent._sweep_command = [*SWEEP["command"], *more]
    args = {key: {"value": value} for key, value in drawn.items()}
    agent._command_run({"run_id": run_id, "program": str(ROOT / SWEEP["program"]), "args": args})


def summary(folder: Path) -> dict[str, Any]:
    """The last value of each metric, as W&B keeps it."""
    latest: dict[str, Any] = {}
    for record in records(folder):
        if record.HasField("summary"):
            for item in record.summary.update:
                latest["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    return latest


def selected(tree: dict[str, Any], key: str) -> Any:
    """The value at a dotted key of a nested mapping."""
    value: Any = tree
    for part in key.split("."):
        value = value[part]
    return value
