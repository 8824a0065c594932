"""`rl status`, `logs`, `cancel` and `collect` as a user types them, on sweeps of this machine."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rl import rundir
from rl.launchers import frozen_job, standings
from rl.launchers.display import whole_table
from rl.launchers.ledger import Ledger
from rl.launchers.results import Row, assigned, columns, objectives, text
from rl.launchers.sweep import Sweep
from tests.conftest import ROOT, launch
from tests.launchers.test_sweeps import QUICK, all_trained, start, wait_until
from tests.sweeps import history, states, write_paced

ENV = "env.id=paced:Paced-v0"


def rl(
    *arguments: object, cwd: Path, columns: int = 160, programs: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`rl <arguments>` in a process of its own, on a terminal of so many columns; of Slurm's programs there
    are those in the folder `programs` only."""
    return subprocess.run(
        [sys.executable, "-c", "from rl.cli import main; main()", *map(str, arguments)],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": str(programs or cwd / "none"), "COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A sweep of four jobs, two complete and two failed; no test changes it."""
    folder = tmp_path_factory.mktemp("commands")
    swept = ("env.kwargs.bad=false,true", "seed=1,2", "hydra.launcher.n_jobs=2")
    ended = launch(
        "-m", *QUICK, "eval.episodes=3", ENV, *swept, f"hydra.sweep.dir={folder}/sweep", cwd=folder,
        env=write_paced(folder / "modules"),
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    return Sweep(folder / "sweep")


class TestStatus:
    @pytest.mark.parametrize("width", [80, 160])
    def test_each_job_whole_and_what_to_do(self, done: Sweep, width: int) -> None:
        shown = rl("status", done.folder, cwd=done.folder, columns=width)
        assert shown.returncode == 0, shown.stderr
        assert "2 completed  2 failed" in shown.stdout
        assert "jobs 2-3 failed: RuntimeError: the pole broke" in shown.stdout
        assert f"resume={done.folder} retry_failed=true" in shown.stdout
        assert "continue with" not in shown.stdout  # nothing was stopped
        rows = shown.stdout.partition("\n\n")[2].splitlines()
        for job in done.jobs().values():
            (row,) = [row for row in rows if row.startswith(f"{job.number} ")]
            assert job.name in row and job.state in row
            if job.objective is not None:
                assert f"{job.objective:,.2f}" in row and "2,048/2,048" in row

    def test_names_longer_than_the_terminal_is_wide_are_folded(self, tmp_path: Path) -> None:
        (tmp_path / "sweep.json").write_text("{}")
        name = "env.kwargs.some_long_key=" + "".join(map(str, range(60)))
        Ledger(tmp_path).append(0, "pending", folder=f"0000_{name}", overrides=[])
        shown = rl("status", tmp_path, cwd=tmp_path, columns=60).stdout
        table = shown.splitlines()[4:-1]
        start = table[0].find(name[:10])
        assert "".join(line[start:].split("  ")[0] for line in table).startswith(name)
        assert "pending jobs wait" in shown

    def test_json_is_what_the_files_say(self, done: Sweep) -> None:
        facts = json.loads(rl("status", done.folder, "--json", cwd=done.folder).stdout)
        assert facts["counts"] == {"completed": 2, "failed": 2} and facts["sweep"] == str(done.folder)
        first, last = facts["jobs"][0], facts["jobs"][-1]
        assert first["objective"] == done.jobs()[0].objective and first["reason"] is None
        assert (first["env_steps"], first["total_timesteps"], first["seconds_left"]) == (2048, 2048, None)
        assert last["state"] == "failed" and last["reason"] == "RuntimeError: the pole broke"
        assert last["overrides"] == done.jobs()[3].overrides

    def test_of_one_run_is_that_of_rl_show(self, done: Sweep) -> None:
        run = done.jobs()[0].path
        shown = rl("status", run, cwd=done.folder)
        assert shown.returncode == 0 and shown.stdout == rl("show", run, cwd=done.folder).stdout

    def test_watching_what_has_ended_ends(self, done: Sweep) -> None:
        assert rl("status", done.folder, "--watch", 60, cwd=done.folder).returncode == 0

    @pytest.mark.parametrize("command", ["status", "logs", "cancel", "collect"])
    @pytest.mark.parametrize("path", ["nowhere", "."])
    def test_no_sweep_is_one_line(self, command: str, path: str, tmp_path: Path) -> None:
        shown = rl(command, path, cwd=tmp_path)
        assert shown.returncode == 2
        assert shown.stderr.count("\n") == 1 and f"SWEEP={path}" in shown.stderr

    def test_a_sweep_that_is_not_ours_to_write_is_shown(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ledger = Ledger(tmp_path)
        ledger.append(0, "pending", folder="0000_seed=1", overrides=["seed=1"])
        here = os.uname().nodename
        ledger.append(0, "running", attempt=1, host=here, pid=2**22 + 1, process_started=1.0)

        def refuse(*arguments: object, **facts: object) -> bool:
            raise PermissionError(13, "Permission denied", str(ledger.path))

        monkeypatch.setattr(Ledger, "append", refuse)
        (standing,) = standings.look(Sweep(tmp_path))
        assert standing.job.state == "running"
        assert "Permission denied" in capsys.readouterr().err


class TestSlurm:
    """Against stand-ins for Slurm's programs, which print what the real ones would."""

    @pytest.fixture
    def sweep(self, tmp_path: Path) -> Sweep:
        """Four jobs of array 12: running, in line, gone while it ran, gone while it was in line."""
        folder = tmp_path / "sweep"
        folder.mkdir()
        (folder / "sweep.json").write_text("{}")
        ledger = Ledger(folder)
        for number in range(4):
            ledger.append(
                number, "pending", folder=f"000{number}_seed={number}", overrides=[f"seed={number}"]
            )
            ledger.append(number, "submitted", slurm_job=f"12_{number}")
        for number in (0, 2):
            ledger.append(number, "running", attempt=1, host="node7", pid=1, process_started=1.0)
        return Sweep(folder)

    @staticmethod
    def programs(folder: Path, **output: str) -> Path:
        folder.mkdir()
        for name, lines in output.items():
            (folder / name).write_text(f"#!/bin/sh\n[ {name} != scancel ] || echo $* >> {folder}/cancelled\n")
            with (folder / name).open("a") as file:
                file.write(f"/bin/cat << 'END'\n{lines}\nEND\n")
            (folder / name).chmod(0o755)
        return folder

    def test_what_the_cluster_knows_is_shown(self, sweep: Sweep, tmp_path: Path) -> None:
        programs = self.programs(
            tmp_path / "bin",
            squeue="12_0|RUNNING|None|node8\n12_1|PENDING|Resources|",
            sacct="12_2|OUT_OF_MEMORY|0:125\n12_3|CANCELLED by 1000|0:0",
        )
        shown = rl("status", sweep.folder, cwd=tmp_path, programs=programs).stdout
        assert states(sweep) == ["running", "submitted", "killed", "cancelled"]
        assert "job 1 submitted: PENDING (Resources)" in shown
        assert (
            "job 2 killed: Slurm's job 12_2: it no longer has the job; Slurm: OUT_OF_MEMORY, exit code 0:125"
            in shown
        )
        assert "Slurm: CANCELLED by 1000" in shown
        assert "node8" in shown and f"continue with: python launch.py resume={sweep.folder}" in shown
        facts = json.loads(rl("status", sweep.folder, "--json", cwd=tmp_path, programs=programs).stdout)
        assert [job["node"] for job in facts["jobs"]] == ["node8", None, "node7", None]
        assert [job["slurm_state"] for job in facts["jobs"]] == ["RUNNING", "PENDING", None, None]

    def test_without_accounting(self, sweep: Sweep, tmp_path: Path) -> None:
        programs = self.programs(tmp_path / "bin", squeue="12_0|RUNNING|None|node8", sacct="no accounting")
        with (programs / "sacct").open("a") as file:
            file.write("exit 1\n")
        shown = rl("status", sweep.folder, cwd=tmp_path, programs=programs)
        assert (
            "job 2 killed: Slurm's job 12_2: it no longer has the job\n" in shown.stdout and not shown.stderr
        )

    def test_without_slurm_all_is_as_noted(self, sweep: Sweep, tmp_path: Path) -> None:
        shown = rl("status", sweep.folder, cwd=tmp_path)
        assert shown.returncode == 0 and not shown.stderr
        assert states(sweep) == ["running", "submitted", "running", "submitted"]
        assert "2 running  2 submitted" in shown.stdout

    def test_a_job_that_never_printed_has_the_log_of_slurm(self, sweep: Sweep, tmp_path: Path) -> None:
        (sweep.folder / ".submitit").mkdir()
        for name, words in (("12_1_0_log.err", "module: command not found\n"), ("12_1_0_log.out", "")):
            (sweep.folder / ".submitit" / name).write_text(words)
        (sweep.folder / ".submitit" / "12_10_0_log.err").write_text("of another job\n")
        shown = rl("logs", sweep.folder, 1, cwd=tmp_path)
        assert shown.stdout.endswith("12_1_0_log.err <==\nmodule: command not found\n")
        other = rl("logs", sweep.folder, 3, cwd=tmp_path)
        assert not other.stdout and "job 3 (seed=3) is submitted and has printed nothing" in other.stderr

    def test_jobs_of_slurm_are_cancelled_there(self, sweep: Sweep, tmp_path: Path) -> None:
        programs = self.programs(tmp_path / "bin", squeue="", scancel="")
        Ledger(sweep.folder).append(0, "completed", objective=1.0)
        (programs / "squeue").write_text(  # what scancel was told is no longer there
            f"#!/bin/sh\n[ -e {programs}/cancelled ] || "
            "echo '12_1|PENDING|Resources|\n12_2|RUNNING|None|node7'\n"
        )
        shown = rl("cancel", sweep.folder, 1, 2, cwd=tmp_path, programs=programs)
        assert shown.returncode == 0, shown.stderr
        assert (programs / "cancelled").read_text() == "12_1 12_2\n"
        assert states(sweep) == ["completed", "cancelled", "cancelled", "cancelled"]
        assert shown.stdout.startswith("job 1 (seed=1) cancelled\njob 2 (seed=2) cancelled\ncontinue with:")


class TestLogs:
    def test_without_a_number_those_that_failed(self, done: Sweep) -> None:
        shown = rl("logs", done.folder, "-n", 2, cwd=done.folder).stdout
        end = "RuntimeError: the pole broke\n"
        assert shown.count(end) == 2
        for number in (2, 3):
            assert (
                f"==> job {number} ({done.jobs()[number].name}) failed: {done.jobs()[number].path}" in shown
            )
        assert len(shown.splitlines()) == 2 * 3

    def test_as_many_lines_as_asked_for(self, done: Sweep) -> None:
        output = (done.jobs()[3].path / "output.txt").read_text()
        assert rl("logs", done.folder, 3, "--lines", 5, cwd=done.folder).stdout == "".join(
            output.splitlines(keepends=True)[-5:]
        )
        assert rl("logs", done.folder, 3, "--lines", 10**6, cwd=done.folder).stdout == output

    def test_following_what_has_ended_ends(self, done: Sweep) -> None:
        shown = rl("logs", done.folder, 0, "--follow", cwd=done.folder)
        assert shown.stdout.endswith((done.jobs()[0].path / "output.txt").read_text().splitlines()[-1] + "\n")
        assert shown.stderr == "job 0 completed\n"

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [(("17",), "NUMBER=17: the sweep has no such job; its jobs are 0-3"),
         (("--follow",), "--follow takes one job; name one")],
    )  # fmt: skip
    def test_mistakes_are_one_line(self, done: Sweep, arguments: tuple[str, ...], words: str) -> None:
        shown = rl("logs", done.folder, *arguments, cwd=done.folder)
        assert shown.returncode == 2
        assert words in shown.stderr and shown.stderr.count("\n") == 1

    def test_nothing_failed_or_running(self, tmp_path: Path) -> None:
        (tmp_path / "sweep.json").write_text("{}")
        for number in (0, 1, 4):
            Ledger(tmp_path).append(number, "pending", folder=f"000{number}", overrides=[])
        shown = rl("logs", tmp_path, cwd=tmp_path)
        assert shown.returncode == 2 and "of 0-1, 4" in shown.stderr


