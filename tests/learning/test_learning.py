"""It learns: a known task to a known return, at a recipe's own hyperparameters."""

from __future__ import annotations

import csv
from pathlib import Path

from tests.conftest import train


class TestPPO:
    def test_cartpole(self, tmp_path: Path) -> None:
        outcome = train(tmp_path, "algo=ppo")
        rows = list(csv.DictReader((tmp_path / "episodes.csv").read_text().splitlines()))
        returns = [float(row["return"]) for row in rows[-100:]]
        assert sum(returns) / 100 >= 475
        assert outcome.objective is not None and outcome.objective >= 475
