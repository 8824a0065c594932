"""Gymnasium environments in worker processes, for steps that take longer than talking to a process.

Each worker holds a `SyncEnvs` over a contiguous slice, so results are those of `SyncEnvs` bit for bit.
Numbers go through shared memory that has no name, so that nothing can be left behind; one byte on a socket
says what to do. Workers are fresh interpreters: they inherit neither the parent's threads nor its imports,
and never run its main module.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import spaces

from rl.envs.sync import Maker
from rl.envs.vector import ActionSpace, Episode, Restored, Step
from rl.envs.worker import (
    CLOSE,
    DONE,
    ENDED,
    ERROR,
    INIT,
    LEFT_TO_PARENT,
    LOAD,
    MAP,
    OBJECT,
    RENDER,
    RESET,
    SAVE,
    STEP,
    layout_of,
    map_arrays,
    size_of,
)
from rl.machine import cpus

_CLOSE_SECONDS = 2.0
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rl.envs.worker import main
main()
"""


class WorkerDied(RuntimeError):
    """A worker process ended without being asked to; the message names it and its exit code."""


class WorkerTraceback(Exception):
    """Where in its worker an exception came from: the cause of the exception raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class AsyncEnvs:
    """A `VectorEnv` over gymnasium environments in worker processes.

    What an environment raises is raised here, with the worker's traceback as its cause. After any error the
    only thing left to do is `close`.
    """

    def __init__(self, makers: Sequence[Maker], *, num_workers: int | None = None) -> None:
        """Make one environment with each of `makers`, in `num_workers` processes (None: one a usable core).

        Raises what a maker raises, and WorkerDied.
        """
        self.num_envs = len(makers)
        count = min(self.num_envs, cpus() if num_workers is None else num_workers)
        bounds = [self.num_envs * k // count for k in range(count + 1)]
        self._workers: list[_Worker] = []
        self._closed = self._out_of_step = False
        memory = _anonymous_file()
        try:
            for k in range(count):
                self._workers.append(_Worker(k, bounds[k], bounds[k + 1], memory))
            made: list[tuple[spaces.Box, ActionSpace, float]] = self._ask(
                INIT, [(cloudpickle.dumps(list(makers[w.first : w.end])), w.first) for w in self._workers]
            )
            self.observation_space, self.action_space, self.render_fps = made[0]
            layout = layout_of(self.num_envs, self.observation_space, self.action_space)
            os.ftruncate(memory, size_of(layout))
            self._shared = map_arrays(memory, layout)
            self._ask(MAP, [layout] * count)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)

    def reset(self, seed: np.random.SeedSequence) -> np.ndarray:
        """See `VectorEnv.reset`."""
        self._ask(RESET, [seed] * len(self._workers))
        return self._shared.obs.copy()

    def step(self, actions: np.ndarray) -> Step:
        """See `VectorEnv.step`."""
        shared = self._shared
        actions = np.asarray(actions)
        if actions.shape != shared.actions.shape:
            actions = self._in_rows(actions)
        shared.actions[...] = actions
        ended = self._ask_to_step()
        next_obs = shared.next_obs.copy()
        terminated, truncated = shared.terminated.copy(), shared.truncated.copy()
        if not ended:
            return Step(next_obs, shared.reward.copy(), terminated, truncated, next_obs, [])
        episodes = [
            Episode(i, float(shared.returns[i]), int(shared.lengths[i]))
            for i in np.flatnonzero(terminated | truncated).tolist()
        ]
        return Step(shared.obs.copy(), shared.reward.copy(), terminated, truncated, next_obs, episodes)

    def render(self, index: int) -> np.ndarray:
        """See `VectorEnv.render`; the frame is drawn in the worker."""
        owner = next(worker for worker in self._workers if worker.first <= index < worker.end)
        frames: list[np.ndarray] = self._ask(RENDER, [index - owner.first], [owner])
        return frames[0]

    def state_dict(self) -> dict[str, Any]:
        """See `VectorEnv.state_dict`; the same as that of `SyncEnvs`, which can load it."""
        parts: list[dict[str, Any]] = self._ask(SAVE, [None] * len(self._workers))
        return {**parts[0], "envs": [record for part in parts for record in part["envs"]]}

    def load_state_dict(self, state: Mapping[str, Any]) -> Restored:
        """See `VectorEnv.load_state_dict`; the workers replay at the same time."""
        records = state["envs"]
        if len(records) != self.num_envs:
            raise ValueError(f"the saved state is of {len(records)} environments, not {self.num_envs}")
        parts = [{**state, "envs": records[worker.first : worker.end]} for worker in self._workers]
        exact: list[np.ndarray] = self._ask(LOAD, parts)
        return Restored(self._shared.obs.copy(), np.concatenate(exact))

    def close(self) -> None:
        """End the workers, by force those that do not end within two seconds; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.leave()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for worker in self._workers:
            worker.end_by(deadline)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def _in_rows(self, actions: np.ndarray) -> np.ndarray:
        shape = self._shared.actions.shape
        if len(shape) == 1:
            raise ValueError(f"actions have shape {actions.shape}, not {shape}")
        return actions.reshape(shape)

    def _ask_to_step(self) -> bool:
        """Let every worker step; whether any episode ended."""
        self._begin()
        for worker in self._workers:
            worker.post(STEP)
        answers = [worker.answer() for worker in self._workers]
        if any(answer not in (DONE, ENDED) for answer in answers):
            self._raise(self._workers, answers)
        self._out_of_step = False
        return ENDED in answers

    def _ask(
        self, command: bytes, objects: Sequence[Any], workers: Sequence[_Worker] | None = None
    ) -> list[Any]:
        """Send `command` and one object to each of `workers` (None: all); return the objects they answer."""
        self._begin()
        workers = self._workers if workers is None else workers
        for worker, given in zip(workers, objects, strict=True):
            worker.post(command, given)
        answers = [worker.answer() for worker in workers]
        answered = list(zip(workers, answers, strict=True))
        received = [worker.receive() if answer == OBJECT else None for worker, answer in answered]
        if any(answer not in (DONE, OBJECT) for answer in answers):
            self._raise(workers, answers)
        self._out_of_step = False
        return received

    def _begin(self) -> None:
        if self._closed or self._out_of_step:
            state = (
                "are closed" if self._closed else "failed or were interrupted earlier and can only be closed"
            )
            raise RuntimeError(f"these environments {state}")
        self._out_of_step = True

    def _raise(self, workers: Sequence[_Worker], answers: Sequence[bytes]) -> None:
        """Raise the first thing that went wrong, what an environment raised before the death of a worker."""
        for worker, answer in zip(workers, answers, strict=True):
            if answer == ERROR:
                raise worker.received_error()
        for worker, answer in zip(workers, answers, strict=True):
            if answer == b"":
                raise worker.death()


