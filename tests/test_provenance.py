"""What is recorded of the code suffices to build it again, and a failure to find out is no exception."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl import provenance
from rl.rundir import replace_text

ROOT = Path(__file__).resolve().parent.parent


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "safe.directory=*"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit on branch `trunk`, hostile diff settings, and a package folder `rl`."""
    top = tmp_path / "repo"
    (top / "rl").mkdir(parents=True)
    git(top, "init", "--quiet", "--initial-branch=trunk")
    hostile = "diff.noprefix=true color.ui=always diff.external=false diff.context=0 diff.relative=true"
    for setting in f"{hostile} diff.submodule=log core.autocrlf=false".split():
        key, value = setting.split("=")
        git(top, "config", key, value)
    (top / "rl" / "a.py").write_text("".join(f"line {i}\n" for i in range(50)))
    (top / "blob.bin").write_bytes(bytes(range(256)))
    (top / "gone.py").write_text("x\n")
    (top / "moved.py").write_text("y\n" * 20)
    (top / ".gitignore").write_text("ignored/\n")
    git(top, "add", ".")
    git(top, "commit", "--quiet", "-m", "first")
    return top


def tree(top: Path) -> dict[str, bytes]:
    files = (path for path in top.rglob("*") if path.is_file() and ".git" not in path.relative_to(top).parts)
    return {str(path.relative_to(top)): path.read_bytes() for path in files}


def apply(top: Path, patch: str, tmp_path: Path) -> dict[str, bytes]:
    """The tree of a fresh clone of the commit with the patch applied."""
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(top), str(clone))
    file = tmp_path / "diff.patch"
    replace_text(file, patch)
    if patch:
        git(clone, "apply", str(file))
    return tree(clone)


class TestDiff:
    def test_clean(self, repository: Path) -> None:
        assert provenance.diff(repository / "rl") == ""

    def test_applies_to_the_commit(self, repository: Path, tmp_path: Path) -> None:
        lines = (repository / "rl" / "a.py").read_text().replace("line 7\n", "line seven\n")
        (repository / "rl" / "a.py").write_text(lines + "no newline at the end")
        git(repository, "add", "rl/a.py")  # staged, and then changed once more
        (repository / "rl" / "a.py").write_text(lines.replace("line 30\n", "γ\r\n"))
        (repository / "blob.bin").write_bytes(bytes(range(255, -1, -1)))
        (repository / "gone.py").unlink()
        git(repository, "mv", "moved.py", "moved_to.py")
        (repository / "latin.py").write_bytes("café\n".encode("latin-1"))
        git(repository, "add", "latin.py")
        for name in (
            "rl/my algo.py",
            "rl/γ.py",
            "rl/*.py",
            "empty.py",
            "rl/deep/er/new.py",
            "rl/no_newline.py",
        ):
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            (repository / name).write_text("" if name == "empty.py" else f"# {name}\r\n\tx\nend" * 3)
        status, expected = git(repository, "status", "--porcelain"), tree(repository)
        assert apply(repository, provenance.diff(repository / "rl"), tmp_path) == expected
        assert git(repository, "status", "--porcelain") == status

    def test_what_is_left_out(self, repository: Path, tmp_path: Path) -> None:
        expected = tree(repository) | {"kept.py": b"kept", "limit.txt": b"x" * (1 << 20)}
        for name, content in {
            "kept.py": b"kept",
            "limit.txt": b"x" * (1 << 20),
            "large.txt": b"x" * ((1 << 20) + 1),
            "binary.dat": b"a\0b",
            "latin.txt": b"\xe9",
            ".env": b"K=1",
            "my_secret.txt": b"s",
            "id.pem": b"p",
            "ignored/x.txt": b"x",
        }.items():
            (repository / name).parent.mkdir(exist_ok=True)
            (repository / name).write_bytes(content)
        (repository / "link.txt").symlink_to("/etc/hostname")
        git(repository, "init", "--quiet", "nested")
        (repository / "nested" / "x.py").write_text("x")
        assert apply(repository, provenance.diff(repository), tmp_path) == expected

    def test_much_untracked_data_is_bounded(self, repository: Path, caplog: pytest.LogCaptureFixture) -> None:
        for number in range(15):
            (repository / f"{number}.csv").write_text("x" * (1 << 20))
        assert provenance.diff(repository).count("new file mode") == 10
        assert "5 untracked files" in caplog.text

    def test_without_a_commit(self, tmp_path: Path) -> None:
        git(tmp_path, "init", "--quiet")
        (tmp_path / "a.py").write_text("a\n")
        (tmp_path / "b.py").write_text("b\n")
        git(tmp_path, "add", "a.py")
        assert provenance.diff(tmp_path).count("new file mode") == 2
        assert provenance.collect(tmp_path)["git"]["commit"] is None


