"""Several networks of one shape as a single batched one: two critics for the price of little more than
one."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Ensemble(nn.Module):
    """E stacks of linear layers and activations, evaluated together by batched matrix products.

    Args:
        members: networks of the same shape, of linear layers and activations only; their weights are copied.

    Raises:
        TypeError: a layer is of another kind.
    """

    def __init__(self, members: list[nn.Sequential]) -> None:
        super().__init__()
        self.size = len(members)
        self.weights, self.biases, self.activations = nn.ParameterList(), nn.ParameterList(), nn.ModuleList()
        for layers in zip(*(_layers(member) for member in members), strict=True):
            if isinstance(layers[0], nn.Linear):
                self.weights.append(torch.stack([layer.weight.detach().T for layer in layers]).contiguous())
                self.biases.append(torch.stack([layer.bias.detach() for layer in layers]).unsqueeze(1))
                self.activations.append(nn.Identity())
            elif len(list(layers[0].parameters())) == 0:
                self.activations[-1] = layers[0]
            else:
                raise TypeError(f"an ensemble is of linear layers and activations, not {type(layers[0])}")

    def forward(self, x: Tensor, count: int | None = None) -> Tensor:
        """Outputs [E, B, K] of inputs [B, D], the same for all members; with `count`, of that many first
        members."""
        x = x.expand(self.size if count is None else count, *x.shape)
        for weight, bias, activation in zip(self.weights, self.biases, self.activations, strict=True):
            if count is not None:  # a slice's gradient is a whole one of zeros, filled and copied into
                weight, bias = weight[:count], bias[:count]
            x = activation(torch.baddbmm(bias, x, weight))
        return x


def _layers(network: nn.Module) -> list[nn.Module]:
    """The leaves of nested Sequentials in order."""
    if not isinstance(network, nn.Sequential):
        return [network]
    return [leaf for child in network for leaf in _layers(child)]
