"""Checkpoints without pickle: a nested state to a folder and back, bit for bit, safe against kills.

    <run>/checkpoints/latest                one line: the name of the newest complete checkpoint
    <run>/checkpoints/step_000500000/
        manifest.json                       format, env_steps, created, config, files (sizes, sha256), state
        tensors.safetensors                 the torch tensors of the state, if it has any
        arrays.safetensors                  the NumPy arrays of the state, if it has any

A state is a dict (keys str or int) of dicts, lists, tuples, int of any size, float, bool, str, None, NumPy
scalars and arrays, and torch tensors. The manifest's `state` holds that tree as JSON; what JSON lacks stands
there as an object with one key that begins with `$` (see rl/state_tree.py). A torch tensor comes back on the
CPU without its `requires_grad`, an OrderedDict as a dict, tensors that shared memory as separate ones.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl import ring_files
from rl.ring_files import Ring
from rl.rundir import fsync_directory, remove_leftovers, replace_text, temporary_path
from rl.state_tree import Encoder, decode, file_parts, read_arrays, read_tensors

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST, TENSORS, ARRAYS = "manifest.json", "tensors.safetensors", "arrays.safetensors"

_STEP = re.compile(r"step_(\d+)")
_SEGMENT = re.compile(r"ring_[0-9a-f]+_\d+_\d+\.safetensors")
_SEAL = ',\n"manifest_sha256": "'  # last entry of the manifest: the hash of all that precedes it
_CHUNK = 1 << 24  # bytes hashed and written at a time
_sound: set[Path] = (
    set()
)  # checkpoints that this process wrote or loaded: their segments may be linked unread


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the message is one line: the file, and what is wrong with it."""


def save(folder: Path, state: dict[str, Any], *, env_steps: int, config: dict[str, Any], keep: int) -> Path:
    """Write `state` as `<folder>/step_<env_steps>`, durable before it bears that name, and return its path.

    `latest` then names the newest complete one, all but the newest `keep` are removed (`keep` <= 0: none is),
    and so is what writers now dead left half-done. A complete, valid checkpoint of that step is left as it
    is. Raises TypeError naming the place in the tree of an object that cannot be saved, and OSError (a full
    disk), both without leaving anything behind.
    """
    folder = Path(folder)
    final = folder / f"step_{env_steps:09d}"
    if not (final.exists() and _is_valid(final)):
        _write(final, state, env_steps, config)
    newer = (path for path in _checkpoints(folder) if _step(path) > env_steps and _is_valid(path))
    replace_text(folder / "latest", next(newer, final).name + "\n")
    # Counted from this one down: those beyond it are unreadable, or from before a resume further back
    up_to_here = [path for path in _checkpoints(folder) if _step(path) <= env_steps]
    for path in up_to_here[keep:] if keep > 0 else []:
        _discard(path)
    remove_leftovers(folder)
    return final


