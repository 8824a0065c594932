"""Checkpoints without pickle: a nested state to a folder and back, bit for bit, safe against kills.

    <run>/checkpoints/latest                one line: the name of the newest complete checkpoint
    <run>/checkpoints/step_000500000/
        manifest.json                       format, env_steps, created, config, files (sizes, sha256), state
        tensors.safetensors                 the torch tensors of the state, if it has any
        arrays.safetensors                  the NumPy arrays of the state, if it has any

A state is a dict (keys str or int) of dicts, lists, tuples, int of any size, float, bool, str, None, NumPy
scalars and arrays, and torch tensors. The manifest's `state` holds that tree as JSON; what JSON lacks stands
there as an object with one key that begins with `$` (see `_Encoder`). A torch tensor comes back on the CPU
without its `requires_grad`, an OrderedDict as a dict, tensors that shared memory as separate ones.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import struct
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rl.rundir import fsync_directory, remove_leftovers, replace_text, temporary_path

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST, TENSORS, ARRAYS = "manifest.json", "tensors.safetensors", "arrays.safetensors"

_STEP = re.compile(r"step_(\d+)")
_SEAL = ',\n"manifest_sha256": "'  # last entry of the manifest: the hash of all that precedes it
_CHUNK = 1 << 24  # bytes hashed and written at a time
_MAX_JSON_INT = 1 << 8192  # Python refuses to read decimal integers of more than 4300 digits

# safetensors' name of each dtype, by the name that NumPy and torch give it
_CODES = {
    f"{kind}{bits}": f"{kind[0].upper()}{bits}"
    for kind in ("int", "uint", "float")
    for bits in (8, 16, 32, 64)
}
_CODES |= {"bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_RAW_KINDS = "biufcSUmM"  # NumPy dtypes that are plain bytes: those without a code are stored as uint8
_RAW_TENSORS = ("complex64", "complex128")


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


def load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state in checkpoint `path` and its manifest (format, env_steps, created, config, files).

    Sizes and checksums are verified first. Raises CheckpointError; executes nothing that the files contain.
    """
    path = Path(path)
    manifest = _verify(path)
    try:
        arrays = _read_arrays(path / ARRAYS) if ARRAYS in manifest["files"] else {}
        tensors = _read_tensors(path / TENSORS) if TENSORS in manifest["files"] else {}
        state = _decode(manifest.pop("state"), arrays, tensors)
        manifest["config"] = _decode(manifest["config"], {}, {})
    except Exception as error:
        message = " ".join(str(error).split())
        raise CheckpointError(
            f"{path / MANIFEST} cannot be decoded: {type(error).__name__}: {message}"
        ) from error
    return state, manifest


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
    doomed = temporary_path(path)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _write(final: Path, state: dict[str, Any], env_steps: int, config: dict[str, Any]) -> None:
    if not isinstance(state, dict):
        raise TypeError(f"a checkpoint's state is a dict, not a {type(state).__name__}")
    encoder = _Encoder()
    fields = {
        "format": FORMAT,
        "env_steps": int(env_steps),
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "config": _Encoder(arrays=False).encode(config, "config"),
        "files": {},
        "state": encoder.encode(state, ""),
    }
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(final)
    try:
        temporary.mkdir()
        for name, entries in ((TENSORS, encoder.tensors), (ARRAYS, encoder.arrays)):
            if entries:
                fields["files"][name] = _write_safetensors(temporary / name, entries)
        # a line for each entry, so that `head` shows everything but the state
        lines = (f'"{key}": {json.dumps(value, allow_nan=False)}' for key, value in fields.items())
        body = "{\n" + ",\n".join(lines)
        seal = hashlib.sha256(body.encode()).hexdigest()
        _write_durably(temporary / MANIFEST, [(body + _SEAL + seal + '"\n}\n').encode()])
        fsync_directory(temporary)
        if final.exists():  # known to be bad
            _discard(final)
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_directory(final.parent)


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
        if name not in (TENSORS, ARRAYS):
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


# --- The state as JSON, and its arrays apart -------------------------------------------------------------


