"""EnvPool behind the vector contract: what ended, what is seen next, and whole returns."""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl.envs.envpool_envs import EnvPoolEnvs, _missing_library
from rl.envs.gymnasium_envs import GymnasiumEnvs
from rl.envs.procgen import GAMES, ProcgenEnvs
from rl.envs.vector import Episode, Step, VectorEnv
from rl.errors import ConfigError
from rl.seeding import seed_of
from tests.conftest import configure

envpool = pytest.importorskip("envpool", reason="needs the extra envpool")

SEED = np.random.SeedSequence(7)
Make = Callable[..., EnvPoolEnvs]
needs_qt = pytest.mark.skipif(
    sys.platform.startswith("linux") and ctypes.util.find_library("Qt5Gui") is None,
    reason="Procgen needs the system's Qt 5 libraries: apt-get install libqt5core5a libqt5gui5",
)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[EnvPoolEnvs] = []

    def make(task_id: str, num_envs: int = 3, **options: Any) -> EnvPoolEnvs:
        made.append(EnvPoolEnvs(task_id, num_envs, **{"num_threads": 2, **options}))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def played(envs: VectorEnv, steps: int, seed: int = 0) -> list[Step]:
    """What `steps` random actions give."""
    rng, space = np.random.default_rng(seed), envs.action_space
    if isinstance(space, spaces.Discrete):
        return [envs.step(rng.integers(0, space.n, envs.num_envs)) for _ in range(steps)]
    return [envs.step(rng.uniform(-2, 2, (envs.num_envs, *space.shape))) for _ in range(steps)]


def played_from_reset(envs: VectorEnv, steps: int) -> list[Step]:
    envs.reset(SEED)
    return played(envs, steps)


def refusal(make: Callable[[], Any]) -> str:
    """The line that `make` refuses with."""
    with pytest.raises(ConfigError) as caught:
        make()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


class TestCartPole:
    def test_every_transition_is_gymnasiums(self, make: Make) -> None:
        # CartPole computes in float64 and is observed in float32, hence the tolerance.
        envs, twin = make("CartPole-v1"), gym.make("CartPole-v1").unwrapped
        obs, rng, ends = envs.reset(SEED), np.random.default_rng(0), 0
        assert obs.dtype == np.float32 and envs.action_space == spaces.Discrete(2)
        twin.reset(seed=0)
        for _ in range(150):
            actions = rng.integers(0, 2, 3)
            step = envs.step(actions)
            for i in range(3):
                twin.state, twin.steps_beyond_terminated = obs[i].astype(np.float64), None  # type: ignore[attr-defined]
                expected, _, terminated, _, _ = twin.step(actions[i])
                np.testing.assert_allclose(step.next_obs[i], expected, atol=1e-5)
                assert step.terminated[i] == terminated
                ends += terminated
            assert step.reward.tolist() == [1.0] * 3 and not step.truncated.any()
            obs = step.obs
        assert ends > 10

    def test_the_end_shows_the_true_last_observation_and_a_fresh_start(self, make: Make) -> None:
        envs = make("CartPole-v1")
        envs.reset(SEED)
        lengths, episodes = np.zeros(3, int), []
        for step in played(envs, 200):
            lengths += 1
            ended = step.terminated
            assert [episode.env for episode in step.episodes] == np.flatnonzero(ended).tolist()
            for i, episodic_return, length in step.episodes:
                x, _, theta, _ = step.next_obs[i]
                assert abs(x) > 2.4 or abs(theta) > np.deg2rad(12)
                assert (abs(step.obs[i]) <= 0.05).all()  # gymnasium's initial range
                assert episodic_return == length == lengths[i]
            assert (step.obs[~ended] == step.next_obs[~ended]).all()
            assert step.episodes or step.obs is step.next_obs
            lengths[ended] = 0
            episodes += step.episodes
        assert sum(episode.length for episode in episodes) + lengths.sum() == 600  # no step was fabricated

    def test_time_limit_truncates_and_termination_on_it_keeps_both_flags(self, make: Make) -> None:
        envs = make("CartPole-v1", max_episode_steps=5)
        envs.reset(SEED)
        steps = played(envs, 10)
        assert [bool(step.truncated.all()) for step in steps] == [False] * 4 + [True] + [False] * 4 + [True]
        assert not any(step.terminated.any() for step in steps)
        assert steps[4].episodes == [Episode(i, 5.0, 5) for i in range(3)]
        # Pushed one way only, CartPole falls after 8 to 10 steps: find when, and put the limit right there.
        envs.close()
        falls = make("CartPole-v1", 1)
        falls.reset(SEED)
        length = next(
            s.episodes[0].length for s in (falls.step(np.ones(1, int)) for _ in range(20)) if s.episodes
        )
        falls = make("CartPole-v1", 1, max_episode_steps=length)
        falls.reset(SEED)
        last = [falls.step(np.ones(1, int)) for _ in range(length)][-1]
        assert last.terminated[0] and last.truncated[0]

    def test_what_was_returned_is_never_written_to_again(self, make: Make) -> None:
        envs = make("CartPole-v1")
        steps, copies = [], []
        envs.reset(SEED)
        for k in range(60):
            steps += played(envs, 1, seed=k)
            copies.append([steps[-1].obs.copy(), steps[-1].next_obs.copy(), steps[-1].reward.copy()])
        for step, (obs, next_obs, reward) in zip(steps, copies, strict=True):
            assert (step.obs == obs).all() and (step.next_obs == next_obs).all()
            assert (step.reward == reward).all()

    def test_actions_of_the_wrong_number_or_range_are_refused(self, make: Make) -> None:
        envs = make("CartPole-v1")
        envs.reset(SEED)
        for actions in ([0, 1], [0, 1, 2], [-1, 0, 0]):
            with pytest.raises(ValueError, match="actions"):
                envs.step(np.array(actions))


