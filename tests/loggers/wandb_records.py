"""Reading what W&B's client writes offline."""

from __future__ import annotations

import importlib
import json
import struct
import time
from pathlib import Path
from typing import Any


def folders(path: Path) -> list[Path]:
    """The W&B folders of the run directory `path`, one for each process, in the order of their starts."""
    return sorted((path / "wandb").glob("offline-run-*"))


def records(folder: Path) -> list[Any]:
    """The records of a closed run that `wandb sync` would upload."""
    deadline = time.monotonic() + 20
    while True:  # W&B's own process writes them, and may end a moment after the run was closed
        found = scan(folder)
        if any(record.HasField("exit") for record in found):
            return found
        assert time.monotonic() < deadline, "W&B wrote no exit record"
        time.sleep(0.02)


def scan(folder: Path) -> list[Any]:
    """The records written so far: protocol buffers in LevelDB's log format behind 7 bytes."""
    record: Any = importlib.import_module("wandb.proto.wandb_internal_pb2").Record  # its stubs do not name it
    (file,) = folder.glob("*.wandb")
    data, at, parts, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:  # no chunk begins in the last 6 bytes of a block
            at += -at % 32768
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):  # still being written
            break
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(record.FromString(parts))
            parts = b""
    return found


def run_record(folder: Path) -> Any:
    """What identifies a run that is closed or was killed: id, group, project, configuration."""
    run: Any = next(record.run for record in records(folder) if record.HasField("run"))
    return run


def config(folder: Path) -> dict[str, Any]:
    """The run's configuration; what a W&B sweep has set stands there under its dotted keys too."""
    return {item.key: json.loads(item.value_json) for item in run_record(folder).config.update}


def history(folder: Path) -> list[dict[str, Any]]:
    """What a closed run has logged, a mapping for each step."""
    rows = []
    for record in records(folder):
        if record.HasField("history"):
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            rows.append({key: json.loads(text) for key, text in items.items()})
    return rows
