"""Worker processes: what they import, how they fail, how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl.envs.async_workers import AsyncEnvs, WorkerDied, WorkerTraceback
from rl.envs.gymnasium_envs import GymnasiumEnvs
from rl.errors import ConfigError, NonFiniteError
from tests import probes
from tests.envs.test_contract import SEED, zeros

ROOT = Path(__file__).parents[2]


def workers(id: str, num_envs: int = 2, num_workers: int = 2, **kwargs: Any) -> AsyncEnvs:
    envs = GymnasiumEnvs(f"tests.probes:{id}-v0", num_envs, "async", num_workers, kwargs=kwargs).make()
    assert isinstance(envs, AsyncEnvs)
    return envs


def pids(envs: AsyncEnvs) -> list[int]:
    return [worker._process.pid for worker in envs._workers]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def gone_within(seconds: float, processes: list[int]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(map(alive, processes)):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def counters() -> Iterator[AsyncEnvs]:
    envs = workers("Counter", 3)
    envs.reset(SEED)
    yield envs
    envs.close()


class LooksAround(probes.Probe):
    """Observes whether its process has imported torch, and how many threads the parent's settings allow."""

    def observe(self) -> np.ndarray:
        return np.array([float("torch" in sys.modules)], np.float32)


class TestErrors:
    def test_an_exception_keeps_its_type_and_brings_its_traceback(self) -> None:
        envs = workers("RaisesAfter", 3, steps=1)
        envs.reset(SEED)
        with pytest.raises(ValueError, match="the probe broke on step 1") as caught:
            envs.step(zeros(envs))
        assert isinstance(caught.value.__cause__, WorkerTraceback)
        text = str(caught.value.__cause__)
        assert (
            "environment worker 0 (environments 0 to 0)" in text
            and "probes.py" in text
            and "in outcome" in text
        )
        with pytest.raises(RuntimeError, match="can only be closed"):
            envs.step(zeros(envs))
        envs.close()

    def test_an_exception_that_cannot_travel_is_described(self) -> None:
        envs = workers("RaisesOddError")
        envs.reset(SEED)
        with pytest.raises(RuntimeError, match="OddError: 1 is not 2") as caught:
            envs.step(zeros(envs))
        assert "in outcome" in str(caught.value.__cause__)
        envs.close()

    def test_non_finite_names_the_env_of_all(self) -> None:
        def fine() -> gym.Env[Any, Any]:
            return probes.NaNAfter(steps=100)

        def bad() -> gym.Env[Any, Any]:
            return probes.NaNAfter(steps=1)

        envs = AsyncEnvs([fine, fine, fine, bad], num_workers=2)
        envs.reset(SEED)
        with pytest.raises(NonFiniteError, match="observation of environment 3 "):
            envs.step(zeros(envs))
        envs.close()

    def test_an_error_while_making_leaves_nothing_running(self) -> None:
        made: list[int] = []

        def broken() -> gym.Env[Any, Any]:
            raise ConfigError(f"process {os.getpid()} cannot")

        with pytest.raises(ConfigError, match="cannot") as caught:
            AsyncEnvs([broken, broken], num_workers=2)
        made.append(int(str(caught.value).split()[1]))
        assert gone_within(3, made)

    @pytest.mark.parametrize("when", ["before", "during"])
    def test_a_killed_worker_is_named(self, when: str) -> None:
        envs = workers("Sleeper", 2, seconds=0.0 if when == "before" else 60.0)
        envs.reset(SEED)
        victims = pids(envs)
        if when == "before":
            os.kill(victims[1], signal.SIGKILL)
        else:
            command = f"sleep 0.3; kill -9 {victims[1]} {victims[0]}"
            subprocess.Popen(["sh", "-c", command])
        with pytest.raises(WorkerDied, match=r"environment worker [01] .*killed by SIGKILL \(exit code -9\)"):
            for _ in range(3):
                envs.step(zeros(envs))
        envs.close()
        assert gone_within(1, victims)


