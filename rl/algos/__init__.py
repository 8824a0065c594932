"""The algorithms, one file each, and what they all offer.

`state_dict()` has the keys `networks` and `normalizers`, which are enough to act and are what a warm start
takes over, and further ones as the algorithm needs. `load_state_dict` returns notes for the user: what could
not be restored exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

    from rl.metrics import Metrics
    from rl.seeding import Streams


@dataclass(frozen=True)
class Context:
    """The facts of the run that an algorithm needs beside its own configuration."""

    total_timesteps: int
    streams: Streams
    device: torch.device
    precision: str = "fp32"
    compile: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """What networks are evaluated in, as a torch type."""
        import torch

        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def autocast(self) -> AbstractContextManager[Any]:
        """A block in which networks are evaluated in the run's precision."""
        if self.precision != "bf16":
            return nullcontext()
        import torch

        return torch.autocast(self.device.type, torch.bfloat16)

    def compiled(self, losses: Callable[..., Any]) -> Callable[..., Any]:
        """`losses`, a function of tensors to a tensor or a tuple of them, compiled where the run asks for it.

        On a CUDA device its kernels, forward and backward, are replayed as CUDA graphs; what it returns is
        copied, since the next replay overwrites it.
        """
        if not self.compile:
            return losses
        import torch

        if self.device.type != "cuda":
            return torch.compile(losses)
        graph = torch.compile(losses, mode="reduce-overhead")

        def replay(*arguments: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            outputs = graph(*arguments)
            if isinstance(outputs, torch.Tensor):
                return outputs.clone()
            return tuple(output.clone() for output in outputs)

        return replay


class Policy(Protocol):
    """Maps raw observations to actions, with the weights and normalisers it was made with."""

    def initial_state(self, num_envs: int) -> Any:
        """The recurrent state at the start of an episode, an array [N, …]; None for a policy without one."""

    def __call__(
        self, obs: np.ndarray, state: Any, rng: np.random.Generator | None
    ) -> tuple[np.ndarray, Any]:
        """Actions [N, …] for observations [N, …] and the next state; `rng` None: deterministic, else
        sampled."""


class Algorithm(Protocol):
    """What the training loop, evaluation and checkpoints ask of an algorithm."""

    env_steps: int

    def iterate(self) -> Metrics:
        """One iteration: a rollout and its update, or a fixed chunk of steps."""

    def policy(self) -> Policy:
        """The present policy, frozen: later training does not change it."""

    def state_dict(self) -> dict[str, Any]:
        """Everything the next iteration depends on."""

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Continue from a saved state; notes on what could not be restored exactly."""

    def close(self) -> None:
        """Close the training envs."""
