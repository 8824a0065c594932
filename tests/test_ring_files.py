"""Rings through checkpoints: each writes what is new, each is whole by itself."""

from __future__ import annotations

import logging
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rl import checkpoint
from rl.checkpoint import CheckpointError
from rl.ring_files import MOST_SEGMENTS, Ring, link

CAPACITY = 10
CAPACITIES = 200  # of the rings that a checkpoint's rows are put into: at least as many as were held


def ring(added: int, capacity: int = CAPACITY, id: str = "0", offset: int = 0) -> Ring:
    """A ring to which `added` rows were added, row r being [r, r] + offset."""
    x = np.full((capacity, 2), -1)
    for r in range(added):
        x[r % capacity] = r + offset
    return Ring(id, {"x": x, "half": x[:, 0] / 2}, max(0, added - capacity), added)


def save(folder: Path, added: int, step: int | None = None, keep: int = 0, **kwargs: Any) -> Path:
    state = {"algorithm": {"replay": {"ring": ring(added, **kwargs)}, "other": 5}}
    return checkpoint.save(folder, state, env_steps=added if step is None else step, config={}, keep=keep)


def rows(path: Path) -> list[int]:
    """The rows that a checkpoint gives back."""
    found = checkpoint.load(path)[0]["algorithm"]["replay"]["ring"]
    arrays = {"x": np.full((CAPACITIES, 2), -1), "half": np.full(CAPACITIES, -1.0)}
    found.fill(arrays)
    numbers = np.arange(found.start, found.end)
    held = arrays["x"][numbers % CAPACITIES]
    np.testing.assert_array_equal(arrays["half"][numbers % CAPACITIES], held[:, 0] / 2)
    assert (arrays["half"] >= 0).sum() == len(numbers), "only those rows are written"
    rows: list[int] = held[:, 0].tolist()
    return rows


def segments(path: Path) -> list[str]:
    """The rows that each segment of a checkpoint holds, `start-end`, in order."""
    names = [name.stem.split("_", 2)[2].replace("_", "-") for name in path.glob("ring_*")]
    return sorted(names, key=lambda name: int(name.split("-")[0]))


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


class TestIncremental:
    def test_a_segment_holds_only_the_new_rows(self, tmp_path: Path) -> None:
        paths = [save(tmp_path, added) for added in (4, 6, 9)]
        assert [segments(path) for path in paths] == [["0-4"], ["0-4", "4-6"], ["0-4", "4-6", "6-9"]]
        assert load_file(paths[2] / "ring_0_6_9.safetensors")["x"].tolist() == [[6, 6], [7, 7], [8, 8]]
        assert [rows(path) for path in paths] == [list(range(4)), list(range(6)), list(range(9))]

    def test_older_segments_are_the_same_file(self, tmp_path: Path) -> None:
        first, second = save(tmp_path, 4), save(tmp_path, 6)
        name = "ring_0_0_4.safetensors"
        assert (first / name).stat().st_ino == (second / name).stat().st_ino
        assert (first / name).stat().st_nlink == 2

    def test_bytes_written_do_not_grow_with_the_ring(self, tmp_path: Path) -> None:
        # 100 rows a time of 2 · 8 + 8 bytes: 2400 and a header, however many are held
        paths = [save(tmp_path, added, capacity=1000) for added in (100, 900, 1000)]
        new = [file for file in paths[2].glob("ring_*") if file.stat().st_nlink == 1]
        assert [file.name for file in new] == ["ring_0_900_1000.safetensors"]
        assert 2400 < new[0].stat().st_size < 2400 + 300

    def test_nothing_new_writes_nothing(self, tmp_path: Path) -> None:
        save(tmp_path, 4, step=1)
        second = save(tmp_path, 4, step=2)
        assert segments(second) == ["0-4"]
        assert all(file.stat().st_nlink == 2 for file in second.glob("ring_*"))
        assert rows(second) == [0, 1, 2, 3]

    def test_an_empty_ring(self, tmp_path: Path) -> None:
        assert rows(save(tmp_path, 0)) == []
        assert rows(save(tmp_path, 3)) == [0, 1, 2]

    def test_where_links_cannot_be_made_it_is_copied(self, tmp_path: Path) -> None:
        memory = Path("/dev/shm")
        if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("needs a second file system")
        (tmp_path / "a").write_text("rows")
        target = memory / f"{tmp_path.name}_{os.getpid()}"
        try:
            link(tmp_path / "a", target)
            assert target.read_text() == "rows"
        finally:
            target.unlink(missing_ok=True)


class TestWrapping:
    def test_a_segment_goes_when_all_its_rows_were_written_over(self, tmp_path: Path) -> None:
        # A ring of 10. At 14 it holds 4 … 13, so rows 0 … 3 are gone and 9 … 13 wrap around
        paths = [save(tmp_path, added) for added in (4, 9, 14)]
        assert segments(paths[2]) == ["4-9", "9-10", "10-14"]
        assert rows(paths[2]) == list(range(4, 14))

    def test_a_segment_stays_while_one_of_its_rows_is_held(self, tmp_path: Path) -> None:
        paths = [save(tmp_path, added) for added in (4, 9, 13)]  # holds 3 … 12
        assert segments(paths[2]) == ["0-4", "4-9", "9-10", "10-13"]
        assert rows(paths[2]) == list(range(3, 13))

    def test_more_new_rows_than_the_ring_holds(self, tmp_path: Path) -> None:
        save(tmp_path, 4)
        last = save(tmp_path, 37)
        assert segments(last) == ["27-30", "30-37"]
        assert rows(last) == list(range(27, 37))

    def test_many_times_around(self, tmp_path: Path) -> None:
        for added in range(3, 60, 3):
            assert rows(save(tmp_path, added, keep=2)) == list(range(max(0, added - CAPACITY), added))


