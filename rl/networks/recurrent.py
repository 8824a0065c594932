"""An encoder followed by an LSTM that forgets where an episode starts, as a torch module."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]  # h and c, each [layers, N, H]


class RecurrentEncoder(nn.Module):
    """Features of observations and of what was seen before them in the same episode.

    Args:
        encoder: from observations [B, …] to features [B, F].
        features: F.
        hidden_size: H, the size of the LSTM's output.
        num_layers: of the LSTM.
    """

    def __init__(self, encoder: nn.Module, features: int, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.lstm = nn.LSTM(features, hidden_size, num_layers)
        for name, parameter in self.lstm.named_parameters():
            if "bias" in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.orthogonal_(parameter)

    def initial_state(self, num_envs: int) -> State:
        """The state [layers, N, H] at the start of an episode: zeros."""
        shape = (self.lstm.num_layers, num_envs, self.lstm.hidden_size)
        weight = next(self.lstm.parameters())
        return weight.new_zeros(shape), weight.new_zeros(shape)

    def forward(self, x: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Features [T, N, H] of observations [T, N, …], and the state after the last.

        All observations are encoded in one batch; the LSTM then runs over whole stretches of steps at which
        no episode starts. It computes in float32, whatever the precision of the encoder.

        Args:
            state: (h, c) before the first step, each [layers, N, H].
            starts: [T, N], bool or 0 and 1, on the CPU whatever the device, so that nobody waits for a GPU:
                whether x[t, n] is the first observation of an episode, before which that env's state is set
                to zero.
        """
        starts = starts.bool()
        encoded = self.encoder(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        ends = sorted({0, len(x), *starts.any(1).nonzero().flatten().tolist()})
        starts = starts.to(x.device)
        outputs = []
        with torch.autocast(x.device.type, enabled=False):
            encoded = encoded.to(state[0].dtype)
            for begin, end in itertools.pairwise(ends):
                fresh = starts[begin].view(1, -1, 1)
                h, c = (part.masked_fill(fresh, 0.0) for part in state)
                output, state = self.lstm(encoded[begin:end], (h, c))
                outputs.append(output)
        return torch.cat(outputs), state