class TestGitState:
    def test_commit_branch_dirty(self, repository: Path) -> None:
        commit = git(repository, "rev-parse", "HEAD")
        state = {"commit": commit, "branch": "trunk", "dirty": False}
        assert provenance.collect(repository / "rl")["git"] == state
        (repository / "new.py").write_text("")
        assert provenance.collect(repository / "rl")["git"] == state | {"dirty": True}
        git(repository, "checkout", "--quiet", "--detach")
        assert provenance.collect(repository / "rl")["git"] == state | {"dirty": True, "branch": None}

    def test_no_repository_or_no_git(
        self, tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nothing = {"commit": None, "branch": None, "dirty": None}
        assert provenance.collect(tmp_path)["git"] == nothing and provenance.diff(tmp_path) == ""
        assert provenance.collect(tmp_path / "absent")["git"] == nothing
        monkeypatch.setenv("PATH", str(tmp_path))
        assert provenance.collect(repository)["git"] == nothing and provenance.diff(repository) == ""

    def test_a_package_in_an_ignored_folder_is_not_the_repositorys(self, repository: Path) -> None:
        (repository / "ignored" / "rl").mkdir(parents=True)
        assert provenance.collect(repository / "ignored" / "rl")["git"]["commit"] is None

    def test_in_a_hook_of_another_repository(self, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GIT_DIR", "/nonexistent")
        assert provenance.collect(repository)["git"]["branch"] == "trunk"

    @pytest.mark.skipif(os.getuid() != 0, reason="giving files away takes root")
    def test_a_repository_that_another_user_owns(self, repository: Path) -> None:
        (repository / "new.py").write_text("n\n")
        for path in (repository, *repository.rglob("*")):
            os.chown(path, 65534, 65534)
        assert provenance.collect(repository)["git"]["branch"] == "trunk"
        assert "new.py" in provenance.diff(repository)

    def test_quick(self, repository: Path) -> None:
        for number in range(20):
            (repository / "rl" / f"new_{number}.py").write_text("x\n" * 100)
        provenance.collect(repository)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            provenance.collect(repository)
            provenance.diff(repository)
            times.append(time.perf_counter() - start)
        assert min(times) < 0.3  # two calls, each within 150 ms


class TestCollect:
    def test_is_json_and_describes_this_process(self) -> None:
        record = provenance.collect()
        assert json.loads(json.dumps(record)) == record
        assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
        assert {"torch", "numpy", "gymnasium", "hydra-core"} <= record["versions"].keys()
        assert record["cores"] == len(os.sched_getaffinity(0)) and record["memory"] > 1 << 28
        assert record["working_directory"] == os.getcwd() and record["command"][0] == sys.executable
        assert all(record[key] for key in ("platform", "hostname", "cpu", "user"))

    def test_no_environment_and_no_secrets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        arguments = [
            "launch.py",
            "logger.wandb.api_key=hunter2",
            "+MY_TOKEN=hunter2",
            "env.kwargs.tokens=5",
            "a=b=c",
        ]
        monkeypatch.setattr(sys, "orig_argv", [sys.executable, *arguments])
        monkeypatch.setenv("WANDB_API_KEY", "hunter2")
        monkeypatch.setenv("SLURM_JOB_ID", "42")
        monkeypatch.setenv("SLURM_JWT", "hunter2")
        record = provenance.collect()
        assert "hunter2" not in json.dumps(record) and record["slurm"] == {"SLURM_JOB_ID": "42"}
        masked = ["launch.py", "logger.wandb.api_key=***", "+MY_TOKEN=***", "env.kwargs.tokens=5", "a=b=c"]
        assert record["command"][1:] == masked

    def test_torch_is_not_imported_for_it(self) -> None:
        code = (
            "import sys; from rl import provenance; r = provenance.collect();"
            "assert 'torch' not in sys.modules;"
            "assert r['cuda_devices'] is None and r['versions']['torch']; import torch;"
            "assert len(provenance.collect()['cuda_devices']) == torch.cuda.device_count()"
        )
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
