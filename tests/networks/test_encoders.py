"""Networks for images and memory: sizes and outputs worked out by other means, and what each refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional as F

from rl import config as configuration
from rl.errors import ConfigError
from rl.learner import Learner
from rl.networks import pixels as pixel_layers
from rl.networks.impala_cnn import ImpalaCNN
from rl.networks.lstm import LSTM
from rl.networks.mlp import MLP
from rl.networks.nature_cnn import NatureCNN
from rl.networks.numpy_forward import numpy_forward
from rl.networks.pixels import PixelConv2d, ResidualBlock, block_weights, blocks
from rl.networks.recurrent import RecurrentEncoder
from tests.conftest import ROOT, configure, launch

NETWORKS = sorted(path.stem for path in (ROOT / "conf" / "network").glob("*.yaml"))
NATURE = NatureCNN(hidden_size=512, shared=True, orthogonal=True)
IMPALA = ImpalaCNN(depths=[16, 32, 32], hidden_size=256, shared=True, orthogonal=False)
DENSE = MLP(hidden_sizes=[6], activation="tanh", shared=True, orthogonal=True)


def pixels(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def images(*shape: int, high: float = 255, dtype: Any = np.uint8) -> spaces.Box:
    return spaces.Box(0, high, shape, dtype)


def vectors(size: int) -> spaces.Box:
    return spaces.Box(-1, 1, (size,), np.float32)


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def unfolded(x: Tensor, layer: nn.Conv2d) -> Tensor:
    """A convolution without padding as a matrix product over patches, in float64."""
    (kernel, _), (stride, _) = layer.kernel_size, layer.stride
    patches = x.unfold(2, kernel, stride).unfold(3, kernel, stride)  # [B, C, H', W', h, w]
    assert layer.bias is not None
    bias = layer.bias.detach().double().view(-1, 1, 1)
    return torch.einsum("bcyxij,kcij->bkyx", patches, layer.weight.detach().double()) + bias


class TestNatureCNN:
    def test_parameter_count(self) -> None:
        # 84 → (84 − 8)/4 + 1 = 20 → (20 − 4)/2 + 1 = 9 → (9 − 3)/1 + 1 = 7, so 64 · 7 · 7 = 3136 features
        convolutions = (4 * 8 * 8 + 1) * 32 + (32 * 4 * 4 + 1) * 64 + (64 * 3 * 3 + 1) * 64
        assert convolutions + (3136 + 1) * 512 == 1_684_128
        assert parameters(NATURE.build((4, 84, 84))) == 1_684_128

    @pytest.mark.parametrize("shape", [(4, 84, 84), (3, 64, 64), (1, 37, 50)])
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
    def test_output_against_matrix_products(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        network = NatureCNN(hidden_size=20, shared=True, orthogonal=False).build(shape)
        x = pixels(3, *shape)
        expected = x.double() / 255
        for layer in network:
            if isinstance(layer, nn.Conv2d):
                expected = unfolded(expected, layer).relu()
            elif isinstance(layer, nn.Linear):
                flat = expected.reshape(3, -1)
                expected = (flat @ layer.weight.detach().double().T + layer.bias.detach().double()).relu()
        out = network(x.to(dtype))
        assert out.shape == (3, 20) == (3, NatureCNN(20, True, False).features(shape))
        assert expected.std() > 0
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-6)

    def test_channels_last_images_are_the_same_images(self) -> None:
        torch.manual_seed(0)
        first = NATURE.build((3, 64, 64))
        last = NATURE.build((64, 64, 3))
        last.load_state_dict(first.state_dict())
        x = pixels(2, 3, 64, 64)
        torch.testing.assert_close(last(x.permute(0, 2, 3, 1).contiguous()), first(x), rtol=1e-4, atol=1e-5)

    def test_bf16_is_close_to_fp32(self) -> None:
        torch.manual_seed(0)
        network = NATURE.build((4, 84, 84))
        x = pixels(4, 4, 84, 84)
        exact = network(x)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = network(x)
        assert rounded.dtype == torch.bfloat16
        assert (rounded.float() - exact).abs().max() < 0.02 * exact.abs().max()

    def test_weights_are_orthogonal_with_gain_sqrt_2(self) -> None:
        for layer in NATURE.build((4, 84, 84)):
            if isinstance(layer, nn.Conv2d | nn.Linear):
                rows = layer.weight.detach().flatten(1)  # W Wᵀ = √2² I
                torch.testing.assert_close(rows @ rows.T, 2 * torch.eye(len(rows)), rtol=0, atol=1e-4)
                assert layer.bias is not None and not layer.bias.any()

    def test_torchs_default_weights_are_not(self) -> None:
        layer = NatureCNN(16, True, False).build((4, 84, 84))[0]
        assert isinstance(layer, PixelConv2d)
        rows = layer.weight.detach().flatten(1)
        # uniform within ±1/√fan_in = ±1/16
        assert 0.06 < rows.abs().max() <= 1 / 16
        assert (rows @ rows.T - 2 * torch.eye(32)).abs().max() > 1


class TestPixelConv2d:
    def test_white_is_one(self) -> None:
        layer = PixelConv2d(1, 1, 1, bias=False)
        nn.init.constant_(layer.weight, 3.0)
        x = torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1)
        assert layer(x).flatten().tolist() == pytest.approx([0.0, 0.6, 3.0])

    def test_blocks_are_exact(self) -> None:
        x = pixels(2, 3, 12, 16)
        weight = torch.randint(-9, 9, (5, 3, 8, 4)).float()  # whole numbers: sums are exact in float32
        ours = F.conv2d(blocks(x).float(), block_weights(weight))
        assert torch.equal(ours, F.conv2d(x.float(), weight, stride=4))

    @pytest.mark.parametrize("wide", [True, False])
    def test_gradients(self, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pixel_layers, "AVX512", wide)
        torch.manual_seed(0)
        layer = PixelConv2d(4, 6, 8, 4)
        x = pixels(3, 4, 20, 24)
        layer(x).square().sum().backward()
        got = layer.weight.grad
        assert got is not None
        weight = layer.weight.detach().requires_grad_()
        F.conv2d(x / 255, weight, layer.bias, 4).square().sum().backward()
        torch.testing.assert_close(got, weight.grad, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(
        ("view", "as_blocks"),
        [
            (lambda x: x[::2], True),
            (lambda x: x[:, 1:], True),  # as a replay buffer's stacks of successors are
            (lambda x: x[..., ::2], False),
            (lambda x: x.transpose(2, 3), False),
            (lambda x: x[..., 1:13], False),
            (lambda x: x[..., :12], True),
            (lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view_as(x), False),
        ],
        ids=["rows", "successors", "columns", "transposed", "odd offset", "left half", "odd start"],
    )
    def test_views(
        self, view: Callable[[Tensor], Tensor], as_blocks: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever lies between the pixels, the answer is that of a copy."""
        monkeypatch.setattr(pixel_layers, "AVX512", True)
        torch.manual_seed(0)
        x = view(pixels(6, 3, 24, 24))
        layer = PixelConv2d(x.shape[1], 4, 8, 4)
        assert layer._takes_blocks(x) == as_blocks
        torch.testing.assert_close(layer(x), layer(x.clone(memory_format=torch.contiguous_format)))