class TestSeeds:
    def test_envs_differ_and_a_seed_gives_the_same_numbers_twice(self, make: Make) -> None:
        envs = make("CartPole-v1", 4)
        first = envs.reset(SEED)
        then = played(envs, 60)
        assert len({row.tobytes() for row in first}) == 4
        assert (envs.reset(SEED) == first).all()
        for a, b in zip(then, played(envs, 60), strict=True):
            assert (a.obs == b.obs).all() and a.episodes == b.episodes

    def test_an_env_has_its_seed_whatever_their_number_and_neighbours_share_none(self, make: Make) -> None:
        three, five = make("CartPole-v1", 3).reset(SEED), make("CartPole-v1", 5).reset(SEED)
        assert (three == five[:3]).all()
        rows = np.concatenate([make("CartPole-v1", 8).reset(np.random.SeedSequence(s)) for s in range(6)])
        assert len({row.tobytes() for row in rows}) == 48

    @pytest.mark.filterwarnings("ignore:.*precision lowered")
    def test_seeds_of_envs_do_not_follow_one_another(self, make: Make) -> None:
        ours, first = make("CartPole-v1", 2).reset(SEED), seed_of(SEED, 0)
        pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=2, seed=first)
        theirs, _ = pool.reset()  # seeds `first` and `first + 1`
        assert (ours[0] == theirs[0]).all() and (ours[1] != theirs[1]).all()


class TestSavedState:
    def test_restored_envs_start_new_episodes_and_go_on_counting(self, make: Make) -> None:
        envs = make("CartPole-v1")
        first = envs.reset(SEED)
        played(envs, 12)
        state = envs.state_dict()
        again = make("CartPole-v1")
        restored = again.load_state_dict(state)
        assert not restored.exact.any() and len(restored.notes()) == 3
        assert (abs(restored.obs) <= 0.05).all() and (restored.obs != first).all()
        assert (make("CartPole-v1").load_state_dict(state).obs == restored.obs).all()
        assert again.state_dict() == state and state["steps"] == 12
        assert again.step(np.ones(3, int)).episodes == []
        lengths = [episode.length for step in played(again, 100) for episode in step.episodes]
        assert min(lengths) > 7  # no episode began before the restart

    def test_state_of_another_number_of_envs_is_refused(self, make: Make) -> None:
        envs = make("CartPole-v1")
        envs.reset(SEED)
        with pytest.raises(ValueError, match="3 environments, not 2"):
            make("CartPole-v1", 2).load_state_dict(envs.state_dict())

    def test_the_serial_backend_takes_the_state_and_starts_new_episodes(self, make: Make) -> None:
        envs = make("CartPole-v1")
        envs.reset(SEED)
        sync = GymnasiumEnvs("CartPole-v1", 3).make()
        assert not sync.load_state_dict(envs.state_dict()).exact.any()
        sync.close()


