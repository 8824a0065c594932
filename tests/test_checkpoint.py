"""Checkpoints come back bit for bit; a kill, a full disk or a damaged file never costs the last good one."""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import logging
import math
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file as load_tensors

from rl import checkpoint
from rl.checkpoint import CheckpointError
from rl.rundir import temporary_path

ROOT = Path(__file__).resolve().parent.parent


def same(left: Any, right: Any) -> bool:
    """Whether two states are equal in type, shape, dtype and every bit."""
    if isinstance(left, torch.Tensor):
        alike = type(right) is torch.Tensor and (left.dtype, left.shape) == (right.dtype, right.shape)
        return alike and right.device.type == "cpu" and torch.equal(_bits(left), _bits(right))
    if isinstance(left, (np.ndarray, np.generic)):
        alike = type(right) is type(left) and (left.dtype, left.shape) == (right.dtype, right.shape)
        return alike and left.dtype.byteorder == right.dtype.byteorder and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return (
            type(right) is dict and list(left) == list(right) and all(same(left[k], right[k]) for k in left)
        )
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return type(right) is float and struct.pack("d", left) == struct.pack("d", right)
    return type(left) is type(right) and left == right


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def save(folder: Path, state: dict[str, Any], step: int = 0, keep: int = 0, **config: Any) -> Path:
    return checkpoint.save(folder, state, env_steps=step, config=config, keep=keep)