class TestCancel:
    def test_in_line_and_running_and_the_sweep_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mine = write_paced(tmp_path / "modules")["PYTHONPATH"]
        monkeypatch.setenv("PYTHONPATH", f"{mine}{os.pathsep}{ROOT}")
        pace = tmp_path / "pace"
        rundir.replace_text(pace, "0.01")
        sweep = Sweep(tmp_path / "sweep")
        arguments = (*QUICK, ENV, f"env.kwargs.pace={pace}", "checkpoint.every=128", "algo.num_steps=32")
        pool = start(
            "-m", *arguments, "seed=range(4)", "hydra.launcher.n_jobs=1", f"hydra.sweep.dir={sweep.folder}",
            cwd=tmp_path,
        )  # fmt: skip
        followed = None
        try:
            wait_until(all_trained(sweep.folder, 1))
            followed = subprocess.Popen(
                [sys.executable, "-m", "rl.cli", "logs", str(sweep.folder), "0", "-f"],
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            in_line = rl("cancel", sweep.folder, 1, 3, cwd=tmp_path)
            assert in_line.stdout.startswith("job 1 (seed=1) cancelled\njob 3 (seed=3) cancelled\n")
            assert states(sweep) == ["running", "cancelled", "pending", "cancelled"]
            pid = sweep.jobs()[0].pid
            assert pid is not None
            assert rl("cancel", sweep.folder, 0, cwd=tmp_path).stdout.startswith("job 0 (seed=0) cancelled\n")
            wait_until(lambda: not psutil.pid_exists(pid))
            output, _ = followed.communicate(timeout=60)
            assert "continue with: python launch.py resume=" in output  # the last words of the run
            wait_until(lambda: sweep.jobs()[2].state == "running")  # the pool goes on with what is left
            assert rl("cancel", sweep.folder, cwd=tmp_path).stdout.startswith("job 2 (seed=2) cancelled\n")
            output, _ = pool.communicate(timeout=60)
        finally:
            for process in filter(None, (pool, followed)):
                process.kill()
        assert pool.returncode == 1 and output.count("cancelled") >= 4, output
        assert states(sweep) == ["cancelled"] * 4
        assert history(sweep, 1) == history(sweep, 3) == ["pending", "cancelled"]
        assert history(sweep, 0)[-1] == "cancelled" and "preempted" not in history(sweep, 0)
        assert not (sweep.jobs()[1].path / "run.json").exists()
        saved = rl("status", sweep.jobs()[0].path, cwd=tmp_path).stdout
        assert "preempted" in saved  # the run itself was saved on a signal

        nothing = rl("cancel", sweep.folder, cwd=tmp_path)
        assert nothing.returncode == 0 and nothing.stdout == "nothing to cancel: no job is in line or runs\n"
        shown = rl("status", sweep.folder, cwd=tmp_path).stdout
        assert "4 cancelled" in shown and f"continue with: python launch.py resume={sweep.folder}" in shown

        rundir.replace_text(pace, "0")
        done = launch(f"resume={sweep.folder}", "hydra.launcher.n_jobs=2", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert states(sweep) == ["completed"] * 4
        assert [sweep.jobs()[n].attempt for n in (0, 1)] == [2, 1]

    @pytest.mark.parametrize("host", ["elsewhere", ""])
    def test_a_study_led_by_another_process(self, tmp_path: Path, host: str) -> None:
        """On another machine it would choose others; one that was killed does not matter."""
        identity = {"host": host or socket.gethostname(), "pid": 2**22 + 1, "process_started": 1.0}
        (tmp_path / "sweep.json").write_text("{}")
        (tmp_path / "leader.json").write_text(json.dumps(identity))
        Ledger(tmp_path).append(0, "pending", folder="0000", overrides=[])
        done = rl("cancel", tmp_path, cwd=tmp_path)
        assert (done.returncode, states(Sweep(tmp_path))) == (
            (2, ["pending"]) if host else (0, ["cancelled"])
        )
        if host:
            assert "on elsewhere chooses" in done.stderr and done.stderr.count("\n") == 1
            assert rl("cancel", tmp_path, 0, cwd=tmp_path).returncode == 0

    def test_what_is_cancelled_while_its_process_starts_does_not_begin(self, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path)
        ledger.append(0, "pending", folder="0000", overrides=[])
        job = ledger.jobs()[0]
        ledger.append(0, "cancelled")
        assert frozen_job.run(job) == 0
        assert history(Sweep(tmp_path), 0) == ["pending", "cancelled"]

    def test_another_machine_s_job_is_left_to_it(self, tmp_path: Path) -> None:
        (tmp_path / "sweep.json").write_text("{}")
        ledger = Ledger(tmp_path)
        ledger.append(0, "pending", folder="0000_seed=1", overrides=["seed=1"])
        ledger.append(0, "running", attempt=1, host="elsewhere", pid=1, process_started=1.0)
        shown = rl("cancel", tmp_path, cwd=tmp_path)
        assert shown.returncode == 1
        assert shown.stderr == "job 0 (seed=1) runs on elsewhere: cancel it there\n"
        assert states(Sweep(tmp_path)) == ["running"]

    def test_a_process_that_dies_unsaved_is_cancelled_all_the_same(self, tmp_path: Path) -> None:
        (tmp_path / "sweep.json").write_text("{}")
        ledger = Ledger(tmp_path)
        ledger.append(0, "pending", folder="0000_seed=1", overrides=["seed=1"])
        process = subprocess.Popen(["sleep", "100"])
        try:
            here, started = os.uname().nodename, psutil.Process(process.pid).create_time()
            ledger.append(0, "running", attempt=1, host=here, pid=process.pid, process_started=started)
            assert rl("cancel", tmp_path, 0, cwd=tmp_path).stdout.startswith("job 0 (seed=1) cancelled\n")
            assert process.wait(timeout=10) == -signal.SIGTERM
        finally:
            process.kill()

    def test_unknown_numbers(self, done: Sweep) -> None:
        shown = rl("cancel", done.folder, 1, 9, cwd=done.folder)
        assert shown.returncode == 2
        assert shown.stderr == "NUMBERS=9: the sweep has no such job; its jobs are 0-3\n"


class TestCollect:
    def test_a_row_for_each_job(self, done: Sweep, tmp_path: Path) -> None:
        file = tmp_path / "all.csv"
        shown = rl("collect", done.folder, "--output", file, cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.endswith(f"4 jobs in {file}\n")
        rows = list(csv.DictReader(io.StringIO(file.read_text())))
        assert [row["job"] for row in rows] == ["0", "1", "2", "3"]
        assert [row["state"] for row in rows] == ["completed", "completed", "failed", "failed"]
        assert [row["env.kwargs.bad"].lower() for row in rows] == ["false", "false", "true", "true"]
        assert [row["seed"] for row in rows] == ["1", "2", "1", "2"]
        assert "algo" not in rows[0] and "total_timesteps" not in rows[0]  # all jobs share these
        for row, job in zip(rows, done.jobs().values(), strict=True):
            assert row["folder"] == job.folder and row["attempt"] == "1"
            if job.state == "failed":
                assert row["objective"] == row["evaluation_mean"] == row["losses/value_loss"] == ""
                continue
            record = json.loads((job.path / "run.json").read_text())
            played = list(csv.DictReader((job.path / "evaluations.csv").read_text().splitlines()))
            returns = [float(line["return"]) for line in played]
            assert float(row["objective"]) == float(row["evaluation_mean"]) == pytest.approx(sum(returns) / 3)
            assert float(row["evaluation_std"]) == pytest.approx(statistics.pstdev(returns))
            assert row["evaluation_episodes"] == "3" and row["env_steps"] == "2048"
            assert float(row["train_seconds"]) == record["train_seconds"]
            lines = [json.loads(line) for line in (job.path / "metrics.jsonl").read_text().splitlines()]
            last = [line["losses/value_loss"] for line in lines if "losses/value_loss" in line][-1]
            assert float(row["losses/value_loss"]) == last
        known = [job.objective for job in done.jobs().values() if job.objective is not None]
        mean = f"{statistics.fmean(known):,.2f} ± {statistics.pstdev(known):,.2f}"
        table = [line.lower().split() for line in shown.stdout.splitlines()]
        assert ["false", "2", "of", "2", *mean.split()] in table
        assert ["true", "0", "of", "2", "-"] in table

    def test_into_the_sweep_by_default_and_nowhere_is_one_line(self, done: Sweep, tmp_path: Path) -> None:
        assert rl("collect", done.folder, cwd=tmp_path).returncode == 0
        assert (done.folder / "collected.csv").read_text().count("\n") == 5
        shown = rl("collect", done.folder, "--output", "no/such/file.csv", cwd=tmp_path)
        assert shown.returncode == 2
        assert "--output=no/such/file.csv" in shown.stderr and shown.stderr.count("\n") == 1

    def test_objectives_over_seeds(self) -> None:
        rows: list[Row] = [
            {"job": n, "lr": lr, "seed": seed, "objective": objective}
            for n, (lr, seed, objective) in enumerate(
                [("0.1", 1, 1.0), ("0.1", 2, 3.0), ("0.2", 1, 5.0), ("0.3", 1, None)]
            )
        ]
        heads, lines = objectives(rows, ["lr", "seed"])
        assert heads == ["lr", "complete", "objective"]
        # mean 2; deviations -1 and 1, so the standard deviation is 1
        assert lines == [["0.1", "2 of 2", "2.00 ± 1.00"], ["0.2", "1 of 1", "5.00"], ["0.3", "0 of 1", "-"]]

    def test_what_is_unknown_is_an_empty_cell(self) -> None:
        rows: list[Row] = [{"job": 0, "losses/a": 1.5}, {"job": 1, "losses/a": None, "charts/b": 2}]
        heads = columns(rows, [])
        assert heads[0] == "job" and heads[-2:] == ["charts/b", "losses/a"]
        first, second = list(csv.DictReader(io.StringIO(text(heads, rows))))
        assert (first["charts/b"], first["losses/a"]) == ("", "1.5")
        assert (second["charts/b"], second["losses/a"], second["objective"]) == ("2", "", "")

    @pytest.mark.parametrize(
        ("override", "expected"),
        [("++env.kwargs.bad=False", ("env.kwargs.bad", "False")), ("a='x y'", ("a", "x y")),
         ("env.id=mine\\:Mine-v0", ("env.id", "mine:Mine-v0")), ("a.b=[1,2]", ("a.b", "[1,2]")),
         ("lr=1e-4", ("lr", "1e-4"))],
    )  # fmt: skip
    def test_keys_and_values_of_overrides(self, override: str, expected: tuple[str, str]) -> None:
        assert assigned(override) == expected


def test_no_cell_of_a_table_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    heads = ["job", "what", "state", "attempt", "step", "return", "node"]
    row = ["3", "algo=ppo,seed=3", "completed", "12", "187,392/400,000", "1,234.5", "a-node-of-the-cluster"]
    drawn = whole_table(heads, [row], fold="what").splitlines()
    for head, cell in zip(heads, row, strict=True):
        assert head in drawn[0]
        assert head == "what" or cell in drawn[1]
