"""Replay for stacked frames: each frame is stored once, though it is seen in up to 2·C stacks.

An observation is a stack of the last C frames. Of a transition only the newest frame of its successor is
stored, in the row's own slot; the stacks are put together again when they are sampled:

    first observation s, kept whole:   s0 s1 s2 s3          C = 4
    frames of rows t, t + 1, …:                    f0 f1 f2 …
    obs of row t + age:                frames age … age + 3 of that line; its successor is one further on

A first observation is what an env acts on that does not continue its last transition: after a reset, and
wherever else (a resumed run whose episode could not be restored, say). How an env fills it does not matter.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from rl.buffers import Transitions, n_step_returns
from rl.envs.vector import Step
from rl.errors import ConfigError
from rl.ring_files import Ring, Rows, place

FIRST_STARTS = 64  # room for first observations at the beginning; it doubles when it is full


class FrameReplayBuffer:
    """The newest `capacity` transitions of `num_envs` envs that observe stacks of frames: `ReplayBuffer` in a
    quarter of the memory, or an eighth.

    Rows are vector steps, so `capacity // num_envs` of them can be sampled; the C rows before them are kept
    for their frames. n-step returns stop where those of `ReplayBuffer` do, and where a stack is not
    continued.

    Args:
        capacity: transitions over all envs, `algo.buffer_size`.
        observation_shape: (C, H, W), C frames of which the last is the newest.
        n_step: steps in a return.
        gamma: discount between them.
        memory_map: a folder; the frames then lie in a file there, without a name, that the system removes
            with this object or its process. None: in memory.

    Raises:
        ConfigError: there is no room in that folder.
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        observation_shape: tuple[int, ...],
        observation_dtype: Any,
        action_shape: tuple[int, ...],
        action_dtype: Any,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        memory_map: str | Path | None = None,
    ) -> None:
        self.rows, self.num_envs, self.n_step, self.gamma = capacity // num_envs, num_envs, n_step, gamma
        self.observation_shape, self.memory_map = tuple(observation_shape), memory_map
        self.frames, *size = self.observation_shape
        self.slots = self.rows + self.frames
        shape = (self.slots, num_envs)
        self.arrays = {
            "frames": _allocate((*shape, *size), observation_dtype, memory_map),
            "actions": np.empty((*shape, *action_shape), action_dtype),
            "rewards": np.empty(shape, np.float32),
            "terminated": np.empty(shape, np.bool_),
            "ended": np.empty(shape, np.bool_),
            "age": np.empty(shape, np.min_scalar_type(self.frames)),  # rows since the start, C at most
            "start": np.empty(shape, np.int64),  # the number of the stack's first observation
        }
        self._flat = {name: x.reshape(self.slots * num_envs, *x.shape[2:]) for name, x in self.arrays.items()}
        self.starts = self._new_starts(FIRST_STARTS)
        self._successor: np.ndarray | None  # [N, C, H, W] of the newest row
        self.clear(0)

    def __len__(self) -> int:
        """Transitions that can be sampled."""
        return min(self.added, self.rows) * self.num_envs

    def add(self, obs: np.ndarray, actions: np.ndarray, step: Step) -> None:
        """Store one vector step: what was acted on [N, C, H, W], the actions [N, …] and what came of them.

        Raises:
            ValueError: the step's `next_obs` is not `obs` moved on by one frame. (Looked at where an episode
                starts.)
        """
        slot, arrays = self.added % self.slots, self.arrays
        new = self._not_continued(obs)
        if len(new) and not np.array_equal(step.next_obs[new, :-1], obs[new, 1:]):
            raise ValueError("the observations are not stacks of frames, the newest last: use ReplayBuffer")
        if self.added:
            newest = (self.added - 1) % self.slots
            arrays["age"][slot] = np.minimum(arrays["age"][newest] + 1, self.frames)
            arrays["start"][slot] = arrays["start"][newest]
        for env in new.tolist():
            arrays["age"][slot, env] = 0
            arrays["start"][slot, env] = self._keep(obs[env])
        arrays["frames"][slot] = step.next_obs[:, -1]
        arrays["actions"][slot] = actions
        arrays["rewards"][slot] = step.reward
        arrays["terminated"][slot] = step.terminated
        arrays["ended"][slot] = step.terminated | step.truncated
        self._successor = step.next_obs
        self.added += 1
        self._forget_starts()

    def _not_continued(self, obs: np.ndarray) -> np.ndarray:
        """The envs whose `obs` is not the successor of their last transition."""
        if self._successor is None:
            return np.arange(self.num_envs)
        if obs is self._successor:  # no episode ended: see `Step.next_obs`
            return np.arange(0)
        return np.flatnonzero((obs != self._successor).reshape(self.num_envs, -1).any(axis=1))

    def sample(self, batch_size: int, rng: np.random.Generator) -> Transitions:
        """`batch_size` transitions drawn uniformly, with replacement.

        With one-step returns `obs` and `next_obs` are views [B, C, H, W] of the same frames.
        """
        flat, oldest = self._flat, max(0, self.added - self.rows)
        index = (rng.integers(0, len(self), batch_size) + oldest * self.num_envs) % len(flat["age"])
        if self.n_step == 1:
            last, rewards = index, flat["rewards"][index]
            discounts = np.full(batch_size, self.gamma, np.float32)
            stacks = self._stacks(index, self.frames + 1)
            obs, next_obs = stacks[:, :-1], stacks[:, 1:]
        else:
            newest = (self.added - 1) % self.slots
            last, rewards, discounts = n_step_returns(
                flat, index, self.n_step, self.gamma, self.num_envs, newest, self._continues
            )
            obs, next_obs = self._stacks(index, self.frames), self._stacks(last, self.frames, ahead=1)
        return Transitions(
            obs,
            flat["actions"][index],
            rewards,
            next_obs,
            flat["terminated"][last].astype(np.float32),
            discounts,
        )

    def _stacks(self, index: np.ndarray, width: int, ahead: int = 0) -> np.ndarray:
        """For flat indices [B] the frames [B, width, H, W], beginning `ahead` of the first of `obs`."""
        back = np.arange(ahead - self.frames, ahead - self.frames + width) * self.num_envs
        stacks = self._flat["frames"].take(index[:, None] + back, axis=0, mode="wrap")
        ages = self._flat["age"][index] + ahead
        whole = self.starts["stacks"]
        for i in np.flatnonzero(ages < self.frames).tolist():
            age, start = int(ages[i]), self._flat["start"][index[i]]
            stacks[i, : self.frames - age] = whole[start % len(whole), age:]
        return stacks

    def _continues(self, last: np.ndarray, following: np.ndarray) -> np.ndarray:
        """Whether flat rows `following` [B] go on with the stacks of `last`."""
        return np.asarray(self._flat["age"][following] > 0)

    # --- first observations -------------------------------------------------------------------------

    def _new_starts(self, capacity: int) -> dict[str, np.ndarray]:
        """Room for first observations; number k lies at k % capacity."""
        stacks = _allocate((capacity, *self.observation_shape), self.arrays["frames"].dtype, self.memory_map)
        return {"stacks": stacks, "row": np.empty(capacity, np.int64)}

    def _keep(self, stack: np.ndarray) -> int:
        """Store the first observation [C, H, W] of the row being added; its number."""
        if self._starts_end - self._starts_begin == len(self.starts["row"]):
            kept = self._starts_ring()
            self.starts = self._new_starts(2 * len(self.starts["row"]))
            for first, last in kept.spans(kept.start):
                for name, rows in kept.rows(first, last).items():
                    place(self.starts[name], rows, first)
        number = self._starts_end
        at = number % len(self.starts["row"])
        self.starts["stacks"][at], self.starts["row"][at] = stack, self.added
        self._starts_end += 1
        return number

    def _forget_starts(self) -> None:
        """Drop the first observations of which no stack that can be sampled holds a frame."""
        needed = self.added - self.rows - self.frames  # rows beyond this one are within C of a sampled row
        rows = self.starts["row"]
        while self._starts_begin < self._starts_end and rows[self._starts_begin % len(rows)] <= needed:
            self._starts_begin += 1

    def _starts_ring(self) -> Ring:
        return Ring(f"{self.id}f", self.starts, self._starts_begin, self._starts_end)

    # --- state --------------------------------------------------------------------------------------

    def clear(self, id: int) -> None:
        """Forget every row; `id` tells this filling from earlier ones."""
        self.added, self.id = 0, f"{id:x}"  # rows ever added: row r lies at r % slots
        self._starts_begin = self._starts_end = 0
        self._successor = None

    def state_dict(self) -> dict[str, Any]:
        """The rows held and the first observations, as rings: a checkpoint writes only what is new."""
        start = max(0, self.added - self.slots)
        return {"ring": Ring(self.id, self.arrays, start, self.added), "starts": self._starts_ring()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the rows of loaded rings.

        Raises:
            ValueError: they were of another size or of other envs.
        """
        ring: Rows = state["ring"]
        starts: Rows = state["starts"]
        ring.restore(self.arrays)
        self.id, self.added = ring.id, ring.end
        self._starts_begin, self._starts_end = starts.start, starts.end
        self.starts = self._new_starts(max(FIRST_STARTS, starts.end - starts.start))
        starts.fill(self.starts)
        self._successor = None
        if self.added:
            newest = (self.added - 1) % self.slots * self.num_envs + np.arange(self.num_envs)
            self._successor = self._stacks(newest, self.frames, ahead=1)


def _allocate(shape: tuple[int, ...], dtype: Any, folder: str | Path | None) -> np.ndarray:
    """An array in memory, or in a nameless file in `folder` whose room is taken at once.

    Raises ConfigError where there is not so much: later it would be a bus error.
    """
    if folder is None:
        return np.empty(shape, dtype)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            if size > shutil.disk_usage(folder).free:  # asked first: reserving would fill the disk and fail
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ConfigError(
                f"algo.memory_map={folder} has no room for {size / 2**30:.2f} GiB of frames; name a folder "
                "that has, or take a smaller algo.buffer_size"
            ) from error
        return np.asarray(np.memmap(file, np.dtype(dtype), "w+", shape=shape))
