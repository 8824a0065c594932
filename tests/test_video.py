"""Videos are complete, playable files or none."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rl import video
from rl.errors import ConfigError
from rl.video import VideoWriter

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")


def read(path: Path) -> np.ndarray:
    """Frames of the video, uint8 [T, H, W, 3]."""
    frames = imageio_ffmpeg.read_frames(str(path))
    width, height = next(frames)["size"]
    return np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in frames])


class TestVideo:
    def test_cartpole(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("pygame")
        import gymnasium as gym

        monkeypatch.setitem(os.environ, "SDL_VIDEODRIVER", "dummy")
        env = gym.make("CartPole-v1", render_mode="rgb_array")
        env.reset(seed=0)
        frames = []
        path = tmp_path / "videos" / "cartpole.mp4"  # the folder is made
        with VideoWriter(path, fps=50) as writer:
            for step in range(9):
                frames.append(env.render())
                writer.add(frames[-1])
                env.step(step % 2)
        env.close()
        back = read(path)
        assert back.shape == (9, 400, 600, 3) == np.stack(frames).shape
        # Lossy, yet the same picture: a cart and a pole on white.
        assert np.abs(back.astype(float) - np.stack(frames)).mean() < 3
        (meta,) = [next(imageio_ffmpeg.read_frames(str(path)))]
        assert (meta["codec"], meta["pix_fmt"].partition("(")[0], meta["fps"]) == ("h264", "yuv420p", 50)

    def test_odd_sizes_are_padded_not_scaled(self, tmp_path: Path) -> None:
        frame = np.full((33, 47, 3), 200, np.uint8)
        with VideoWriter(tmp_path / "v.mp4", fps=10) as writer:
            for _ in range(3):
                writer.add(frame)
        back = read(tmp_path / "v.mp4")
        assert back.shape == (3, 34, 48, 3)
        assert back[0, :32, :46].min() > 150 and back[0, 33].max() < 100

    def test_appears_only_when_complete(self, tmp_path: Path) -> None:
        writer = VideoWriter(tmp_path / "v.mp4", fps=10)
        writer.add(np.zeros((16, 16, 3), np.uint8))
        assert not (tmp_path / "v.mp4").exists()
        writer.close()
        writer.close()
        assert [file.name for file in tmp_path.iterdir()] == ["v.mp4"]
        assert writer.frames == 1

    def test_nothing_is_left_of_a_block_that_raises(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError), VideoWriter(tmp_path / "v.mp4", fps=10) as writer:
            writer.add(np.zeros((16, 16, 3), np.uint8))
            raise RuntimeError
        assert list(tmp_path.iterdir()) == []

    def test_no_frames_no_file(self, tmp_path: Path) -> None:
        VideoWriter(tmp_path / "v.mp4", fps=10).close()
        assert list(tmp_path.iterdir()) == []

    def test_frames_that_are_not_pictures(self, tmp_path: Path) -> None:
        writer = VideoWriter(tmp_path / "v.mp4", fps=10)
        with pytest.raises(ValueError, match=r"uint8 \[H, W, 3\], not float64 \[16, 16, 3\]"):
            writer.add(np.zeros((16, 16, 3)))
        writer.add(np.zeros((16, 16, 3), np.uint8))
        with pytest.raises(ValueError, match="changed"):
            writer.add(np.zeros((16, 18, 3), np.uint8))
        writer.discard()

    def test_ctrl_c_does_not_reach_the_encoder(self, tmp_path: Path) -> None:
        code = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from rl.video import VideoWriter
signal.signal(signal.SIGINT, lambda *_: None)  # as a run that saves before it leaves
with VideoWriter(Path(sys.argv[1]), fps=10) as writer:
    for index in range(6):
        writer.add(np.zeros((64, 64, 3), np.uint8))
        if index == 2:
            time.sleep(0.2)
            os.killpg(0, signal.SIGINT)  # what a terminal does: the whole process group gets it
            time.sleep(0.2)
"""
        command = [sys.executable, "-c", code, str(tmp_path / "v.mp4")]
        root = Path(__file__).parents[1]
        assert subprocess.run(command, cwd=root, start_new_session=True).returncode == 0
        assert len(read(tmp_path / "v.mp4")) == 6

    def test_check_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        video.check()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"pip install -e '\.\[video\]'"):
            video.check()
