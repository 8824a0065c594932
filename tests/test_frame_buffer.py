"""Replay of frames against one that keeps every stack: what can be sampled is the same, bit for bit."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl import checkpoint, checks
from rl.buffers import ReplayBuffer, Transitions
from rl.checks import check_replay_memory, frame_replay_bytes, stacks_frames
from rl.envs.vector import Episode, Step
from rl.errors import ConfigError
from rl.frame_buffer import FIRST_STARTS, FrameReplayBuffer

H, W = 2, 3
GAMMA = 0.5


class World:
    """Envs that observe stacks of `frames` frames, no two alike, in episodes of random length.

    A stack begins as one frame repeated, as zeros and a frame, or as frames that all differ; a life is lost
    (terminated, the stack goes on) in a fifth of the steps, an episode terminated or cut in `ends` of them;
    after one life in four the env plays on by itself, so that what is acted on next is not `next_obs`, though
    no episode ended. With `same_array`, `obs` is `next_obs` where they are equal, as the contract has it.
    """

    def __init__(self, num_envs: int, frames: int, seed: int, same_array: bool = True) -> None:
        self.num_envs, self.frames, self.same_array = num_envs, frames, same_array
        self.rng = np.random.default_rng(seed)
        self.drawn, self.ends = 0, 1 / 8
        self.obs = np.stack([self.first() for _ in range(num_envs)])
        self.steps = 0

    def frame(self) -> np.ndarray:
        """A frame that no other equals: its number in base 251, and noise."""
        self.drawn += 1
        frame = self.rng.integers(0, 256, (H, W), np.uint8)
        frame[0] = self.drawn % 251, self.drawn // 251 % 251, self.drawn // 251**2
        return frame

    def first(self) -> np.ndarray:
        way = self.rng.integers(3)
        if way == 0:
            return np.repeat(self.frame()[None], self.frames, axis=0)
        stack = np.stack([self.frame() for _ in range(self.frames)])
        if way == 1:
            stack[:-1] = 0
        return stack

    def moved(self, stack: np.ndarray) -> np.ndarray:
        return np.concatenate([stack[1:], self.frame()[None]])

    def step(self) -> tuple[np.ndarray, np.ndarray, Step]:
        """What was acted on, the actions (the number of the transition), and what came of them."""
        n, before = self.num_envs, self.obs
        next_obs = np.stack([self.moved(stack) for stack in before])
        obs, episodes = next_obs.copy(), []
        terminated, truncated = np.zeros(n, bool), np.zeros(n, bool)
        for env, chance in enumerate(self.rng.random(n)):
            if chance < self.ends:
                terminated[env], truncated[env] = ((True, False), (False, True), (True, True))[
                    self.rng.integers(3)
                ]
                obs[env] = self.first()
                episodes.append(Episode(env, 0.0, 1))
            elif chance < self.ends + 1 / 5:
                terminated[env] = True
                if self.rng.random() < 1 / 4:
                    obs[env] = self.moved(self.moved(obs[env]))
        if self.same_array and np.array_equal(obs, next_obs):
            obs = next_obs
        actions = self.steps * n + np.arange(n)
        reward = self.rng.integers(-3, 4, n).astype(np.float32)
        self.obs, self.steps = obs, self.steps + 1
        return before, actions, Step(obs, reward, terminated, truncated, next_obs, episodes)


class Kept:
    """A naive memory: every transition whole, by its number."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.of: dict[int, tuple[Any, ...]] = {}

    def add(self, obs: np.ndarray, actions: np.ndarray, step: Step) -> None:
        for i, number in enumerate(actions.tolist()):
            ended = bool(step.terminated[i] or step.truncated[i])
            goes_on = not ended and np.array_equal(step.obs[i], step.next_obs[i])
            terminated = float(step.terminated[i])
            self.of[number] = obs[i], float(step.reward[i]), step.next_obs[i], terminated, goes_on

    def transition(self, number: int, n_step: int) -> tuple[Any, ...]:
        """obs, Σ γ^k r_k, next_obs, terminated, γ^steps of the n-step transition that begins at `number`."""
        obs, rewards, discount = self.of[number][0], 0.0, 1.0
        for _ in range(n_step):
            _, reward, next_obs, terminated, goes_on = self.of[number]
            rewards += discount * reward
            discount *= GAMMA
            number += self.num_envs
            if not goes_on or number not in self.of:
                break
        return obs, rewards, next_obs, terminated, discount  # type: ignore[possibly-undefined]


