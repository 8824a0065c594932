"""Rings in checkpoints: of a replay buffer, each checkpoint writes only the rows that are new.

A ring's rows are numbered from its beginning and written once, in segments; a checkpoint holds hard links to
the segments that earlier ones wrote, so each is whole by itself, and a segment goes with the last checkpoint
that needs it. Where a file system knows no hard links the segments are copied.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MOST_SEGMENTS = 64  # beyond it a checkpoint writes all rows anew, as one segment


@dataclass(frozen=True)
class Ring:
    """Arrays [capacity, …] of which row r, counted from the ring's beginning, lies at r % capacity.

    Attributes:
        id: tells rings apart whose rows bear the same numbers.
        start, end: the rows held, `end` not included.
    """

    id: str
    arrays: dict[str, np.ndarray]
    start: int
    end: int

    def rows(self, start: int, end: int) -> dict[str, np.ndarray]:
        """Rows `start` to `end` in order, copied where they wrap around."""
        return {name: _unwrapped(array, start, end) for name, array in self.arrays.items()}


class Rows(NamedTuple):
    """What was read back of a ring: its rows `start` to `end` in order, [end − start, …] each array."""

    id: str
    arrays: dict[str, np.ndarray]
    start: int
    end: int


class Segment(NamedTuple):
    """A file in a checkpoint with rows `start` to `end` of a ring."""

    file: str
    start: int
    end: int


def _unwrapped(array: np.ndarray, start: int, end: int) -> np.ndarray:
    first, length = start % len(array), end - start
    if first + length <= len(array):
        return array[first : first + length]
    return np.concatenate([array[first:], array[: first + length - len(array)]])


def plan(ring: Ring, earlier: Mapping[str, Any] | None) -> tuple[list[Segment], Segment | None]:
    """The segments of an earlier checkpoint to keep, and the one to write (None: nothing is new).

    Args:
        earlier: what that checkpoint's manifest says of the ring at the same place in the state.
    """
    kept: list[Segment] = []
    if earlier is not None and earlier["id"] == ring.id and earlier["end"] <= ring.end:
        kept = [s for s in (Segment(*s) for s in earlier["segments"]) if s.end > ring.start]
    if len(kept) >= MOST_SEGMENTS or (kept and kept[0].start > ring.start):
        kept = []
    start = kept[-1].end if kept else ring.start
    if start == ring.end and kept:
        return kept, None
    return kept, Segment(f"ring_{ring.id}_{start}_{ring.end}.safetensors", start, ring.end)


def link(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, or a copy where that cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def assemble(entry: Mapping[str, Any], read: Any, folder: Path) -> Rows:
    """The rows of a ring from the segments that a manifest's entry names; `read` gives a file's arrays by
    name. Segments are read one by one: beside the rows, memory holds the largest of them."""
    start, end = entry["start"], entry["end"]
    whole: dict[str, np.ndarray] = {}
    for first, arrays in _parts(entry, read, folder, start, end):
        for name, rows in arrays.items():
            if name not in whole:
                whole[name] = np.empty((end - start, *rows.shape[1:]), rows.dtype)
            whole[name][first - start : first - start + len(rows)] = rows
    return Rows(entry["id"], whole, start, end)


def _parts(
    entry: Mapping[str, Any], read: Any, folder: Path, start: int, end: int
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Of each segment the number of its first row that is wanted, and the rows wanted."""
    expected = start
    for segment in (Segment(*s) for s in entry["segments"]):
        first, last = max(start, segment.start), min(end, segment.end)
        if first != expected:
            raise ValueError(f"rows {expected} to {first} of a ring are in no segment")
        arrays = read(folder / segment.file)
        yield (
            first,
            {name: rows[first - segment.start : last - segment.start] for name, rows in arrays.items()},
        )
        expected = last
    if expected != end:
        raise ValueError(f"rows {expected} to {end} of a ring are in no segment")