class TestImpalaCNN:
    def test_parameter_count(self) -> None:
        # 64 → 32 → 16 → 8, so 32 · 8 · 8 = 2048 features; four convolutions in the two blocks of a sequence
        total, channels = 0, 3
        for depth in (16, 32, 32):
            total += (channels * 9 + 1) * depth + 4 * (depth * 9 + 1) * depth
            channels = depth
        assert total + (2048 + 1) * 256 == 622_144
        assert parameters(IMPALA.build((3, 64, 64))) == 622_144

    @pytest.mark.parametrize("shape", [(3, 64, 64), (1, 5, 8)])
    def test_output_against_the_formula(self, shape: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        network = IMPALA.build(shape)
        convs = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
        x = pixels(2, *shape)
        y = x / 255
        for first, *block in (convs[i : i + 5] for i in (0, 5, 10)):
            y = F.max_pool2d(F.conv2d(y, first.weight, first.bias, padding=1), 3, stride=2, padding=1)
            for a, b in (block[:2], block[2:]):
                inner = F.conv2d(torch.relu(y), a.weight, a.bias, padding=1)
                y = y + F.conv2d(torch.relu(inner), b.weight, b.bias, padding=1)
        hidden = network[-2]
        assert isinstance(hidden, nn.Linear)
        expected = torch.relu(torch.relu(y.flatten(1)) @ hidden.weight.T + hidden.bias)
        out = network(x)
        assert out.shape == (2, 256)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-6)
        # and its gradient: nothing that it needs was overwritten in place
        (got,) = torch.autograd.grad(out.square().sum(), convs[1].weight)
        (wanted,) = torch.autograd.grad(expected.square().sum(), convs[1].weight)
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-6)

    def test_a_residual_block_of_zeros_is_the_identity(self) -> None:
        block = ResidualBlock(3)
        for parameter in block.parameters():
            nn.init.zeros_(parameter)
        x = torch.randn(2, 3, 5, 5)
        before = x.clone()
        assert torch.equal(block(x), before)
        assert torch.equal(x, before)

    def test_orthogonal_on_demand(self) -> None:
        network = ImpalaCNN([4], 8, True, orthogonal=True).build((1, 8, 8))
        for layer in network.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                rows = layer.weight.detach().flatten(1)
                torch.testing.assert_close(rows @ rows.T, 2 * torch.eye(len(rows)), rtol=0, atol=1e-5)


