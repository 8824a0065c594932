"""TensorBoard: event files in `<run>/tensorboard`.

Writes the record format directly around TensorBoard's own protocol buffers, which import in 30 ms:
TensorBoard's own writer and `torch.utils.tensorboard` each take 200 ms, the latter after torch itself.
Format: https://www.tensorflow.org/tutorials/load_data/tfrecord (length, its checksum, data, its checksum).
"""

from __future__ import annotations

import importlib.util
import os
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from rl.errors import ConfigError
from rl.loggers import RunInfo, StepMeans


@dataclass
class TensorBoardLogger:
    """Scalars and the configuration as TensorBoard events; of several values at one step, the mean."""

    flush_secs: float
    _file: BinaryIO | None = field(default=None, init=False, repr=False)
    _pending: StepMeans = field(default_factory=StepMeans, init=False, repr=False)
    _flushed_at: float = field(default=0.0, init=False, repr=False)

    def check(self) -> None:
        """Raises ConfigError where tensorboard is not installed."""
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                "logger=tensorboard needs the package tensorboard: pip install tensorboard (or logger=csv)"
            )

    def open(self, run: RunInfo, state: dict[str, Any] | None) -> None:
        """Start a new event file; of a resumed run, TensorBoard drops what came after `run.env_steps`."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        folder = run.path / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names, so the time comes first.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("xb")
        self._write(file_version="brain.Event:2")
        # START discards points at or above its step, but the first START of a folder discards nothing:
        # it must therefore stand in the first file too.
        self._write(step=run.env_steps + 1 if run.env_steps else 0, session_log=SessionLog(status="START"))
        self._write(step=run.env_steps, summary=_text_summary("config", _markdown_table(run.config)))
        self.flush()

    def log(self, env_steps: int, metrics: dict[str, float]) -> None:
        """Record scalars at `env_steps`, with the wall time at which the step was left."""
        finished = self._pending.add(env_steps, metrics)
        if finished is not None:
            self._write_scalars(*finished)
            if time.monotonic() - self._flushed_at > self.flush_secs:
                assert self._file is not None
                self._file.flush()
                self._flushed_at = time.monotonic()

    def video(self, env_steps: int, path: Path) -> None:
        """TensorBoard shows no mp4: nothing to do, the file lies in `<run>/videos`."""

    def flush(self) -> None:
        """Write what is pending and hand it to the operating system."""
        if self._file is None:
            return
        scalars = self._pending.take()
        if scalars:
            self._write_scalars(self._pending.env_steps, scalars)
        self._file.flush()
        self._flushed_at = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """Nothing but the flush: a resumed run is continued by `run.env_steps` alone."""
        self.flush()
        return {}

    def close(self, status: str) -> None:
        """Write what is pending and close the file."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None

    def _write_scalars(self, env_steps: int, scalars: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary()
        for name, value in scalars.items():
            summary.value.add(tag=name, simple_value=value)
        self._write(step=env_steps, summary=summary)

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        assert self._file is not None, "log() outside open() and close()"
        data = Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        # One write call a record, so that a kill tears at most the last one, which readers skip.
        self._file.write(
            length + struct.pack("<I", _masked_crc(length)) + data + struct.pack("<I", _masked_crc(data))
        )


def _text_summary(tag: str, markdown: str) -> Any:
    """A Summary that TensorBoard's Text tab renders as markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", tensor_shape=shape, string_val=[markdown.encode()])
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])


def _markdown_table(config: dict[str, Any]) -> str:
    """The nested config as a table of dotted keys and values."""
    rows: list[str] = []

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            text = str(value).replace("|", "\\|").replace("\n", " ")
            rows.append(f"| {prefix} | {text} |")

    walk("", config)
    return "\n".join(["| key | value |", "| --- | --- |", *rows])


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # the Castagnoli polynomial, bits reversed
        table.append(value)
    return tuple(table)


_CRC_TABLE = _crc_table()


def _masked_crc(data: bytes) -> int:
    """CRC-32C of `data`, rotated and offset as the record format wants it."""
    table, crc = _CRC_TABLE, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