def round_trip(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    return checkpoint.load(save(folder, state))[0]


class TestRoundTrip:
    def test_scalars_and_containers(self, tmp_path: Path) -> None:
        negative_nan = struct.unpack("d", struct.pack("Q", 0xFFF8_0000_0000_1234))[0]
        state = {
            "none": None,
            "flags": [True, False],
            "ints": [0, -1, 2**63, -(2**127), 3**9000, 10**5000],
            "floats": [
                0.1,
                -0.0,
                5e-324,
                1.7976931348623157e308,
                math.inf,
                -math.inf,
                math.nan,
                negative_nan,
            ],
            "text": ["", "γ ≠ \u2028\n\"'\\", "$tuple", "\ud800"],
            "tuples": ((), (1, [2, (3.0,)])),
            "empty": [{}, [], ()],
            "keys": {0: {"step": 1}, 1: {}, "1": "text", -5: None},
            "dollars": {"$tuple": [1], "$float": "x", "a": {"$": 1}},
            "generator": np.random.default_rng(3).bit_generator.state,
            "python": random.Random(1).getstate(),
        }
        assert same(state, round_trip(tmp_path, state))

    def test_arrays_of_every_dtype_and_shape(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        state: dict[str, Any] = {"datetime": np.array(["2026-12-02", "NaT"], "datetime64[s]")}
        for code in (*"?bBhHiIlLqQefdgFDG", ">f4", ">i8", "U5", "S3"):
            for shape in ((), (0,), (3,), (2, 0, 3), (2, 3, 1)):
                raw = rng.integers(0, 100, shape)
                state[f"{code}{shape}"] = np.asarray(raw % 2 if code == "?" else raw, dtype=code)
        loaded = round_trip(tmp_path, state)
        assert same(state, loaded)
        assert all(array.flags.writeable and array.flags.aligned for array in loaded.values())

    def test_numpy_scalars_keep_their_type(self, tmp_path: Path) -> None:
        values = [np.float32(0.1), np.float64(math.nan), np.int64(-3), np.bool_(True), np.uint8(255)]
        state = {"values": [*values, np.str_("γ"), np.str_(""), np.complex64(1 - 2j), np.datetime64(5, "s")]}
        assert same(state, round_trip(tmp_path, state))

    def test_views(self, tmp_path: Path) -> None:
        array, tensor = np.arange(24).reshape(4, 6), torch.arange(24.0).reshape(4, 6)
        state = {
            "arrays": [
                array,
                array[::-1, 1::2],
                array.T,
                np.asfortranarray(array),
                np.broadcast_to(array[0], (3, 6)),
            ],
            "tensors": [tensor, tensor, tensor[1:3], tensor.T, tensor[:, 2], tensor[0].expand(3, 6)],
        }
        assert same(state, round_trip(tmp_path, state))

    def test_tensors_of_every_dtype(self, tmp_path: Path) -> None:
        names = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64"
        names += " float8_e4m3fn float8_e5m2 complex64 complex128"
        state: dict[str, Any] = {"parameter": torch.nn.Parameter(torch.randn(3)).data}
        state["conjugate"] = torch.tensor([1 + 2j]).conj()
        for name in names.split():
            for shape in ((), (0,), (2, 3)):
                state[f"{name}{shape}"] = torch.randint(0, 2, shape).to(getattr(torch, name))
        assert same(state, round_trip(tmp_path, state))

    def test_special_values_in_low_precision(self, tmp_path: Path) -> None:
        every_pattern = torch.arange(-(2**15), 2**15).to(
            torch.int16
        )  # all NaN payloads, denormals, signed zeros
        state = {"bf16": every_pattern.view(torch.bfloat16), "f16": every_pattern.numpy().view(np.float16)}
        assert same(state, round_trip(tmp_path, state))

    def test_names_that_collide(self, tmp_path: Path) -> None:
        one = np.ones(1)
        state = {
            "a/b": one,
            "a": {"b": one * 2},
            "a/b~2": one * 3,
            "__metadata__": one * 4,
            "": {"": one * 5},
            "k": {},
        }
        state["k"] = {1: one * 6, "1": one * 7}
        assert same(state, round_trip(tmp_path, state))

    def test_a_training_state_resumes_identically(self, tmp_path: Path) -> None:
        def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
            return net, torch.optim.Adam(net.parameters(), lr=1e-3)

        def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, updates: int) -> None:
            for _ in range(updates):
                optimizer.zero_grad()
                net(torch.randn(8, 4)).square().sum().backward()
                optimizer.step()

        net, optimizer = make()
        train(net, optimizer, 3)
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        assert isinstance(state["net"], OrderedDict)
        path = save(tmp_path, state)
        train(net, optimizer, 5)
        net2, optimizer2 = make()
        loaded = checkpoint.load(path)[0]
        net2.load_state_dict(loaded["net"])
        optimizer2.load_state_dict(loaded["optimizer"])
        torch.set_rng_state(loaded["rng"])
        train(net2, optimizer2, 5)
        assert same(dict(net.state_dict()), dict(net2.state_dict()))

    def test_files_are_plain_safetensors(self, tmp_path: Path) -> None:
        state = {
            "net": {"w": torch.ones(2, 3, dtype=torch.bfloat16)},
            "flag": torch.tensor(True),
            "x": np.arange(3),
        }
        path = save(tmp_path, state)
        tensors, arrays = load_tensors(path / "tensors.safetensors"), load_arrays(path / "arrays.safetensors")
        assert same(
            {"net/w": state["net"]["w"], "flag": state["flag"]}, dict(sorted(tensors.items(), reverse=True))
        )
        assert same({"x": state["x"]}, arrays)

    def test_without_tensors_torch_is_not_imported(self, tmp_path: Path) -> None:
        code = (
            "import sys, pathlib, numpy as np; from rl import checkpoint as c;"
            "p = c.save(pathlib.Path(sys.argv[1]), {'a': np.ones(2)}, env_steps=1, config={}, keep=1);"
            "assert c.load(p)[0]['a'].sum() == 2 and c.newest(p.parent) == p and 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True)


class TestUnsupported:
    @pytest.mark.parametrize(
        ("value", "named"),
        [
            (object(), "builtins.object"),
            ({1, 2}, "builtins.set"),
            (b"bytes", "builtins.bytes"),
            (np.array([object()]), "dtype object"),
            (np.ma.array([1], mask=[True]), "MaskedArray"),
            (np.zeros(1, [("a", "f4")]), "dtype"),
            (torch.zeros(2, 2).to_sparse(), "sparse"),
            (torch.zeros(2, device="meta"), "meta|tensor"),
            (signal.SIGTERM, "Signals"),
        ],
    )
    def test_is_named_with_its_path_and_leaves_nothing(self, tmp_path: Path, value: Any, named: str) -> None:
        with pytest.raises(TypeError, match=rf"^algo/streams/2.*({named})"):
            save(tmp_path / "c", {"algo": {"streams": [1, 2.0, value]}})
        assert not (tmp_path / "c").exists()

    def test_keys(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match=r"algo/1\.5: a key"):
            save(tmp_path, {"algo": {1.5: 0}})
        with pytest.raises(TypeError, match="a dict"):
            save(tmp_path, [1])  # type: ignore[arg-type]


class TestManifest:
    def test_says_what_it_is(self, tmp_path: Path) -> None:
        path = save(tmp_path, {"x": np.zeros(3), "n": 1}, step=500_000, gamma=0.99, clip=math.inf)
        assert path == tmp_path / "step_000500000"
        raw = json.loads((path / "manifest.json").read_text())
        assert (raw["format"], raw["env_steps"], raw["state"]["n"]) == (1, 500_000, 1)
        assert raw["files"]["arrays.safetensors"]["size"] == (path / "arrays.safetensors").stat().st_size
        state, manifest = checkpoint.load(path)
        assert manifest["config"] == {"gamma": 0.99, "clip": math.inf}
        assert abs(time.time() - _timestamp(manifest["created"])) < 60
        assert "state" not in manifest and state["n"] == 1
        assert (tmp_path / "latest").read_text() == "step_000500000\n"


def _timestamp(iso: str) -> float:
    return datetime.datetime.fromisoformat(iso).timestamp()


def corrupt_manifest(path: Path, old: str, new: str) -> None:
    file = path / "manifest.json"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def flip(file: Path, at: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "missing": lambda path: (path / "arrays.safetensors").unlink(),
    "truncated": lambda path: os.truncate(path / "tensors.safetensors", 50),
    "too long": lambda path: (path / "tensors.safetensors").open("ab").write(b"x"),
    "arrays.safetensors is corrupt: its checksum": lambda path: flip(path / "arrays.safetensors"),
    "tensors.safetensors is corrupt: its checksum": lambda path: flip(path / "tensors.safetensors", 8),
    "manifest.json is missing": lambda path: (path / "manifest.json").unlink(),
    "manifest.json is not JSON": lambda path: os.truncate(path / "manifest.json", 100),
    "manifest.json is not JSON: 'utf-8'": lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe"),
    "manifest.json is corrupt": lambda path: corrupt_manifest(path, '"counter": 7', '"counter": 8'),
    "format version 2, newer": lambda path: corrupt_manifest(path, '"format": 1', '"format": 2'),
    "no format version": lambda path: (path / "manifest.json").write_text("[]"),
}


class TestDamage:
    def make(self, folder: Path, step: int) -> Path:
        return save(folder, {"t": torch.ones(9), "a": np.ones(9), "counter": 7}, step=step)

    @pytest.mark.parametrize("what", DAMAGE)
    def test_is_named_and_the_previous_one_used(
        self, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        good, bad = self.make(tmp_path, 1), self.make(tmp_path, 2)
        assert checkpoint.newest(tmp_path) == bad
        DAMAGE[what](bad)
        with pytest.raises(CheckpointError, match=what) as raised:
            checkpoint.load(bad)
        assert str(bad) in str(raised.value) and "\n" not in str(raised.value)
        with caplog.at_level(logging.WARNING):
            assert checkpoint.newest(tmp_path) == good
        assert [str(raised.value) in record.getMessage() for record in caplog.records] == [True]
        # saving that step once more replaces the damaged one
        assert self.make(tmp_path, 2) == checkpoint.newest(tmp_path) == bad
        assert checkpoint.load(bad)[0]["counter"] == 7

    def test_nothing_there(self, tmp_path: Path) -> None:
        assert checkpoint.newest(tmp_path / "absent") is None
        with pytest.raises(CheckpointError, match="missing"):
            checkpoint.load(tmp_path / "step_000000001")
        DAMAGE["missing"](self.make(tmp_path, 1))
        (tmp_path / "step_000000007").symlink_to(tmp_path / "nowhere")
        assert checkpoint.newest(tmp_path) is None

    def test_a_sealed_manifest_cannot_name_other_files_or_objects(self, tmp_path: Path) -> None:
        for field, value in (
            ("files", {"../x": {"size": 0, "sha256": ""}}),
            ("state", {"$scalar": ["O", "00" * 8]}),
        ):
            path = self.make(tmp_path, 1)
            manifest = json.loads((path / "manifest.json").read_text()) | {"files": {}} | {field: value}
            del manifest["manifest_sha256"]
            lines = ",\n".join(f'"{key}": {json.dumps(item)}' for key, item in manifest.items())
            seal = hashlib.sha256(("{\n" + lines).encode()).hexdigest()
            (path / "manifest.json").write_text("{\n" + lines + f',\n"manifest_sha256": "{seal}"\n}}\n')
            with pytest.raises(CheckpointError, match=r"names a file|cannot be decoded.*dtype 'O'"):
                checkpoint.load(path)
            shutil.rmtree(path)


class TestFolder:
    def steps(self, folder: Path) -> list[int]:
        return sorted(int(path.name[5:]) for path in folder.glob("step_*"))

    def test_pruning(self, tmp_path: Path) -> None:
        for step in (5, 10, 1_000_000_000, 10_000_000_000):
            save(tmp_path, {}, step=step, keep=2)
        assert self.steps(tmp_path) == [1_000_000_000, 10_000_000_000]
        newest = checkpoint.newest(tmp_path)
        assert (
            newest is not None
            and newest.name == "step_10000000000" == (tmp_path / "latest").read_text().strip()
        )
        save(tmp_path, {}, step=10_000_000_001, keep=1)
        assert self.steps(tmp_path) == [10_000_000_001]
        for step in (1, 2, 3):
            save(tmp_path / "all", {}, step=step, keep=0)
        assert self.steps(tmp_path / "all") == [1, 2, 3]

    def test_the_one_just_saved_is_kept_whatever_lies_beyond_it(self, tmp_path: Path) -> None:
        for step in (1, 2, 3):
            save(tmp_path, {}, step=step, keep=3)
        DAMAGE["manifest.json is missing"](tmp_path / "step_000000003")
        DAMAGE["manifest.json is missing"](tmp_path / "step_000000002")
        save(tmp_path, {"resumed": True}, step=2, keep=1)
        assert self.steps(tmp_path) == [2, 3]
        assert (tmp_path / "latest").read_text() == "step_000000002\n"
        save(tmp_path, {}, step=3, keep=1)
        assert self.steps(tmp_path) == [3] and (tmp_path / "latest").read_text() == "step_000000003\n"

    def test_saving_a_complete_step_again_changes_nothing(self, tmp_path: Path) -> None:
        path = save(tmp_path, {"n": 1}, step=1)
        before = (path / "manifest.json").stat()
        assert save(tmp_path, {"n": 2}, step=1) == path
        after = (path / "manifest.json").stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
        assert checkpoint.load(path)[0] == {"n": 1}

    def test_leftovers_of_dead_writers_only(self, tmp_path: Path) -> None:
        living = temporary_path(tmp_path / "step_000000009")
        dead = Path(str(living).replace(f"-{os.getpid()}-", "-4194304-"))  # beyond any pid
        foreign = living.with_name(living.name + "x")
        old = foreign.with_name(foreign.name + "y")
        for folder in (living, dead, foreign, old):
            folder.mkdir()
            (folder / "tensors.safetensors").write_bytes(b"half")
            os.utime(folder / "tensors.safetensors", (0, 0))
        os.utime(old, (0, 0))
        save(tmp_path, {}, step=1)
        assert [folder.exists() for folder in (living, dead, foreign, old)] == [True, False, True, False]


KILLED = """
import os, pathlib, signal, sys, numpy as np
from rl import checkpoint
folder, first = pathlib.Path(sys.argv[1]), 0
for line in sys.stdin:  # one child for each line, so that imports are paid for once
    child = os.fork()
    if child == 0:
        newest = checkpoint.newest(folder)
        step = 0 if newest is None else checkpoint.load(newest)[0]["step"]
        while True:
            step += 1
            state = {"step": step, "a": np.full(20_000, step), "list": [step] * 500}
            checkpoint.save(folder, state, env_steps=step, config={}, keep=2)
    print(child, flush=True)
    sys.stdin.readline()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""

STOPPED = """
import itertools, os, pathlib, shutil, sys, numpy as np
from rl import checkpoint
folder = pathlib.Path(sys.argv[1])

def save(step):
    checkpoint.save(folder, {"step": step, "a": np.full(9, step)}, env_steps=step, config={}, keep=1)

def stop(name, _):  # before the n-th operation on files: open, os.mkdir, os.rename, os.remove, ...
    global left
    if name == "open" or name.startswith(("os.", "shutil.")):
        left -= 1
        if left < 0:
            os._exit(9)

save(1)
for number in itertools.count():
    child = os.fork()
    if child == 0:
        left = number
        sys.addaudithook(stop)
        save(2)
        os._exit(0)
    done = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    steps = [checkpoint.load(path)[0]["step"] for path in folder.glob("step_*")]  # all are whole
    assert steps and checkpoint.newest(folder).name == f"step_{max(steps):09d}", (number, steps)
    if done:
        break
    shutil.rmtree(folder)
    save(1)
print(number, sorted(path.name for path in folder.iterdir()))
"""


class TestKill:
    def test_before_each_file_operation(self, tmp_path: Path) -> None:
        command = [sys.executable, "-c", STOPPED, str(tmp_path / "c")]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        number, names = done.stdout.split(maxsplit=1)
        assert int(number) > 15 and names == "['latest', 'step_000000002']\n"

    def test_at_any_moment_the_last_complete_one_is_usable(self, tmp_path: Path) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", KILLED, str(tmp_path)]
        chance = random.Random(0)
        kills, in_the_middle, last, start = 0, 0, 0, time.monotonic()
        with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as parent:
            assert parent.stdin is not None and parent.stdout is not None
            while kills < 30 or in_the_middle < 5 or last < 30:
                assert time.monotonic() - start < 60, (kills, in_the_middle, last)
                kills += 1
                print("go", file=parent.stdin, flush=True)
                assert int(parent.stdout.readline()) > 0
                time.sleep(0.1 * chance.random())
                print("kill", file=parent.stdin, flush=True)
                assert parent.stdout.readline() == "dead\n"
                in_the_middle += bool(list(tmp_path.glob(".tmp-*")))
                newest = checkpoint.newest(tmp_path)
                if newest is None:
                    assert last == 0
                    continue
                for path in tmp_path.glob("step_*"):  # a name stands for something whole
                    checkpoint.load(path)
                state = checkpoint.load(newest)[0]
                assert newest.name == f"step_{state['step']:09d}" and state["step"] >= last
                assert (state["a"] == state["step"]).all() and state["list"] == [state["step"]] * 500
                assert (tmp_path / (tmp_path / "latest").read_text().strip()).is_dir() or last == 0
                last = state["step"]
            parent.stdin.close()
        save(tmp_path, {}, step=last + 1, keep=1)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", f"step_{last + 1:09d}"]


class TestFullDisk:
    def check(self, folder: Path, code: int) -> None:
        good = save(folder, {"n": 1}, step=1, keep=1)
        for big in (np.zeros(1 << 21), torch.zeros(1 << 21), ["x" * 100] * 20_000):
            with pytest.raises(OSError) as raised:
                save(folder, {"big": big}, step=2, keep=1)
            assert raised.value.errno == code
            assert sorted(path.name for path in folder.iterdir()) == ["latest", good.name]
            assert checkpoint.newest(folder) == good
        assert checkpoint.load(good)[0] == {"n": 1}

    def test_a_mount_of_one_megabyte(self, tmp_path: Path) -> None:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
        if (
            shutil.which("mount") is None
            or subprocess.run(mount, capture_output=True, check=False).returncode
        ):
            pytest.skip("mounting a tmpfs takes root")
        try:
            self.check(tmp_path / "checkpoints", errno.ENOSPC)
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)

    def test_a_limit_on_file_size(self, tmp_path: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            self.check(tmp_path, errno.EFBIG)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
