"""Policies at one moment: weights copied and normalisers frozen, so that training on does not change them."""

from __future__ import annotations

import copy

import numpy as np
from torch import Tensor, nn

from rl.distributions import Distribution
from rl.envs.normalization import ObsNormalizer
from rl.networks.numpy_forward import numpy_forward


class ActorPolicy:
    """A feed-forward actor whose outputs [N, K] are the parameters of a distribution over actions.

    Args:
        actor: the network from observations [N, …] to outputs.
        logstd: the log standard deviations [K] beside them, None where the distribution has none.
        normalizer: of the observations, None where they are taken raw.
    """

    def __init__(
        self,
        actor: nn.Sequential,
        logstd: Tensor | None,
        distribution: Distribution,
        normalizer: ObsNormalizer | None = None,
    ) -> None:
        self.actor = numpy_forward(actor)
        self.std = None if logstd is None else logstd.detach().exp().cpu().numpy()
        self.distribution = distribution
        self.normalizer = copy.deepcopy(normalizer)

    def initial_state(self, num_envs: int) -> None:
        """Feed-forward: there is none."""

    def sample(self, obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions [N, …] for observations as the network takes them, drawn with `distribution.noise`."""
        return self.distribution.sample(self.actor(obs), noise, self.std)

    def __call__(
        self, obs: np.ndarray, state: None, rng: np.random.Generator | None
    ) -> tuple[np.ndarray, None]:
        """Actions for raw observations [N, …]: the mode, or drawn with `rng`."""
        obs = obs if self.normalizer is None else self.normalizer(obs, update=False)
        if rng is None:
            return self.distribution.mode(self.actor(obs)), None
        return self.sample(obs, self.distribution.noise(rng, (len(obs),))), None