def buffer_of(
    capacity: int, num_envs: int, frames: int, n_step: int = 1, folder: Path | None = None
) -> FrameReplayBuffer:
    return FrameReplayBuffer(
        capacity, num_envs, (frames, H, W), np.uint8, (), np.int64,
        n_step=n_step, gamma=GAMMA, memory_map=folder,
    )  # fmt: skip


def assert_all_can_be_sampled(buffer: FrameReplayBuffer, kept: Kept, capacity: int) -> None:
    """Exactly the newest transitions are sampled, each as it was."""
    held = min(len(kept.of), capacity // kept.num_envs * kept.num_envs)
    assert len(buffer) == held
    batch = buffer.sample(40 * held, np.random.default_rng(0))  # misses one with p < held · e^−40
    first = len(kept.of) - held
    assert set(batch.actions.tolist()) == set(range(first, len(kept.of)))
    lived = [kept.transition(number, buffer.n_step) for number in range(first, len(kept.of))]
    expected = [np.stack(column)[batch.actions - first] for column in zip(*lived, strict=True)]
    for name, column in zip(("obs", "rewards", "next_obs", "terminated", "discounts"), expected, strict=True):
        np.testing.assert_array_equal(getattr(batch, name), column, err_msg=name)


def assert_equal(a: Transitions, b: Transitions) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


class TestAgainstWholeStacks:
    """A ring of 20 transitions over 60 steps, looked at while it fills, as it wraps and after several turns:
    3 to 9 of them. Nothing is lost at the ring's head."""

    CAPACITY = 20
    LOOKS = (1, 2, 5, 6, 7, 19, 20, 21, 24, 25, 60)

    @pytest.mark.parametrize("n_step", [1, 3])
    @pytest.mark.parametrize("frames", [1, 2, 3, 4])
    @pytest.mark.parametrize("num_envs", [1, 2, 3])
    def test_every_transition(self, num_envs: int, frames: int, n_step: int) -> None:
        world = World(num_envs, frames, seed=100 * num_envs + 10 * frames + n_step)
        buffer, kept = buffer_of(self.CAPACITY, num_envs, frames, n_step), Kept(num_envs)
        for t in range(1, max(self.LOOKS) + 1):
            taken = world.step()
            buffer.add(*taken)
            kept.add(*taken)
            if t in self.LOOKS:
                assert_all_can_be_sampled(buffer, kept, self.CAPACITY)

    @pytest.mark.parametrize("capacity", [1, 2, 3, 4, 5, 9])
    def test_a_ring_of_hardly_more_rows_than_frames(self, capacity: int) -> None:
        world, buffer, kept = World(1, 4, seed=capacity), buffer_of(capacity, 1, 4, 3), Kept(1)
        for _ in range(40):
            taken = world.step()
            buffer.add(*taken)
            kept.add(*taken)
            assert_all_can_be_sampled(buffer, kept, capacity)

    def test_an_env_that_never_says_that_nothing_ended(self) -> None:
        world, kept = World(2, 4, seed=5, same_array=False), Kept(2)
        buffer = buffer_of(self.CAPACITY, 2, 4, 3)
        for _ in range(60):
            taken = world.step()
            buffer.add(*taken)
            kept.add(*taken)
        assert_all_can_be_sampled(buffer, kept, self.CAPACITY)
        assert buffer._starts_end < 60, "a stack that goes on is not stored whole, though it is another array"

    def test_more_first_observations_than_there_was_room_for(self) -> None:
        world, buffer, kept = World(3, 4, seed=6), buffer_of(900, 3, 4), Kept(3)
        for _ in range(700):
            taken = world.step()
            buffer.add(*taken)
            kept.add(*taken)
        assert len(buffer.starts["row"]) > FIRST_STARTS
        assert_all_can_be_sampled(buffer, kept, 900)

    def test_room_for_first_observations_grows_when_some_were_forgotten(self) -> None:
        world, buffer, kept, begin, t = World(2, 4, seed=12), buffer_of(120, 2, 4), Kept(2), 0, 0
        while len(buffer.starts["row"]) == FIRST_STARTS:
            begin, t = buffer._starts_begin, t + 1
            world.ends = 0.02 if t < 150 else 0.7
            taken = world.step()
            buffer.add(*taken)
            kept.add(*taken)
        assert begin % FIRST_STARTS > 0
        assert_all_can_be_sampled(buffer, kept, 120)

    def test_first_observations_are_forgotten_with_their_rows(self) -> None:
        # Of 5 rows, 4 frames before them count: those begun in the last 9 rows or just before are held
        world, buffer = World(2, 4, seed=7), buffer_of(10, 2, 4)
        for _ in range(2000):
            buffer.add(*world.step())
        assert buffer._starts_end > 300
        assert buffer._starts_end - buffer._starts_begin <= 2 * (5 + 4)
        assert len(buffer.starts["row"]) == FIRST_STARTS

    def test_as_replay_of_whole_stacks_does_it(self) -> None:
        """The returns of `ReplayBuffer`, where no env plays on by itself."""
        plain = ReplayBuffer(30, 1, (4, H, W), np.uint8, (), np.int64, n_step=3, gamma=GAMMA)
        frames, world = buffer_of(30, 1, 4, 3), World(1, 4, seed=8)
        for _ in range(100):
            obs, actions, step = world.step()
            if not step.episodes:
                step = step._replace(obs=step.next_obs)
                world.obs = step.next_obs
            plain.add(obs, actions, step)
            frames.add(obs, actions, step)
        a, b = (buffer.sample(2000, np.random.default_rng(0)) for buffer in (plain, frames))
        first = {int(number): i for i, number in enumerate(a.actions)}
        where = [first[int(number)] for number in b.actions]
        assert len(first) == 30
        assert_equal(Transitions(*(column[where] for column in a)), b)

    def test_what_is_not_a_stack_of_frames_is_refused(self) -> None:
        buffer, rng = buffer_of(10, 1, 3), np.random.default_rng(0)
        obs, following = rng.integers(0, 256, (2, 1, 3, H, W), np.uint8)
        false = np.zeros(1, bool)
        step = Step(following, np.zeros(1, np.float32), false, false, following, [])
        with pytest.raises(ValueError, match="not stacks of frames"):
            buffer.add(obs, np.zeros(1, int), step)


class TestSampling:
    def test_uniform_over_what_can_be_sampled(self) -> None:
        # 6 of 8 rows (two more are kept for their frames), each with p = 1/6; of 60,000 draws 10,000, with a
        # deviation of √(60000 · 1/6 · 5/6) = 91; five deviations allowed
        world, buffer = World(1, 2, seed=0), buffer_of(6, 1, 2)
        for _ in range(50):
            buffer.add(*world.step())
        numbers, counts = np.unique(
            buffer.sample(60_000, np.random.default_rng(0)).actions, return_counts=True
        )
        assert numbers.tolist() == list(range(44, 50))
        assert np.abs(counts - 10_000).max() < 5 * 91

    @pytest.mark.parametrize("n_step", [1, 3])
    def test_shapes_dtypes_and_that_it_is_a_copy(self, n_step: int) -> None:
        world, buffer = World(2, 4, seed=0), buffer_of(20, 2, 4, n_step)
        for _ in range(30):
            buffer.add(*world.step())
        batch = buffer.sample(8, np.random.default_rng(0))
        assert batch.obs.shape == batch.next_obs.shape == (8, 4, H, W)
        assert [column.dtype for column in batch] == [
            np.uint8, np.int64, np.float32, np.uint8, np.float32, np.float32,
        ]  # fmt: skip
        before = buffer.sample(50, np.random.default_rng(1))
        for column in batch:
            column.fill(99)
        assert_equal(before, buffer.sample(50, np.random.default_rng(1)))

    def test_a_batch_of_atari_takes_little_time(self) -> None:
        # 32 · 5 frames of 7 kB: some 130 µs on a busy machine of 2026; a loop over stacks took twice that
        buffer = FrameReplayBuffer(20_000, 1, (4, 84, 84), np.uint8, (), np.int64)
        for array in buffer.arrays.values():
            array.fill(0)
        buffer.arrays["age"].fill(4)
        buffer.added, rng = 30_000, np.random.default_rng(0)
        seconds = []
        for _ in range(300):
            start = time.perf_counter()
            buffer.sample(32, rng)
            seconds.append(time.perf_counter() - start)
        assert np.quantile(seconds, 0.25) < 1e-3


class TestCheckpoints:
    def save(self, folder: Path, buffer: FrameReplayBuffer) -> Path:
        state = {"algorithm": {"replay": buffer.state_dict()}}
        return checkpoint.save(folder, state, env_steps=buffer.added, config={}, keep=0)

    def load(self, path: Path, buffer: FrameReplayBuffer) -> FrameReplayBuffer:
        buffer.load_state_dict(checkpoint.load(path)[0]["algorithm"]["replay"])
        return buffer

    @pytest.mark.parametrize("mapped", [False, True])
    @pytest.mark.parametrize("n_step", [1, 3])
    def test_a_restored_buffer_continues_alike(self, tmp_path: Path, n_step: int, mapped: bool) -> None:
        """Saved every 13 steps, restored each time from what was written incrementally."""
        world, kept = World(2, 4, seed=3), Kept(2)
        folder = tmp_path if mapped else None
        old = buffer_of(40, 2, 4, n_step, folder)
        for _ in range(6):
            for _ in range(13):
                taken = world.step()
                old.add(*taken)
                kept.add(*taken)
            path = self.save(tmp_path, old)
            new = self.load(path, buffer_of(40, 2, 4, n_step, folder))
            assert_equal(old.sample(100, np.random.default_rng(0)), new.sample(100, np.random.default_rng(0)))
            for name, ring in old.state_dict().items():
                assert (new.state_dict()[name].start, new.state_dict()[name].end) == (ring.start, ring.end)
            for _ in range(4):  # some steps further on, whose stacks reach back beyond the checkpoint
                taken = world.step()
                kept.add(*taken)
                for buffer in (old, new):
                    buffer.add(*taken)
            assert_all_can_be_sampled(new, kept, 40)

    def test_more_first_observations_than_a_new_buffer_has_room_for(self, tmp_path: Path) -> None:
        world, kept, buffer = World(3, 4, seed=13), Kept(3), buffer_of(900, 3, 4)
        for _ in range(400):
            taken = world.step()
            buffer.add(*taken)
            kept.add(*taken)
        restored = self.load(self.save(tmp_path, buffer), buffer_of(900, 3, 4))
        assert restored._starts_end - restored._starts_begin > FIRST_STARTS
        assert_all_can_be_sampled(restored, kept, 900)

    def test_only_what_is_new_is_written(self, tmp_path: Path) -> None:
        world, buffer = World(1, 4, seed=4), buffer_of(100, 1, 4)
        for t in range(1, 31):
            buffer.add(*world.step())
            if t % 10 == 0:
                self.save(tmp_path, buffer)
        path = tmp_path / "step_000000030"
        segments = sorted(file.name for file in path.glob("ring_0_*"))
        assert segments == [f"ring_0_{n}_{n + 10}.safetensors" for n in (0, 10, 20)]
        assert len(list(path.glob("ring_0f_*"))) == 3, "of the first observations likewise"

    def test_an_episode_that_could_not_be_restored(self, tmp_path: Path) -> None:
        """A new one starts after the restore, though none ended: no stack and no return spans the gap."""
        world, kept, buffer = World(2, 4, seed=9), Kept(2), buffer_of(20, 2, 4, 3)
        for _ in range(12):
            taken = world.step()
            buffer.add(*taken)
            kept.add(*taken)
        restored = self.load(self.save(tmp_path, buffer), buffer_of(20, 2, 4, 3))
        world.obs = world.obs.copy()
        world.obs[1] = world.first()
        kept.of[2 * 11 + 1] = (*kept.of[2 * 11 + 1][:-1], False)
        for _ in range(6):
            taken = world.step()
            restored.add(*taken)
            kept.add(*taken)
        assert_all_can_be_sampled(restored, kept, 20)

    def test_an_endless_episode_holds_no_first_observation(self, tmp_path: Path) -> None:
        world, buffer = World(1, 3, seed=1), buffer_of(5, 1, 3)
        for _ in range(30):
            obs, actions, step = world.step()
            no = np.zeros(1, bool)
            world.obs = step.next_obs
            buffer.add(obs, actions, Step(step.next_obs, step.reward, no, no, step.next_obs, []))
        assert buffer._starts_begin == buffer._starts_end == 1
        restored = self.load(self.save(tmp_path, buffer), buffer_of(5, 1, 3))
        assert_equal(
            buffer.sample(50, np.random.default_rng(0)), restored.sample(50, np.random.default_rng(0))
        )

    @pytest.mark.parametrize("other", [(30, 2, 4), (20, 1, 4), (20, 2, 3)])
    def test_a_buffer_of_another_size_is_refused(self, tmp_path: Path, other: tuple[int, int, int]) -> None:
        world, buffer = World(2, 4, seed=2), buffer_of(20, 2, 4)
        for _ in range(50):
            buffer.add(*world.step())
        path = self.save(tmp_path, buffer)
        with pytest.raises(ValueError, match="saved replay buffer"):
            self.load(path, buffer_of(*other))

    def test_cleared_it_is_empty_and_another_ring(self) -> None:
        world, buffer, kept = World(2, 4, seed=2), buffer_of(20, 2, 4, 3), Kept(2)
        for _ in range(15):
            buffer.add(*world.step())
        rings = buffer.state_dict()
        buffer.clear(4096)
        assert len(buffer) == 0
        for name, ring in buffer.state_dict().items():
            assert ring.id != rings[name].id and ring.start == ring.end == 0
        world.steps = 0
        for _ in range(15):
            taken = world.step()
            buffer.add(*taken)
            kept.add(*taken)
        assert_all_can_be_sampled(buffer, kept, 20)


class TestMemoryMap:
    def test_as_in_memory(self, tmp_path: Path) -> None:
        worlds = World(3, 4, seed=11), World(3, 4, seed=11)
        buffers = buffer_of(600, 3, 4), buffer_of(600, 3, 4, folder=tmp_path)
        for world, buffer in zip(worlds, buffers, strict=True):
            for _ in range(500):
                buffer.add(*world.step())
        assert_equal(*(buffer.sample(500, np.random.default_rng(0)) for buffer in buffers))

    def test_the_frames_are_in_a_file_of_which_nothing_is_left(self, tmp_path: Path) -> None:
        def mapped() -> int:
            maps = Path("/proc/self/maps").read_text()
            return sum(str(tmp_path) in line for line in maps.splitlines())

        if not Path("/proc/self/maps").exists():
            pytest.skip("this system does not list what is mapped")
        buffer = FrameReplayBuffer(50, 1, (4, 84, 84), np.uint8, (), np.int64, memory_map=tmp_path)
        assert mapped() == 2, "the frames and the first observations"
        assert os.listdir(tmp_path) == [], "and no name to be left behind"
        del buffer
        assert mapped() == 0

    def test_a_disk_without_room(self, tmp_path: Path) -> None:
        # 2^33 frames of 2^18 bytes: two million GiB
        with pytest.raises(ConfigError, match=r"algo\.memory_map=.* has no room for .* GiB") as caught:
            FrameReplayBuffer(2**33, 1, (4, 2**9, 2**9), np.uint8, (), np.uint8, memory_map=tmp_path)
        assert "algo.buffer_size" in str(caught.value)


@dataclasses.dataclass
class Keys:
    buffer_size: int = 1_000_000
    memory_map: str | None = None


@dataclasses.dataclass
class Family:
    num_envs: int = 1
    frame_stack: int | None = 4


BREAKOUT = spaces.Box(0, 255, (4, 84, 84), np.uint8)
ACTIONS = spaces.Discrete(4)


class TestMemoryCheck:
    def test_a_million_transitions_of_breakout(self) -> None:
        # 84 · 84 = 7056 bytes a frame, 8 the action, 15 the rest: 7.08 GB; stacks of 28,224 bytes for 5000
        # episodes: 0.14 GB
        needed = frame_replay_bytes(1_000_000, 1, (4, 84, 84), np.dtype(np.uint8), 8)
        assert 7.2e9 < needed < 7.25e9

    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_it_is_what_the_arrays_take(self, num_envs: int) -> None:
        buffer = FrameReplayBuffer(1000, num_envs, (4, 84, 84), np.uint8, (), np.int64)
        taken = sum(array.nbytes for array in buffer.arrays.values())
        needed = frame_replay_bytes(1000, num_envs, (4, 84, 84), np.dtype(np.uint8), 8)
        rows = buffer.slots * num_envs
        assert needed - taken == rows * (4 * 7056 + 8) // checks.EPISODE_STEPS

    def test_which_observations_are_stacks_of_frames(self) -> None:
        assert stacks_frames(Family(), BREAKOUT)
        assert not stacks_frames(Family(frame_stack=None), BREAKOUT), "colours"
        assert not stacks_frames(Family(frame_stack=4), spaces.Box(0, 255, (6, 84, 84), np.uint8)), "agents"
        assert not stacks_frames(Family(frame_stack=4), spaces.Box(-1, 1, (4,))), "a vector"

    def test_memory_that_there_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "available_bytes", lambda: 8 * 10**9)
        assert 7e9 < check_replay_memory(Keys(), Family(), BREAKOUT, ACTIONS) < 8e9  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"buffer_size=1000000 needs 5\d\.\d+ GiB"):
            check_replay_memory(Keys(), Family(frame_stack=None), BREAKOUT, ACTIONS)  # type: ignore[arg-type]
        monkeypatch.setattr(checks, "available_bytes", lambda: 2**30)
        with pytest.raises(
            ConfigError, match=r"needs 6\.7. GiB, but 1\.00 GiB are available; .*memory_map"
        ) as caught:
            check_replay_memory(Keys(), Family(), BREAKOUT, ACTIONS)  # type: ignore[arg-type]
        fits = int(str(caught.value).split("algo.buffer_size=")[2].split()[0])
        check_replay_memory(Keys(fits), Family(), BREAKOUT, ACTIONS)  # type: ignore[arg-type]

    def test_a_folder_for_the_frames(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checks, "available_bytes", lambda: 2**20)
        keys: Any = Keys(1000, str(tmp_path))
        assert check_replay_memory(keys, Family(), BREAKOUT, ACTIONS) > 2**20, "the disk counts"
        keys.buffer_size = 10**14
        with pytest.raises(ConfigError, match=r"are available in algo\.memory_map=.*buffer_size=\d+ fits"):
            check_replay_memory(keys, Family(), BREAKOUT, ACTIONS)
        with pytest.raises(ConfigError, match=r"stacked frames.*algo\.memory_map=null"):
            check_replay_memory(keys, Family(frame_stack=None), BREAKOUT, ACTIONS)
        keys.memory_map = str(tmp_path / "none")
        with pytest.raises(ConfigError, match=r"not a folder.*algo\.memory_map=null"):
            check_replay_memory(keys, Family(), BREAKOUT, ACTIONS)
