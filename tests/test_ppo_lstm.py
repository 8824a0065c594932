"""PPO with memory and with many agents: what goes through the state, and who is learnt from."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from rl.errors import ConfigError
from tests.conftest import algorithm, configure, train

MEMORY = ("algo=ppo_atari_lstm", "env=classic", "network@network.encoder=mlp", "network.hidden_size=16")
RECALL = (
    "env=classic",
    "env.id=tests.probes:Recall-v0",
    "env.num_envs=8",
    "algo.num_steps=40",
    "algo.learning_rate=3e-3",
    "total_timesteps=32000",
    "eval.every=0",
    "eval.episodes=40",
)


class TestRecall:
    """A cue of −1 or 1, four steps of zeros, then a reward of 1 for the action that the cue asked for."""

    def test_with_memory(self, tmp_path: Path) -> None:
        outcome = train(tmp_path, *MEMORY, *RECALL)
        assert outcome.objective == 1.0, "every one of 40 episodes, played with the state of its own"

    def test_without_memory_it_is_chance(self, tmp_path: Path) -> None:
        train(tmp_path, "algo=ppo", *RECALL)
        rows = list(csv.DictReader((tmp_path / "episodes.csv").read_text().splitlines()))
        returns = [float(row["return"]) for row in rows[-1000:]]
        # a coin thrown 1000 times has a deviation of √(¼ / 1000) = 0.016; five of them
        assert abs(sum(returns) / 1000 - 0.5) < 0.08


class TestSequences:
    @pytest.fixture
    def algo(self) -> object:
        algo = algorithm(*MEMORY, "env.id=CartPole-v1", "env.num_envs=4", "algo.num_steps=64")
        yield algo
        algo.close()

    def test_the_first_ratio_is_one(self, algo: object) -> None:
        """Run again in minibatches of envs from the state at the beginning, the policy is the one that
        acted."""
        for _ in range(3):  # from the second rollout on, the state at its beginning is not zero
            batch, episodes = algo.collect()  # type: ignore[attr-defined]
        assert episodes, "episodes start inside the sequences"
        assert batch["h"].abs().max() > 0
        for minibatch in algo._minibatches(batch):  # type: ignore[attr-defined]
            logratio = algo._losses(minibatch)[-1]  # type: ignore[attr-defined]
            torch.testing.assert_close(logratio.exp(), torch.ones_like(logratio), rtol=0, atol=1e-5)

    def test_values_of_the_rollout_are_those_of_a_step_by_step_run(self, algo: object) -> None:
        state, starts = algo.state, algo.starts.copy()  # type: ignore[attr-defined]
        batch, _ = algo.collect()  # type: ignore[attr-defined]
        for t in range(64):
            starts = batch["starts"][t : t + 1].numpy()
            obs = batch["obs"][t : t + 1]
            _, values, state = algo._sequence(obs, state, starts)  # type: ignore[attr-defined]
            torch.testing.assert_close(values[0], batch["values"][t], rtol=0, atol=1e-5)

    def test_envs_that_do_not_divide_into_minibatches_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"algo\.num_minibatches=4.*env\.num_envs=6.*=3 does"):
            configure(*MEMORY, "env.num_envs=6")


class TestManyAgents:
    """Three agents; the second dies on step 2 of 5, and its rows from then on are nobody's."""

    OVERRIDES = (
        "env=pettingzoo_atari",
        "env.id=tests.probes_parallel:Earners",
        "env.kwargs={agents: 3, length: 5, dies: {1: 2}}",
        "env.num_envs=6",
        "env.clip_rewards=false",
        "algo.num_steps=20",
    )

    def test_the_dead_are_not_learnt_from(self) -> None:
        algo = algorithm("algo=ppo", "network=mlp", *self.OVERRIDES)
        batch, episodes = algo.collect()
        # of 4 games in 20 steps: agents 0 and 2 act on 5 steps, agent 1 on 2
        assert len(batch["obs"]) == 2 * 4 * (5 + 2 + 5)
        assert sorted({(e.env, e.episodic_return) for e in episodes}) == [
            (0, 5.0), (1, 4.0), (2, 15.0), (3, 5.0), (4, 4.0), (5, 15.0),
        ]  # fmt: skip
        algo.update(batch)
        algo.close()

    def test_neither_with_memory(self) -> None:
        algo = algorithm(
            "algo=ppo_atari_lstm",
            "network@network.encoder=mlp",
            *self.OVERRIDES,
            "algo.num_minibatches=2",
        )
        batch, _ = algo.collect()
        rows = [len(part["returns"]) for part in algo._minibatches(batch)]
        assert sum(rows) == 2 * 4 * (5 + 2 + 5)
        outputs = [algo._evaluate(part)[1] for part in algo._minibatches(batch)]
        assert sum(map(len, outputs)) == sum(rows)
        assert np.isfinite(algo.update(batch)["losses/value_loss"])
        algo.close()


class TestWhatFits:
    @pytest.mark.parametrize(
        ("overrides", "advice"),
        [
            (("algo=ppo", "network=lstm", "network@network.encoder=mlp"), "algo=ppo_atari_lstm"),
            (("algo=ppo_atari_lstm", "env=classic", "network=mlp"), "network=lstm"),
            (("algo=ppo_atari", "network=mlp"), "network=nature_cnn"),
            (("algo=ppo", "network=nature_cnn"), "network=mlp"),
        ],
    )
    def test_refusals_name_it(self, overrides: tuple[str, ...], advice: str) -> None:
        from rl.config import check_spaces

        with pytest.raises(ConfigError, match=advice):
            check_spaces(configure(*overrides))
