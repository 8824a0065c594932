"""Several values at one env step."""

from __future__ import annotations

import math

from rl.loggers import StepMeans


class TestStepMeans:
    def test_values_at_one_step_become_their_mean(self) -> None:
        means = StepMeans()
        assert means.add(8, {"return": 1.0}) is None
        assert means.add(8, {"return": 4.0, "length": 7.0}) is None
        # (1 + 4) / 2 and 7 / 1
        assert means.add(16, {"return": 9.0}) == (8, {"return": 2.5, "length": 7.0})
        assert means.take() == {"return": 9.0}

    def test_after_take_only_what_changed_is_given_again_with_all_its_values(self) -> None:
        means = StepMeans()
        means.add(8, {"return": 1.0, "loss": 0.5})
        assert means.take() == {"return": 1.0, "loss": 0.5}
        assert means.take() == {}
        means.add(8, {"return": 2.0})
        assert means.take() == {"return": 1.5}
        assert means.add(9, {"loss": 1.0}) is None

    def test_nan_stays_with_its_metric(self) -> None:
        means = StepMeans()
        means.add(1, {"a": math.nan, "b": 1.0})
        means.add(1, {"a": 1.0})
        taken = means.take()
        assert math.isnan(taken["a"]) and taken["b"] == 1.0
