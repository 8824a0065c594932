"""What a user may ask for, and the one line they read when it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rl.envs.gymnasium_envs import GymnasiumEnvs
from rl.errors import ConfigError

ROOT = Path(__file__).parents[2]


def message(id: str, *, render: bool = False, **fields: Any) -> str:
    """The line that `check` refuses with."""
    with pytest.raises(ConfigError) as caught:
        GymnasiumEnvs(id, **{"num_envs": 1, **fields}).check(render=render)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500
    return text


def python(program: str, *, cwd: Path = ROOT, **environ: str) -> str:
    """Output of `program` in a new interpreter, with `check(id, render)` at hand: it prints its message."""
    start = textwrap.dedent(
        """
        import sys
        from rl.envs.gymnasium_envs import GymnasiumEnvs
        from rl.errors import ConfigError
        def check(id, render=False):
            try:
                print(GymnasiumEnvs(id, 1).check(render=render))
            except ConfigError as error:
                print(error)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(program)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


class TestId:
    @pytest.mark.parametrize(
        ("id", "near"),
        [
            ("CartPole-v7", "env.id=CartPole-v1"),
            ("CartPol-v1", "env.id=CartPole-v1"),
            ("cartpole-v1", "env.id=CartPole-v1"),
            ("CartPole", "env.id=CartPole-v1"),
            ("HalfCheeta-v4", "env.id=HalfCheetah-v4"),
            ("tests.probes:Countr-v0", "env.id=tests.probes:Counter-v0"),
            ("tests.probes:CartPole-v9", "env.id=CartPole-v1"),
            ("", "env.id=CartPole-v1"),
            ("nothing like it", "env.id=my_pkg:MyEnv-v0"),
        ],
    )
    def test_unregistered_ids_get_near_matches(self, id: str, near: str) -> None:
        text = message(id)
        assert text.startswith(f"env.id={id} is not a registered environment") and near in text

    def test_a_package_that_is_not_there(self) -> None:
        assert "there is no package 'my_pkg'" in message("my_pkg:MyEnv-v0")

    def test_an_old_id_whose_code_has_gone_gets_the_new_one(self) -> None:
        assert "env.id=HalfCheetah-v5" in message("HalfCheetah-v3")

    def test_a_package_that_needs_another(self) -> None:
        text = message("tests.probes:NeedsMissingPackage-v0")
        assert "pip install package_that_nobody_has" in text

    def test_a_users_package_registers_and_works_in_workers(self, tmp_path: Path) -> None:
        (tmp_path / "my_pkg").mkdir()
        (tmp_path / "my_pkg" / "__init__.py").write_text(
            "import gymnasium\ngymnasium.register('Mine-v0', 'my_pkg.mine:Mine')\n"
        )
        (tmp_path / "my_pkg" / "mine.py").write_text("from tests.probes import Counter as Mine\n")
        program = """
            sys.path.insert(0, "")
            check("my_pkg:Mine-v0")
            check("my_pkg:Mine-v1")
            envs = GymnasiumEnvs("my_pkg:Mine-v0", 2, "async").make()
            import numpy
            print(envs.reset(numpy.random.SeedSequence(0)).tolist())
            envs.close()
            """
        assert python(program, cwd=tmp_path).splitlines() == [
            "(Box(0.0, inf, (2,), float32), Discrete(2))",
            "env.id=my_pkg:Mine-v1 is not a registered environment: did you mean env.id=my_pkg:Mine-v0?",
            "[[0.0, 0.0], [0.0, 0.0]]",
        ]


class TestPackages:
    @pytest.mark.parametrize(
        ("package", "id", "extra"),
        [
            ("mujoco", "HalfCheetah-v4", "mujoco"),
            ("Box2D", "LunarLander-v3", "box2d"),
            ("ale_py", "ALE/Breakout-v5", "atari"),
            ("ale_py", "BreakoutNoFrameskip-v4", "atari"),
        ],
    )
    def test_a_missing_one_names_our_extra(self, package: str, id: str, extra: str) -> None:
        text = python(f"sys.modules[{package!r}] = None\ncheck({id!r})")
        assert text.startswith(f"env.id={id} needs the package {package}, which is not installed")
        assert text.endswith(f": pip install -e '.[{extra}]'\n")

    def test_drawing_classic_control_needs_pygame(self) -> None:
        text = python("sys.modules['pygame'] = None\ncheck('CartPole-v1')\ncheck('CartPole-v1', render=True)")
        assert text.splitlines()[0].endswith("Discrete(2))")
        assert text.splitlines()[1].startswith("capture_video=true") and "pip install -e '.[video]'" in text


