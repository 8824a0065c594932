"""Replay: a preallocated ring of transitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rl.envs.vector import Step
from rl.ring_files import Ring, Rows


class Transitions(NamedTuple):
    """A sampled batch [B, …]; with n steps, rewards are summed and `next_obs` is n steps on."""

    obs: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    """[B] float32: Σ γ^k r_k over the steps taken."""
    next_obs: np.ndarray
    """[B, …], the true successor of the last step: never the first observation of a new episode."""
    terminated: np.ndarray
    """[B] float32, 1 where the last step terminated: nothing is to be expected after it."""
    discounts: np.ndarray
    """[B] float32, γ to the number of steps taken: fewer than n at an episode's end or the newest row."""


class ReplayBuffer:
    """The newest `capacity` transitions of `num_envs` envs, raw observations as the envs gave them.

    Rows are vector steps, so `capacity // num_envs` of them are kept. An n-step return stops where the
    episode ends, cut or terminated, at the newest row, and where the next row is not its continuation (a
    resume that could not restore an episode); it is then of fewer steps, with the discount that belongs to
    them.

    Args:
        capacity: transitions over all envs, `algo.buffer_size`.
        n_step: steps in a return.
        gamma: discount between them.
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
    ) -> None:
        self.rows, self.num_envs, self.n_step, self.gamma = capacity // num_envs, num_envs, n_step, gamma
        shape = (self.rows, num_envs)
        self.arrays = {
            "obs": np.empty((*shape, *observation_shape), observation_dtype),
            "next_obs": np.empty((*shape, *observation_shape), observation_dtype),
            "actions": np.empty((*shape, *action_shape), action_dtype),
            "rewards": np.empty(shape, np.float32),
            "terminated": np.empty(shape, np.bool_),
            "ended": np.empty(shape, np.bool_),
        }
        self._flat = {name: x.reshape(self.rows * num_envs, *x.shape[2:]) for name, x in self.arrays.items()}
        self.added = 0  # rows ever added: row r lies at r % rows
        self.id = "0"  # tells fillings of the buffer apart

    def __len__(self) -> int:
        """Transitions held."""
        return min(self.added, self.rows) * self.num_envs

    def add(self, obs: np.ndarray, actions: np.ndarray, step: Step) -> None:
        """Store one vector step: what was acted on [N, …], the actions [N, …] and what came of them."""
        row = self.added % self.rows
        arrays = self.arrays
        arrays["obs"][row] = obs
        arrays["next_obs"][row] = step.next_obs
        arrays["actions"][row] = actions
        arrays["rewards"][row] = step.reward
        arrays["terminated"][row] = step.terminated
        arrays["ended"][row] = step.terminated | step.truncated
        self.added += 1

    def sample(self, batch_size: int, rng: np.random.Generator) -> Transitions:
        """`batch_size` transitions drawn uniformly, with replacement."""
        index = rng.integers(0, len(self), batch_size)
        flat = self._flat
        if self.n_step == 1:
            last, rewards = index, flat["rewards"][index]
            discounts = np.full(batch_size, self.gamma, np.float32)
        else:
            newest = (self.added - 1) % self.rows
            last, rewards, discounts = n_step_returns(
                self._flat, index, self.n_step, self.gamma, self.num_envs, newest, self._continues
            )
        return Transitions(
            flat["obs"][index],
            flat["actions"][index],
            rewards,
            flat["next_obs"][last],
            flat["terminated"][last].astype(np.float32),
            discounts,
        )

    def _continues(self, last: np.ndarray, following: np.ndarray) -> np.ndarray:
        """Whether flat rows `following` [B] go on where `last` left: not where a resume began anew."""
        same = self._flat["obs"][following] == self._flat["next_obs"][last]
        return np.asarray(same.reshape(len(last), -1).all(1))

    def clear(self, id: int) -> None:
        """Forget every row; `id` tells this filling from earlier ones."""
        self.added, self.id = 0, f"{id:x}"

    def state_dict(self) -> dict[str, Any]:
        """The rows held, as a ring of which a checkpoint writes only what is new."""
        start = max(0, self.added - self.rows)
        return {"ring": Ring(self.id, self.arrays, start, self.added)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the rows of a loaded ring.

        Raises:
            ValueError: the ring was of another size or of other envs.
        """
        ring: Rows = state["ring"]
        ring.restore(self.arrays)
        self.id, self.added = ring.id, ring.end


def n_step_returns(
    flat: dict[str, np.ndarray],
    index: np.ndarray,
    n_step: int,
    gamma: float,
    num_envs: int,
    newest: int,
    continues: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From flat first indices [B] of a ring of rows: the flat last ones, Σ γ^k r_k, and γ^steps.

    Args:
        flat: the ring's `rewards` and `ended`, [rows · num_envs] each.
        newest: the row after which there is none yet.
        continues: whether flat indices [B] go on where others [B] left.
    """
    last = index
    rewards = flat["rewards"][index].astype(np.float64)
    discounts = np.full(len(index), gamma)
    going = np.ones(len(index), np.bool_)
    for _ in range(n_step - 1):
        following = (last + num_envs) % len(flat["rewards"])
        going &= ~flat["ended"][last] & (last // num_envs != newest) & continues(last, following)
        last = np.where(going, following, last)
        rewards += np.where(going, discounts * flat["rewards"][last], 0.0)
        discounts = np.where(going, discounts * gamma, discounts)
    return last, rewards.astype(np.float32), discounts.astype(np.float32)
