"""A checkpoint's nested state as JSON, and its arrays and tensors apart, as safetensors files.

What may stand in a state is said in rl/checkpoint.py; what JSON lacks of it becomes an object with one key
that begins with `$` (see `Encoder`).
"""

from __future__ import annotations

import itertools
import json
import math
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rl.ring_files import Ring, Rows

if TYPE_CHECKING:
    import torch

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


class Encoder:
    """Turns a state into JSON values, setting its arrays and tensors aside by name.

    {"$tuple": […]}
    {"$dict": [[key, value], …]}        a dict with keys that are int, or begin with $
    {"$int": hex}  {"$float": hex}      a huge int; a NaN or an infinity
    {"$scalar": [dtype, hex]}           a NumPy scalar
    {"$ring": path}                     a `Ring`, described in the manifest's "rings"
    {"$array": name}  {"$tensor": name} with "dtype" and "shape" where the file has only the bytes, as uint8
    """

    def __init__(self, *, arrays: bool = True) -> None:
        self.allowed = arrays
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.rings: dict[str, Ring] = {}

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
        if self.allowed and kind is Ring:
            self.rings[path] = value
            return {"$ring": path}
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


def decode(
    node: Any,
    arrays: Mapping[str, Any],
    tensors: Mapping[str, Any],
    rings: Mapping[str, Rows] | None = None,
) -> Any:
    """The inverse of `Encoder.encode`; a ring comes back as `Rows`, or as None where it is not in `rings`."""
    if type(node) is list:
        return [decode(item, arrays, tensors, rings) for item in node]
    if type(node) is not dict:
        return node
    tag = next(iter(node), "")
    if not tag.startswith("$"):
        return {key: decode(item, arrays, tensors, rings) for key, item in node.items()}
    value = node[tag]
    if tag == "$tuple":
        return tuple(decode(item, arrays, tensors, rings) for item in value)
    if tag == "$dict":
        return {key: decode(item, arrays, tensors, rings) for key, item in value}
    if tag == "$int":
        return int(value, 16)
    if tag == "$float":
        return struct.unpack(">d", bytes.fromhex(value))[0]
    if tag == "$scalar":
        return _from_bytes(np.frombuffer(bytes.fromhex(value[1]), np.uint8), value[0], [])[()]
    if tag == "$ring":
        return (rings or {}).get(value)
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


def file_parts(entries: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file of arrays or tensors by name: its header, then each of them in turn."""
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
    return itertools.chain([prefix], (_memory(entries[name]) for name in names))


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a safetensors file by name."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return {name: np.array(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 (not a mapping)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file by name, on the CPU."""
    from safetensors import safe_open

    # cloned into memory of torch's own alignment, on which the last bit of some kernels' results depends
    with safe_open(path, framework="pt") as file:
        return {name: cast("torch.Tensor", file.get_tensor(name)).clone() for name in file.keys()}  # noqa: SIM118
