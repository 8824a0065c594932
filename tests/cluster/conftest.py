"""A Slurm cluster for the tests marked `slurm`: one that runs already, or one of this machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.sweeps import write_paced

HERE = Path(__file__).resolve().parent
NOT_INSTALLED = 3
"""up.sh's exit code for that."""


def wait_until(condition: Callable[[], object], what: str, timeout: float = 120) -> None:
    """Return as soon as `condition()` is true; fail with `what` after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout:g} s: {what}"
        time.sleep(0.2)


@dataclass(frozen=True)
class Cluster:
    """A cluster of 4 CPUs with the partitions `low`, the default, and `high`, which pre-empts and requeues
    the jobs of `low`. Jobs are named as squeue does: "12", or "12_3" for element 3 of an array."""

    env: dict[str, str]
    """What a process needs in its environment to reach it."""
    submitted: list[str] = field(default_factory=list)
    """The jobs of `submit` that the running test has to answer for."""

    def run(self, *command: str, text: str | None = None) -> str:
        """The standard output of a Slurm command; AssertionError with its message when it fails."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.env},
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}"
        return done.stdout

    def submit(self, script: str, *sbatch_args: str) -> str:
        """Submit the text of a script, which starts with `#!`; the job's number. Its output goes nowhere
        unless an `--output` is among the arguments."""
        job = self.run("sbatch", "--parsable", "--output=/dev/null", *sbatch_args, text=script).strip()
        self.submitted.append(job)
        return job

    def squeue(self) -> dict[str, str]:
        """The state, such as "PENDING", of every job that is queued, runs, or ended a few minutes ago."""
        rows = self.run("squeue", "--noheader", "--array", "--states=all", "--format=%i %T").splitlines()
        return dict(row.split(maxsplit=1) for row in rows)

    def scontrol(self, job: str) -> dict[str, str]:
        """The fields of one job or array element, such as `JobState`, `Reason`, `Restarts`, `ExitCode`."""
        line = self.run("scontrol", "--oneliner", "show", "job", job).splitlines()[0]
        # "Key=value Key=value …", where a value may hold spaces and further equals signs.
        return dict(re.findall(r"(?:^| )([A-Z][\w/:]*)=(.*?)(?= [A-Z][\w/:]*=|\s*$)", line))

    def wait(self, job: str, states: str | Collection[str], timeout: float = 120) -> str:
        """Wait until a job is in one of the states, and return which; AssertionError after `timeout`
        seconds."""
        wanted = {states} if isinstance(states, str) else set(states)
        end = time.monotonic() + timeout
        while (state := self.squeue().get(job, "unknown")) not in wanted:
            if time.monotonic() >= end:
                shown = "" if state == "unknown" else self.scontrol(job)
                raise AssertionError(
                    f"job {job} is {state}, not {sorted(wanted)}, after {timeout:g} s: {shown}"
                )
            time.sleep(0.3)
        return state

    def cancel(self, job: str) -> None:
        """scancel; a job that has ended stays as it is."""
        self.run("scancel", job)


def _is_up() -> bool:
    """Whether the environment names a cluster that answers and has both partitions."""
    if "SLURM_CONF" not in os.environ or shutil.which("sinfo") is None:
        return False
    try:
        done = subprocess.run(
            ("sinfo", "--noheader", "--format=%R"), capture_output=True, text=True, timeout=30, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and {"low", "high"} <= set(done.stdout.split())


def _up(folder: Path) -> Cluster:
    """Start the cluster of `folder`, or find it running."""
    if os.geteuid() != 0:
        pytest.skip("no Slurm cluster, and only root can start one: set SLURM_CONF to one that runs")
    done = subprocess.run(
        (HERE / "up.sh", folder), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode == NOT_INSTALLED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return Cluster({"SLURM_CONF": str(folder / "slurm.conf")})


def _shared(factory: pytest.TempPathFactory) -> Path:
    """The temporary folder that all processes of this run of pytest share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster for the whole run, shared by its worker processes; the last one to use it ends it."""
    if _is_up():
        yield Cluster({"SLURM_CONF": os.environ["SLURM_CONF"]})
        return
    shared = _shared(tmp_path_factory)
    # Not below pytest's folder, which is closed to others: munged wants its socket where all can reach it.
    name = hashlib.sha256(str(shared).encode()).hexdigest()[:8]
    folder = Path(tempfile.gettempdir()) / f"rl-slurm-{name}"
    with open(shared / "cluster.users", "a") as users:
        # All users of the cluster hold the lock together, and whoever gets it alone is the last of them. A
        # worker that dies lets go of it too.
        fcntl.flock(users, fcntl.LOCK_SH)
        yield _up(folder)
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        subprocess.run((HERE / "down.sh", folder), stdin=subprocess.DEVNULL, capture_output=True, check=True)
        shutil.rmtree(folder)


@pytest.fixture
def alone() -> None:
    """For a test that fills the cluster or pre-empts: no test of another process uses it meanwhile."""


@pytest.fixture(autouse=True)
def _turns(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Wait for tests that want the cluster alone; afterwards, cancel what the test submitted and left."""
    if "cluster" not in request.fixturenames:
        yield
        return
    with open(_shared(tmp_path_factory) / "cluster.turns", "a") as turns:
        fcntl.flock(turns, fcntl.LOCK_EX if "alone" in request.fixturenames else fcntl.LOCK_SH)
        used: Cluster = request.getfixturevalue("cluster")
        yield
        while used.submitted:
            used.cancel(used.submitted.pop())


@pytest.fixture
def paced(tmp_path: Path) -> dict[str, str]:
    """The environment variables of a user who has a module of their own, `paced`."""
    return write_paced(tmp_path / "modules")


__all__ = ["Cluster", "wait_until"]
