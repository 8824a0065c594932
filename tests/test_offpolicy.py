"""What the off-policy algorithms share: the counting, their streams, resume without the buffer, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl import rundir
from rl.config import check_spaces
from rl.errors import ConfigError
from rl.seeding import Streams
from tests.conftest import algorithm, configure, lines, small, train
from tests.probes import Probe

TINY = ("network.hidden_sizes=[8]", "algo.batch_size=16", "algo.buffer_size=2000")
DISCRETE = ("dqn", "c51")
CONTINUOUS = ("ddpg_continuous_action", "td3_continuous_action", "sac_continuous_action")
ENV = {
    **dict.fromkeys(DISCRETE, "env.id=tests.probes:ConstantReward-v0"),
    **dict.fromkeys(CONTINUOUS, "env.id=tests.probes:BoxBounds-v0"),
}


class UnboundedBox(Probe):
    """Actions of which one has no upper bound."""

    action_space = spaces.Box(np.array([-1, 0], np.float32), np.array([1, np.inf], np.float32))


gym.register("UnboundedBox-v0", entry_point="tests.test_offpolicy:UnboundedBox")


def small_algorithm(recipe: str, num_envs: int, *overrides: str) -> Any:
    return algorithm(f"algo={recipe}", ENV[recipe], f"env.num_envs={num_envs}", *TINY, *overrides)


def run_to_the_end(algo: Any) -> dict[str, float]:
    """Iterate to total_timesteps; the scalars of the last iteration."""
    while algo.env_steps < algo.context.total_timesteps:
        scalars: dict[str, float] = algo.iterate().scalars
    algo.close()
    return scalars


def optimizer_steps(learner: Any) -> int:
    """How many steps a learner's optimiser has taken."""
    steps: int = learner.optimizer.steps
    return steps


