"""The state of a torch optimiser as a checkpoint can hold it: string keys, no tuples."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


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
