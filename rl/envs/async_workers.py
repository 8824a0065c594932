"""Gymnasium environments in worker processes, for steps that take longer than talking to a process.

Each worker holds a `SyncEnvs` over a contiguous slice, so results are those of `SyncEnvs` bit for bit.
Numbers go through shared memory that has no name, so that nothing can be left behind; one byte on a socket
says what to do. Workers are fresh interpreters: they inherit neither the parent's threads nor its imports,
and never run its main module.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from gymnasium import spaces

from rl.envs.sync import Maker, SyncEnvs
from rl.envs.vector import ActionSpace, Episode, Restored, Step

# One byte asks, one byte answers; an object follows where the two sides expect one.
_INIT, _MAP, _RESET, _STEP, _RENDER, _SAVE, _LOAD, _CLOSE = (b"i", b"m", b"r", b"s", b"v", b"g", b"l", b"c")
_DONE, _ENDED, _OBJECT, _ERROR = (b".", b"e", b"+", b"!")

_LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)  # the parent decides what they mean
_CLOSE_SECONDS = 2.0
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rl.envs.async_workers import _main
_main()
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
        count = min(self.num_envs, usable_cores() if num_workers is None else num_workers)
        bounds = [self.num_envs * k // count for k in range(count + 1)]
        self._workers: list[_Worker] = []
        self._closed = self._out_of_step = False
        memory = _anonymous_file()
        try:
            for k in range(count):
                self._workers.append(_Worker(k, bounds[k], bounds[k + 1], memory))
            made: list[tuple[spaces.Box, ActionSpace]] = self._ask(
                _INIT, [(cloudpickle.dumps(list(makers[w.first : w.end])), w.first) for w in self._workers]
            )
            self.observation_space, self.action_space = made[0]
            layout = _layout(self.num_envs, self.observation_space, self.action_space)
            os.ftruncate(memory, _size(layout))
            self._shared = _map(memory, layout)
            self._ask(_MAP, [layout] * count)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)

    def reset(self, seed: np.random.SeedSequence) -> np.ndarray:
        """See `VectorEnv.reset`."""
        self._ask(_RESET, [seed] * len(self._workers))
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
        frames: list[np.ndarray] = self._ask(_RENDER, [index - owner.first], [owner])
        return frames[0]

    def state_dict(self) -> dict[str, Any]:
        """See `VectorEnv.state_dict`; the same as that of `SyncEnvs`, which can load it."""
        parts: list[dict[str, Any]] = self._ask(_SAVE, [None] * len(self._workers))
        return {**parts[0], "envs": [record for part in parts for record in part["envs"]]}

    def load_state_dict(self, state: Mapping[str, Any]) -> Restored:
        """See `VectorEnv.load_state_dict`; the workers replay at the same time."""
        records = state["envs"]
        if len(records) != self.num_envs:
            raise ValueError(f"the saved state is of {len(records)} environments, not {self.num_envs}")
        parts = [{**state, "envs": records[worker.first : worker.end]} for worker in self._workers]
        exact: list[np.ndarray] = self._ask(_LOAD, parts)
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
            worker.post(_STEP)
        answers = [worker.answer() for worker in self._workers]
        if any(answer not in (_DONE, _ENDED) for answer in answers):
            self._raise(self._workers, answers)
        self._out_of_step = False
        return _ENDED in answers

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
        received = [worker.receive() if answer == _OBJECT else None for worker, answer in answered]
        if any(answer not in (_DONE, _OBJECT) for answer in answers):
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
            if answer == _ERROR:
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
        self.post(_CLOSE)
        self._connection.close()

    def end_by(self, deadline: float) -> None:
        """Wait for the worker until `deadline` (of `time.monotonic`), then end it by force."""
        try:
            self._process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Shared(NamedTuple):
    """The arrays that both sides see, of all N environments."""

    actions: np.ndarray  # as the policy chose them: int64 [N] or [N, K], or float64 [N, K]
    obs: np.ndarray
    next_obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    returns: np.ndarray  # [N] float64 and
    lengths: np.ndarray  # [N] int64, of episodes that ended on this step


_Layout = list[tuple[tuple[int, ...], str]]  # shape and dtype of each array of `_Shared`


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _layout(num_envs: int, observation_space: spaces.Box, action_space: ActionSpace) -> _Layout:
    n = (num_envs,)
    obs = ((num_envs, *observation_space.shape), np.dtype(observation_space.dtype).str)
    actions: tuple[tuple[int, ...], str] = (n, "<i8")
    if isinstance(action_space, spaces.MultiDiscrete):
        actions = ((num_envs, len(action_space.nvec)), "<i8")
    elif isinstance(action_space, spaces.Box):
        actions = ((num_envs, math.prod(action_space.shape)), "<f8")  # holds every float32 as it is
    return [actions, obs, obs, (n, "<f4"), (n, "|b1"), (n, "|b1"), (n, "<f8"), (n, "<i8")]


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Size of one array, rounded up to a cache line."""
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // 64) * 64


