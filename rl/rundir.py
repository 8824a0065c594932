"""A run's directory: making it, the files every run writes (metrics, episodes, evaluations), and run.json.

    metrics.jsonl      {"env_steps": 512, "charts/SPS": …} a line; what JSON lacks (NaN, infinity) is null
    episodes.csv       env_steps,env,return,length,seconds
    evaluations.csv    env_steps,episode,return,length
    run.json           the status, and whatever else `update` was given

A run has one writer. Whatever replaces a file goes through a temporary sibling whose name tells which process
owns it, so that what a killed process left behind can be told from what a living one is writing, and removed.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

log = logging.getLogger(__name__)

Status = Literal["running", "completed", "failed", "preempted", "interrupted"]
"""How a run stands, as run.json says; a run that says "running" while `is_alive` is false was killed."""

_TEMPORARY = re.compile(r"\.tmp-.+-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]{8}-(?P<host>.*)")
_SAME_START = 5.0  # seconds: a process's start is derived from the wall clock, which may be corrected
_FOREIGN_LEFTOVER = 24 * 3600.0  # seconds without a change that make another host's temporary file abandoned


HEADERS = {
    "metrics.jsonl": b"",
    "episodes.csv": b"env_steps,env,return,length,seconds\n",
    "evaluations.csv": b"env_steps,episode,return,length\n",
}
"""The files that `RunFiles` appends to, in the order of its methods, each with its first line."""


def create(parent: Path, stem: str) -> Path:
    """Make and return `<parent>/<stem>_<4 hex digits>`, a directory nobody else has.

    A `/` in `stem` becomes `-`. The digits come from the operating system: no seeded generator is touched.
    Raises OSError when it cannot be made.
    """
    parent.mkdir(parents=True, exist_ok=True)
    stem = stem.replace("/", "-")
    for _ in range(1000):
        path = parent / f"{stem}_{secrets.token_hex(2)}"
        with suppress(FileExistsError):
            os.mkdir(path)
            return path
    raise FileExistsError(errno.EEXIST, "a thousand free names tried, all of them taken", str(parent / stem))


# --- Metrics, episodes, evaluations ----------------------------------------------------------------------


def _as_number(value: Any) -> Any:
    """What JSON lacks a form for: NumPy and torch values as numbers or lists, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _finite(value: Any) -> Any:
    """`value` with every NaN and infinity in it as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_encode = json.JSONEncoder(allow_nan=False, default=_as_number).encode


def _line(record: dict[str, Any]) -> str:
    try:
        return _encode(record)
    except ValueError:  # NaN or infinity, which is rare: look for them only now
        return _encode(_finite(record))


class _LineFile:
    """A file of whole lines, opened for appending: a torn last line is cut off, an absent header written."""

    def __init__(self, path: Path, header: bytes = b"") -> None:
        self.header = header
        self.file: BinaryIO = open(path, "ab", buffering=1 << 16)  # noqa: SIM115 (closed by RunFiles.close)
        self.write = self.file.write
        try:
            self.cut(self.position())
        except BaseException:
            self.file.close()
            raise

    def position(self) -> int:
        """Length in bytes, all of it handed to the operating system."""
        self.file.flush()
        return os.fstat(self.file.fileno()).st_size

    def cut(self, size: int) -> None:
        """Drop what lies beyond `size` bytes, and the incomplete line before it if there is one."""
        present = self.position()
        if size > present:
            log.warning(
                "%s ends at byte %d, before byte %d where it should go on", self.file.name, present, size
            )
        size = self._end_of_line(min(size, present))
        if size < present:
            os.truncate(self.file.fileno(), size)
        if size < len(self.header):
            os.truncate(self.file.fileno(), 0)
            self.file.write(self.header)
            self.file.flush()

    def _end_of_line(self, size: int) -> int:
        with open(self.file.name, "rb") as reader:
            while size > 0:
                start = max(0, size - 4096)
                reader.seek(start)
                newline = reader.read(size - start).rfind(b"\n")
                if newline >= 0:
                    return start + newline + 1
                size = start
        return 0


class RunFiles:
    """metrics.jsonl, episodes.csv and evaluations.csv of the run directory `path`, opened for appending.

    Lines are buffered: `flush` hands them to the operating system, after which a kill of the process loses
    none of them.
    """

    def __init__(self, path: Path) -> None:
        with ExitStack() as stack:
            self._files: dict[str, _LineFile] = {}
            for name, header in HEADERS.items():
                self._files[name] = _LineFile(Path(path) / name, header)
                stack.callback(self._files[name].file.close)
            self._closing = stack.pop_all()
        self._write_metrics, self._write_episode, self._write_evaluation = (
            file.write for file in self._files.values()
        )

    def metrics(self, env_steps: int, metrics: Mapping[str, float]) -> None:
        """Append a line to metrics.jsonl, env_steps first; NaN and infinity are written as null."""
        self._write_metrics((_line({"env_steps": env_steps, **metrics}) + "\n").encode())

    def episode(self, env_steps: int, env: int, ret: float, length: int, seconds: float) -> None:
        """Append a finished training episode: raw return, agent steps, seconds since the run began."""
        row = f"{int(env_steps)},{int(env)},{float(ret)!r},{int(length)},{float(seconds)!r}\n"
        self._write_episode(row.encode())

    def evaluation(self, env_steps: int, episode: int, ret: float, length: int) -> None:
        """Append an evaluation episode: its number within the evaluation, raw return, agent steps."""
        row = f"{int(env_steps)},{int(episode)},{float(ret)!r},{int(length)}\n"
        self._write_evaluation(row.encode())

    def positions(self) -> dict[str, int]:
        """Flush, and return the length in bytes of each file by name: what `rewind` takes."""
        return {name: file.position() for name, file in self._files.items()}

    def rewind(self, positions: Mapping[str, int]) -> None:
        """Cut each file back to its position, and one that `positions` lacks to nothing but its header.

        A resumed run calls it with the positions of its checkpoint, so that no line stands in a file twice.
        """
        for name, file in self._files.items():
            file.cut(positions.get(name, 0))

    def flush(self) -> None:
        """Hand every line to the operating system. Raises OSError (a full disk), keeping the unwritten."""
        for file in self._files.values():
            file.file.flush()

    def close(self) -> None:
        """Flush and close; harmless when repeated."""
        self._closing.close()

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- run.json --------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """The run.json in run directory `path`. Raises FileNotFoundError, or ValueError if it is not JSON."""
    file = Path(path) / "run.json"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return record


def read_if_any(path: Path) -> dict[str, Any]:
    """The run.json in run directory `path`; empty where there is none, or it cannot be understood."""
    try:
        return read(path)
    except (FileNotFoundError, ValueError):
        return {}


def update(path: Path, /, **fields: Any) -> None:
    """Set top-level fields of run.json in run directory `path`, all at once, leaving the others as they are.

    A field that is a dict replaces the former one whole; NaN and infinity are written as null. Raises
    ValueError on an unknown `status`, and OSError where it cannot be written (a full disk): the old file is
    then untouched.
    """
    if "status" in fields and fields["status"] not in get_args(Status):
        raise ValueError(f"status {fields['status']!r} is not one of {', '.join(get_args(Status))}")
    try:
        record = read(path)
    except FileNotFoundError:
        record = {}
    text = json.dumps(_finite({**record, **fields}), indent=2, allow_nan=False, default=_as_number)
    replace_text(Path(path) / "run.json", text + "\n")
    remove_leftovers(Path(path))


def process_identity() -> dict[str, Any]:
    """`host`, `pid` and `process_started` (Unix time in seconds) of this process: fields for run.json."""
    import psutil

    process = psutil.Process()
    return {"host": socket.gethostname(), "pid": process.pid, "process_started": process.create_time()}


def process_exists(identity: Mapping[str, Any]) -> bool | None:
    """Whether the process that `process_identity` described still runs; None if another host must say.

    False where `identity` names no process.
    """
    import psutil

    if not {"host", "pid", "process_started"} <= identity.keys():
        return False
    if identity["host"] != socket.gethostname():
        return None
    try:
        process = psutil.Process(int(identity["pid"]))
        if process.status() == psutil.STATUS_ZOMBIE:  # killed, and only not yet waited for
            return False
        return bool(abs(process.create_time() - float(identity["process_started"])) < _SAME_START)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def is_alive(record: Mapping[str, Any]) -> bool:
    """Whether a run is being trained, given its run.json: a status "running" outlives a killed process.

    True for a run on another host, of which nothing can be known here; false where the record names no
    process.
    """
    return record.get("status") == "running" and process_exists(record) is not False


# --- Replacing files so that a kill never shows ----------------------------------------------------------


def temporary_path(path: Path) -> Path:
    """A hidden sibling for what will become `path`, unique and naming the process that owns it."""
    owner = process_identity()
    started = int(owner["process_started"])
    return path.with_name(f".tmp-{path.name}-{owner['pid']}-{started}-{secrets.token_hex(4)}-{owner['host']}")


def replace_text(path: Path, text: str) -> None:
    """Write `text` and put it at `path` in one step. Raises OSError, leaving the former file as it was.

    Bytes that `provenance.diff` could not decode are written as they were.
    """
    temporary = temporary_path(path)
    try:
        with open(temporary, "x", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems lack it
            raise
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files and folders in `folder` whose process is gone; another host's after a day."""
    for entry in folder.glob(".tmp-*"):
        if not _is_leftover(entry):
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with suppress(OSError):
                entry.unlink()


def _is_leftover(entry: Path) -> bool:
    match = _TEMPORARY.fullmatch(entry.name)
    if match is None:
        return False
    exists = process_exists({"host": match["host"], "pid": match["pid"], "process_started": match["started"]})
    if exists is not None:
        return not exists
    try:
        inside = list(entry.iterdir()) if entry.is_dir() else []
        newest: float = max(item.lstat().st_mtime for item in (entry, *inside))
    except OSError:  # vanished meanwhile
        return False
    return time.time() - newest > _FOREIGN_LEFTOVER
