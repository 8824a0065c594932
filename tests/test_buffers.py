"""Replay against an env that counts: every sampled row is one that happened, and its return is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl import checkpoint
from rl.buffers import ReplayBuffer, Transitions
from rl.envs.vector import Step
from tests.conftest import configure

LIMIT = 7  # Counter-v0's time limit: it observes [steps done, episode], reward: the number of the step
GAMMA = 0.5


def buffer_of(capacity: int, num_envs: int, n_step: int = 1, size: int = 1) -> ReplayBuffer:
    return ReplayBuffer(capacity, num_envs, (size,), np.float32, (), np.int64, n_step=n_step, gamma=GAMMA)


def counted(num_envs: int, backend: str, steps: int, capacity: int = 50) -> dict[int, ReplayBuffer]:
    """Buffers of n-step returns, by n, that saw the same `steps` vector steps of Counter-v0."""
    config = configure(
        "algo=dqn",
        "env.id=tests.probes:Counter-v0",
        f"env.num_envs={num_envs}",
        f"env.backend={backend}",
        "env.num_workers=1" if backend == "async" else "env.num_workers=null",
    )
    envs = config.env.make()
    buffers = {n: buffer_of(capacity, num_envs, n, size=2) for n in (1, 3)}
    obs = envs.reset(np.random.SeedSequence(0))
    for _ in range(steps):
        actions = np.zeros(num_envs, np.int64)
        step = envs.step(actions)
        for buffer in buffers.values():
            buffer.add(obs, actions, step)
        obs = step.obs
    envs.close()
    return buffers


def lived(num_envs: int, ends: dict[int, tuple[bool, bool]], n_step: int, capacity: int = 5) -> ReplayBuffer:
    """A buffer after seven steps t = 0 … 6 of `num_envs` envs alike: observations t, reward 2^t.

    `ends` says of a t which of (terminated, truncated) env 0 met there; the true successor is then t + 1 all
    the same, and the new episode's first observation −1.
    """
    buffer = buffer_of(capacity * num_envs, num_envs, n_step)
    for t in range(7):
        terminated, truncated = np.zeros(num_envs, bool), np.zeros(num_envs, bool)
        terminated[0], truncated[0] = ends.get(t, (False, False))
        next_obs = np.full((num_envs, 1), t + 1.0, np.float32)
        obs = np.where((terminated | truncated)[:, None], np.float32(-1), next_obs)
        step = Step(obs, np.full(num_envs, 2.0**t, np.float32), terminated, truncated, next_obs, [])
        before = np.full((num_envs, 1), float(t), np.float32)
        buffer.add(before, np.arange(num_envs), step)  # the action tells the env
    return buffer


def rows_of(buffer: ReplayBuffer, env: int = 0) -> dict[int, tuple[float, float, float, float]]:
    """(reward, next_obs, terminated, discount) by observation, of all that can be sampled of an env."""
    batch = buffer.sample(2000, np.random.default_rng(0))
    rows: dict[int, tuple[float, float, float, float]] = {}
    for i in np.flatnonzero(batch.actions == env):
        row = (batch.rewards[i], batch.next_obs[i, 0], batch.terminated[i], batch.discounts[i])
        assert rows.setdefault(int(batch.obs[i, 0]), tuple(map(float, row))) == tuple(map(float, row))
    return rows


class TestCounter:
    """200 steps through a ring of 50, 25 or 16 rows, episodes cut after 7."""

    STEPS = 200

    @pytest.mark.parametrize("backend", ["sync", "async"])
    @pytest.mark.parametrize("num_envs", [1, 2, 3])
    def test_every_row_is_one_that_happened(self, num_envs: int, backend: str) -> None:
        for n_step, buffer in counted(num_envs, backend, self.STEPS).items():
            batch = buffer.sample(3000, np.random.default_rng(1))
            steps, episode = batch.obs.T
            assert steps.min() == 0 and steps.max() == LIMIT - 1
            # The newest row is step 200 of the run: step (200 − 1) % 7 + 1 = 4 of episode 199 // 7 = 28
            newest = np.where(episode == (self.STEPS - 1) // LIMIT, (self.STEPS - 1) % LIMIT + 1, LIMIT)
            taken = np.minimum(n_step, newest - steps)
            assert set(taken) == set(range(1, n_step + 1)), "shorter ones at the ends, full ones elsewhere"
            expected = batch.obs + np.stack([taken, np.zeros_like(taken)], axis=1)
            np.testing.assert_array_equal(batch.next_obs, expected)
            # rewards count the steps of the episode: Σ_k γ^k (steps + 1 + k)
            k = np.arange(n_step)
            returns = (GAMMA**k * (steps[:, None] + 1 + k) * (k < taken[:, None])).sum(1)
            np.testing.assert_array_equal(batch.rewards, returns.astype(np.float32))
            np.testing.assert_array_equal(batch.discounts, (GAMMA**taken).astype(np.float32))
            assert not batch.terminated.any(), "a time limit does not terminate"

    @pytest.mark.parametrize("num_envs", [1, 2, 3])
    def test_the_newest_transitions_are_held(self, num_envs: int) -> None:
        buffer = counted(num_envs, "sync", self.STEPS)[1]
        held = 50 // num_envs
        assert len(buffer) == held * num_envs <= 50
        batch = buffer.sample(5000, np.random.default_rng(0))
        time = batch.obs[:, 1] * LIMIT + batch.obs[:, 0]
        assert set(time) == set(range(self.STEPS - held, self.STEPS))


class TestNSteps:
    """γ = 0.5, n = 3, rewards 1, 2, 4, …, 64 on steps 0 … 6, of which a ring of 5 holds steps 2 … 6."""

    def test_no_end(self) -> None:
        # 2: 4 + 8/2 + 16/4 = 12; 3: 24; 4: 16 + 32/2 + 64/4 = 48, three steps with discount 1/8; the head:
        # 5: 32 + 64/2 = 64, two steps; 6: 64, one
        assert rows_of(lived(1, {}, n_step=3)) == {
            2: (12, 5, 0, 0.125),
            3: (24, 6, 0, 0.125),
            4: (48, 7, 0, 0.125),
            5: (64, 7, 0, 0.25),
            6: (64, 7, 0, 0.5),
        }

    @pytest.mark.parametrize(
        ("flags", "terminated"), [((True, False), 1), ((False, True), 0), ((True, True), 1)]
    )
    def test_an_end_at_step_3(self, flags: tuple[bool, bool], terminated: int) -> None:
        # 2: 4 + 8/2 = 8, two steps to the successor 4 of step 3, not to −1; 3: 8, one; the others as before
        assert rows_of(lived(1, {3: flags}, n_step=3)) == {
            2: (8, 4, terminated, 0.25),
            3: (8, 4, terminated, 0.5),
            4: (48, 7, 0, 0.125),
            5: (64, 7, 0, 0.25),
            6: (64, 7, 0, 0.5),
        }

    def test_the_oldest_row_is_not_taken_for_what_follows_the_newest(self) -> None:
        # Ring of 4: rows 3 … 6 lie at 3, 0, 1, 2, so row 3 comes after row 6 in memory and before it in time
        assert rows_of(lived(1, {}, n_step=3, capacity=4))[6] == (64, 7, 0, 0.5)

    def test_one_env_ends_and_its_neighbour_goes_on(self) -> None:
        buffer = lived(2, {3: (True, False)}, n_step=3)
        assert rows_of(buffer, env=0)[2] == (8, 4, 1, 0.25)
        assert rows_of(buffer, env=1)[2] == (12, 5, 0, 0.125)

    def test_a_ring_that_is_not_full(self) -> None:
        buffer = lived(1, {}, n_step=3, capacity=100)
        assert len(buffer) == 7
        rows = rows_of(buffer)
        assert rows[0] == (1 + 2 / 2 + 4 / 4, 3, 0, 0.125)
        assert rows[6] == (64, 7, 0, 0.5)

    def test_one_step(self) -> None:
        # The discount is γ and the flag its own row's: a terminated row keeps it, its neighbours don't get it
        rows = rows_of(lived(1, {3: (True, False), 5: (False, True)}, n_step=1))
        assert rows == {t: (2.0**t, t + 1, float(t == 3), 0.5) for t in (2, 3, 4, 5, 6)}, (
            "termination counts, truncation does not"
        )

    def test_a_row_that_does_not_follow_on_ends_the_return(self) -> None:
        """As after a resume that could not restore the episode: nothing ended, and yet another began."""
        buffer, false = buffer_of(10, 1, n_step=3), np.zeros(1, bool)
        for t, start in ((0, 0.0), (1, 1.0), (2, 50.0), (3, 51.0)):
            next_obs = np.full((1, 1), start + 1, np.float32)
            step = Step(next_obs, np.full(1, 2.0**t, np.float32), false, false, next_obs, [])
            buffer.add(np.full((1, 1), start, np.float32), np.zeros(1, int), step)
        batch = buffer.sample(200, np.random.default_rng(0))
        sampled = {
            (float(o[0]), float(n[0]), float(r), float(d))
            for o, n, r, d in zip(batch.obs, batch.next_obs, batch.rewards, batch.discounts, strict=True)
        }
        # γ = ½: 1 + ½·2 over two steps, then 2 alone; 4 + ½·8, then 8 alone
        assert sampled == {(0, 2, 2, 0.25), (1, 2, 2, 0.5), (50, 52, 8, 0.25), (51, 52, 8, 0.5)}


class TestSampling:
    def test_uniform_over_what_is_held(self) -> None:
        # 7 transitions for 2 envs are 3 rows: 6 transitions, each drawn with p = 1/6. Of 60,000 draws 10,000,
        # with a deviation of √(60000 · 1/6 · 5/6) = 91; five deviations allowed
        buffer = buffer_of(7, 2)
        for t in range(4):  # row 0 is written over
            next_obs = np.full((2, 1), t + 1.0, np.float32)
            false = np.zeros(2, bool)
            step = Step(next_obs, np.zeros(2, np.float32), false, false, next_obs, [])
            buffer.add(np.array([[10.0 * t], [10.0 * t + 1]], np.float32), np.zeros(2, int), step)
        batch = buffer.sample(60_000, np.random.default_rng(0))
        values, counts = np.unique(batch.obs, return_counts=True)
        assert values.tolist() == [10, 11, 20, 21, 30, 31]
        assert np.abs(counts - 10_000).max() < 5 * 91

    def test_the_generator_decides_alone(self) -> None:
        buffer = counted(2, "sync", 30)[3]

        def drawn(seed: int, global_seed: int) -> Transitions:
            np.random.seed(global_seed)  # noqa: NPY002
            return buffer.sample(64, np.random.default_rng(seed))

        for a, b in zip(drawn(3, 0), drawn(3, 1), strict=True):
            np.testing.assert_array_equal(a, b)
        assert not np.array_equal(drawn(3, 0).obs, drawn(4, 0).obs)

    def test_what_is_sampled_is_a_copy(self) -> None:
        buffer = lived(1, {}, n_step=1)
        before = rows_of(buffer)
        batch = buffer.sample(64, np.random.default_rng(0))
        for column in batch:
            column.fill(99)
        assert rows_of(buffer) == before

    def test_dtypes(self) -> None:
        buffer = ReplayBuffer(10, 1, (2, 2), np.uint8, (3,), np.float32)
        obs = np.full((1, 2, 2), 200, np.uint8)
        false = np.zeros(1, bool)
        buffer.add(obs, np.zeros((1, 3), np.float32), Step(obs, np.ones(1), false, false, obs, []))
        batch = buffer.sample(4, np.random.default_rng(0))
        assert [column.dtype for column in batch] == [
            np.uint8, np.float32, np.float32, np.uint8, np.float32, np.float32,
        ]  # fmt: skip
        assert batch.obs.shape == (4, 2, 2) and batch.actions.shape == (4, 3)


def kept(folder: Path, buffer: ReplayBuffer) -> dict[str, Any]:
    """A buffer's state as a checkpoint gives it back."""
    path = checkpoint.save(folder, buffer.state_dict(), env_steps=buffer.added, config={}, keep=0)
    return checkpoint.load(path)[0]


