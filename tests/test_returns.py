"""GAE against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rl.returns import gae


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float32)[:, None]


def flags(*values: int) -> np.ndarray:
    return np.array(values, bool)[:, None]


class TestGAE:
    """γ = 0.5 and λ = 0.5, so γλ = 0.25; V(s) = 2 everywhere, V(s') = 4 everywhere, r = 1."""

    rewards = column(1, 1, 1)
    values = column(2, 2, 2)
    next_values = column(4, 4, 4)

    def advantages(self, terminated: np.ndarray, truncated: np.ndarray) -> np.ndarray:
        return gae(self.rewards, self.values, self.next_values, terminated, truncated, 0.5, 0.5)[:, 0]

    def test_episode_that_runs_on(self) -> None:
        # δ = 1 + 0.5·4 − 2 = 1 each; A2 = 1, A1 = 1 + 0.25·1 = 1.25, A0 = 1 + 0.25·1.25 = 1.3125
        np.testing.assert_allclose(self.advantages(flags(0, 0, 0), flags(0, 0, 0)), [1.3125, 1.25, 1.0])

    def test_termination_puts_zero_for_the_next_value(self) -> None:
        # δ1 = 1 − 2 = −1 and nothing flows from t = 2: A1 = −1, A0 = 1 + 0.25·(−1) = 0.75
        np.testing.assert_allclose(self.advantages(flags(0, 1, 0), flags(0, 0, 0)), [0.75, -1.0, 1.0])

    def test_truncation_bootstraps_and_stops_the_recursion(self) -> None:
        # δ1 = 1 as the value of the true successor counts, but A1 takes nothing from t = 2: A1 = 1, A0 = 1.25
        np.testing.assert_allclose(self.advantages(flags(0, 0, 0), flags(0, 1, 0)), [1.25, 1.0, 1.0])

    def test_terminated_wins_where_both_are_set(self) -> None:
        np.testing.assert_allclose(self.advantages(flags(0, 1, 0), flags(0, 1, 0)), [0.75, -1.0, 1.0])

    def test_a_terminal_next_value_is_never_read(self) -> None:
        self_next = column(4, np.nan, 4)
        result = gae(self.rewards, self.values, self_next, flags(0, 1, 0), flags(0, 0, 0), 0.5, 0.5)
        assert np.isfinite(result).all()

    def test_columns_are_independent(self) -> None:
        ends = [
            (flags(0, 0, 0), flags(0, 0, 0)),
            (flags(0, 1, 0), flags(0, 0, 0)),
            (flags(0, 0, 0), flags(0, 1, 0)),
        ]
        terminated = np.hstack([t for t, _ in ends])
        truncated = np.hstack([t for _, t in ends])
        rows = [np.repeat(x, 3, axis=1) for x in (self.rewards, self.values, self.next_values)]
        together = gae(*rows, terminated, truncated, 0.5, 0.5)
        for i, (term, trunc) in enumerate(ends):
            np.testing.assert_array_equal(together[:, i], self.advantages(term, trunc))

    @pytest.mark.parametrize("gae_lambda", [0.0, 1.0])
    def test_extremes_of_lambda(self, gae_lambda: float) -> None:
        # λ = 0: A = δ = 1. λ = 1: A0 = 1 + 0.5·(1 + 0.5·1) = 1.75, A1 = 1.5, A2 = 1
        expected = [1.75, 1.5, 1.0] if gae_lambda else [1.0, 1.0, 1.0]
        none = flags(0, 0, 0)
        result = gae(self.rewards, self.values, self.next_values, none, none, 0.5, gae_lambda)[:, 0]
        np.testing.assert_allclose(result, expected)
