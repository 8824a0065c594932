"""What runs on the CPU runs on a CUDA device, emulated (see `tests.emulated_cuda`), and waits for it no more
often than it has to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl import experiment
from tests.conftest import RECIPES, algorithm, configure, lines, small, train
from tests.emulated_cuda import CUDA, DeviceTensor, emulated_cuda

OTHER_WAITS = (
    12  # of an iteration: for weights to act with, values to compute advantages of, losses to report
)


def one_iteration(recipe: str, *, more_updates: bool = False) -> tuple[list[str], int]:
    """Overrides for a recipe, and the env steps of its first iteration; updates begin in it."""
    algo = configure(f"algo={recipe}").algo
    if hasattr(algo, "learning_starts"):
        # A few updates at the end: a rounding error grows with every step of a robot.
        every = 10 if more_updates else 50
        return small(recipe, "algo.learning_starts=900", f"algo.train_frequency={every}"), 1000
    overrides = small(recipe, f"algo.update_epochs={2 if more_updates else 1}")
    config = configure(*overrides)
    return overrides, config.env.num_envs * config.algo.num_steps


@pytest.mark.parametrize("recipe", RECIPES)
class TestEveryRecipe:
    def test_trains_evaluates_and_resumes(
        self, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        overrides, steps = one_iteration(recipe)
        overrides += ["eval.episodes=1", f"total_timesteps={2 * steps}", f"checkpoint.every={steps}"]
        on_cpu = algorithm(*overrides)
        expected = {k: v for k, v in on_cpu.iterate().scalars.items() if not k.startswith("time/")}
        on_cpu.close()

        def iterations(folder: Path) -> list[dict[str, float]]:
            return [row for row in lines(folder) if row.keys() >= expected.keys()]

        monkeypatch.setattr(experiment, "device", lambda name: CUDA)
        straight, resumed = tmp_path / "straight", tmp_path / "resumed"
        with emulated_cuda(monkeypatch):
            train(straight, *overrides, "checkpoint.keep=0")
            train(resumed, *overrides, resumed_from=straight / "checkpoints" / f"step_{steps:09d}")
        found = iterations(straight)[0]
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert [row["env_steps"] for row in iterations(resumed)] == [steps, 2 * steps]

    def test_updates_do_not_wait(self, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """More of them, no more waiting; and a step in the envs waits for its actions, nothing else."""
        waits = []
        for more_updates in (False, True):
            overrides, steps = one_iteration(recipe, more_updates=more_updates)
            with emulated_cuda(monkeypatch) as tensors:
                algo = algorithm(*overrides, f"total_timesteps={steps}", device="cuda")
                tensors.waits = 0
                algo.iterate()
                waits.append(tensors.waits)
                algo.close()
        assert waits[0] == waits[1]
        config = configure(*overrides)
        acting = steps - getattr(config.algo, "learning_starts", 0)
        assert waits[0] <= acting / config.env.num_envs + OTHER_WAITS


class TestEmulation:
    """It refuses what the device would, or the tests above could not fail."""

    @pytest.mark.parametrize(
        "fault",
        [
            lambda x: x + torch.ones(3),
            lambda x: x[torch.tensor([0, 1])],
            lambda x: torch.where(x > 0, x, torch.ones(3)),
            lambda x: torch.cat([x, torch.ones(3)]),
            lambda x: x.numpy(),
            lambda x: np.asarray(x),
            lambda x: x.normal_(generator=torch.Generator()),
            lambda x: torch.randn(3, generator=torch.Generator(), device="cuda"),
        ],
    )
    def test_refuses(self, fault: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
        with emulated_cuda(monkeypatch), pytest.raises((RuntimeError, TypeError), match=r"cuda"):
            fault(torch.ones(3, device="cuda"))

    @pytest.mark.parametrize(
        ("waiting", "times"),
        [
            (lambda x: x.sum().item(), 1),
            (lambda x: float(x[0]) + float(x[1]), 2),
            (lambda x: bool((x > 0).all()), 1),
            (lambda x: x.tolist(), 1),
            (lambda x: x.cpu(), 1),
            (lambda x: torch.empty(3).copy_(x), 1),
            (lambda x: x[x > 0], 1),
            (lambda x: x.nonzero(), 1),
            (lambda x: (x.exp().sum(), x[:2].clone(), x.to(torch.int64), torch.ones(2).to("cuda") + 1), 0),
            (lambda x: torch.empty(3).copy_(x, non_blocking=True), 0),
        ],
    )
    def test_counts(
        self, waiting: Callable[[torch.Tensor], Any], times: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with emulated_cuda(monkeypatch) as tensors:
            waiting(torch.ones(3, device="cuda"))
        assert tensors.waits == times

    def test_gradients_stay_on_the_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with emulated_cuda(monkeypatch):
            x = torch.tensor([-1.0, 2.0, 3.0]).to("cuda").requires_grad_()
            x.clamp(0, 2.5).square().sum().backward()
            assert isinstance(x.grad, DeviceTensor) and x.grad.device == CUDA
            assert x.grad.tolist() == [0.0, 4.0, 0.0]