def _size(layout: _Layout) -> int:
    return sum(_bytes(*each) for each in layout)


def _map(memory: int, layout: _Layout) -> _Shared:
    buffer = mmap.mmap(memory, _size(layout))
    arrays, offset = [], 0
    for shape, dtype in layout:
        arrays.append(np.ndarray(shape, dtype, buffer, offset))
        offset += _bytes(shape, dtype)
    return _Shared(*arrays)


def _anonymous_file() -> int:
    """A file descriptor of memory that goes when the last process that holds it does."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rl-envs")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Hold back the signals that workers ignore, so that none ends a worker before it has said so."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _main() -> None:
    """Run a worker until it is told to close or its parent is gone."""
    for number in _LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_PARENT)
    socket_number, memory, parent = (int(argument) for argument in sys.argv[2:5])
    sys.argv[1:] = []
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        _Service(Connection(socket_number), memory).serve()


def _end_with_parent(parent: int) -> None:
    """End this process when its parent is gone, even in the middle of a step that never returns."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


class _Service:
    """The worker's side: does what the parent asks, one command at a time."""

    def __init__(self, connection: Connection, memory: int) -> None:
        self._connection = connection
        self._memory = memory
        self._first = 0
        self._envs: Any = None
        self._shared: Any = None  # this worker's rows

    def serve(self) -> None:
        socket_number = self._connection.fileno()
        while True:
            command = os.read(socket_number, 1)
            if command in (b"", _CLOSE):
                break
            try:
                answer, *given = self._step() if command == _STEP else self._obey(command)
            except Exception as error:
                answer, given = _ERROR, [_portable(error)]
            os.write(socket_number, answer)
            for each in given:
                self._connection.send_bytes(cloudpickle.dumps(each))
        if self._envs is not None:
            self._envs.close()

    def _step(self) -> tuple[bytes]:
        shared = self._shared
        step = self._envs.step(shared.actions)
        shared.next_obs[...] = step.next_obs
        shared.reward[...] = step.reward
        shared.terminated[...] = step.terminated
        shared.truncated[...] = step.truncated
        if not step.episodes:
            # Where an episode ended in another worker, the parent copies all rows of `obs`.
            shared.obs[...] = step.next_obs
            return (_DONE,)
        shared.obs[...] = step.obs
        for episode in step.episodes:
            row = episode.env - self._first
            shared.returns[row] = episode.episodic_return
            shared.lengths[row] = episode.length
        return (_ENDED,)

    def _obey(self, command: bytes) -> tuple[Any, ...]:
        given = cloudpickle.loads(self._connection.recv_bytes())
        if command == _INIT:
            makers, self._first = given
            self._envs = SyncEnvs(cloudpickle.loads(makers), first_index=self._first)
            return _OBJECT, (self._envs.observation_space, self._envs.action_space)
        if command == _MAP:
            rows = slice(self._first, self._first + self._envs.num_envs)
            self._shared = _Shared(*(array[rows] for array in _map(self._memory, given)))
            os.close(self._memory)
        elif command == _RESET:
            self._shared.obs[...] = self._envs.reset(given)
        elif command == _RENDER:
            return _OBJECT, self._envs.render(given)
        elif command == _SAVE:
            return _OBJECT, self._envs.state_dict()
        elif command == _LOAD:
            restored = self._envs.load_state_dict(given)
            self._shared.obs[...] = restored.obs
            return _OBJECT, restored.exact
        return (_DONE,)


def _portable(error: Exception) -> tuple[bytes | None, str, str]:
    """What can be sent of an exception: itself pickled where that works, one line about it, its traceback."""
    pickled: bytes | None = None
    with contextlib.suppress(Exception):
        pickled = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
    return pickled, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
