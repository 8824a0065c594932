"""Videos: frames streamed to an H.264 mp4 that browsers play, through the ffmpeg of imageio-ffmpeg."""

from __future__ import annotations

import importlib.util
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from rl.errors import ConfigError


def check() -> None:
    """Raises ConfigError where imageio-ffmpeg is not installed; imports nothing."""
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        raise ConfigError(
            "capture_video=true needs the package imageio-ffmpeg: pip install -e '.[video]' "
            "(or capture_video=false)"
        )


class VideoWriter:
    """Encodes frames as they come; `path` exists only once the video is complete.

    As a context manager it closes at the end of the block, and discards the video when the block raises.
    """

    def __init__(self, path: Path, fps: float) -> None:
        """`fps`: frames a second at which it plays. Starts nothing before the first frame."""
        self.path = path
        self.fps = fps
        self.frames = 0
        self._temporary = path.with_name(f".{path.name}.partial")
        self._shape: tuple[int, ...] = ()
        self._encoder: Generator[None, Any, None] | None = None

    def add(self, frame: np.ndarray) -> None:
        """Append one RGB frame, uint8 [H, W, 3]. Raises ValueError for another type or a changed shape."""
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise ValueError(f"a video frame must be uint8 [H, W, 3], not {frame.dtype} {list(frame.shape)}")
        if self._encoder is None:
            self._shape = frame.shape
            self._encoder = self._start()
        elif frame.shape != self._shape:
            raise ValueError(f"video frames changed from {list(self._shape)} to {list(frame.shape)}")
        self._encoder.send(np.ascontiguousarray(frame))
        self.frames += 1

    def close(self) -> None:
        """Complete the file; without frames there is none. Raises OSError when ffmpeg failed to write it."""
        if self._encoder is None:
            return
        self._stop()
        if not self._temporary.exists() or self._temporary.stat().st_size == 0:
            raise OSError(f"ffmpeg wrote no video for {self.path}")
        self._temporary.replace(self.path)

    def discard(self) -> None:
        """Give the video up and leave no file."""
        self._stop()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _start(self) -> Generator[None, Any, None]:
        import imageio_ffmpeg

        self.path.parent.mkdir(parents=True, exist_ok=True)
        height, width = self._shape[:2]
        encoder: Generator[None, Any, None] = imageio_ffmpeg.write_frames(
            str(self._temporary),
            (width, height),
            fps=self.fps,
            codec="libx264",
            pix_fmt_out="yuv420p",
            quality=None,
            macro_block_size=1,
            ffmpeg_log_level="error",
            # yuv420p halves the colour planes, so both sides must be even: pad at the right and the bottom.
            output_params=[
                *("-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2"),
                *("-preset", "veryfast", "-crf", "23"),
                *("-movflags", "+faststart", "-f", "mp4"),
            ],
        )
        encoder.send(None)
        return encoder

    def _stop(self) -> None:
        if self._encoder is not None:
            self._encoder.close()
            self._encoder = None
