"""Stepping a small network cheaply.

Below a few hundred units a kernel launch costs more than its arithmetic, so a dozen parameters are worth
keeping in one piece: zeroing, clipping and stepping are then a few operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_GRAIN = 2**15  # elements of a tensor below which torch does not add a thread


def start_threads(threads: int) -> None:
    """Let torch compute with so many threads, all but this one with denormals flushed for good.

    The mode is each thread's own, and a thread begins with that of the one that starts it: were torch to
    start them when it first needs them, `flushed_denormals` would leave their share of a tensor as it is.
    """
    torch.set_num_threads(threads)
    with flushed_denormals():
        torch.zeros(threads * _GRAIN).add_(1)


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """A block in which numbers too small for a normal float count as 0: a CPU takes up to 30 times longer
    over them.

    Gradients and Adam's moments fall that low as a matter of course. Only updates run inside, so that envs
    compute the same in every process. The threads beside this one are `start_threads`'.
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


class Adam:
    """Adam (Kingma & Ba 2015, algorithm 1) on one flat parameter, as torch's fused kernel: one pass over
    memory.

    The kernel is called directly because torch's optimisers load its compiler at their first step, which
    takes a second or two of every start. A formula in torch's own operations takes three times as long, and
    most of that for the square roots of zeros, which gradients through ReLUs are full of.

    Args:
        parameter, grad: [P], stepped in place; see `flatten_parameters`.
        lr: the step size; may be set between steps.
        eps: added to the root of the second moment.
    """

    def __init__(self, parameter: Tensor, grad: Tensor, lr: float, eps: float = 1e-8) -> None:
        self.parameter, self.grad, self.lr, self.eps = parameter.detach(), grad, lr, eps
        self.betas = (0.9, 0.999)
        self.steps = torch.zeros((), device=grad.device)
        self.mean, self.square = torch.zeros_like(grad), torch.zeros_like(grad)

    def step(self) -> None:
        """One step: θ ← θ − lr · m̂ / (√v̂ + ε)."""
        self.steps += 1
        torch._fused_adam_(
            [self.parameter],
            [self.grad],
            [self.mean],
            [self.square],
            [],
            [self.steps],
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            weight_decay=0.0,
            amsgrad=False,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Any]:
        """Moments and count of steps."""
        return {"mean": self.mean, "square": self.square, "steps": int(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.mean.copy_(state["mean"])
        self.square.copy_(state["square"])
        self.steps.fill_(state["steps"])
