"""Our Adam, clipping and flat parameters against torch's."""

from __future__ import annotations

import copy
import subprocess
import sys

import torch
from torch import nn

from rl.optim import Adam, clip_grad_norm, flatten_parameters, flushed_denormals
from tests.conftest import ROOT


def twins() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return network, copy.deepcopy(network)


class TestAdam:
    def test_follows_torchs_with_clipping(self) -> None:
        ours, reference = twins()
        flat, grad = flatten_parameters(ours)
        adam = Adam(flat, grad, lr=1e-2, eps=1e-5)
        theirs = torch.optim.Adam(reference.parameters(), lr=1e-2, eps=1e-5)
        for i in range(100):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(i))
            for network in (ours, reference):
                for p in network.parameters():
                    assert p.grad is None or p.grad.zero_() is not None
                network(x).square().sum().backward()
            clip_grad_norm(grad, 0.5)
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            adam.step()
            theirs.step()
        for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)

    def test_first_step_by_hand(self) -> None:
        # m̂ = g and v̂ = g² after one step, so θ moves by lr · g / (|g| + ε): −0.1 and +0.1
        parameter, grad = torch.tensor([1.0, 1.0]), torch.tensor([2.0, -3.0])
        Adam(parameter, grad, lr=0.1).step()
        torch.testing.assert_close(parameter, torch.tensor([0.9, 1.1]))

    def test_state_continues(self) -> None:
        parameter, grad = torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
        first = Adam(parameter, grad, lr=0.1)
        first.step()
        other = parameter.clone()
        second = Adam(other, grad, lr=0.1)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        first.step()
        second.step()
        assert torch.equal(parameter, other)

    def test_loads_no_compiler(self) -> None:
        code = (
            "import sys; from tests.conftest import algorithm; algorithm().iterate(); "
            "print('torch._dynamo' in sys.modules)"
        )
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert result.stdout.strip() == "False"


class TestFlatParameters:
    def test_share_memory_both_ways(self) -> None:
        network, _ = twins()
        flat, grad = flatten_parameters(network)
        with torch.no_grad():
            flat.zero_()
        assert all(bool((p == 0).all()) for p in network.parameters())
        network(torch.ones(1, 4)).sum().backward()
        assert grad.abs().sum() > 0
        assert grad.numel() == sum(p.numel() for p in network.parameters())


class TestDenormals:
    def test_count_as_zero_inside_only(self) -> None:
        tiny = torch.tensor([1e-40])
        with flushed_denormals():
            assert (tiny + tiny).item() == 0
        assert (tiny + tiny).item() > 0

    def test_count_as_zero_in_every_thread(self) -> None:
        """Also in one that has gone and come back: a rollout lends its core to the envs."""
        code = (
            "import torch; from rl.optim import flushed_denormals, start_threads\n"
            "start_threads(4)\n"
            "tiny = torch.full((2**20,), 1e-40)\n"
            "for threads in (4, 2, 1, 4):\n"
            "    torch.set_num_threads(threads)\n"
            "    with flushed_denormals():\n"
            "        doubled = tiny + tiny\n"
            "    print(threads, int((doubled.view(torch.int32) != 0).sum()))\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert result.stdout.split() == ["4", "0", "2", "0", "1", "0", "4", "0"]