class TestSpaces:
    def test_of_a_policy(self) -> None:
        box, actions = GymnasiumEnvs("tests.probes:DictObs-v0", 1).check(render=False)
        assert box.shape == (7,) and box.dtype == np.float32 and actions == spaces.Discrete(2)
        envs = GymnasiumEnvs("HalfCheetah-v4", 1)
        assert envs.check(render=False) == (envs.make().observation_space, envs.make().action_space)

    def test_an_action_space_that_nobody_can_use(self) -> None:
        text = message("tests.probes:DictActions-v0")
        assert "Dict action space" in text and "Discrete, MultiDiscrete, MultiBinary and Box" in text


class TestKeys:
    def test_backend(self) -> None:
        assert "try env.backend=async" in message("CartPole-v1", backend="asnyc")

    @pytest.mark.parametrize("key", ["num_envs", "num_workers", "max_episode_steps"])
    def test_numbers(self, key: str) -> None:
        assert message("CartPole-v1", **{key: 0}).startswith(f"env.{key}=0 must be at least 1")

    @pytest.mark.parametrize(
        ("id", "kwargs", "text"),
        [
            (
                "HalfCheetah-v5",
                {"forward_reward_weigth": 1},
                "did you mean env.kwargs.forward_reward_weight?",
            ),
            (
                "CartPole-v1",
                {"gravity": 1},
                "env.kwargs.gravity is not an argument of CartPole-v1: it takes sutton",
            ),
            ("CartPole-v1", {"max_episode_steps": 3}, "set env.max_episode_steps=3"),
            ("CartPole-v1", {"render_mode": "human"}, "capture_video=true"),
            ("LunarLander-v3", {"gravity": 5}, "must be between -12 and 0"),
        ],
    )
    def test_kwargs(self, id: str, kwargs: dict[str, Any], text: str) -> None:
        got = message(id, kwargs=kwargs)
        assert got.startswith("env.kwargs") and text in got

    def test_they_reach_the_environment(self) -> None:
        envs = GymnasiumEnvs("tests.probes:TerminatingConstantReward-v0", 2, kwargs={"length": 4}).make(
            num_envs=1
        )
        envs.reset(np.random.SeedSequence(0))
        assert [bool(envs.step(np.zeros(1)).terminated[0]) for _ in range(4)] == [False, False, False, True]


class TestDrawing:
    @pytest.mark.parametrize("backend", ["sync", "async"])
    def test_a_frame(self, backend: str) -> None:
        factory = GymnasiumEnvs("CartPole-v1", 4, backend)
        factory.check(render=True)
        envs = factory.make(num_envs=2, render_mode="rgb_array")
        envs.reset(np.random.SeedSequence(0))
        frames = [envs.render(i) for i in (0, 1)]
        assert frames[0].dtype == np.uint8 and frames[0].shape == (400, 600, 3)
        assert (frames[0] != frames[1]).any()
        envs.close()

    def test_what_cannot_be_drawn(self) -> None:
        text = message("tests.probes:Counter-v0", render=True)
        assert "render modes are none" in text and "capture_video=false" in text

    def test_without_egl_the_way_out_is_said(self) -> None:
        # A platform that does not exist stands for a machine without the libraries.
        text = python("check('HalfCheetah-v4', render=True)", MUJOCO_GL="egl", PYOPENGL_PLATFORM="nonsense")
        assert "MUJOCO_GL=egl and apt-get install libegl1 libgl1-mesa-dri" in text.splitlines()[0]

    def test_off_screen_is_chosen_only_where_there_is_no_screen(self) -> None:
        program = """
            import os
            for key in ("SDL_VIDEODRIVER", "MUJOCO_GL"):
                os.environ.pop(key, None)
            check("CartPole-v1", render=True)
            print(os.environ.get("SDL_VIDEODRIVER"), os.environ.get("MUJOCO_GL"))
            """
        assert python(program, DISPLAY="", WAYLAND_DISPLAY="").splitlines()[-1] == "dummy egl"


class TestQuiet:
    def test_nothing_is_printed_about_old_versions_or_models(self, tmp_path: Path) -> None:
        program = "check('HalfCheetah-v4')\nGymnasiumEnvs('HalfCheetah-v4', 1).make().close()"
        out = python(program, cwd=tmp_path, PYTHONWARNINGS="always::DeprecationWarning:gymnasium")
        assert out.count("\n") == 1 and out.startswith("(Box(")
        assert list(tmp_path.iterdir()) == []  # MuJoCo would write MUJOCO_LOG.TXT

    def test_nothing_warns_here(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            GymnasiumEnvs("Hopper-v4", 1).check(render=False)

    def test_modules_are_light(self) -> None:
        program = "print([m for m in ('torch', 'mujoco', 'pygame', 'wandb', 'Box2D') if m in sys.modules])"
        assert python("import rl.envs.async_workers, rl.envs.normalization\n" + program) == "[]\n"
