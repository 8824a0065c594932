"""Rings in checkpoints: of a replay buffer, each checkpoint writes only the rows that are new.

A ring's rows are numbered from its beginning and written once, in segments; a checkpoint holds hard links to
the segments that earlier ones wrote, so each is whole by itself, and a segment goes with the last checkpoint
that needs it. Where a file system knows no hard links the segments are copied.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MOST_SEGMENTS = 64  # beyond it a checkpoint writes all rows anew
_CHUNK = 1 << 24  # bytes read at a time


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

    def spans(self, start: int) -> list[tuple[int, int]]:
        """Rows `start` to the end, in the one or two spans that lie in one piece; none where there is no
        row."""
        capacity = len(next(iter(self.arrays.values())))
        turn = min((start // capacity + 1) * capacity, self.end)
        return [(first, last) for first, last in itertools.pairwise((start, turn, self.end)) if first < last]

    def rows(self, start: int, end: int) -> dict[str, np.ndarray]:
        """The rows of a span, [end − start, …] each array: views."""
        first = {name: start % len(array) for name, array in self.arrays.items()}
        return {name: array[first[name] : first[name] + end - start] for name, array in self.arrays.items()}


class Segment(NamedTuple):
    """A file in a checkpoint with rows `start` to `end` of a ring."""

    file: str
    start: int
    end: int


@dataclass(frozen=True)
class Rows:
    """What a checkpoint in `folder` holds of a ring: its rows `start` to `end`, read when they are asked for,
    so that memory need not hold them twice."""

    id: str
    start: int
    end: int
    folder: Path
    segments: tuple[Segment, ...]

    def fill(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Put the rows into a ring's arrays [capacity, …], row r at r % capacity.

        Raises:
            ValueError: rows of another shape, or too many, or none by that name.
        """
        for name, array in arrays.items():
            for number, rows in self._read(name, array.shape):
                place(array, rows, number)

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """`fill` the arrays of a ring that is to go on as the saved one. Raises ValueError also where that
        one had another capacity."""
        held, capacity = self.end - self.start, len(next(iter(arrays.values())))
        if held != min(self.end, capacity):
            raise ValueError(f"the saved replay buffer has {held} rows, not {capacity}")
        self.fill(arrays)

    def _read(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[int, np.ndarray]]:
        """What was saved as `name`, for an array of this shape, in pieces, each with the number of its first
        row."""
        from safetensors import safe_open

        for segment in self.segments:
            with safe_open(self.folder / segment.file, framework="np") as file:
                if name not in file.keys():  # noqa: SIM118 (not a mapping)
                    raise ValueError(f"the saved replay buffer has no {name}")
                saved = file.get_slice(name)
                width = tuple(saved.get_shape()[1:])
                if width != shape[1:] or self.end - self.start > shape[0]:
                    held = (self.end - self.start, *width)
                    raise ValueError(f"the saved replay buffer's {name} are {held}, not {shape}")
                first, last = max(self.start, segment.start), min(self.end, segment.end)
                step = max(1, _CHUNK // max(1, 8 * math.prod(width)))
                for number in range(first, last, step):
                    at = number - segment.start
                    yield number, saved[at : min(at + step, last - segment.start)]


def place(array: np.ndarray, rows: np.ndarray, number: int) -> None:
    """Put rows that are numbered from `number` where they lie in the ring `array`: r at r % len(array)."""
    first = number % len(array)
    fitting = min(len(rows), len(array) - first)
    array[first : first + fitting] = rows[:fitting]
    array[: len(rows) - fitting] = rows[fitting:]


def plan(ring: Ring, earlier: Mapping[str, Any] | None) -> tuple[list[Segment], list[Segment]]:
    """The segments of an earlier checkpoint to keep, and those to write: each lies in one piece, so that
    none of it is copied.

    Args:
        earlier: what that checkpoint's manifest says of the ring at the same place in the state.
    """
    kept: list[Segment] = []
    if earlier is not None and earlier["id"] == ring.id and earlier["end"] <= ring.end:
        kept = [s for s in (Segment(*s) for s in earlier["segments"]) if s.end > ring.start]
    if len(kept) >= MOST_SEGMENTS or (kept and kept[0].start > ring.start):
        kept = []
    spans = ring.spans(kept[-1].end if kept else ring.start)
    return kept, [Segment(f"ring_{ring.id}_{first}_{last}.safetensors", first, last) for first, last in spans]


def link(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, or a copy where that cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def described(entry: Mapping[str, Any], folder: Path) -> Rows:
    """The rows of a ring as a manifest's entry describes them. Raises ValueError where its segments lack
    some."""
    segments = tuple(Segment(*s) for s in entry["segments"])
    reached = entry["start"]
    for segment in segments:
        if max(entry["start"], segment.start) != reached:
            raise ValueError(f"rows {reached} to {segment.start} of a ring are in no segment")
        reached = min(entry["end"], segment.end)
    if reached != entry["end"]:
        raise ValueError(f"rows {reached} to {entry['end']} of a ring are in no segment")
    return Rows(entry["id"], entry["start"], entry["end"], folder, segments)