def small_lstm(num_layers: int = 1) -> RecurrentEncoder:
    torch.manual_seed(0)
    network = LSTM(DENSE, hidden_size=5, num_layers=num_layers).build((3,))
    for name, parameter in network.lstm.named_parameters():
        if "bias" in name:  # zeros would hide a gate's bias
            nn.init.normal_(parameter)
    return network


class TestLSTM:
    STARTS = ((0, 0), (0, 1), (0, 0), (1, 0), (1, 1), (0, 0), (0, 0))  # T = 7, N = 2

    def test_against_a_loop_of_cells(self) -> None:
        network = small_lstm()
        cell = nn.LSTMCell(6, 5)
        cell.load_state_dict({n.removesuffix("_l0"): p for n, p in network.lstm.state_dict().items()})
        x, starts = torch.randn(7, 2, 3), torch.tensor(self.STARTS)
        state = torch.randn(1, 2, 5), torch.randn(1, 2, 5)
        h, c = state[0][0], state[1][0]
        expected = []
        for t in range(7):
            keep = 1.0 - starts[t].view(2, 1)
            h, c = cell(network.encoder(x[t]), (keep * h, keep * c))
            expected.append(h)
        for flags in (starts.bool(), starts.float()):
            features, after = network(x, state, flags)
            torch.testing.assert_close(features, torch.stack(expected))
            torch.testing.assert_close(after, (h[None], c[None]))

    def test_all_at_once_is_step_by_step(self) -> None:
        network = small_lstm(num_layers=2)
        x, starts = torch.randn(7, 2, 3), torch.tensor(self.STARTS).bool()
        state = network.initial_state(2)
        features, after = network(x, state, starts)
        for t in range(7):
            step, state = network(x[t : t + 1], state, starts[t : t + 1])
            torch.testing.assert_close(step[0], features[t])
        torch.testing.assert_close(after, state)

    def test_gradients_flow_through_time_but_not_across_a_start(self) -> None:
        network = small_lstm()
        x = torch.randn(7, 2, 3, requires_grad=True)
        features, _ = network(x, network.initial_state(2), torch.tensor(self.STARTS))
        (grad,) = torch.autograd.grad(features[-1].sum(), x)
        # In both envs the last episode starts at t = 4
        assert not grad[:4].any()
        assert bool((grad[4:].abs().sum(-1) > 0).all())
        features, _ = network(x, network.initial_state(2), torch.tensor(self.STARTS))
        (grad,) = torch.autograd.grad(features[2].sum(), x)
        # At t = 2 env 0 goes back to the beginning, env 1 to its start at t = 1
        assert (grad.abs().sum(-1) > 0).tolist() == [[True, False], *[[True, True]] * 2, *[[False] * 2] * 4]

    def test_a_state_gone_bad_ends_with_its_episode(self) -> None:
        network = small_lstm()
        state = torch.full((1, 2, 5), torch.nan), torch.full((1, 2, 5), torch.inf)
        features, _ = network(torch.randn(1, 2, 3), state, torch.tensor([[1, 0]]))
        assert features[0, 0].isfinite().all()
        assert not features[0, 1].isfinite().any()

    def test_starts_orthogonal_without_biases_and_from_zeros(self) -> None:
        description = LSTM(NATURE, hidden_size=128, num_layers=1)
        network = description.build((1, 84, 84))
        for name, parameter in network.lstm.named_parameters():
            if "bias" in name:
                assert not parameter.any()
            else:  # [4·128, 512 or 128]: the columns are orthonormal
                assert torch.allclose(parameter.T @ parameter, torch.eye(parameter.shape[1]), atol=1e-5)
        h, c = network.initial_state(3)
        assert h.shape == c.shape == (1, 3, 128) and not h.any() and not c.any()
        # 4 gates of 128 units, each with weights from 512 features and 128 units, and two biases
        assert parameters(network.lstm) == 4 * 128 * (512 + 128 + 2)
        assert description.features((1, 84, 84)) == 128
        assert description.recurrent and description.shared and not NATURE.recurrent

    def test_images_in_bf16(self) -> None:
        torch.manual_seed(0)
        network = LSTM(NATURE, hidden_size=16, num_layers=1).build((1, 84, 84))
        x, starts = pixels(3, 2, 1, 84, 84), torch.tensor([[1, 1], [0, 0], [0, 1]])
        exact, _ = network(x, network.initial_state(2), starts)
        with torch.autocast("cpu", torch.bfloat16):
            rounded, state = network(x, network.initial_state(2), starts)
        assert rounded.dtype == state[0].dtype == torch.float32
        assert exact.shape == (3, 2, 16)
        torch.testing.assert_close(rounded, exact, rtol=0, atol=0.01)