class TestMuJoCo:
    def test_steps_are_gymnasiums(self, make: Make) -> None:
        # Positions and velocities set from EnvPool's first observation, which then shows the root's x too.
        pytest.importorskip("mujoco", reason="needs the extra mujoco")
        envs = make("HalfCheetah-v4", 1, exclude_current_positions_from_observation=False)
        twin: Any = gym.make("HalfCheetah-v4", exclude_current_positions_from_observation=False).unwrapped
        obs = envs.reset(SEED)
        twin.reset(seed=0)
        twin.set_state(obs[0, :9].astype(np.float64), obs[0, 9:].astype(np.float64))
        rng = np.random.default_rng(0)
        for _ in range(10):
            action = rng.uniform(-2, 2, (1, 6)).astype(np.float32)
            step, expected = envs.step(action), twin.step(np.clip(action[0], -1, 1))
            assert step.obs.dtype == np.float32
            np.testing.assert_allclose(step.obs[0], expected[0], atol=2e-3)
            np.testing.assert_allclose(step.reward[0], expected[1], atol=2e-3)
        twin.close()

    def test_contact_forces_are_seen(self, make: Make) -> None:
        envs = make("Humanoid-v4", 1)
        forces = [step.next_obs[0, -84:] for step in played_from_reset(envs, 40)]
        assert np.abs(forces).max() > 1.0  # newtons; it falls

    def test_drawing_is_left_to_gymnasium(self, make: Make) -> None:
        assert "env.backend=sync" in refusal(lambda: make("HalfCheetah-v4", render=True))


class TestAtari:
    def test_lost_lives_end_the_task_but_not_the_game(self, make: Make) -> None:
        envs = make("Breakout-v5", 2, episodic_life=True, clip_rewards=True)
        obs = envs.reset(SEED)
        assert obs.dtype == np.uint8 and obs.shape == (2, 4, 84, 84)
        lost, scored, games = np.zeros(2, int), np.zeros(2), []
        for step in played(envs, 500):
            ended = [episode.env for episode in step.episodes]
            assert step.terminated[ended].all()
            lost += step.terminated
            scored += step.reward
            assert np.isin(step.reward, (-1.0, 0.0, 1.0)).all() and step.reward.dtype == np.float32
            for i, episodic_return, length in step.episodes:
                assert lost[i] == 5 and length > 100  # Breakout has five lives
                assert episodic_return == int(episodic_return) >= scored[i]
                assert (step.obs[i] == step.obs[i][:1]).all() and not (step.next_obs[i] == step.obs[i]).all()
                lost[i] = scored[i] = 0
                games.append(episodic_return)
            going_on = np.setdiff1d([0, 1], ended)
            assert (step.obs[going_on] == step.next_obs[going_on]).all()
        assert len(games) >= 2

    def test_whole_games_for_evaluation(self, make: Make) -> None:
        envs = make("Breakout-v5", 2)
        envs.reset(SEED)
        total, games = np.zeros(2), 0
        for step in played(envs, 300):
            total += step.reward
            assert step.terminated.sum() == len(step.episodes)
            for i, episodic_return, _ in step.episodes:
                assert episodic_return == total[i]
                total[i], games = 0, games + 1
        assert games >= 1

    def test_limit_counts_agent_steps(self, make: Make) -> None:
        envs = make("Breakout-v5", 1, max_episode_steps=20, episodic_life=True)
        steps = played_from_reset(envs, 40)
        assert [k for k, step in enumerate(steps, 1) if step.truncated[0]] == [20, 40]
        assert [step.episodes[0].length for step in steps if step.episodes] == [20, 20]

    def test_frames_for_videos_are_the_screen(self, make: Make) -> None:
        envs = make("Breakout-v5", 1, render=True)
        envs.reset(SEED)
        frame = envs.render(0)
        assert frame.shape == (210, 160, 3) and frame.dtype == np.uint8 and frame.std() > 10

    def test_options_that_cannot_be(self, make: Make) -> None:
        assert "env.noop_max=1" in refusal(lambda: make("Breakout-v5", noop_max=0))
        assert "env.episodic_life=false" in refusal(lambda: make("CartPole-v1", episodic_life=True))


