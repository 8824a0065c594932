"""Games of several agents as rows: the right number to the right row, whoever dies, whenever games end."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from gymnasium import spaces

from rl.envs.agent_views import GameOptions
from rl.envs.parallel import ParallelEnvs, fitting_num_envs
from rl.envs.pettingzoo_envs import PettingZooEnvs
from rl.envs.vector import Episode, Step
from rl.errors import ConfigError, NonFiniteError
from tests.envs.test_saved_state import same, through_json
from tests.probes_parallel import Earners

SEED = np.random.SeedSequence(7)
ROOT = Path(__file__).parents[2]
GAMES = {  # players of each
    "pong_v3": 2,
    "surround_v2": 2,
    "tennis_v3": 2,
    "space_invaders_v2": 2,
    "warlords_v3": 4,
    "combat_plane_v2": 2,
    "combat_tank_v2": 2,
}


def family(probe: str, num_envs: int, **fields: Any) -> PettingZooEnvs:
    return PettingZooEnvs(f"tests.probes_parallel:{probe}", num_envs, **fields)


def made(probe: str, num_envs: int, **fields: Any) -> ParallelEnvs:
    envs = family(probe, num_envs, **fields).make()
    assert isinstance(envs, ParallelEnvs)
    return envs


def zeros(envs: ParallelEnvs) -> np.ndarray:
    return np.zeros(envs.num_envs, np.int64)


def after(envs: ParallelEnvs, steps: int) -> Step:
    """The last of so many steps with action 0."""
    return [envs.step(zeros(envs)) for _ in range(steps)][-1]


def refusal(probe: str, num_envs: int, *, render: bool = False, **fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        family(probe, num_envs, **fields).check(render=render)
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestRows:
    """Three agents that earn 1, 2, 3 a step; the first dies on step 2 of 5, two games side by side."""

    kwargs = {"agents": 3, "length": 5, "dies": {0: 2}}  # noqa: RUF012

    def test_returns_arrive_at_their_row_whoever_dies_and_in_the_next_game_too(self) -> None:
        envs = made("Earners", 6, kwargs=self.kwargs)
        envs.reset(SEED)
        ended = {t: envs.step(zeros(envs)).episodes for t in range(1, 11)}
        first = [Episode(0, 2.0, 2), Episode(3, 2.0, 2)]  # 1 × 2
        last = [Episode(1, 10.0, 5), Episode(2, 15.0, 5), Episode(4, 10.0, 5), Episode(5, 15.0, 5)]
        expected: dict[int, list[Episode]] = {t: [] for t in range(1, 11)} | {
            2: first,
            5: last,
            7: first,
            10: last,
        }
        assert ended == expected

    def test_a_dead_row_is_masked_until_its_game_ends(self) -> None:
        envs = made("Earners", 3, kwargs=self.kwargs, agent_indicator=False)
        envs.reset(SEED)
        steps = [envs.step(zeros(envs)) for _ in range(6)]
        rewards = [[1, 2, 3], [1, 2, 3], [0, 2, 3], [0, 2, 3], [0, 2, 3], [1, 2, 3]]
        assert [step.reward.tolist() for step in steps] == rewards
        dead = [False, True, True]
        assert [None if step.active is None else step.active.tolist() for step in steps] == [
            None,
            None,  # it lived when it acted
            dead,
            dead,
            dead,
            None,
        ]
        terminated = [
            [False] * 3,
            [True, False, False],
            [True, False, False],
            [True, False, False],
            [True] * 3,
        ]
        assert [step.terminated.tolist() for step in steps[:5]] == terminated
        assert not any(step.truncated.any() for step in steps)
        # [steps done, game, place]: its last sight is a successor, and then it sees nothing
        assert steps[1].next_obs[0].tolist() == [2, 0, 0]
        assert steps[1].obs.tolist() == [[0, 0, 0], [2, 0, 1], [2, 0, 2]]
        assert steps[2].obs is steps[2].next_obs
        assert steps[3].obs.tolist() == [[0, 0, 0], [4, 0, 1], [4, 0, 2]]

    def test_a_game_that_ends_begins_anew_within_the_step(self) -> None:
        envs = made("Earners", 3, kwargs=self.kwargs, agent_indicator=False)
        envs.reset(SEED)
        step = after(envs, 5)
        assert step.next_obs.tolist() == [[0, 0, 0], [5, 0, 1], [5, 0, 2]]  # who was dead saw no end
        assert step.obs.tolist() == [[0, 1, 0], [0, 1, 1], [0, 1, 2]]

    def test_only_who_lives_acts_and_in_its_own_name(self) -> None:
        envs = made("Earners", 6, kwargs=self.kwargs)
        envs.reset(SEED)
        for _ in range(3):
            envs.step(np.array([0, 1, 2, 2, 1, 0]))
        env: Any = envs._games[1].env
        everybody = {"agent_0": 2, "agent_1": 1, "agent_2": 0}
        assert env.given == [everybody, everybody, {"agent_1": 1, "agent_2": 0}]

    def test_an_agent_that_leaves_without_a_flag_has_terminated(self) -> None:
        envs = made("LeavesWithoutAFlag", 3, kwargs=self.kwargs)
        envs.reset(SEED)
        episodes = [envs.step(zeros(envs)).episodes for _ in range(5)]
        assert episodes[1] == [Episode(0, 2.0, 2)]
        assert episodes[4] == [Episode(1, 10.0, 5), Episode(2, 15.0, 5)]

    def test_flags_are_the_games_own(self) -> None:
        envs = made("Earners", 3, kwargs={**self.kwargs, "truncates": True})
        envs.reset(SEED)
        step = after(envs, 5)
        assert step.terminated.tolist() == [True, False, False]
        assert step.truncated.tolist() == [False, True, True]

    def test_time_limit_cuts_those_that_live(self) -> None:
        envs = made("Earners", 3, kwargs=self.kwargs, max_episode_steps=3)
        envs.reset(SEED)
        step = after(envs, 3)
        assert step.truncated.tolist() == [False, True, True]
        assert step.episodes == [Episode(1, 6.0, 3), Episode(2, 9.0, 3)]
        assert step.obs[:, :2].tolist() == [[0, 1]] * 3
        assert envs.step(zeros(envs)).active is None

    def test_both_flags_when_the_limit_meets_a_death(self) -> None:
        envs = made("Earners", 3, kwargs=self.kwargs, max_episode_steps=2)
        envs.reset(SEED)
        envs.step(zeros(envs))
        step = envs.step(zeros(envs))
        assert step.terminated.tolist() == [True, False, False]
        assert step.truncated.tolist() == [False, True, True]
        assert [episode.env for episode in step.episodes] == [0, 1, 2]

    def test_sign_of_rewards_is_learnt_from_and_raw_returns_are_reported(self) -> None:
        envs = made("Earners", 3, kwargs=self.kwargs, clip_rewards=True)
        envs.reset(SEED)
        assert envs.step(zeros(envs)).reward.tolist() == [1, 1, 1]
        assert envs.step(zeros(envs)).episodes == [Episode(0, 2.0, 2)]
        evaluated = family("Earners", 3, clip_rewards=True).make(evaluation=True)
        evaluated.reset(SEED)
        assert evaluated.step(np.zeros(3, np.int64)).reward.tolist() == [1, 2, 3]

    def test_boxes_are_clipped_and_the_game_may_change_what_it_is_given(self) -> None:
        envs = made("Steering", 2, kwargs={"agents": 2})
        envs.reset(SEED)
        actions = np.array([[0.25, 9.0], [-9.0, 0.125]], np.float32)
        assert envs.step(actions).reward.tolist() == [0.75, -0.375]
        assert actions.tolist() == [[0.25, 9.0], [-9.0, 0.125]]
        other = made("Steering", 2, kwargs={"agents": 2})
        assert other.load_state_dict(through_json(envs.state_dict())).exact.all()

    def test_reward_that_is_not_a_number(self) -> None:
        envs = made("PaysNaN", 4, kwargs={"agents": 2})
        envs.reset(SEED)
        with pytest.raises(NonFiniteError, match=r"reward of environment 1 .*PaysNaN.* is nan"):
            envs.step(zeros(envs))

    def test_frames_are_those_of_the_rows_game(self) -> None:
        envs = family("Earners", 4, kwargs={"agents": 2}).make(render_mode="rgb_array")
        envs.reset(SEED)
        envs.step(np.zeros(4, np.int64))
        assert envs.render(3).tolist() == np.full((4, 6, 3), 1).tolist()
        assert envs.render_fps == 20  # vectors skip no frame
        envs.close()
        envs.close()
        assert [game.env.closed for game in envs._games] == [1, 1]  # type: ignore[attr-defined]


class TestObservations:
    def test_vectors_end_with_a_one_hot_of_the_place(self) -> None:
        envs = made("Earners", 4, kwargs={"agents": 2})
        obs = envs.reset(SEED)
        assert obs.tolist() == [[0, 0, 0, 1, 0], [0, 0, 1, 0, 1]] * 2
        space = envs.observation_space
        assert obs.dtype == space.dtype == np.float32
        assert space.low.tolist() == [-1, -1, -1, 0, 0]
        assert space.high.tolist() == [1000, 1000, 1000, 1, 1]

    def test_dicts_are_flattened(self) -> None:
        envs = made("DictEyes", 2, kwargs={"agents": 2}, agent_indicator=False)
        envs.reset(SEED)
        assert envs.step(zeros(envs)).obs.tolist() == [[1, 0, 0, 1], [0, 1, 0, 1]]

    @pytest.mark.parametrize("probe", ["Screens", "GreyScreens"])
    def test_images_are_skipped_pooled_stacked_and_marked(self, probe: str) -> None:
        envs = made(probe, 2, kwargs={"agents": 2, "length": 6}, frame_stack=2)
        assert envs.observation_space == spaces.Box(0, 255, (4, 84, 84), np.uint8)
        assert envs.render_fps == 5  # 20 a second, every fourth is seen
        obs = envs.reset(SEED)

        def levels(obs: np.ndarray) -> list[list[int]]:
            assert obs.dtype == np.uint8
            assert (obs == obs[:, :, :1, :1]).all()
            return obs[:, :, 0, 0].tolist()

        # frames 0 … are 10, 200, 30, 40, 50, 60, 120, 80; the first stack repeats the first frame
        assert levels(obs) == [[10, 10, 255, 0], [10, 10, 0, 255]]
        step = envs.step(zeros(envs))
        assert levels(step.obs) == [[10, 50, 255, 0], [10, 50, 0, 255]]  # max(frame 3, frame 4), not 200
        assert step.reward.tolist() == [4, 8]  # 1 and 2 a frame, four frames
        step = envs.step(zeros(envs))  # over on frame 6: max(60, 120)
        assert levels(step.next_obs) == [[50, 120, 255, 0], [50, 120, 0, 255]]
        assert levels(step.obs) == [[10, 10, 255, 0], [10, 10, 0, 255]]
        assert step.episodes == [Episode(0, 6.0, 2), Episode(1, 12.0, 2)]  # 6 frames, 2 agent steps

    def test_a_dead_row_is_black_and_its_last_image_is_a_successor(self) -> None:
        envs = made("Screens", 2, kwargs={"agents": 2, "length": 8, "dies": {1: 2}}, frame_stack=1)
        envs.reset(SEED)
        step = envs.step(zeros(envs))
        assert step.next_obs[:, :, 0, 0].tolist() == [[50, 255, 0], [200, 0, 255]]  # max(frames 1 and 2)
        assert step.obs[:, :, 0, 0].tolist() == [[50, 255, 0], [0, 0, 0]]
        assert step.reward.tolist() == [4, 4]  # 1 × 4; 2 × 2, then dead
        assert step.episodes == [Episode(1, 4.0, 1)]

    def test_one_frame_a_step_is_not_pooled(self) -> None:
        envs = made("Screens", 2, kwargs={"agents": 2}, frame_skip=1, frame_stack=1, agent_indicator=False)
        envs.reset(SEED)
        assert [int(envs.step(zeros(envs)).obs[0, 0, 0, 0]) for _ in range(3)] == [200, 30, 40]

    def test_without_indicator(self) -> None:
        box, _ = family("Screens", 2, kwargs={"agents": 2}, agent_indicator=False).check(render=False)
        assert box.shape == (4, 84, 84)


class TestSeeds:
    def test_every_game_has_its_own_and_the_same_again(self) -> None:
        def seeds(root: int) -> list[list[int]]:
            envs = made("Earners", 4, kwargs={"agents": 2, "length": 2})
            envs.reset(np.random.SeedSequence(root))
            for _ in range(4):
                envs.step(zeros(envs))
            return [game.env.seeds for game in envs._games]  # type: ignore[attr-defined]

        first = seeds(1)
        assert [len(each) for each in first] == [3, 3]
        flat = [seed for each in first for seed in each]
        assert len(set(flat)) == 6
        assert seeds(1) == first
        assert not set(flat) & {seed for each in seeds(2) for seed in each}

    def test_more_games_leave_the_first_as_they_are(self) -> None:
        few, many = (made("Walkers", n, kwargs={"agents": 2}) for n in (2, 6))
        assert many.reset(SEED)[:2].tobytes() == few.reset(SEED).tobytes()


class TestSavedState:
    kwargs = {"agents": 3, "length": 6, "dies": {1: 2}}  # noqa: RUF012

    @pytest.mark.parametrize("before", [0, 1, 3, 6, 10])
    def test_continues_bit_for_bit(self, before: int) -> None:
        envs, other = (made("Walkers", 6, kwargs=self.kwargs) for _ in range(2))
        obs = envs.reset(SEED)
        rng = np.random.default_rng(3)
        for _ in range(before):
            obs = envs.step(rng.integers(3, size=6)).obs
        restored = other.load_state_dict(through_json(envs.state_dict()))
        assert restored.exact.tolist() == [True] * 6
        assert restored.obs.tobytes() == obs.tobytes()
        for _ in range(15):
            actions = rng.integers(3, size=6)
            a, b = envs.step(actions), other.step(actions)
            assert same(a, b)
            assert (a.active is None) == (b.active is None)
            assert a.active is None or b.active is None or (a.active == b.active).all()
        assert repr(envs.state_dict()) == repr(other.state_dict())

    def test_images_come_back_with_their_stack(self) -> None:
        envs, other = (made("Screens", 2, kwargs={"agents": 2, "length": 8}) for _ in range(2))
        envs.reset(SEED)
        obs = envs.step(zeros(envs)).obs
        restored = other.load_state_dict(through_json(envs.state_dict()))
        assert restored.exact.all()
        assert restored.obs.tobytes() == obs.tobytes()
        assert same(envs.step(zeros(envs)), other.step(zeros(envs)))

    def test_what_cannot_be_replayed_begins_the_next_game_and_says_so(self) -> None:
        envs, other = (made("Unseeded", 4, kwargs={"agents": 2}) for _ in range(2))
        envs.reset(SEED)
        envs.step(zeros(envs))
        restored = other.load_state_dict(through_json(envs.state_dict()))
        assert restored.exact.tolist() == [False] * 4
        assert restored.obs[:, 0].tolist() == [0] * 4  # no step done
        assert len(restored.notes()) == 4
        first, again = envs._games[0], other._games[0]
        assert again.env.seeds[-1] not in first.env.seeds  # type: ignore[attr-defined]
        step = other.step(zeros(other))
        assert step.active is None
        assert [game.returns for game in other._games] == [[1.0, 2.0]] * 2

    def test_long_games_are_not_remembered(self) -> None:
        envs = ParallelEnvs(lambda: Earners(2, length=100), 2, GameOptions(), name="long", remembered_steps=3)
        envs.reset(SEED)
        kept = []
        for _ in range(5):
            envs.step(zeros(envs))
            kept.append(envs.state_dict()["games"][0]["actions"] is not None)
        assert kept == [True, True, True, True, False]
        assert not envs.load_state_dict(through_json(envs.state_dict())).exact.any()

    def test_another_number_of_games(self) -> None:
        envs = made("Earners", 6)
        envs.reset(SEED)
        with pytest.raises(ValueError, match="of 6 rows, not 3"):
            made("Earners", 3).load_state_dict(envs.state_dict())

    def test_before_any_reset(self) -> None:
        with pytest.raises(RuntimeError, match="never reset"):
            made("Earners", 3).state_dict()


class TestRefusals:
    @pytest.mark.parametrize(("num_envs", "works"), [(16, 15), (2, 3), (1, 3), (17, 18), (4, 3)])
    def test_rows_that_are_no_whole_number_of_games(self, num_envs: int, works: int) -> None:
        message = refusal("Earners", num_envs)
        assert f"env.num_envs={num_envs} counts agents" in message
        assert f"env.num_envs={works} is a whole number of games" in message
        with pytest.raises(ConfigError, match=f"env.num_envs={works}"):
            made("Earners", num_envs)

    def test_of_two_equally_near_the_larger(self) -> None:
        assert fitting_num_envs(15, 2) == 16

    def test_evaluation_completes_the_last_game(self) -> None:
        envs = family("Earners", 3).make(num_envs=4, evaluation=True)
        assert envs.num_envs == 6
        assert envs.reset(SEED).shape == (6, 6)

    @pytest.mark.parametrize(
        ("probe", "fields", "parts"),
        [
            ("DifferentEyes", {}, ("agent_0 sees", "agent agent_2", "same space")),
            ("DifferentHands", {}, ("agent_0 acts in Discrete(3)", "Discrete(4)")),
            ("DictActions", {}, ("Dict action space", "Discrete")),
            ("ChannelsFirst", {}, ("(3, 42, 168)", "[H, W, 3]")),
            ("Earner", {}, ("no function or class 'Earner'", "tests.probes_parallel:Earners?")),
            ("NOT_CALLABLE", {}, ("no function or class",)),
            ("not_an_environment", {}, ("without possible_agents",)),
            ("TakesTurns", {}, ("aec_to_parallel",)),
            ("Earners", {"kwargs": {"size": 3}}, ("env.kwargs.size is not an argument",)),
            ("Earners", {"kwargs": {"agents": "many"}}, ("env.kwargs=", "was refused")),
            ("Earners", {"kwargs": {"frame_skip": 3}}, ("set env.frame_skip=3 instead",)),
            ("Earners", {"kwargs": {"render_mode": "human"}}, ("capture_video=true",)),
            ("Earners", {"backend": "async"}, ("env.backend=async", "env.backend=sync")),
            ("Earners", {"frame_skip": 0}, ("env.frame_skip=0 must be at least 1",)),
            ("Earners", {"noop_max": -1}, ("env.noop_max=-1 must be at least 0",)),
            ("Earners", {"max_episode_steps": 0}, ("env.max_episode_steps=0",)),
            ("NoRenderMode", {"render": True}, ("takes no render_mode", "capture_video=false")),
        ],
    )
    def test_one_line_says_what_would_work(
        self, probe: str, fields: dict[str, Any], parts: tuple[str, ...]
    ) -> None:
        message = refusal(probe, 3, **fields)
        for part in parts:
            assert part in message

    def test_a_module_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match=r"no module 'my_package'.*env.id=pong_v3"):
            PettingZooEnvs("my_package.my_game:make", 2).check(render=False)

    def test_a_module_alone_means_its_parallel_env(self) -> None:
        box, actions = PettingZooEnvs("tests.probes_parallel", 2).check(render=True)
        assert box.shape == (5,)
        assert actions == spaces.Discrete(3)

    @pytest.mark.parametrize("module", ["pettingzoo", "multi_agent_ale_py", "ale_py", "cv2", "pygame"])
    def test_a_package_that_is_missing(self, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == module else find_spec(name)
        )
        with pytest.raises(
            ConfigError, match=rf"needs the package {module}.*pip install -e '\.\[pettingzoo\]'"
        ):
            PettingZooEnvs("pong_v3", 2).check(render=False)


def test_nothing_heavy_is_imported_with_the_family() -> None:
    heavy = ("torch", "cv2", "pettingzoo", "pygame", "ale_py")
    program = f"import sys, rl.envs.pettingzoo_envs\nprint([m for m in {heavy} if m in sys.modules])"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_yaml_and_dataclass_have_the_same_keys() -> None:
    values = yaml.safe_load((ROOT / "conf/env/pettingzoo_atari.yaml").read_text())
    assert values.pop("_target_") == "rl.envs.pettingzoo_envs.PettingZooEnvs"
    assert set(values) == set(PettingZooEnvs.__dataclass_fields__)
    assert PettingZooEnvs(**values).num_envs == 16


class TestAtari:
    """The real games, with the ROMs that ale-py brings."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        for package in ("pettingzoo", "multi_agent_ale_py", "ale_py", "cv2"):
            pytest.importorskip(package, reason="the extra `pettingzoo` is not installed")

    @pytest.mark.parametrize("id", GAMES)
    def test_every_game_plays(self, id: str) -> None:
        players = GAMES[id]
        envs = PettingZooEnvs(id, players, clip_rewards=True, noop_max=30).make()
        try:
            assert envs.num_envs == players
            assert isinstance(envs.action_space, spaces.Discrete)
            obs = envs.reset(SEED)
            assert obs.shape == (players, 4 + players, 84, 84)
            assert obs.dtype == np.uint8
            who = obs[:, 4:].reshape(players, players, -1)
            assert (who == 255 * np.eye(players, dtype=np.uint8)[:, :, None]).all()
            rng = np.random.default_rng(0)
            changed = False
            for _ in range(50):
                step = envs.step(rng.integers(envs.action_space.n, size=players))
                assert (step.next_obs[:, 2] == obs[:, 3]).all() or step.active is not None
                assert set(step.reward.tolist()) <= {-1.0, 0.0, 1.0}
                changed = changed or bool((step.obs != obs).any())
                obs = step.obs
            assert changed
        finally:
            envs.close()

    def test_an_action_is_held_for_four_frames_and_no_more(self) -> None:
        envs: Any = PettingZooEnvs("pong_v3", 2).make()
        try:
            envs.reset(SEED)
            for t in range(1, 6):
                envs.step(zeros(envs))
                assert envs._games[0].env.frame == 4 * t
            assert envs.render_fps == 15
        finally:
            envs.close()

    def test_games_begin_apart_continue_exactly_and_are_drawn(self) -> None:
        factory = PettingZooEnvs("pong_v3", 4, noop_max=30)
        envs, other = factory.make(render_mode="rgb_array"), factory.make()
        try:
            envs.reset(SEED)
            rng = np.random.default_rng(0)
            frames = [game.env.frame for game in envs._games]  # type: ignore[attr-defined]
            assert frames[0] != frames[1]
            assert all(1 <= count <= 30 for count in frames)
            step = [envs.step(rng.integers(6, size=4)) for _ in range(40)][-1]
            restored = other.load_state_dict(through_json(envs.state_dict()))
            assert restored.exact.tolist() == [True] * 4
            assert restored.obs.tobytes() == step.obs.tobytes()
            for _ in range(40):
                actions = rng.integers(6, size=4)
                assert same(envs.step(actions), other.step(actions))
            assert envs.render(2).shape == (210, 160, 3)
        finally:
            envs.close()
            other.close()

    def test_a_death_in_a_real_game(self) -> None:
        """Warlords: whoever loses its castle is out with -1 while the others play on (here at step 545)."""
        envs, other = (PettingZooEnvs("warlords_v3", 4).make() for _ in range(2))
        try:
            envs.reset(np.random.SeedSequence(5))
            rng = np.random.default_rng(1)
            step = envs.step(rng.integers(6, size=4))
            while not step.episodes:
                step = envs.step(rng.integers(6, size=4))
            (episode,) = step.episodes
            dead = np.arange(4) == episode.env
            assert episode.episodic_return == -1
            assert (step.terminated == dead).all()
            assert step.next_obs[dead].any()
            assert not step.obs[dead].any()
            restored = other.load_state_dict(through_json(envs.state_dict()))
            assert restored.exact.all()
            assert restored.obs.tobytes() == step.obs.tobytes()
            step = envs.step(np.zeros(4, np.int64))
            assert step.active is not None
            assert (step.active == ~dead).all()
            assert same(step, other.step(np.zeros(4, np.int64)))
        finally:
            envs.close()
            other.close()

    def test_pong_is_played_against_each_other(self) -> None:
        """What one player wins the other loses, in rewards as in returns of whole games to 21."""
        envs = PettingZooEnvs("pong_v3", 2, clip_rewards=True).make()
        try:
            envs.reset(SEED)
            rng = np.random.default_rng(0)
            won = np.zeros(2)
            step = envs.step(np.zeros(2, np.int64))
            while not step.episodes:
                won += step.reward
                step = envs.step(rng.integers(6, size=2))
            won += step.reward
            left, right = step.episodes
            assert left.episodic_return == -right.episodic_return == won[0] == -won[1]
            assert step.terminated.all()
        finally:
            envs.close()

    @pytest.mark.parametrize(
        ("id", "near"),
        [
            ("pong_v2", "pong_v3"),
            ("pongg_v3", "pong_v3"),
            ("SpaceInvaders-v4", "space_invaders_v2"),
            ("combat-tanks", "combat_tank_v2"),
        ],
    )
    def test_a_misspelt_game(self, id: str, near: str) -> None:
        with pytest.raises(ConfigError, match=f"did you mean env.id={near}"):
            PettingZooEnvs(id, 2).check(render=False)

    def test_four_players_of_pong_need_whole_games_of_four(self) -> None:
        with pytest.raises(ConfigError, match=r"env\.num_envs=8 is a whole number"):
            PettingZooEnvs("pong_v3", 6, kwargs={"num_players": 4}).check(render=False)

    def test_ram_is_a_row_of_floats(self) -> None:
        box, _ = PettingZooEnvs("pong_v3", 2, kwargs={"obs_type": "ram"}).check(render=False)
        assert box.shape == (130,)
        assert box.dtype == np.float32
