"""What the encoders of images share: which observations are images, and how their axes lie."""

from __future__ import annotations

from typing import Any

from rl.errors import ConfigError


def is_channels_last(shape: tuple[int, ...]) -> bool:
    """Whether an image's shape is [H, W, C]: the last axis is shorter than the first, as in 96x96x3."""
    return shape[-1] < shape[0]


def channels_first(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(C, H, W) of an image's shape, which may be [C, H, W] or [H, W, C]."""
    a, b, c = shape
    return (c, a, b) if is_channels_last(shape) else (a, b, c)


def check_images(observation_space: Any, name: str, group: str) -> None:
    """Raise ConfigError unless observations are images of pixels from 0 to 255.

    Args:
        observation_space: a Box.
        name: the option of the group that is being checked, for the message.
        group: how the command line chooses the option, e.g. `network`.
    """
    shape = observation_space.shape
    if len(shape) == 1:
        raise ConfigError(
            f"{group}={name} takes images, but the env's observations are vectors of {shape[0]}; "
            f"{group}=mlp takes them"
        )
    if len(shape) != 3:
        raise ConfigError(
            f"{group}={name} takes images, but the env's observations have the shape "
            f"{'x'.join(map(str, shape))}; choose an env with images [C, H, W]"
        )
    low, high = float(observation_space.low.min()), float(observation_space.high.max())
    if low < 0 or not 1 < high <= 255:
        raise ConfigError(
            f"{group}={name} divides pixels by 255, but the env's are from {low:g} to {high:g}; "
            f"choose an env whose images are from 0 to 255"
        )
