"""A network being trained: its parameters in one piece, its optimiser, and the copy that follows it."""

from __future__ import annotations

import copy
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rl.networks.numpy_forward import Forward, numpy_forward, runs_in_numpy
from rl.optim import Adam, flatten_parameters

Network = TypeVar("Network", bound=nn.Module)


class Learner(Generic[Network]):
    """A network, Adam on its flat parameters, and a target network.

    Args:
        network: on its device, with its initial weights; `target` starts as a copy of it.
        learning_rate, adam_eps: of Adam.
    """

    def __init__(self, network: Network, learning_rate: float, adam_eps: float = 1e-8) -> None:
        self.network = network
        self.target = copy.deepcopy(network).requires_grad_(False)
        self._parameters = list(network.parameters())
        self._flat, grad = flatten_parameters(network)
        self._target_flat, _ = flatten_parameters(self.target)
        self.optimizer = Adam(self._flat, grad, learning_rate, adam_eps)
        self.changes = 0
        """How often the weights have changed."""

    def step(self, loss: Tensor) -> None:
        """One step down the gradient of `loss`."""
        self.optimizer.grad.zero_()
        loss.backward()
        self.optimizer.step()
        self.changes += 1

    def follow(self, tau: float) -> None:
        """target ← (1 − τ) target + τ network."""
        self._target_flat.data.lerp_(self._flat.data, tau)

    def acting(self, dtype: torch.dtype) -> Forward:
        """The network, a stack of layers, as a function of observations [N, …] that always has the newest
        weights (see `numpy_forward`).

        Where it computes in another type than the weights', they are cast once for all the steps between two
        updates: acting with the Nature CNN in bf16 takes two thirds of the time in fp32.
        """
        network = self.network
        assert isinstance(network, nn.Sequential)
        if dtype == self._flat.dtype or runs_in_numpy(network):
            return numpy_forward(network, live=True)
        copied = copy.deepcopy(network).to(dtype)
        copied.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        weights, newest = list(copied.parameters()), self.changes
        forward = numpy_forward(copied, live=True)

        def follow(obs: np.ndarray) -> np.ndarray:
            nonlocal newest
            if newest != self.changes:
                with torch.no_grad():
                    for weight, trained in zip(weights, self._parameters, strict=True):
                        weight.copy_(trained)
                newest = self.changes
            return forward(obs)

        return follow

    def freeze(self, frozen: bool) -> None:
        """Whether the weights take part in gradients: an actor's loss needs none of its critics'."""
        for parameter in self._parameters:
            parameter.requires_grad_(not frozen)

    def weights(self) -> dict[str, Any]:
        """The weights of network and target, for `networks` of the algorithm's state."""
        return {"online": dict(self.network.state_dict()), "target": dict(self.target.state_dict())}

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Continue with `weights()`."""
        self.network.load_state_dict(weights["online"])
        self.target.load_state_dict(weights["target"])
        self.changes += 1


def learners_state(learners: dict[str, Learner[Any]]) -> dict[str, Any]:
    """`networks` and `optimizers` of an algorithm's state."""
    return {
        "networks": {name: learner.weights() for name, learner in learners.items()},
        "optimizers": {name: learner.optimizer.state_dict() for name, learner in learners.items()},
    }


def load_learners(learners: dict[str, Learner[Any]], state: dict[str, Any]) -> None:
    """Continue from `learners_state`."""
    for name, learner in learners.items():
        learner.load_weights(state["networks"][name])
        learner.optimizer.load_state_dict(state["optimizers"][name])