class TestCounting:
    """1200 env steps by 1, 2, 3 or 4 at a time; learning starts at 120 of them."""

    COUNTS = ("total_timesteps=1200", "algo.learning_starts=120")

    @pytest.mark.parametrize("num_envs", [1, 2, 3, 4])
    @pytest.mark.parametrize("recipe", DISCRETE)
    def test_gradient_steps(self, recipe: str, num_envs: int) -> None:
        # (1200 − 120) / 10 = 108 times two updates; 216 / (1200 − 120) = 0.2 an env step
        algo = small_algorithm(
            recipe, num_envs, *self.COUNTS, "algo.train_frequency=10", "algo.gradient_steps=2"
        )
        scalars = run_to_the_end(algo)
        assert algo.env_steps == 1200
        assert algo.experience.gradient_steps == optimizer_steps(algo.q) == 216
        assert scalars["charts/update_to_data"] == pytest.approx(0.2)

    @pytest.mark.parametrize("num_envs", [1, 2, 3, 4])
    @pytest.mark.parametrize("recipe", ["ddpg_continuous_action", "td3_continuous_action"])
    def test_the_actor_takes_half_as_many_as_the_critics(self, recipe: str, num_envs: int) -> None:
        # (1200 − 120) / 6 = 180 times one update of the critics; of the actor at every second one
        algo = small_algorithm(recipe, num_envs, *self.COUNTS, "algo.train_frequency=6")
        run_to_the_end(algo)
        critics = algo.learners["critic" if "critic" in algo.learners else "critics"]
        assert optimizer_steps(critics) == 180
        assert optimizer_steps(algo.actor) == 90

    @pytest.mark.parametrize("num_envs", [1, 2, 3, 4])
    def test_sac_makes_up_for_the_delay(self, num_envs: int) -> None:
        # 180 of the critics; every third time three of the actor and of α: as many
        algo = small_algorithm(
            "sac_continuous_action",
            num_envs,
            *self.COUNTS,
            "algo.train_frequency=6",
            "algo.policy_frequency=3",
        )
        run_to_the_end(algo)
        assert optimizer_steps(algo.critics) == optimizer_steps(algo.actor) == 180
        assert algo.alpha_optimizer.steps == 180

    def test_when_updates_are_owed(self) -> None:
        # From 8 on one for every 10 env steps passed: at 18, 28, 38, 48, which 4 envs reach at 20, 28, 40, 48
        algo = small_algorithm("dqn", 4, "algo.learning_starts=8", "algo.train_frequency=10")
        owed = {}
        for _ in range(12):
            algo.experience.step(np.zeros(4, np.int64))
            if algo.experience.due():
                owed[algo.env_steps] = algo.experience.due()
                algo.experience.sample()
        algo.close()
        assert owed == {20: 1, 28: 1, 40: 1, 48: 1}

    def test_more_envs_than_the_frequency_owe_several(self) -> None:
        # Every env step owes one: 4 a vector step of 4 envs, from the one that passes learning_starts = 6 on
        algo = small_algorithm("dqn", 4, "algo.learning_starts=6", "algo.train_frequency=1")
        owed = []
        for _ in range(4):
            algo.experience.step(np.zeros(4, np.int64))
            owed.append(algo.experience.due())
            for _ in range(owed[-1]):
                algo.experience.sample()
        algo.close()
        assert owed == [0, 2, 4, 4]

    @pytest.mark.parametrize("num_envs", [1, 2, 3, 4])
    @pytest.mark.parametrize("recipe", DISCRETE)
    def test_target_syncs(self, recipe: str, num_envs: int) -> None:
        # The first update is at 126, so the target changes at 150, 200, …, 1200: 22 times, to a copy
        algo = small_algorithm(
            recipe, num_envs, *self.COUNTS, "algo.train_frequency=6", "algo.target_network_frequency=50"
        )
        at = []
        previous = [p.clone() for p in algo.q.target.parameters()]
        while algo.env_steps < 1200:
            algo.experience.step(algo.act())
            for _ in range(algo.experience.due()):
                algo.update(algo.experience.sample())
            algo.sync_target()
            target = list(algo.q.target.parameters())
            if not all(map(torch.equal, target, previous)):
                at.append(algo.env_steps)
                assert all(map(torch.equal, target, algo.q.network.parameters()))
                previous = [p.clone() for p in target]
        algo.close()
        assert at == [-(-step // num_envs) * num_envs for step in range(150, 1201, 50)]

    def test_several_intervals_crossed_at_once_are_as_many_syncs(self) -> None:
        # τ = ½ at every env step: after the 4 of a vector step (1 − ½)⁴ = 1/16 of the distance is left
        algo = small_algorithm("dqn", 4, "algo.tau=0.5", "algo.target_network_frequency=1")
        with torch.no_grad():
            for online, target in zip(algo.q.network.parameters(), algo.q.target.parameters(), strict=True):
                online.fill_(0.0)
                target.fill_(16.0)
        algo.experience.step(algo.act())
        algo.sync_target()
        algo.close()
        assert all((p == 1.0).all() for p in algo.q.target.parameters())


class TestEpsilon:
    @pytest.mark.parametrize("num_envs", [1, 4])
    @pytest.mark.parametrize("recipe", DISCRETE)
    def test_at_given_env_steps(self, recipe: str, num_envs: int) -> None:
        # From 1 to 0.05 over half of 2000 env steps: 1 − 0.95 · t / 1000
        algo = small_algorithm(
            recipe,
            num_envs,
            "total_timesteps=2000",
            "algo.exploration_fraction=0.5",
            "algo.learning_starts=100",
        )
        found = {}
        while algo.env_steps < 1600:
            algo.experience.step(np.zeros(num_envs, np.int64))
            found[algo.env_steps] = algo.epsilon
        algo.close()
        for at, expected in {100: 0.905, 500: 0.525, 1000: 0.05, 1600: 0.05}.items():
            assert found[at] == pytest.approx(expected)

    def test_share_of_random_actions(self) -> None:
        # ε = 0.2 and a network that prefers action 1: 0 is taken with p = 0.2 / 2 = 0.1, each env on its own.
        # Of 8000 draws 800, with a deviation of √(8000 · 0.1 · 0.9) = 27
        algo = small_algorithm(
            "dqn", 4, "algo.start_e=0.2", "algo.end_e=0.2", "algo.learning_starts=0", "total_timesteps=9000"
        )
        with torch.no_grad():
            for parameter in algo.q.network.parameters():
                parameter.zero_()
            algo.q.network[-1].bias.copy_(torch.tensor([0.0, 1.0]))
        taken = np.array([algo.act() for _ in range(2000)])
        algo.close()
        assert abs((taken == 0).sum() - 800) < 5 * 27
        assert abs(np.corrcoef(taken.T) - np.eye(4)).max() < 0.1

    def test_all_random_until_learning_starts(self) -> None:
        algo = small_algorithm("dqn", 1, "algo.start_e=0", "algo.end_e=0", "algo.learning_starts=200")
        taken = []
        for _ in range(250):
            actions = algo.act()
            taken.append(int(actions[0]))
            algo.experience.step(actions)
        algo.close()
        # 200 fair draws are 100 ± 7; after them the same observation gets the same action
        assert abs(sum(taken[:200]) - 100) < 5 * 7
        assert len(set(taken[200:])) == 1


class TestStreams:
    @pytest.mark.parametrize("recipe", [*DISCRETE, *CONTINUOUS])
    def test_sampling_has_a_stream_of_its_own(self, recipe: str) -> None:
        """Whatever acting and updating draw, the same rows are sampled."""
        drawn = []
        for extra in (0, 100):
            algo = small_algorithm(recipe, 2, "algo.learning_starts=100")
            for _ in range(50):
                algo.experience.step(
                    np.zeros((2, 3), np.float32) if recipe in CONTINUOUS else np.zeros(2, int)
                )
            algo.experience.action_rng.random(extra)
            torch.rand(extra)
            np.random.random(extra)  # noqa: NPY002
            drawn.append(algo.experience.sample().obs)
            rng = Streams(1).generator("replay")
            index = rng.integers(0, 100, 16)
            algo.close()
        assert torch.equal(*drawn)
        held = algo.experience.buffer.arrays["obs"][:50].reshape(100, -1)
        np.testing.assert_array_equal(drawn[0].numpy(), held[index])

    @pytest.mark.parametrize("recipe", DISCRETE)
    def test_random_actions_come_from_the_runs_own_stream(self, recipe: str) -> None:
        taken = []
        for seed in (1, 1, 2):
            algo = small_algorithm(recipe, 4, f"seed={seed}", "algo.learning_starts=100")
            np.random.seed(len(taken))  # noqa: NPY002
            taken.append(np.concatenate([algo.act() for _ in range(20)]).tolist())
            algo.close()
        assert taken[0] == taken[1] != taken[2]


class TestNormalization:
    def test_stored_raw_and_normalized_when_sampled(self) -> None:
        algo = algorithm(
            "algo=dqn", "env.id=tests.probes:Counter-v0", "env.num_envs=2", "env.normalize_obs=true", *TINY
        )
        experience = algo.experience
        for _ in range(100):
            experience.step(np.zeros(2, np.int64))
        # the counter counts on in whole steps: raw
        held = experience.buffer.arrays["obs"][:100, 0]
        np.testing.assert_array_equal(held[:, 0], np.arange(100) % 7)
        # By the statistics of now, over all observations acted on: 2 envs × (1 first one + 100 that followed)
        seen = np.concatenate([held, experience.obs[:1]])
        batch = experience.sample()
        index = Streams(1).generator("replay").integers(0, 200, 16)
        raw = experience.buffer.arrays["obs"][:100].reshape(200, 2)[index]
        expected = (raw - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8)
        np.testing.assert_allclose(batch.obs.numpy(), expected, rtol=1e-3, atol=1e-3)
        assert not np.array_equal(batch.next_obs.numpy(), batch.obs.numpy())
        algo.close()


class TestTruncation:
    @pytest.mark.parametrize(("num_envs", "backend"), [(1, "sync"), (3, "sync"), (1, "async"), (3, "async")])
    def test_a_time_limit_bootstraps_and_a_termination_does_not(self, num_envs: int, backend: str) -> None:
        # Target network: Q = 5 everywhere, online: 0; so the loss of a row is its target squared
        #   ConstantReward, cut after 10: 1 + 0.9 · 5 = 5.5 in every row, also in the truncated ones
        #   BothFlags, over after 3: 5.5, and 1 in the last row of an episode
        for env, at_the_end in (("ConstantReward", 5.5), ("BothFlags", 1.0)):
            algo = algorithm(
                "algo=dqn",
                f"env.id=tests.probes:{env}-v0",
                f"env.num_envs={num_envs}",
                f"env.backend={backend}",
                "algo.gamma=0.9",
                "algo.batch_size=1",
                "network.hidden_sizes=[]",
            )
            with torch.no_grad():
                for network, value in ((algo.q.network, 0.0), (algo.q.target, 5.0)):
                    network[-1].weight.zero_()
                    network[-1].bias.fill_(value)
            for _ in range(60):
                algo.experience.step(np.zeros(num_envs, np.int64))
            index = Streams(1).generator("replay")
            ended = algo.experience.buffer.arrays["ended"][:60].reshape(-1)
            targets: dict[bool, set[float]] = {False: set(), True: set()}
            for _ in range(200):
                at_end = bool(ended[index.integers(0, 60 * num_envs, 1)[0]])
                loss, _q = algo._loss(algo.experience.sample())
                targets[at_end].add(round(loss.item() ** 0.5, 3))
            algo.close()
            assert targets == {False: {5.5}, True: {at_the_end}}


class TestResumeWithoutTheBuffer:
    def test_it_is_filled_again_and_says_so(self, tmp_path: Path) -> None:
        # Small: starts at 200, trains every 10. At 2000 there are (2000 − 200) / 10 = 180 gradient steps; the
        # resumed run acts for 200 more steps before it learns on: (3000 − 2200) / 10 = 80 more
        overrides = small(
            "dqn",
            "total_timesteps=3000",
            "checkpoint.every=1000",
            "checkpoint.keep=0",
            "checkpoint.replay=false",
            "eval.episodes=1",
        )
        train(tmp_path / "straight", *overrides)
        middle = tmp_path / "straight" / "checkpoints" / "step_000002000"
        assert not list(middle.glob("ring_*"))
        (tmp_path / "resumed").mkdir()
        outcome = train(tmp_path / "resumed", *overrides, resumed_from=middle)
        assert outcome.env_steps == 3000
        (note,) = rundir.read(tmp_path / "resumed")["starts"][-1]["notes"]
        assert "checkpoint.replay=false" in note and "200" in note
        steps = [line["env_steps"] for line in lines(tmp_path / "resumed") if "time/update" not in line]
        assert steps[:3] == [1000, 2000, 3000], "no step is lost or told twice"
        from rl import checkpoint

        for run, updates in (("straight", 280), ("resumed", 260)):
            newest = checkpoint.newest(tmp_path / run / "checkpoints")
            assert newest is not None
            counters = checkpoint.load(newest)[0]["algorithm"]["counters"]
            assert (counters["env_steps"], counters["gradient_steps"]) == (3000, updates)

    def test_nothing_learns_from_rows_that_are_not_there(self) -> None:
        """After the resume only new rows are sampled, and not before there are as many as at the start."""
        algo = small_algorithm("dqn", 2, "algo.learning_starts=100", "algo.train_frequency=10")
        for _ in range(100):
            algo.experience.step(np.zeros(2, np.int64))
            for _ in range(algo.experience.due()):
                algo.experience.sample()
        state = {key: value for key, value in algo.state_dict().items() if key != "replay"}
        algo.close()
        other = small_algorithm("dqn", 2, "algo.learning_starts=100", "algo.train_frequency=10")
        assert len(other.load_state_dict(state)) == 1
        assert other.env_steps == 200 and len(other.experience.buffer) == 0
        assert other.experience.gradient_steps == 10
        owed = []
        for _ in range(60):
            other.experience.step(np.zeros(2, np.int64))
            if other.experience.due():
                owed.append((other.env_steps, len(other.experience.buffer), other.experience.due()))
                other.experience.sample()
        other.close()
        assert owed == [(310, 110, 1), (320, 120, 1)]


class TestRefused:
    """In one line that names a key."""

    def refusal(self, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            check_spaces(configure(*overrides))
        message = str(caught.value)
        assert "\n" not in message
        return message

    @pytest.mark.parametrize("recipe", DISCRETE)
    def test_box_actions(self, recipe: str) -> None:
        message = self.refusal(f"algo={recipe}", "env.id=tests.probes:BoxBounds-v0")
        assert "Discrete action spaces" in message and "env.id=tests.probes:BoxBounds-v0" in message

    @pytest.mark.parametrize("recipe", CONTINUOUS)
    def test_discrete_actions(self, recipe: str) -> None:
        message = self.refusal(f"algo={recipe}", "env.id=CartPole-v1")
        assert "Box action spaces" in message and "env.id=CartPole-v1" in message

    @pytest.mark.parametrize("recipe", CONTINUOUS)
    def test_unbounded_actions(self, recipe: str) -> None:
        message = self.refusal(f"algo={recipe}", "env.id=tests.test_offpolicy:UnboundedBox-v0")
        assert "bounded actions" in message and "algo=ppo_continuous_action" in message

    @pytest.mark.parametrize("recipe", [*DISCRETE, *CONTINUOUS])
    def test_what_cannot_work(self, recipe: str) -> None:
        algo = (f"algo={recipe}", ENV[recipe])
        message = self.refusal(*algo, "algo.buffer_size=100", "algo.batch_size=101")
        assert "algo.batch_size=101" in message and "algo.buffer_size=100" in message
        message = self.refusal(*algo, "total_timesteps=5000", "algo.learning_starts=5000")
        assert "algo.learning_starts=5000" in message and "total_timesteps=5000" in message
        message = self.refusal(*algo, "algo.buffer_size=1e12")
        assert "algo.buffer_size=1000000000000" in message and "GiB" in message
        message = self.refusal(*algo, "env.normalize_reward=true")
        assert "env.normalize_reward=true" in message
        message = self.refusal(
            *algo, "env.num_envs=64", "algo.buffer_size=63", "algo.batch_size=8", "algo.learning_starts=50"
        )
        assert "algo.buffer_size=63" in message and "env.num_envs=64" in message

    def test_just_what_works_is_not_refused(self) -> None:
        check_spaces(
            configure(
                "algo=dqn",
                "algo.batch_size=100",
                "algo.buffer_size=100",
                "total_timesteps=5000",
                "algo.learning_starts=4999",
            )
        )

    def test_the_size_that_is_said_to_fit_does(self) -> None:
        message = self.refusal("algo=dqn", "algo.buffer_size=1e12")
        fits = message.rpartition("algo.buffer_size=")[2].split()[0]
        # CartPole: two observations of 4 floats, an action of 8 bytes, a reward and two flags: 46 bytes a row
        assert check_spaces(configure("algo=dqn", f"algo.buffer_size={fits}")) == 46 * int(fits)

    def test_the_bytes_are_those_of_the_buffer(self) -> None:
        config = configure("algo=td3_continuous_action", ENV["td3_continuous_action"], "algo.buffer_size=1e5")
        algo = algorithm("algo=td3_continuous_action", ENV["td3_continuous_action"], "algo.buffer_size=1e5")
        held = sum(array.nbytes for array in algo.experience.buffer.arrays.values())
        algo.close()
        assert check_spaces(config) == held
