"""The fully connected network, as a description that any backend can build from, and as a torch module."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rl.errors import ConfigError
from rl.schemas import bounded, join

if TYPE_CHECKING:
    from torch import nn

ACTIVATIONS = {"tanh": "Tanh", "relu": "ReLU", "gelu": "GELU", "silu": "SiLU", "elu": "ELU"}


@dataclass(frozen=True)
class MLP:
    """Hidden layers of the given sizes, each followed by the activation."""

    recurrent: ClassVar[bool] = False

    hidden_sizes: list[int] = bounded()
    activation: str = bounded(choices=tuple(ACTIVATIONS))
    shared: bool = bounded()
    orthogonal: bool = bounded()

    def check(self, observation_space: Any, group: str = "network") -> None:
        """Raise ConfigError when observations are not vectors or a layer has no units.

        `group` is how the command line chooses this network, for the message.
        """
        if len(observation_space.shape) != 1:
            shape = "x".join(map(str, observation_space.shape))
            is_image = len(observation_space.shape) == 3
            raise ConfigError(
                f"{group}=mlp takes vectors, but the env's observations are {shape}"
                + (f" images; {group}=nature_cnn takes them" if is_image else "; choose an env with vectors")
            )
        if any(size < 1 for size in self.hidden_sizes):
            key = join(group.rpartition("@")[2], "hidden_sizes")
            raise ConfigError(f"{key}={self.hidden_sizes}: every layer needs at least 1 unit, e.g. [64,64]")

    def build(self, observation_shape: tuple[int, ...]) -> nn.Sequential:
        """The encoder, its weights orthogonal with gain √2 or torch's default; see `features` for its
        output."""
        from torch import nn

        from rl.networks.initialisers import layer_init

        prepare = layer_init if self.orthogonal else nn.Identity()
        sizes = [math.prod(observation_shape), *self.hidden_sizes]
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(sizes):
            layers += [prepare(nn.Linear(fan_in, fan_out)), _activation(self.activation)]
        return nn.Sequential(*layers)

    def features(self, observation_shape: tuple[int, ...]) -> int:
        """The size of the encoder's output."""
        return self.hidden_sizes[-1] if self.hidden_sizes else math.prod(observation_shape)


def _activation(name: str) -> nn.Module:
    """The module of an activation; ReLU in place, which spares a pass through memory."""
    from torch import nn

    return nn.ReLU(inplace=True) if name == "relu" else getattr(nn, ACTIVATIONS[name])()
