"""A worker process of `AsyncEnvs`: what it can be asked, the memory it shares with its parent, what it does.

The parent's side, and why it is made this way, is in rl/envs/async_workers.py.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from gymnasium import spaces

from rl.envs.sync import SyncEnvs
from rl.envs.vector import ActionSpace

# One byte asks, one byte answers; an object follows where the two sides expect one.
INIT, MAP, RESET, STEP, RENDER, SAVE, LOAD, CLOSE = (b"i", b"m", b"r", b"s", b"v", b"g", b"l", b"c")
DONE, ENDED, OBJECT, ERROR = (b".", b"e", b"+", b"!")

LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)  # the parent decides what they mean


class Shared(NamedTuple):
    """The arrays that both sides see, of all N environments."""

    actions: np.ndarray  # as the policy chose them: int64 [N] or [N, K], or float64 [N, K]
    obs: np.ndarray
    next_obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    returns: np.ndarray  # [N] float64 and
    lengths: np.ndarray  # [N] int64, of episodes that ended on this step


Layout = list[tuple[tuple[int, ...], str]]  # shape and dtype of each array of `Shared`


def layout_of(num_envs: int, observation_space: spaces.Box, action_space: ActionSpace) -> Layout:
    """The arrays of `Shared` for `num_envs` environments with these spaces."""
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


def size_of(layout: Layout) -> int:
    """Bytes of memory that arrays of this layout take."""
    return sum(_bytes(*each) for each in layout)


def map_arrays(memory: int, layout: Layout) -> Shared:
    """The arrays in `memory`, a file descriptor."""
    buffer = mmap.mmap(memory, size_of(layout))
    arrays, offset = [], 0
    for shape, dtype in layout:
        arrays.append(np.ndarray(shape, dtype, buffer, offset))
        offset += _bytes(shape, dtype)
    return Shared(*arrays)


def main() -> None:
    """Run a worker until it is told to close or its parent is gone."""
    for number in LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_PARENT)
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
            if command in (b"", CLOSE):
                break
            try:
                answer, *given = self._step() if command == STEP else self._obey(command)
            except Exception as error:
                answer, given = ERROR, [_portable(error)]
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
            return (DONE,)
        shared.obs[...] = step.obs
        for episode in step.episodes:
            row = episode.env - self._first
            shared.returns[row] = episode.episodic_return
            shared.lengths[row] = episode.length
        return (ENDED,)

    def _obey(self, command: bytes) -> tuple[Any, ...]:
        given = cloudpickle.loads(self._connection.recv_bytes())
        if command == INIT:
            makers, self._first = given
            self._envs = SyncEnvs(cloudpickle.loads(makers), first_index=self._first)
            return OBJECT, (self._envs.observation_space, self._envs.action_space, self._envs.render_fps)
        if command == MAP:
            rows = slice(self._first, self._first + self._envs.num_envs)
            self._shared = Shared(*(array[rows] for array in map_arrays(self._memory, given)))
            os.close(self._memory)
        elif command == RESET:
            self._shared.obs[...] = self._envs.reset(given)
        elif command == RENDER:
            return OBJECT, self._envs.render(given)
        elif command == SAVE:
            return OBJECT, self._envs.state_dict()
        elif command == LOAD:
            restored = self._envs.load_state_dict(given)
            self._shared.obs[...] = restored.obs
            return OBJECT, restored.exact
        return (DONE,)


def _portable(error: Exception) -> tuple[bytes | None, str, str]:
    """What can be sent of an exception: itself pickled where that works, one line about it, its traceback."""
    pickled: bytes | None = None
    with contextlib.suppress(Exception):
        pickled = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
    return pickled, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
