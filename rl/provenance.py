"""What a run was made by: the code's commit and uncommitted changes, versions, the machine, the command line.

Nothing here fails a run: what cannot be found out is None. Of the environment only Slurm's ids are recorded.
"""

from __future__ import annotations

import fnmatch
import getpass
import importlib.metadata
import logging
import os
import platform
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parent
# fmt: off
_PACKAGES = (
    "torch", "numpy", "gymnasium", "mujoco", "hydra-core", "omegaconf", "safetensors", "ale-py", "box2d",
    "envpool", "procgen", "pettingzoo", "jax", "jaxlib", "flax", "optax", "tensorboard", "wandb", "submitit",
)
_SLURM = (
    "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_PROCID",
    "SLURM_RESTART_COUNT", "SLURM_JOB_PARTITION", "SLURM_JOB_NODELIST", "SLURM_CLUSTER_NAME",
)
# Whatever the user's own configuration says about diffs, `git apply` must understand these
_DIFF = (
    "-c", "diff.noprefix=false", "-c", "diff.mnemonicPrefix=false", "-c", "core.quotePath=true", "diff",
    "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short", "--unified=3",
)
# fmt: on
_GIT_TIMEOUT = 10.0  # seconds
_MAX_FILE, _MAX_FILES = 1 << 20, 10 << 20  # bytes: of one untracked file, and of all of them
_SECRET_FILES = (".env*", "*.pem", "*.key", "id_rsa*", "id_ed25519*", ".netrc", "*credentials*", "*secret*")
_SECRET_ARGUMENT = re.compile(r"(?is)([^=]*(?:api_?key|secret|passw|credential|token(?!s))[^=]*=).+")


def collect(root: Path | None = None) -> dict[str, Any]:
    """Where and by what this process runs, as JSON values; `root` is a folder of the code (default: rl's).

    git (commit, branch, dirty), versions, platform, hostname, cpu, cores (usable ones), memory (bytes),
    cuda_devices (None unless torch is imported already), user, command, working_directory, slurm. Values of
    arguments that name a secret are masked.
    """
    return {
        "git": git_state(root),
        "versions": _versions(),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": _memory(),
        "cuda_devices": _cuda_devices(),
        "user": _user(),
        "command": [_SECRET_ARGUMENT.sub(r"\1***", argument) for argument in sys.orig_argv],
        "working_directory": _working_directory(),
        "slurm": {name: os.environ[name] for name in _SLURM if name in os.environ},
    }


def diff(root: Path | None = None) -> str:
    """What the repository around `root` (default: rl's own) has beyond its commit, to `git apply` on that.

    Changes to tracked files, and untracked text files that git does not ignore: up to 1 MB each and 10 MB in
    all, and none whose name suggests a secret. Empty when there is nothing, no git, or no repository. Bytes
    that are not UTF-8 come as surrogates: write it with `rundir.replace_text`, which turns them back.
    """
    top = _repository(root or _ROOT)
    if top is None:
        return ""
    index = _git(top, "rev-parse", "--git-path", "index")
    untracked = _git(top, "ls-files", "--others", "--exclude-standard", "-z")
    if index is None or untracked is None:
        return ""
    names = _recordable(top, [os.fsdecode(name) for name in untracked.split(b"\0")])
    with tempfile.TemporaryDirectory(prefix="rl-diff-") as folder:
        # `git diff` shows new files that the index announces: a copy of it does, the real one stays as it is
        copy = Path(folder) / "index"
        real = top / os.fsdecode(index.rstrip(b"\n"))
        if real.exists():
            shutil.copyfile(real, copy)
        if names:
            announce = ("add", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul")
            _git(top, "--literal-pathspecs", *announce, index=copy, stdin=os.fsencode("\0".join(names)))
        changes = _git(top, *_DIFF, _base(top), "--", index=copy)
    return "" if changes is None else changes.decode("utf-8", "surrogateescape")


# --- git -------------------------------------------------------------------------------------------------


def _git(folder: Path, *arguments: str, index: Path | None = None, stdin: bytes = b"") -> bytes | None:
    """What a git command prints, None if it fails or there is no git. Takes no locks: other jobs run too."""
    # A hook's GIT_DIR and the like would lead to another repository
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    if index is not None:
        environment["GIT_INDEX_FILE"] = str(index)
    # In a container the folder often belongs to another user; its code is what runs here, so trust it
    command = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", *arguments]
    how: dict[str, Any] = {"cwd": folder, "env": environment, "input": stdin, "capture_output": True}
    try:
        done = subprocess.run(command, timeout=_GIT_TIMEOUT, check=False, **how)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _repository(folder: Path) -> Path | None:
    """The top folder of the repository that `folder` is part of; None where that ignores it (a .venv)."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or _git(folder, "check-ignore", "--quiet", str(folder.resolve())) is not None:
        return None
    return Path(os.fsdecode(top.rstrip(b"\n")))


def git_state(root: Path | None = None) -> dict[str, Any]:
    """`commit`, `branch` and `dirty` of the repository around `root` (default: rl's own), each None where it
    is unknown."""
    folder = root or _ROOT
    state: dict[str, Any] = {"commit": None, "branch": None, "dirty": None}
    top = _repository(folder)
    status = ("status", "--porcelain=v2", "--branch", "--untracked-files=normal")
    printed = None if top is None else _git(top, *status)
    if printed is None:
        return state
    lines = printed.decode("utf-8", "replace").splitlines()
    for key, prefix in (("commit", "# branch.oid "), ("branch", "# branch.head ")):
        value = next((line.removeprefix(prefix) for line in lines if line.startswith(prefix)), "(")
        state[key] = None if value.startswith("(") else value  # (initial), (detached)
    state["dirty"] = any(not line.startswith("#") for line in lines)
    return state


def _base(top: Path) -> str:
    """HEAD, or the empty tree in a repository without a commit."""
    if _git(top, "rev-parse", "--verify", "--quiet", "HEAD") is not None:
        return "HEAD"
    return (_git(top, "hash-object", "-t", "tree", "--stdin") or b"HEAD").decode().strip()


def _recordable(top: Path, names: list[str]) -> list[str]:
    """Of these files, the small text ones."""
    kept, left_out, total = [], 0, 0
    for name in filter(None, names):
        if any(fnmatch.fnmatch(Path(name).name.lower(), pattern) for pattern in _SECRET_FILES):
            continue
        try:
            status = os.lstat(top / name)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE:
                continue
            if total + status.st_size > _MAX_FILES:
                left_out += 1
                continue
            content = (top / name).read_bytes()
            content.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if b"\0" not in content:
            total += status.st_size
            kept.append(name)
    if left_out:
        log.warning("%d untracked files beyond 10 MB are not recorded; add data to .gitignore", left_out)
    return kept


# --- Machine and process ---------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")  # Linux alone has it
    for line in cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _cuda_devices() -> list[dict[str, Any]] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    try:
        if not torch.cuda.is_available():
            return []
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [{"name": device.name, "memory": device.total_memory} for device in devices]
    except Exception:  # a broken driver raises many kinds; a CPU run must not stop for it
        return None


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):  # a container's user without a passwd entry
        return str(os.getuid()) if hasattr(os, "getuid") else None


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # removed meanwhile
        return None