def load(path: Path, *, rings: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state in checkpoint `path` and its manifest (format, env_steps, created, config, files).

    A `Ring` comes back as `Rows`, which are still to be read from `path`; with `rings=False`, for those who
    only want the policy, as None. Sizes and checksums are verified first. Raises CheckpointError; executes
    nothing that the files contain.
    """
    path = Path(path)
    manifest = _verify(path)
    _sound.add(path)
    try:
        arrays = read_arrays(path / ARRAYS) if ARRAYS in manifest["files"] else {}
        tensors = read_tensors(path / TENSORS) if TENSORS in manifest["files"] else {}
        entries = manifest.pop("rings", {})
        rows = {name: ring_files.described(entry, path) for name, entry in entries.items() if rings}
        state = decode(manifest.pop("state"), arrays, tensors, rows)
        manifest["config"] = decode(manifest["config"], {}, {})
    except Exception as error:
        message = " ".join(str(error).split())
        raise CheckpointError(
            f"{path / MANIFEST} cannot be decoded: {type(error).__name__}: {message}"
        ) from error
    return state, manifest


def manifest(path: Path) -> dict[str, Any]:
    """The manifest of checkpoint `path` as `load` gives it, all files verified, nothing of the state read.

    For those who want to know what a checkpoint is: it needs no torch. Raises CheckpointError.
    """
    entries = _verify(Path(path))
    entries["config"] = decode(entries["config"], {}, {})
    return {name: value for name, value in entries.items() if name not in ("state", "rings")}


def newest(folder: Path) -> Path | None:
    """The newest valid checkpoint in `folder`, None if there is none; warns of each bad one on the way."""
    vanished = False
    for path in _checkpoints(Path(folder)):
        try:
            _verify(path)
        except CheckpointError as error:
            if os.path.lexists(path):
                log.warning("skipping a bad checkpoint: %s", error)
            else:
                vanished = True
        else:
            return path
    return newest(folder) if vanished else None  # a running trainer pruned it, having written a newer one


# --- Folders ---------------------------------------------------------------------------------------------


def _step(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else -1


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders in `folder`, newest first."""
    paths = [path for path in folder.glob("step_*") if _step(path) >= 0]
    return sorted(paths, key=_step, reverse=True)


def _discard(path: Path) -> None:
    """Remove a checkpoint: first of all its name, so that a kill leaves no half of it."""
    _sound.discard(path)
    doomed = temporary_path(path)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _write(final: Path, state: dict[str, Any], env_steps: int, config: dict[str, Any]) -> None:
    if not isinstance(state, dict):
        raise TypeError(f"a checkpoint's state is a dict, not a {type(state).__name__}")
    encoder = Encoder()
    fields = {
        "format": FORMAT,
        "env_steps": int(env_steps),
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "config": Encoder(arrays=False).encode(config, "config"),
        "files": {},
        "rings": {},
        "state": encoder.encode(state, ""),
    }
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(final)
    try:
        temporary.mkdir()
        for name, entries in ((TENSORS, encoder.tensors), (ARRAYS, encoder.arrays)):
            if entries:
                fields["files"][name] = _write_durably(temporary / name, file_parts(entries))
        if encoder.rings:
            _write_rings(temporary, encoder.rings, _earlier(final), fields)
        # a line for each entry, so that `head` shows everything but the state
        lines = (f'"{key}": {json.dumps(value, allow_nan=False)}' for key, value in fields.items())
        body = "{\n" + ",\n".join(lines)
        seal = hashlib.sha256(body.encode()).hexdigest()
        _write_durably(temporary / MANIFEST, [(body + _SEAL + seal + '"\n}\n').encode()])
        fsync_directory(temporary)
        if final.exists():  # known to be bad
            _discard(final)
        os.rename(temporary, final)
        _sound.add(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_directory(final.parent)


def _earlier(final: Path) -> Path | None:
    """The newest sound checkpoint before `final`, whose segments of rings may be linked.

    After a resume the newest may be one that was found to be bad: its damage is not handed on.
    """
    before = (path for path in _checkpoints(final.parent) if _step(path) < _step(final))
    return next((path for path in before if path in _sound or _is_valid(path)), None)


def _write_rings(
    temporary: Path, rings: dict[str, Ring], earlier: Path | None, fields: dict[str, Any]
) -> None:
    """Link or write the segments of each ring, and describe them in the manifest's fields."""
    known: dict[str, Any] = {"rings": {}, "files": {}}
    if earlier is not None:
        try:
            known = _read_manifest(earlier / MANIFEST)
        except CheckpointError as error:
            log.warning("the replay buffer is written whole: %s", error)
    for path, ring in rings.items():
        kept, new = ring_files.plan(ring, known.get("rings", {}).get(path))
        for segment in kept:
            assert earlier is not None
            ring_files.link(earlier / segment.file, temporary / segment.file)
            fields["files"][segment.file] = known["files"][segment.file]
        for segment in new:
            parts = file_parts(ring.rows(segment.start, segment.end))
            fields["files"][segment.file] = _write_durably(temporary / segment.file, parts)
        segments = [list(segment) for segment in (*kept, *new)]
        fields["rings"][path] = {"id": ring.id, "start": ring.start, "end": ring.end, "segments": segments}


def _write_durably(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write and fsync a new file; its size and sha256."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for part in parts:
            for start in range(0, len(part), _CHUNK):
                chunk = part[start : start + _CHUNK]
                file.write(chunk)
                digest.update(chunk)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


# --- Verification ----------------------------------------------------------------------------------------


def _verify(path: Path) -> dict[str, Any]:
    """The manifest of checkpoint `path`, still encoded, all files being whole. Raises CheckpointError."""
    manifest = _read_manifest(path / MANIFEST)
    for name, expected in manifest["files"].items():
        file = path / name
        if name not in (TENSORS, ARRAYS) and not _SEGMENT.fullmatch(name):
            raise CheckpointError(f"{path / MANIFEST} names a file that no checkpoint has: {name!r}")
        try:
            size, sha256 = file.stat().st_size, ""
            if size == expected["size"]:
                sha256 = _hash(file)
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
        if size != expected["size"]:
            what = "truncated" if size < expected["size"] else "too long"
            raise CheckpointError(f"{file} is {what}: {size} bytes instead of {expected['size']}")
        if sha256 != expected["sha256"]:
            raise CheckpointError(f"{file} is corrupt: its checksum differs from the manifest's")
    return manifest


def _read_manifest(file: Path) -> dict[str, Any]:
    try:
        text = file.read_bytes().decode()
        manifest = json.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{file} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise CheckpointError(f"{file} is not the manifest of a checkpoint: it has no format version")
    if manifest["format"] > FORMAT:
        version = manifest["format"]
        raise CheckpointError(
            f"{file} has format version {version}, newer than the {FORMAT} that this rl reads"
        )
    body, _, seal = text.rpartition(_SEAL)
    if seal != hashlib.sha256(body.encode()).hexdigest() + '"\n}\n':
        raise CheckpointError(f"{file} is corrupt: its content differs from its own checksum")
    del manifest["manifest_sha256"]
    return manifest


def _hash(file: Path) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with open(file, "rb", buffering=0) as reader:
        while count := reader.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _is_valid(path: Path) -> bool:
    try:
        _verify(path)
    except CheckpointError:
        return False
    return True