class TestState:
    @pytest.mark.parametrize("steps", [10, 40, 113])
    def test_another_buffer_continues_alike(self, tmp_path: Path, steps: int) -> None:
        """What a checkpoint keeps is in order; the new buffer samples as the old one does, also later."""
        old, new = counted(2, "sync", steps)[3], buffer_of(50, 2, 3, size=2)
        new.load_state_dict(kept(tmp_path, old))
        for a, b in zip(
            old.sample(200, np.random.default_rng(0)), new.sample(200, np.random.default_rng(0)), strict=True
        ):
            np.testing.assert_array_equal(a, b)
        obs = np.full((2, 2), 500, np.float32)
        false = np.zeros(2, bool)
        for buffer in (old, new):
            buffer.add(obs, np.zeros(2, int), Step(obs, np.zeros(2, np.float32), false, false, obs, []))
        for name, array in old.arrays.items():
            held = np.arange(max(0, old.added - old.rows), old.added) % old.rows
            np.testing.assert_array_equal(array[held], new.arrays[name][held])

    def test_a_ring_of_another_size_is_refused(self, tmp_path: Path) -> None:
        state = kept(tmp_path, counted(2, "sync", 113)[1])
        with pytest.raises(ValueError, match="saved replay buffer has 25 rows, not 50"):
            buffer_of(50, 1, size=2).load_state_dict(state)

    def test_cleared_it_is_empty_and_another_ring(self) -> None:
        buffer = lived(1, {}, n_step=1)
        before = buffer.state_dict()["ring"].id
        buffer.clear(4096)
        assert len(buffer) == 0
        assert buffer.state_dict()["ring"].id not in (before, "")
