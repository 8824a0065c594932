"""Atari: what ids mean, one preprocessing on every backend, whole games reported, lives seen in training."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl.envs.atari import AtariEnvs, parse
from rl.envs.atari_game import AtariGame, GameSettings
from rl.envs.atari_training import AtariTraining
from rl.envs.sync import SyncEnvs
from rl.envs.vector import Episode, Step, VectorEnv
from rl.errors import ConfigError
from rl.evaluation import evaluate
from tests.conftest import configure, launch

pytest.importorskip("ale_py", reason="needs the extra atari")
pytest.importorskip("cv2", reason="needs the extra atari")

ROOT = Path(__file__).parents[2]
SEED = np.random.SeedSequence(7)
BREAKOUT = "BreakoutNoFrameskip-v4"
Make = Callable[..., VectorEnv]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[VectorEnv] = []

    def make(id: str, num_envs: int, backend: str, *, evaluation: bool = False, **keys: Any) -> VectorEnv:
        made.append(AtariEnvs(id, num_envs, backend, **keys).make(evaluation=evaluation))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def actions_of(envs: VectorEnv, steps: int, seed: int = 0) -> np.ndarray:
    assert isinstance(envs.action_space, spaces.Discrete)
    return np.random.default_rng(seed).integers(0, envs.action_space.n, (steps, envs.num_envs))


def assert_same_step(a: Step, b: Step) -> None:
    for name in ("obs", "reward", "terminated", "truncated", "next_obs"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype and np.array_equal(x, y), name
    assert a.episodes == b.episodes


def message(id: str, **keys: Any) -> str:
    """The line that `check` refuses with."""
    with pytest.raises(ConfigError) as caught:
        AtariEnvs(id, **{"num_envs": 1, **keys}).check(render=False)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 300
    return text


class TestIds:
    @pytest.mark.parametrize(
        ("id", "meaning"),
        [
            ("BreakoutNoFrameskip-v4", ("Breakout", "breakout", 0.0)),
            ("ALE/Breakout-v5", ("Breakout", "breakout", 0.25)),
            ("Breakout-v5", ("Breakout", "breakout", 0.0)),
            ("ALE/MsPacman-v5", ("MsPacman", "ms_pacman", 0.25)),
        ],
    )
    def test_three_spellings(self, id: str, meaning: tuple[str, str, float]) -> None:
        assert parse(id) == meaning

    @pytest.mark.parametrize(
        ("id", "text"),
        [
            ("Breakout-v4", "env.id=BreakoutNoFrameskip-v4 has no sticky actions"),
            ("BreakoutDeterministic-v4", "env.id=BreakoutNoFrameskip-v4"),
            ("BreakoutNoFrameskip-v0", "env.id=ALE/Breakout-v5 has (probability 0.25)"),
            ("Breakout-ram-v4", "observes memory, not pixels: env.id=BreakoutNoFrameskip-v4"),
            ("ALE/MsPacman-ram-v5", "env.id=ALE/MsPacman-v5"),
            ("breakout", "env.id=BreakoutNoFrameskip-v4"),
            ("BrakoutNoFrameskip-v4", "did you mean env.id=BreakoutNoFrameskip-v4?"),
            ("BreakoutNoFramskip-v4", "did you mean env.id=BreakoutNoFrameskip-v4?"),
            ("ALE/Sequest-v5", "did you mean env.id=ALE/Seaquest-v5?"),
            ("CartPole-v1", "is not an Atari game"),
            ("Warlords-v5", "for one player"),
        ],
    )
    def test_others_get_the_spelling_that_works(self, id: str, text: str) -> None:
        got = message(id)
        assert got.startswith(f"env.id={id} ") and text in got

    def test_a_misspelt_game_on_the_command_line(self, tmp_path: Path) -> None:
        done = launch("env=atari", "env.id=ALE/Brakout-v5", cwd=tmp_path)
        assert done.returncode == 2 and "did you mean env.id=ALE/Breakout-v5?" in done.stdout + done.stderr
        assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []

    def test_the_log_says_once_what_it_means(self, make: Make, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "rl.envs.atari")
        make("ALE/Breakout-v5", 1, "sync", evaluation=True)
        assert caplog.messages == []
        make("ALE/Breakout-v5", 1, "sync")
        assert caplog.messages == [
            "ALE/Breakout-v5 is the game Breakout with sticky actions (probability 0.25); 4 frames a step, "
            "skipped once; a lost life is terminal in training; games of at most 108000 frames"
        ]

    @pytest.mark.parametrize("backend", ["ale", "sync"])
    def test_sticky_actions_are_those_of_the_spelling(self, make: Make, backend: str) -> None:
        plain, envpool, sticky, set_to_none = (
            make(id, 1, backend, noop_max=1, repeat_action_probability=given)
            for id, given in (
                (BREAKOUT, None),
                ("Breakout-v5", None),
                ("ALE/Breakout-v5", None),
                ("ALE/Breakout-v5", 0.0),
            )
        )
        everyone = (plain, envpool, sticky, set_to_none)
        for envs in everyone:
            envs.reset(SEED)
        same = np.ones(4, bool)
        for action in actions_of(plain, 40):
            rows = [envs.step(action).obs for envs in everyone]
            same &= [np.array_equal(row, rows[0]) for row in rows]
        assert same.tolist() == [True, True, False, True]


class TestFrames:
    def test_as_gymnasiums_own_wrappers_make_them(self) -> None:
        import ale_py

        gym.register_envs(ale_py)
        theirs = gym.wrappers.FrameStackObservation(
            gym.wrappers.AtariPreprocessing(gym.make(BREAKOUT), noop_max=0), 4
        )
        ours = AtariGame(GameSettings("breakout", 0.0, noop_max=0, fire_reset=False))
        assert np.array_equal(ours.reset(seed=1)[0], theirs.reset(seed=1)[0])
        over = False
        actions = iter(np.random.default_rng(0).integers(0, 4, 400))
        while not over:
            action = next(actions)
            a, b = ours.step(action), theirs.step(action)
            assert np.array_equal(a[0], b[0]) and a[1:3] == b[1:3]
            over = a[2]
        theirs.close()

    def test_four_frames_a_step_never_more(self) -> None:
        for id in (BREAKOUT, "ALE/Breakout-v5", "Breakout-v5"):
            game = AtariGame(AtariEnvs(id, 1)._settings())
            game.reset(seed=0)
            frames = [game._ale.getEpisodeFrameNumber()]
            for _ in range(5):
                game.step(0)
                frames.append(game._ale.getEpisodeFrameNumber())
            assert np.diff(frames).tolist() == [4] * 5

    @pytest.mark.parametrize("id", [BREAKOUT, "PongNoFrameskip-v4"])
    @pytest.mark.parametrize(("backend", "evaluation"), [("sync", False), ("sync", True), ("envpool", False)])
    def test_backends_agree(self, make: Make, id: str, backend: str, evaluation: bool) -> None:
        # noop_max=1: no idle frames, so all games start alike. Games end by themselves and by the limit.
        if backend == "envpool":
            pytest.importorskip("envpool", reason="needs the extra envpool")
        ale, other = (
            make(id, 2, name, noop_max=1, max_episode_steps=210, evaluation=evaluation)
            for name in ("ale", backend)
        )
        assert np.array_equal(ale.reset(SEED), other.reset(SEED))
        ends = np.zeros(2, int)
        for action in actions_of(ale, 430):
            a, b = ale.step(action), other.step(action)
            assert_same_step(a, b)
            assert (a.obs is a.next_obs) == (a.episodes == [])
            ends += [a.terminated.sum(), a.truncated.sum()]
        assert ends[1] > 0 and (ends[0] > 0) == (id == BREAKOUT)

    @pytest.mark.parametrize("backend", ["ale", "sync"])
    def test_a_time_limit_shows_the_true_last_frame(self, make: Make, backend: str) -> None:
        limited, free = (make(BREAKOUT, 2, backend, noop_max=1, max_episode_steps=n) for n in (6, None))
        first = limited.reset(SEED)
        free.reset(SEED)
        for action in actions_of(free, 5):
            step = limited.step(action)
            assert_same_step(step, free.step(action))
            assert not (step.terminated | step.truncated).any()
        last, same = limited.step(np.zeros(2, np.int64)), free.step(np.zeros(2, np.int64))
        assert last.truncated.all() and not last.terminated.any()
        assert [(episode.env, episode.length) for episode in last.episodes] == [(0, 6), (1, 6)]
        assert np.array_equal(last.next_obs, same.next_obs)
        assert np.array_equal(last.obs, first) and not np.array_equal(last.next_obs, first)


class ScriptedLives(gym.Env[np.ndarray, np.int64]):
    """Rewards and lives step by step: two lives lost, a life won, none shown for a step before the end."""

    observation_space = spaces.Box(0, 255, (1,), np.uint8)
    action_space = spaces.Discrete(2)
    script = ((0.0, 3), (7.0, 2), (-3.0, 2), (0.0, 3), (0.5, 2), (0.0, 0), (2.0, 0))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.lives = 0, 3
        return np.zeros(1, np.uint8), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward, self.lives = self.script[self.steps]
        self.steps += 1
        return np.full(1, self.steps, np.uint8), reward, self.steps == len(self.script), False, {}


def _itself(game: ScriptedLives) -> ScriptedLives:
    return game


def _lives_of(game: ScriptedLives) -> np.ndarray:
    return np.array([game.lives])


class TestLives:
    def views(self, count: int, **keys: bool) -> list[AtariTraining]:
        games = [ScriptedLives() for _ in range(count)]
        return [
            AtariTraining(SyncEnvs([partial(_itself, game)]), partial(_lives_of, game), **keys)
            for game in games
        ]

    @pytest.mark.parametrize("episodic_life", [False, True])
    @pytest.mark.parametrize("clip_rewards", [False, True])
    def test_lives_and_signs(self, episodic_life: bool, clip_rewards: bool) -> None:
        (envs,) = self.views(1, episodic_life=episodic_life, clip_rewards=clip_rewards)
        envs.reset(SEED)
        for _ in range(2):  # two games
            steps = [envs.step(np.zeros(1, np.int64)) for _ in range(7)]
            lost = [False, True, False, False, True, False, True] if episodic_life else [False] * 6 + [True]
            assert [bool(step.terminated[0]) for step in steps] == lost
            rewards = [0, 1, -1, 0, 1, 0, 1] if clip_rewards else [0, 7, -3, 0, 0.5, 0, 2]
            assert [float(step.reward[0]) for step in steps] == rewards
            assert [len(step.episodes) for step in steps] == [0] * 6 + [1]
            assert steps[-1].episodes == [Episode(0, 6.5, 7)]

    def test_lives_come_back_with_a_saved_game(self) -> None:
        envs, restored = self.views(2, episodic_life=True, clip_rewards=True)
        envs.reset(SEED)
        envs.step(np.zeros(1, np.int64))
        assert restored.load_state_dict(envs.state_dict()).exact.all()
        assert restored.step(np.zeros(1, np.int64)).terminated.all()  # the second step loses a life


@pytest.mark.parametrize("backend", ["ale", "sync"])
class TestTraining:
    def test_five_lives_are_one_game(self, make: Make, backend: str) -> None:
        training = make(BREAKOUT, 2, backend)
        whole = make(BREAKOUT, 2, backend, evaluation=True)
        assert np.array_equal(training.reset(SEED), whole.reset(SEED))
        lives_lost, returns, episodes = np.zeros(2, int), np.zeros(2), []
        for action in actions_of(training, 600):
            seen, true = training.step(action), whole.step(action)
            assert np.array_equal(seen.obs, true.obs) and np.array_equal(seen.next_obs, true.next_obs)
            assert seen.episodes == true.episodes and not (true.terminated & ~seen.terminated).any()
            lives_lost += seen.terminated
            returns += true.reward
            if not seen.episodes:
                assert seen.obs is seen.next_obs
            for episode in seen.episodes:
                i = episode.env
                assert true.terminated[i] and lives_lost[i] == 5
                assert episode.episodic_return == returns[i] == int(returns[i])
                lives_lost[i], returns[i] = 0, 0.0
                episodes.append(episode)
        assert len(episodes) >= 4

    def test_signs_are_learnt_from_and_raw_returns_reported(self, make: Make, backend: str) -> None:
        # Qbert pays 25 for each cube: two envs, one with signs and one without, see the same game.
        signs = make("QbertNoFrameskip-v4", 1, backend, max_episode_steps=80)
        raw = make("QbertNoFrameskip-v4", 1, backend, max_episode_steps=80, clip_rewards=False)
        signs.reset(SEED)
        raw.reset(SEED)
        total, episodes = 0.0, []
        for action in actions_of(signs, 80):
            a, b = signs.step(action), raw.step(action)
            assert a.reward.dtype == np.float32 and a.reward == np.sign(b.reward)
            assert a.episodes == b.episodes
            total += float(b.reward[0])
            episodes += a.episodes
        assert total >= 25 and episodes == [Episode(0, total, 80)]

    def test_without_life_episodes_only_a_game_ends(self, make: Make, backend: str) -> None:
        envs = make(BREAKOUT, 1, backend, episodic_life=False)
        envs.reset(SEED)
        steps = [envs.step(action) for action in actions_of(envs, 300)]
        assert [step.terminated[0] for step in steps] == [bool(step.episodes) for step in steps]
        assert any(step.terminated[0] for step in steps)

    def test_env_i_is_seeded_by_child_i(self, make: Make, backend: str) -> None:
        three, two = make(BREAKOUT, 3, backend), make(BREAKOUT, 2, backend)
        a, b = three.reset(SEED), two.reset(SEED)
        assert np.array_equal(a[:2], b) and len({row.tobytes() for row in a}) > 1
        for action in actions_of(three, 250):  # into the second game
            a, b = three.step(action).obs, two.step(action[:2]).obs
            assert np.array_equal(a[:2], b)

    def test_actions_that_do_not_exist_are_refused(self, make: Make, backend: str) -> None:
        envs = make(BREAKOUT, 2, backend)
        envs.reset(SEED)
        with pytest.raises(ValueError, match="shape"):
            envs.step(np.zeros(3, np.int64))
        with pytest.raises((ValueError, IndexError), match=r"0\.\.3|out of range"):
            envs.step(np.array([0, 4]))


class TestEvaluation:
    def test_plays_whole_games(self) -> None:
        # Fire again and again: without moving, the first lives are lost before step 100.
        def fire(obs: Any, state: Any, rng: Any) -> Any:
            return np.ones(len(obs), np.int64), state

        fire.initial_state = lambda count: None  # type: ignore[attr-defined]
        family = AtariEnvs(BREAKOUT, 8, "ale", max_episode_steps=100)
        found: Any = evaluate(fire, family, SEED, episodes=2, deterministic=True)  # type: ignore[arg-type]
        assert [episode.length for episode in found] == [100, 100]
        training = family.make(num_envs=2)
        training.reset(SEED)
        assert any(training.step(np.ones(2, np.int64)).terminated.any() for _ in range(99))
        training.close()

    def test_a_frame_to_film(self, make: Make) -> None:
        envs = make(BREAKOUT, 1, "sync")
        envs.reset(SEED)
        frame = envs.render(0)
        assert frame.shape == (210, 160, 3) and frame.dtype == np.uint8 and frame.std() > 0
        assert envs.render_fps == 15.0
        with pytest.raises(RuntimeError, match=r"env\.backend=sync can"):
            make(BREAKOUT, 1, "ale").render(0)


class TestSavedState:
    @pytest.mark.parametrize(("id", "limit"), [("ALE/Breakout-v5", None), ("BeamRiderNoFrameskip-v4", 150)])
    def test_sync_continues_exactly(self, make: Make, id: str, limit: int | None) -> None:
        # Sticky actions; and a game that starts otherwise after power-on, saved in its second episode.
        envs, restored = (make(id, 2, "sync", max_episode_steps=limit) for _ in range(2))
        envs.reset(SEED)
        actions = actions_of(envs, 460)
        for action in actions[:230]:
            envs.step(action)
        loaded = restored.load_state_dict(envs.state_dict())
        assert loaded.exact.all()
        lost = 0
        for action in actions[230:]:
            step = envs.step(action)
            assert_same_step(step, restored.step(action))
            lost += int(step.terminated.sum())
        assert lost > 0 or id != "ALE/Breakout-v5"

    def test_ale_starts_new_games_and_says_so(self, make: Make) -> None:
        envs, again, later = (make(BREAKOUT, 2, "ale") for _ in range(3))
        envs.reset(SEED)
        actions = actions_of(envs, 20)
        for action in actions[:10]:
            envs.step(action)
        state = envs.state_dict()
        restored = again.load_state_dict(state)
        assert not restored.exact.any() and len(restored.notes()) == 2
        assert "a new one starts" in restored.notes()[0]
        assert np.array_equal(restored.obs, later.load_state_dict(state).obs)  # seeded, not random
        for action in actions[10:]:
            assert_same_step(again.step(action), later.step(action))
        assert again.state_dict()["steps"] == 20
        fresh = [later.load_state_dict({**state, "steps": n}).obs.tobytes() for n in range(3)]
        assert len(set(fresh)) > 1  # new games are not always the same ones

    def test_each_backend_loads_the_others(self, make: Make) -> None:
        ale, sync = make(BREAKOUT, 2, "ale"), make(BREAKOUT, 2, "sync")
        for envs in (ale, sync):
            envs.reset(SEED)
            envs.step(np.zeros(2, np.int64))
        saved_by_ale, saved_by_sync = ale.state_dict(), sync.state_dict()
        assert not ale.load_state_dict(saved_by_sync).exact.any()
        assert not sync.load_state_dict(saved_by_ale).exact.any()
        assert ale.state_dict()["steps"] == sync.state_dict()["steps"] == 1


class TestKeys:
    def test_the_yaml_is_the_dataclass(self) -> None:
        family = configure("env=atari").env
        assert family == AtariEnvs(BREAKOUT, 8, clip_obs=10.0, clip_reward=10.0)

    def test_spaces_of_every_backend(self) -> None:
        for backend in ("ale", "sync"):
            box, actions = AtariEnvs(BREAKOUT, 8, backend, frame_stack=1).check(render=True)
            assert box == spaces.Box(0, 255, (1, 84, 84), np.uint8) and actions == spaces.Discrete(4)
        assert AtariEnvs(BREAKOUT, 8, full_action_space=True).check(render=False)[1] == spaces.Discrete(18)

    @pytest.mark.parametrize(
        ("keys", "text"),
        [
            ({"backend": "snyc"}, "try env.backend=sync"),
            ({"num_envs": 0}, "env.num_envs=0 must be at least 1"),
            ({"frame_skip": 0}, "try env.frame_skip=1"),
            ({"noop_max": -1}, "try env.noop_max=0"),
            ({"repeat_action_probability": 1.0}, "env.repeat_action_probability=null"),
            ({"normalize_obs": True}, "env.normalize_obs=false"),
            ({"kwargs": {"frame_skip": 2}}, "set env.frame_skip=2"),
            ({"kwargs": {"obs_type": "ram"}}, "it takes mode and difficulty"),
            ({"kwargs": {"mode": 4}}, "set env.backend=sync"),
            ({"kwargs": {"mode": 3}, "backend": "sync"}, "try env.kwargs.mode=0"),
        ],
    )
    def test_what_cannot_be(self, keys: dict[str, Any], text: str) -> None:
        assert text in message(BREAKOUT, **keys)

    def test_modes_reach_the_game(self) -> None:
        games = [
            SyncEnvs([partial(AtariGame, GameSettings("breakout", 0.0, mode=mode))]) for mode in (None, 0, 12)
        ]
        first, same, other = (envs.reset(SEED) for envs in games)
        assert np.array_equal(first, same)
        for action in np.random.default_rng(0).integers(0, 4, (60, 1)):
            first, same, other = (envs.step(action).obs for envs in games)
        assert np.array_equal(first, same) and not np.array_equal(first, other)


class TestPackages:
    def python(self, program: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @pytest.mark.parametrize("package", ["ale_py", "cv2"])
    def test_a_missing_one_names_our_extra(self, package: str) -> None:
        out = self.python(
            f"import sys; sys.modules[{package!r}] = None\n"
            "from rl.envs.atari import AtariEnvs, ConfigError\n"
            f"try: AtariEnvs({BREAKOUT!r}, 1).check(render=False)\n"
            "except ConfigError as error: print(error)"
        )
        assert out.startswith(f"env.id={BREAKOUT} needs the package {package}, which is not installed")
        assert out.endswith(": pip install -e '.[atari]'\n") and out.count("\n") == 1

    def test_the_family_is_light(self) -> None:
        out = self.python(
            "import sys, rl.envs.atari, rl.schemas\n"
            "rl.schemas.schema_of('rl.envs.atari.AtariEnvs')\n"
            "print([m for m in ('torch', 'ale_py', 'cv2', 'envpool') if m in sys.modules])"
        )
        assert out == "[]\n"
