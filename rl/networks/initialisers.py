"""Weight initialisation as CleanRL has it."""

from __future__ import annotations

import math
from typing import TypeVar

from torch import nn

Layer = TypeVar("Layer", bound=nn.Linear | nn.Conv2d)
Network = TypeVar("Network", bound=nn.Module)


def layer_init(layer: Layer, std: float = math.sqrt(2), bias: float = 0.0) -> Layer:
    """Orthogonal weights of gain `std`, a convolution's as [out, in·h·w], and a constant bias, in place."""
    nn.init.orthogonal_(layer.weight, std)
    assert layer.bias is not None
    nn.init.constant_(layer.bias, bias)
    return layer


def kaiming_init(network: Network) -> Network:
    """Normal weights by fan-in (He et al. 2015) and zero biases in every linear layer and convolution, in
    place."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return network