class _Encoder:
    """Turns a state into JSON values, setting its arrays and tensors aside by name.

    {"$tuple": […]}
    {"$dict": [[key, value], …]}        a dict with keys that are int, or begin with $
    {"$int": hex}  {"$float": hex}      a huge int; a NaN or an infinity
    {"$scalar": [dtype, hex]}           a NumPy scalar
    {"$array": name}  {"$tensor": name} with "dtype" and "shape" where the file has only the bytes, as uint8
    """

    def __init__(self, *, arrays: bool = True) -> None:
        self.allowed = arrays
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, path: str) -> Any:
        """`value`, found at `path` in the tree, as JSON. Raises TypeError."""
        kind = type(value)
        if value is None or kind is str or kind is bool:
            return value
        if kind is int:
            return value if -_MAX_JSON_INT < value < _MAX_JSON_INT else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if isinstance(value, dict):
            return self._dict(value, path)
        if kind is list:
            return self._items(value, path)
        if kind is tuple:
            return {"$tuple": self._items(value, path)}
        if isinstance(value, np.generic) and value.dtype.kind in _RAW_KINDS:
            return {"$scalar": [value.dtype.str, value.tobytes().hex()]}
        if self.allowed and kind in (np.ndarray, np.memmap) and value.dtype.kind in _RAW_KINDS:
            return self._array(value, path)
        torch = sys.modules.get("torch")
        if self.allowed and torch is not None and isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        dtype = f" of dtype {value.dtype}" if isinstance(value, (np.ndarray, np.generic)) else ""
        raise TypeError(f"{path}: a {kind.__module__}.{kind.__qualname__}{dtype} cannot be saved")

    def _items(self, items: Iterable[Any], path: str) -> list[Any]:
        return [self.encode(item, f"{path}/{index}") for index, item in enumerate(items)]

    def _dict(self, value: Mapping[Any, Any], path: str) -> dict[str, Any]:
        prefix = f"{path}/" if path else ""
        encoded = {}
        plain = True
        for key, item in value.items():
            if type(key) is not str:
                if type(key) is not int:
                    raise TypeError(
                        f"{prefix}{key!r}: a key must be a str or an int, not {type(key).__name__}"
                    )
                plain = False
            elif key.startswith("$"):
                plain = False
            encoded[key] = self.encode(item, f"{prefix}{key}")
        return encoded if plain else {"$dict": [[key, item] for key, item in encoded.items()]}

    def _array(self, value: np.ndarray[Any, Any], path: str) -> dict[str, Any]:
        dtype = value.dtype
        if dtype.isnative and dtype.name in _CODES:
            return {"$array": _put(self.arrays, path, value)}
        name = _put(self.arrays, path, _array_bytes(value))
        return {"$array": name, "dtype": dtype.str, "shape": list(value.shape)}

    def _tensor(self, value: torch.Tensor, path: str) -> dict[str, Any]:
        import torch

        name = str(value.dtype).removeprefix("torch.")
        if value.layout is not torch.strided or value.is_meta or name not in (*_CODES, *_RAW_TENSORS):
            raise TypeError(f"{path}: a torch tensor of dtype {name}, layout {value.layout} cannot be saved")
        value = value.detach()
        if name in _CODES:
            return {"$tensor": _put(self.tensors, path, value)}
        key = _put(self.tensors, path, _tensor_bytes(value))
        return {"$tensor": key, "dtype": name, "shape": list(value.shape)}


def _put(entries: dict[str, Any], path: str, value: Any) -> str:
    """Store under the path in the tree, or beside it where another has that name already; the name."""
    name, copies = path, 1
    while name in entries or name == "__metadata__":  # reserved by the file format
        copies += 1
        name = f"{path}~{copies}"
    entries[name] = value
    return name


def _decode(node: Any, arrays: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    """The inverse of `_Encoder.encode`."""
    if type(node) is list:
        return [_decode(item, arrays, tensors) for item in node]
    if type(node) is not dict:
        return node
    tag = next(iter(node), "")
    if not tag.startswith("$"):
        return {key: _decode(item, arrays, tensors) for key, item in node.items()}
    value = node[tag]
    if tag == "$tuple":
        return tuple(_decode(item, arrays, tensors) for item in value)
    if tag == "$dict":
        return {key: _decode(item, arrays, tensors) for key, item in value}
    if tag == "$int":
        return int(value, 16)
    if tag == "$float":
        return struct.unpack(">d", bytes.fromhex(value))[0]
    if tag == "$scalar":
        return _from_bytes(np.frombuffer(bytes.fromhex(value[1]), np.uint8), value[0], [])[()]
    if tag == "$array":
        return _from_bytes(arrays[value], node["dtype"], node["shape"]) if "dtype" in node else arrays[value]
    if tag == "$tensor":
        if "dtype" not in node:
            return tensors[value]
        return tensors[value].view(getattr(sys.modules["torch"], node["dtype"])).reshape(node["shape"])
    raise ValueError(f"unknown tag {tag!r}")


def _from_bytes(raw: np.ndarray[Any, Any], dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    if kind.kind not in _RAW_KINDS:  # never objects: their bytes would be taken for addresses
        raise ValueError(f"dtype {dtype!r} in a checkpoint")
    return raw.view(kind).reshape(shape) if kind.itemsize else np.zeros(shape, kind)


# --- safetensors files -----------------------------------------------------------------------------------
# An 8-byte header length, a JSON header, the bytes. Written here, because the library's
# writer reports a full disk as an error of its own, cannot hash what it writes, and refuses tensors that
# share memory; read by the library.


def _tensor_bytes(value: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in C order as flat uint8 on the CPU, without a copy where possible."""
    import torch

    return value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _array_bytes(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    flat = np.asarray(value, order="C").reshape(-1)
    return flat.view(np.uint8) if flat.size and flat.itemsize else np.empty(0, np.uint8)


def _memory(value: Any) -> memoryview:
    return (_array_bytes(value) if isinstance(value, np.ndarray) else _tensor_bytes(value).numpy()).data


def _write_safetensors(path: Path, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Write arrays or tensors by name; the file's size and sha256."""
    # the widest elements first, which aligns them all
    names = sorted(entries, key=lambda name: (-entries[name].dtype.itemsize, name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        value = entries[name]
        start, end = end, end + math.prod(value.shape) * value.dtype.itemsize
        dtype = _CODES[str(value.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    prefix = struct.pack("<Q", len(encoded)) + encoded
    return _write_durably(path, itertools.chain([prefix], (_memory(entries[name]) for name in names)))


def _read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return {name: np.array(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 (not a mapping)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    # cloned into memory of torch's own alignment, on which the last bit of some kernels' results depends
    with safe_open(path, framework="pt") as file:
        return {name: cast("torch.Tensor", file.get_tensor(name)).clone() for name in file.keys()}  # noqa: SIM118