REFUSALS: list[tuple[Any, spaces.Box, str]] = [
    (DENSE, images(4, 84, 84), "network=mlp takes vectors.*4x84x84 images; network=nature_cnn takes them"),
    (DENSE, images(9, 9), "network=mlp takes vectors.*are 9x9; choose an env with vectors"),
    (NATURE, vectors(4), "network=nature_cnn takes images.*vectors of 4; network=mlp takes them"),
    (IMPALA, vectors(4), "network=impala_cnn takes images.*vectors of 4; network=mlp takes them"),
    (NATURE, images(3, 35, 64), "at least 36x36.*are 35x64; network=impala_cnn takes them"),
    (NATURE, images(35, 64, 3), "at least 36x36.*are 35x64"),
    (NATURE, images(84, 84), "network=nature_cnn takes images.*shape 84x84"),
    (NATURE, images(3, 64, 64, high=1.0, dtype=np.float32), "divides pixels by 255.*from 0 to 1;"),
    (ImpalaCNN([], 8, True, False), images(3, 8, 8), r"network.depths=\[\]: .*\[16,32,32\]"),
    (ImpalaCNN([16, 0], 8, True, False), images(3, 8, 8), r"network.depths=\[16, 0\]"),
    (LSTM(NATURE, 8, 1), vectors(4), "network@network.encoder=nature_cnn.*network@network.encoder=mlp takes"),
    (LSTM(MLP([0], "tanh", True, True), 8, 1), vectors(4), r"network.encoder.hidden_sizes=\[0\]"),
    (LSTM(LSTM(DENSE, 8, 1), 8, 1), vectors(4), "network@network.encoder.*without memory"),
    (LSTM("mlp", 8, 1), vectors(4), "network@network.encoder.*network@network.encoder=nature_cnn"),
]


