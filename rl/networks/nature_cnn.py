"""The convolutional network of deep Q-learning (Mnih et al. 2015, https://www.nature.com/articles/nature14236)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rl.errors import ConfigError
from rl.networks.images import channels_first, check_images, is_channels_last
from rl.schemas import bounded

if TYPE_CHECKING:
    from torch import nn

LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # channels, kernel, stride of each convolution
LEAST_SIDE = 36  # (36 − 8)/4 + 1 = 8, (8 − 4)/2 + 1 = 3, (3 − 3)/1 + 1 = 1


@dataclass(frozen=True)
class NatureCNN:
    """Convolutions of 32 8x8 kernels at stride 4, 64 4x4 at stride 2 and 64 3x3 at stride 1, then a hidden
    layer; each followed by a ReLU."""

    recurrent: ClassVar[bool] = False

    hidden_size: int = bounded(ge=1)
    shared: bool = bounded()
    orthogonal: bool = bounded()

    def check(self, observation_space: Any, group: str = "network") -> None:
        """Raise ConfigError unless observations are images of at least 36x36 pixels from 0 to 255."""
        check_images(observation_space, "nature_cnn", group)
        _, height, width = channels_first(observation_space.shape)
        if min(height, width) < LEAST_SIDE:
            raise ConfigError(
                f"{group}=nature_cnn needs images of at least {LEAST_SIDE}x{LEAST_SIDE}, but the env's are "
                f"{height}x{width}; {group}=impala_cnn takes them"
            )

    def build(self, observation_shape: tuple[int, ...]) -> nn.Sequential:
        """The encoder, from pixels [B, C, H, W] (or [B, H, W, C]) to features [B, hidden_size]."""
        from torch import nn

        from rl.networks.initialisers import layer_init
        from rl.networks.pixels import PixelConv2d

        prepare = layer_init if self.orthogonal else nn.Identity()
        channels, height, width = channels_first(observation_shape)
        first = PixelConv2d(channels, *LAYERS[0], channels_last=is_channels_last(observation_shape))
        layers: list[nn.Module] = [prepare(first), nn.ReLU(inplace=True)]
        for (fan_in, _, _), (fan_out, kernel, stride) in itertools.pairwise(LAYERS):
            layers += [prepare(nn.Conv2d(fan_in, fan_out, kernel, stride)), nn.ReLU(inplace=True)]
        for _, kernel, stride in LAYERS:
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
        hidden = prepare(nn.Linear(LAYERS[-1][0] * height * width, self.hidden_size))
        return nn.Sequential(*layers, nn.Flatten(), hidden, nn.ReLU(inplace=True))

    def features(self, observation_shape: tuple[int, ...]) -> int:
        """The size of the encoder's output."""
        return self.hidden_size
