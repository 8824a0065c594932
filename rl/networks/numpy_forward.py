"""Acting without torch: below a few hundred units a forward pass costs more in dispatch than in arithmetic.

One observation through a 64-64 network takes some 8 µs in NumPy and 60 µs in torch on a CPU, and acting is
one such pass per env step. Modules that are not plain stacks of linear layers and activations go through
torch as usual.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

Forward = Callable[[np.ndarray], np.ndarray]

_ACTIVATIONS: dict[type[nn.Module], Callable[[np.ndarray], np.ndarray]] = {
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, 0, out=x),
}
_MOST_UNITS = 512


def numpy_forward(network: nn.Sequential, live: bool = False, dtype: torch.dtype = torch.float32) -> Forward:
    """A function from observations [N, …] to the outputs [N, K] of `network`; where it goes through torch
    (see `runs_in_numpy`), observations may also be a tensor on the network's device.

    The weights are copied: train the network and call this again. With `live` they are looked at where they
    are, so that a network that is trained in place between two steps acts with its newest weights.

    Args:
        dtype: what a copy that goes through torch computes in; live weights are used as they are.
    """
    on_device = next(network.parameters()).device.type != "cpu"
    if not runs_in_numpy(network) or (live and on_device):
        return _torch_forward(network, live, dtype)
    steps: list[Forward] = [
        _linear(layer, live) if isinstance(layer, nn.Linear) else _ACTIVATIONS[type(layer)]
        for layer in _layers(network)
    ]

    def forward(x: np.ndarray) -> np.ndarray:
        for step in steps:
            x = step(x)
        return x

    return forward


def runs_in_numpy(network: nn.Sequential) -> bool:
    """Whether `network` is a plain stack of small linear layers and activations."""
    return all(
        type(layer) in _ACTIVATIONS
        or (
            isinstance(layer, nn.Linear) and layer.bias is not None and max(layer.weight.shape) <= _MOST_UNITS
        )
        for layer in _layers(network)
    )


def _layers(network: nn.Sequential) -> list[nn.Module]:
    return [layer for layer in network.modules() if not isinstance(layer, nn.Sequential)]


def _linear(layer: nn.Linear, live: bool) -> Forward:
    weight = layer.weight.detach().float().cpu().numpy().T
    bias = layer.bias.detach().float().cpu().numpy()
    if not live:
        weight, bias = np.array(weight, order="C"), bias.copy()

    def apply(x: np.ndarray) -> np.ndarray:
        y = x @ weight
        y += bias
        return y

    return apply


def _torch_forward(network: nn.Sequential, live: bool, dtype: torch.dtype) -> Forward:
    if not live:
        network = copy.deepcopy(network).to(dtype)
    weight = next(network.parameters())

    def forward(x: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            obs = torch.as_tensor(x, device=weight.device)
            obs = obs if obs.dtype == torch.uint8 else obs.to(weight.dtype)
            return network(obs).float().cpu().numpy()

    return forward
