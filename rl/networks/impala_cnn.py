"""The residual network of IMPALA (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, figure 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rl.errors import ConfigError
from rl.networks.images import channels_first, check_images, is_channels_last
from rl.schemas import bounded, join

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ImpalaCNN:
    """For each depth a 3x3 convolution, max pooling that halves the image, and two residual blocks; then a
    hidden layer."""

    recurrent: ClassVar[bool] = False

    depths: list[int] = bounded()
    hidden_size: int = bounded(ge=1)
    shared: bool = bounded()
    orthogonal: bool = bounded()

    def check(self, observation_space: Any, group: str = "network") -> None:
        """Raise ConfigError unless observations are images of pixels from 0 to 255 and every depth is at
        least 1."""
        check_images(observation_space, "impala_cnn", group)
        if not self.depths or min(self.depths) < 1:
            key = join(group.rpartition("@")[2], "depths")
            raise ConfigError(f"{key}={self.depths}: one depth or more, each at least 1, e.g. [16,32,32]")

    def build(self, observation_shape: tuple[int, ...]) -> nn.Sequential:
        """The encoder, from pixels [B, C, H, W] (or [B, H, W, C]) to features [B, hidden_size]."""
        from torch import nn

        from rl.networks.initialisers import layer_init
        from rl.networks.pixels import PixelConv2d, ResidualBlock

        channels, height, width = channels_first(observation_shape)
        layers: list[nn.Module] = []
        for depth in self.depths:
            if layers:
                layers.append(nn.Conv2d(channels, depth, 3, padding=1))
            else:
                last = is_channels_last(observation_shape)
                layers.append(PixelConv2d(channels, depth, 3, padding=1, channels_last=last))
            layers += [nn.MaxPool2d(3, stride=2, padding=1), ResidualBlock(depth), ResidualBlock(depth)]
            channels, height, width = depth, (height + 1) // 2, (width + 1) // 2
        layers += [nn.Flatten(), nn.ReLU(inplace=True)]
        hidden = nn.Linear(channels * height * width, self.hidden_size)
        network = nn.Sequential(*layers, hidden, nn.ReLU(inplace=True))
        if self.orthogonal:
            for module in network.modules():
                if isinstance(module, nn.Conv2d | nn.Linear):
                    layer_init(module)
        return network

    def features(self, observation_shape: tuple[int, ...]) -> int:
        """The size of the encoder's output."""
        return self.hidden_size