@needs_qt
class TestProcgen:
    def test_images_actions_and_frames(self) -> None:
        family = ProcgenEnvs("starpilot", 4)
        observation_space, action_space = family.check(render=True)
        assert observation_space == spaces.Box(0, 255, (3, 64, 64), np.uint8)
        assert action_space == spaces.Discrete(15)
        envs = family.make(num_envs=2, backend="sync", render_mode="rgb_array", evaluation=True)
        obs = envs.reset(SEED)
        assert obs.shape == (2, 3, 64, 64) and obs.dtype == np.uint8 and (obs[0] != obs[1]).any()
        frame = envs.render(1)
        assert frame.shape == (256, 256, 3) and frame.dtype == np.uint8
        # Shrunk again by means of 4×4, the frame is the observation but for the smoothing.
        small = frame.reshape(64, 4, 64, 4, 3).mean((1, 3)).transpose(2, 0, 1)
        assert abs(small - obs[1]).mean() < 5 < abs(small - obs[0]).mean()
        envs.close()

    def test_returns_lengths_and_ends_agree(self) -> None:
        envs = ProcgenEnvs("starpilot", 8).make()
        total, lengths, episodes = np.zeros(8), np.zeros(8, int), 0
        for step in played_from_reset(envs, 200):
            total += step.reward
            lengths += 1
            assert [episode.env for episode in step.episodes] == np.flatnonzero(step.terminated).tolist()
            for i, episodic_return, length in step.episodes:
                assert (episodic_return, length) == (total[i], lengths[i])
                assert (step.obs[i] != step.next_obs[i]).any()
                total[i], lengths[i], episodes = 0, 0, episodes + 1
        assert episodes > 8
        envs.close()

    def test_the_timeout_of_a_game_truncates_with_its_own_last_frame(self) -> None:
        # A mouse in a maze that stands still (action 4) sees the same maze until 500 steps are over.
        envs = ProcgenEnvs("maze", 2).make()
        first = envs.reset(SEED)
        steps = [envs.step(np.full(2, 4)) for _ in range(500)]
        assert not any(step.terminated.any() or step.truncated.any() for step in steps[:-1])
        assert steps[-1].truncated.all() and not steps[-1].terminated.any()
        assert (steps[-1].next_obs == first).all() and (steps[-1].obs != first).any(axis=(1, 2, 3)).all()
        envs.close()

    def test_a_shorter_limit_truncates_and_never_marks_a_death(self) -> None:
        envs = ProcgenEnvs("starpilot", 8, max_episode_steps=50).make()
        deaths = cuts = 0
        for step in played_from_reset(envs, 150):
            for i, _, length in step.episodes:
                assert step.truncated[i] == (length == 50) and (length == 50 or step.terminated[i])
                deaths, cuts = deaths + (length < 50), cuts + (length == 50)
        assert deaths and cuts
        envs.close()

    def test_one_level_starts_alike_everywhere_and_easy_differs_from_hard(self) -> None:
        def first(**fields: Any) -> np.ndarray:
            envs = ProcgenEnvs("coinrun", 3, **fields).make()
            obs = envs.reset(SEED)
            envs.close()
            return obs

        level = first(num_levels=1, start_level=5)
        assert (level == level[0]).all()
        assert (first(num_levels=1, start_level=6) != level).any()
        assert (first(num_levels=1, start_level=5, distribution_mode="hard") != level).any()
        everything = first()
        assert len({row.tobytes() for row in everything}) == 3

    def test_every_game_is_there(self) -> None:
        for game in GAMES:
            for mode in ("easy", "hard"):
                ProcgenEnvs(game, 1, distribution_mode=mode).check(render=False)

    def test_recipe_keys_reach_the_family(self) -> None:
        env = configure("env=procgen", "network=nature_cnn", "env.num_envs=2", "env.id=maze").env
        assert isinstance(env, ProcgenEnvs) and (env.id, env.num_levels) == ("maze", 0)


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "advice"),
        [
            ({"id": "starpilott"}, "did you mean env.id=starpilot?"),
            ({"id": "procgen-coinrun-v0"}, "env.id=coinrun"),
            ({"backend": "sync"}, "env.backend=envpool"),
            ({"distribution_mode": "esay"}, "env.distribution_mode=easy"),
            ({"num_levels": -1}, "env.num_levels=0"),
            ({"start_level": 10}, "env.num_levels=200"),
            ({"num_levels": 2, "start_level": 2**31 - 2}, "env.start_level=0"),
            ({"num_threads": 0}, "env.num_threads=64"),
            ({"normalize_obs": True}, "env.normalize_obs=false"),
            ({"kwargs": {"num_levels": 3}}, "env.num_levels=3"),
        ],
    )
    def test_procgen(self, fields: dict[str, Any], advice: str) -> None:
        line = refusal(
            lambda: ProcgenEnvs(**{"id": "starpilot", "num_envs": 1, **fields}).check(render=False)
        )
        assert advice in line

    @needs_qt
    def test_procgen_options(self) -> None:
        def line(**kwargs: Any) -> str:
            return refusal(lambda: ProcgenEnvs("starpilot", 1, kwargs=kwargs).check(render=False))

        assert "env.kwargs.use_backgrounds?" in line(use_background=False)
        assert "has a type" in line(use_backgrounds=[])
        assert "env.kwargs.seed is not passed on" in line(seed=1)

    @pytest.mark.parametrize(
        ("id", "kwargs", "advice"),
        [
            ("MountainCar-v0", {"nonsense": 1}, "env.kwargs"),
            ("tests.probes:Counter-v0", {}, "env.backend=sync"),
            ("FrozenLake-v1", {}, "env.backend=sync"),
        ],
    )
    def test_gymnasium_ids(self, id: str, kwargs: dict[str, Any], advice: str) -> None:
        assert advice in refusal(lambda: GymnasiumEnvs(id, 1, "envpool", kwargs=kwargs).check(render=False))

    def test_missing_libraries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        error = ImportError("EnvPool Procgen requires the system Qt 5 runtime on Linux.\nInstall")
        assert "apt-get install libqt5core5a libqt5gui5" in _missing_library("MazeEasy-v0", error)
        monkeypatch.setitem(sys.modules, "envpool", None)
        assert "pip install -e '.[envpool]'" in refusal(lambda: EnvPoolEnvs("CartPole-v1", 1))


class TestFamilies:
    def test_classic_control_trains_on_envpool_and_is_evaluated_on_gymnasium(self) -> None:
        family = GymnasiumEnvs("Pendulum-v1", 3, "envpool", max_episode_steps=10)
        observation_space, action_space = family.check(render=False)
        envs = family.make()
        assert isinstance(envs, EnvPoolEnvs)
        assert envs.observation_space == observation_space and envs.action_space == action_space
        steps = played_from_reset(envs, 10)
        assert steps[-1].truncated.all() and len(steps[-1].episodes) == 3
        envs.close()
        evaluation = family.make(num_envs=1, backend="sync", evaluation=True)
        assert not isinstance(evaluation, EnvPoolEnvs)
        evaluation.close()

    def test_closing_ends_the_threads(self, make: Make) -> None:
        tasks = Path("/proc/self/task")
        if not tasks.is_dir():
            pytest.skip("counts threads in /proc")
        before = len(os.listdir(tasks))
        envs = make("CartPole-v1")
        envs.reset(SEED)
        assert len(os.listdir(tasks)) > before
        envs.close()
        envs.close()
        assert len(os.listdir(tasks)) == before