def test_memory_never_holds_the_rows_twice(tmp_path: Path) -> None:
    """Neither where a ring that wraps is written whole, nor where it is read: 128 MiB of frames."""
    frames, numbers = np.zeros((2048, 65536), np.uint8), np.zeros(2048)
    tracemalloc.start()
    try:
        held = Ring("0", {"frames": frames, "numbers": numbers}, 1000, 3048)
        path = checkpoint.save(tmp_path, {"ring": held}, env_steps=1, config={}, keep=0)
        assert segments(path) == ["1000-2048", "2048-3048"]
        checkpoint.load(path)[0]["ring"].fill({"frames": frames, "numbers": numbers})
        assert tracemalloc.get_traced_memory()[1] < frames.nbytes / 4
    finally:
        tracemalloc.stop()


class TestEachIsWhole:
    def test_pruning_keeps_what_later_ones_need(self, tmp_path: Path) -> None:
        for added in (3, 5, 7, 9):
            last = save(tmp_path, added, keep=1)
        assert [path.name for path in tmp_path.glob("step_*")] == [last.name]
        assert segments(last) == ["0-3", "3-5", "5-7", "7-9"]
        assert rows(last) == list(range(9))

    def test_one_moved_elsewhere_loads_by_itself(self, tmp_path: Path) -> None:
        for added in (3, 5, 7):
            last = save(tmp_path / "run", added)
        moved = Path(shutil.move(last, tmp_path / "elsewhere"))
        shutil.rmtree(tmp_path / "run")
        assert rows(moved) == list(range(7))

    def test_many_segments_become_one(self, tmp_path: Path) -> None:
        for added in range(1, MOST_SEGMENTS + 1):
            path = save(tmp_path, added, keep=1, capacity=200)
        assert len(segments(path)) == MOST_SEGMENTS
        path = save(tmp_path, MOST_SEGMENTS + 1, keep=1, capacity=200)
        assert segments(path) == [f"0-{MOST_SEGMENTS + 1}"]
        assert rows(path) == list(range(MOST_SEGMENTS + 1))

    def test_another_ring_with_the_same_numbers_starts_anew(self, tmp_path: Path) -> None:
        save(tmp_path, 4)
        path = save(tmp_path, 6, id="3e8", offset=100)
        assert [file.name for file in path.glob("ring_*")] == ["ring_3e8_0_6.safetensors"]
        assert rows(path) == [100, 101, 102, 103, 104, 105]

    def test_a_ring_with_fewer_rows_than_before_starts_anew(self, tmp_path: Path) -> None:
        save(tmp_path, 6, step=1)
        path = save(tmp_path, 4, step=2, offset=100)
        assert rows(path) == [100, 101, 102, 103]

    def test_without_rings(self, tmp_path: Path) -> None:
        """A policy needs none; the rest of the state is there."""
        state, manifest = checkpoint.load(save(tmp_path, 4), rings=False)
        assert state == {"algorithm": {"replay": {"ring": None}, "other": 5}}
        assert "rings" not in manifest or manifest["rings"] == {}


class TestDamage:
    def test_a_corrupt_segment_is_named_and_the_previous_checkpoint_used(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        good, bad = save(tmp_path, 4), save(tmp_path, 6)
        flip_a_byte(bad / "ring_0_4_6.safetensors")
        with pytest.raises(CheckpointError, match=r"ring_0_4_6\.safetensors is corrupt"):
            checkpoint.load(bad)
        with caplog.at_level(logging.WARNING):
            assert checkpoint.newest(tmp_path) == good
        assert "ring_0_4_6.safetensors" in caplog.text
        assert rows(good) == [0, 1, 2, 3]

    def test_a_missing_segment_is_named(self, tmp_path: Path) -> None:
        save(tmp_path, 4)
        bad = save(tmp_path, 6)
        (bad / "ring_0_0_4.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"ring_0_0_4\.safetensors is missing"):
            checkpoint.load(bad)

    def test_a_bad_checkpoint_is_written_again_whole(self, tmp_path: Path) -> None:
        save(tmp_path, 4)
        bad = save(tmp_path, 6)
        flip_a_byte(bad / "ring_0_4_6.safetensors")
        assert rows(save(tmp_path, 6)) == list(range(6))

    def test_damage_is_not_handed_on(self, tmp_path: Path) -> None:
        """A run that went back to the previous checkpoint does not build on the segments of the bad one."""
        save(tmp_path / "before", 4)
        flip_a_byte(save(tmp_path / "before", 6) / "ring_0_4_6.safetensors")
        (tmp_path / "before").rename(tmp_path / "run")  # as to another process: it wrote nothing there itself
        last = save(tmp_path / "run", 8)
        assert rows(last) == list(range(8))
        assert segments(last) == ["0-4", "4-8"]

    def test_a_lost_segment_does_not_stop_the_run(self, tmp_path: Path) -> None:
        save(tmp_path / "before", 4)
        (save(tmp_path / "before", 6) / "ring_0_4_6.safetensors").unlink()
        (tmp_path / "before").rename(tmp_path / "run")
        assert rows(save(tmp_path / "run", 8)) == list(range(8))