class TestChecks:
    @pytest.mark.parametrize(("network", "space", "message"), REFUSALS)
    def test_refusals(self, network: Any, space: spaces.Box, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as error:
            network.check(space)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("network", "space"),
        [
            (NATURE, images(1, 36, 36)),
            (NATURE, images(96, 96, 3)),
            (IMPALA, images(1, 1, 1)),
            (LSTM(IMPALA, 8, 1), images(3, 64, 64)),
            (LSTM(DENSE, 8, 1), vectors(4)),
        ],
    )
    def test_what_is_taken_can_be_built(self, network: Any, space: spaces.Box) -> None:
        network.check(space)
        network.build(space.shape)


class TestConfiguration:
    @pytest.mark.parametrize("name", NETWORKS)
    def test_every_option_composes_and_survives_its_record(self, name: str) -> None:
        config = configure(f"network={name}")
        assert configuration.check(config.resolved).network == config.network

    def test_keys_and_encoder_of_an_lstm(self) -> None:
        network = configure(
            "network=lstm", "network@network.encoder=impala_cnn", "network.encoder.depths=[4]"
        ).network
        assert network == LSTM(ImpalaCNN([4], 256, True, False), 128, 1)
        with pytest.raises(ConfigError, match=r"network.encoder.hidden_size=0: must be at least 1"):
            configure("network=lstm", "network.encoder.hidden_size=0")

    def test_nothing_heavy_is_imported(self) -> None:
        code = (
            "import sys\n"
            "from hydra import compose, initialize_config_dir\n"
            "from rl import config\n"
            "config.register_schema()\n"
            f"with initialize_config_dir({str(ROOT / 'conf')!r}, version_base='1.3'):\n"
            f"    for name in {NETWORKS}:\n"
            "        config.check(compose('config', [f'network={name}', 'logger=none']))\n"
            "assert 'rl.networks.lstm' in sys.modules and 'torch' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)

    def test_the_command_line_answers_in_one_line(self, tmp_path: Path) -> None:
        result = launch("network=nature_cnn", "env=classic", cwd=tmp_path)
        assert result.returncode == 2
        assert result.stderr.strip() == (
            "network=nature_cnn takes images, but the env's observations are vectors of 4; "
            "network=mlp takes them"
        )
        assert not list(tmp_path.iterdir())


class TestActing:
    @pytest.mark.parametrize("live", [False, True])
    def test_images_as_numpy(self, live: bool) -> None:
        torch.manual_seed(0)
        head = nn.Linear(512, 3)
        network = nn.Sequential(NATURE.build((4, 84, 84)), head)
        obs = pixels(2, 4, 84, 84)
        forward = numpy_forward(network, live)
        expected = network(obs).detach().numpy()
        out = forward(obs.numpy())
        assert out.dtype == np.float32
        np.testing.assert_array_equal(out, expected)
        with torch.no_grad():
            head.bias.add_(1)
        np.testing.assert_allclose(forward(obs.numpy()), expected + live, rtol=1e-5, atol=1e-5)

    def test_in_bf16_it_follows_training_and_loaded_weights(self) -> None:
        torch.manual_seed(0)
        learners = [Learner(nn.Sequential(NATURE.build((4, 84, 84)), nn.Linear(512, 3)), 1e-2) for _ in "ab"]
        learner, other = learners
        obs = pixels(2, 4, 84, 84)

        def expected() -> np.ndarray:
            return numpy_forward(learner.network, dtype=torch.bfloat16)(obs.numpy())

        acting = learner.acting(torch.bfloat16)
        np.testing.assert_allclose(acting(obs.numpy()), expected(), rtol=0.02, atol=0.02)
        before = expected()
        learner.step(learner.network(obs).square().sum())
        np.testing.assert_allclose(acting(obs.numpy()), expected(), rtol=0.02, atol=0.02)
        assert np.abs(expected() - before).max() > 0.2
        learner.load_weights(other.weights())
        np.testing.assert_allclose(acting(obs.numpy()), expected(), rtol=0.02, atol=0.02)
