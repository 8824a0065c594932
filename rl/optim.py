"""Stepping a small network cheaply, and the state of an optimiser as a checkpoint can hold it.

Below a few hundred units a kernel launch costs more than its arithmetic, so a dozen parameters are worth
keeping in one piece: zeroing, clipping and stepping are then one operation each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """A block in which numbers too small for a normal float count as 0: a CPU takes some 30 times longer over
    them.

    Gradients and Adam's moments fall that low as a matter of course. Only updates run inside, so that envs
    compute the same in every process.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def flatten_parameters(module: nn.Module) -> tuple[nn.Parameter, Tensor]:
    """One parameter [P] sharing its memory with all parameters of `module`, and its gradient [P], likewise.

    The module works and saves as before; zero, clip and optimise the flat one. Move the module to its device
    and type first, and never set its gradients to None.
    """
    parameters = list(module.parameters())
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parameters]))
    grad = flat.grad = torch.zeros_like(flat)
    start = 0
    for p in parameters:
        end = start + p.numel()
        p.data = flat.data[start:end].view_as(p)
        p.grad = grad[start:end].view_as(p)
        start = end
    return flat, grad


def clip_grad_norm(grad: Tensor, max_norm: float) -> None:
    """Scale the flat gradient in place so that its norm is at most `max_norm`, as `nn.utils.clip_grad_norm_`
    does."""
    grad.mul_((max_norm / (grad.norm() + 1e-6)).clamp(max=1.0))


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The optimiser's `state_dict` with the parameters' numbers as strings."""
    state = optimizer.state_dict()
    groups = [
        {**group, "betas": list(group["betas"])} if "betas" in group else dict(group)
        for group in state["param_groups"]
    ]
    return {
        "state": {str(number): dict(slots) for number, slots in state["state"].items()},
        "param_groups": groups,
    }


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Continue from `optimizer_state`."""
    slots = {int(number): slots for number, slots in state["state"].items()}
    groups = [
        {**group, "betas": tuple(group["betas"])} if "betas" in group else group
        for group in state["param_groups"]
    ]
    optimizer.load_state_dict({"state": slots, "param_groups": groups})