class _Worker:
    """The parent's end of one worker process, which holds environments `first` to `end - 1`."""

    def __init__(self, number: int, first: int, end: int, memory: int) -> None:
        self.number, self.first, self.end = number, first, end
        ours, theirs = socket.socketpair()
        with theirs:
            self._connection = Connection(ours.detach())
            self._socket = self._connection.fileno()
            paths = json.dumps([path or os.getcwd() for path in sys.path])
            arguments = [str(theirs.fileno()), str(memory), str(os.getpid())]
            environ = {**dict.fromkeys(_ONE_THREAD, "1"), **os.environ}
            with _signals_held_back():
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, paths, *arguments],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), memory),
                    env=environ,
                )

    def post(self, command: bytes, *given: Any) -> None:
        """Send a command; a worker that is gone is noticed when its answer is read."""
        with contextlib.suppress(OSError):
            os.write(self._socket, command)
            for each in given:
                self._connection.send_bytes(cloudpickle.dumps(each))

    def answer(self) -> bytes:
        """Wait for the one byte that says how it went; empty where the worker is gone."""
        try:
            return os.read(self._socket, 1)
        except OSError:
            return b""

    def receive(self) -> Any:
        """Return the object that the worker sent after its answer."""
        try:
            return cloudpickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self.death() from None

    def received_error(self) -> BaseException:
        """Return the exception that the worker sent, with its traceback there as the cause."""
        pickled, summary, text = self.receive()
        error: BaseException = RuntimeError(summary)
        if pickled is not None:
            with contextlib.suppress(Exception):
                error = cloudpickle.loads(pickled)
        where = f"in environment worker {self.number} (environments {self.first} to {self.end - 1})"
        error.__cause__ = WorkerTraceback(f"{where}:\n{text}")
        return error

    def death(self) -> WorkerDied:
        """Return the error that says how the worker ended."""
        try:
            code: int | None = self._process.wait(timeout=_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name} (exit code {code})"
        return WorkerDied(
            f"environment worker {self.number} (process {self._process.pid}, environments {self.first} to "
            f"{self.end - 1}) {how}; where memory ran out, env.num_workers=1 or env.backend=sync needs less"
        )

    def leave(self) -> None:
        """Ask the worker to end."""
        self.post(CLOSE)
        self._connection.close()

    def end_by(self, deadline: float) -> None:
        """Wait for the worker until `deadline` (of `time.monotonic`), then end it by force."""
        try:
            self._process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _anonymous_file() -> int:
    """A file descriptor of memory that goes when the last process that holds it does."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rl-envs")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Hold back the signals that workers ignore, so that none ends a worker before it has said so."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