class TestProcesses:
    def test_torch_stays_out_of_workers(self) -> None:
        pytest.importorskip("torch")
        envs = AsyncEnvs([LooksAround] * 2, num_workers=1)
        assert "torch" in sys.modules and envs.reset(SEED).tolist() == [[0], [0]]
        envs.close()

    def test_an_id_registered_only_here_works(self) -> None:
        class OnlyHere(probes.Counter):
            observation_space = spaces.Box(0.0, 9.0, (2,), np.float32)

        gym.register(
            "OnlyInThisProcess-v0", entry_point=lambda **kwargs: OnlyHere(**kwargs), max_episode_steps=2
        )
        try:
            envs = GymnasiumEnvs("OnlyInThisProcess-v0", 2, "async").make()
            envs.reset(SEED)
            envs.step(zeros(envs))
            assert envs.step(zeros(envs)).truncated.all()
            envs.close()
        finally:
            del gym.registry["OnlyInThisProcess-v0"]

    def test_more_workers_than_envs_and_uneven_slices(self) -> None:
        for num_envs, num_workers, slices in [(2, 9, [1, 1]), (5, 2, [2, 3])]:
            envs = workers("Counter", num_envs, num_workers)
            assert [worker.end - worker.first for worker in envs._workers] == slices
            envs.close()

    def test_signals_are_left_to_the_parent(self, counters: AsyncEnvs) -> None:
        for pid in pids(counters):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
                os.kill(pid, number)
        assert counters.step(zeros(counters)).obs.tolist() == [[1, 0]] * 3

    def test_signals_during_the_start_are_too(self) -> None:
        program = """
            import os, signal, threading, time
            from rl.envs.gymnasium_envs import GymnasiumEnvs
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
                signal.signal(number, lambda *_: None)
            def shout():
                while True:
                    os.killpg(0, signal.SIGUSR2); os.killpg(0, signal.SIGTERM); os.killpg(0, signal.SIGINT)
                    time.sleep(0.005)
            threading.Thread(target=shout, daemon=True).start()
            envs = GymnasiumEnvs("tests.probes:Counter-v0", 2, "async", 2).make()
            envs.close()
            print("made", flush=True)
            """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            start_new_session=True,
        )
        assert done.stdout == "made\n", done.stderr

    def test_close_is_quick_and_leaves_nothing(self, counters: AsyncEnvs) -> None:
        processes = pids(counters)
        before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        start = time.monotonic()
        counters.close()
        counters.close()
        assert time.monotonic() - start < 2 and not any(map(alive, processes))
        if before:
            assert len(os.listdir("/proc/self/fd")) <= before - len(processes)
        with pytest.raises(RuntimeError, match="closed"):
            counters.step(zeros(counters))

    def test_forgetting_to_close_ends_them_too(self) -> None:
        envs = workers("Counter")
        processes = pids(envs)
        del envs
        assert gone_within(3, processes)

    @pytest.mark.parametrize("busy", [False, True])
    def test_when_the_parent_is_killed_workers_go(self, busy: bool) -> None:
        program = f"""
            import numpy as np
            from rl.envs.gymnasium_envs import GymnasiumEnvs
            envs = GymnasiumEnvs("tests.probes:Sleeper-v0", 2, "async", 2).make()
            envs.reset(np.random.SeedSequence(0))
            print(*[w._process.pid for w in envs._workers], flush=True)
            {"envs.step(np.zeros(2, np.int64))" if busy else "input()"}
            """
        parent = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert parent.stdout is not None
        processes = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(processes) == 2 and all(map(alive, processes))
        time.sleep(0.2)
        parent.kill()
        parent.communicate()
        assert gone_within(4, processes)

    def test_a_step_that_was_interrupted_can_only_be_closed_and_is_within_seconds(self) -> None:
        program = """
            import os, signal, threading, time
            import numpy as np
            from rl.envs.gymnasium_envs import GymnasiumEnvs
            envs = GymnasiumEnvs("tests.probes:Sleeper-v0", 1, "async", 1).make()
            envs.reset(np.random.SeedSequence(0))
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                envs.step(np.zeros(1, np.int64))
            except KeyboardInterrupt:
                try:
                    envs.step(np.zeros(1, np.int64))
                except RuntimeError as error:
                    print(error)
            envs.close()
            """
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "can only be closed" in done.stdout and done.returncode == 0, done.stderr
        assert time.monotonic() - start < 15
