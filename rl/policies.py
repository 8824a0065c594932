"""Policies at one moment: weights copied and normalisers frozen, so that training on does not change them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl.distributions import Distribution
from rl.envs.normalization import ObsNormalizer
from rl.networks.continuous import LOG_STD_MAX, LOG_STD_MIN
from rl.networks.numpy_forward import Forward, numpy_forward, runs_in_numpy


class ActorPolicy:
    """A feed-forward actor whose outputs [N, K] are the parameters of a distribution over actions.

    Args:
        actor: the network from observations [N, …] to outputs.
        logstd: the log standard deviations [K] beside them, None where the distribution has none.
        normalizer: of the observations, None where they are taken raw.
        dtype: of the run's precision, for networks that go through torch.
    """

    def __init__(
        self,
        actor: nn.Sequential,
        logstd: Tensor | None,
        distribution: Distribution,
        normalizer: ObsNormalizer | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.actor = numpy_forward(actor, dtype=dtype)
        self.in_numpy = runs_in_numpy(actor)
        self.std = None if logstd is None else logstd.detach().exp().cpu().numpy()
        self.distribution = distribution
        self.normalizer = copy.deepcopy(normalizer)

    def initial_state(self, num_envs: int) -> None:
        """Feed-forward: there is none."""

    def sample(self, obs: Any, noise: np.ndarray) -> np.ndarray:
        """Actions [N, …] for observations as the network takes them, drawn with `distribution.noise`.

        Args:
            obs: [N, …], an array; or, unless the network runs `in_numpy`, a tensor on its device.
            noise: [N, K].
        """
        return self.distribution.sample(self.actor(obs), noise, self.std)

    def __call__(
        self, obs: np.ndarray, state: None, rng: np.random.Generator | None
    ) -> tuple[np.ndarray, None]:
        """Actions for raw observations [N, …]: the mode, or drawn with `rng`."""
        obs = obs if self.normalizer is None else self.normalizer(obs, update=False)
        if rng is None:
            return self.distribution.mode(self.actor(obs)), None
        return self.sample(obs, self.distribution.noise(rng, (len(obs),))), None


class RecurrentPolicy:
    """An actor with memory; its state is an array [N, 2, layers, H]: h and c of each env.

    Args:
        agent: gives outputs [T, N, K], values and the state of observations [T, N, …], a state and which of
            the observations are the first of an episode.
        normalizer: of the observations, None where they are taken raw.
        autocast: the run's precision.
    """

    def __init__(
        self,
        agent: Any,
        distribution: Distribution,
        normalizer: ObsNormalizer | None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.agent = copy.deepcopy(agent)
        self.std = None if agent.logstd is None else agent.logstd.detach().exp().cpu().numpy()
        self.distribution, self.autocast = distribution, autocast
        self.normalizer = copy.deepcopy(normalizer)

    def initial_state(self, num_envs: int) -> np.ndarray:
        """Zeros."""
        h, _ = self.agent.trunk.initial_state(num_envs)
        return np.zeros((num_envs, 2, len(h), h.shape[-1]), np.float32)

    def __call__(
        self, obs: np.ndarray, state: np.ndarray, rng: np.random.Generator | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Actions for raw observations [N, …] and the state after them: the mode, or drawn with `rng`."""
        obs = obs if self.normalizer is None else self.normalizer(obs, update=False)
        device = next(self.agent.parameters()).device
        x = torch.as_tensor(obs, device=device).unsqueeze(0)
        h, c = torch.as_tensor(state, device=device).permute(1, 2, 0, 3).contiguous()
        with torch.inference_mode(), self.autocast():
            y, _, after = self.agent(x, (h, c), torch.zeros(x.shape[:2], dtype=torch.bool))
        outputs, following = y[0].float().cpu().numpy(), torch.stack(after).permute(2, 0, 1, 3).cpu().numpy()
        if rng is None:
            return self.distribution.mode(outputs), following
        noise = self.distribution.noise(rng, (len(obs),))
        return self.distribution.sample(outputs, noise, self.std), following


class GreedyPolicy:
    """The action of the highest value; sampled, a random one with probability `epsilon`.

    Args:
        values: from observations as the network takes them [N, …] to action values [N, A].
        normalizer: of the observations, None where they are taken raw.
    """

    def __init__(
        self, values: Forward, num_actions: int, epsilon: float, normalizer: ObsNormalizer | None
    ) -> None:
        self.values, self.num_actions, self.epsilon = values, num_actions, epsilon
        self.normalizer = copy.deepcopy(normalizer)

    def initial_state(self, num_envs: int) -> None:
        """Feed-forward: there is none."""

    def __call__(
        self, obs: np.ndarray, state: None, rng: np.random.Generator | None
    ) -> tuple[np.ndarray, None]:
        """Actions [N] for raw observations [N, …]."""
        obs = obs if self.normalizer is None else self.normalizer(obs, update=False)
        if rng is None:
            return self.values(obs).argmax(-1), None
        return epsilon_greedy(self.values, obs, self.num_actions, self.epsilon, rng), None


def epsilon_greedy(
    values: Forward, obs: np.ndarray, num_actions: int, epsilon: float, rng: np.random.Generator
) -> np.ndarray:
    """Actions [N]: for each env on its own, random with probability `epsilon`, else of the highest value."""
    random = rng.integers(0, num_actions, len(obs))
    explore = rng.random(len(obs)) < epsilon
    return random if explore.all() else np.where(explore, random, values(obs).argmax(-1))


class BoundedPolicy:
    """Actions of an actor whose outputs x in [−1, 1] stand for a Box; sampled, x has clipped noise added.

    Args:
        actor: from observations as the network takes them [N, …] to x [N, D].
        space: the Box.
        normalizer: of the observations, None where they are taken raw.
        noise: the standard deviation of what is added to x.
    """

    def __init__(self, actor: Forward, space: Any, normalizer: ObsNormalizer | None, noise: float) -> None:
        self.actor, self.space, self.noise = actor, space, noise
        self.normalizer = copy.deepcopy(normalizer)

    def initial_state(self, num_envs: int) -> None:
        """Feed-forward: there is none."""

    def __call__(
        self, obs: np.ndarray, state: None, rng: np.random.Generator | None
    ) -> tuple[np.ndarray, None]:
        """Actions [N, D] for raw observations [N, …]."""
        x = self.actor(obs if self.normalizer is None else self.normalizer(obs, update=False))
        return to_bounds(x, self.space) if rng is None else explore(x, self.noise, rng, self.space), None


def to_bounds(x: np.ndarray, space: Any) -> np.ndarray:
    """Actions [N, D] in the units of a Box from x [N, D] in [−1, 1], per dimension."""
    low, high = space.low.ravel(), space.high.ravel()
    return (high - low) / 2 * x + (high + low) / 2


def explore(x: np.ndarray, noise: float, rng: np.random.Generator, space: Any) -> np.ndarray:
    """Actions [N, D] from x in [−1, 1] with independent normal noise, clipped: of each dimension's own
    width."""
    noisy = x + noise * rng.standard_normal(x.shape, dtype=np.float32)
    return to_bounds(np.clip(noisy, -1, 1), space)


def random_actions(rng: np.random.Generator, space: Any, num_envs: int) -> np.ndarray:
    """Actions [N, D] uniform between a Box's bounds, per env and dimension."""
    low, high = space.low.ravel(), space.high.ravel()
    return rng.uniform(low, high, (num_envs, low.size)).astype(np.float32)


class SquashedGaussianPolicy:
    """Actions bias + scale · tanh(u), u normal; deterministic, tanh of the mean.

    Args:
        actor: from observations as the network takes them [N, …] to [μ, raw log σ], [N, 2·D].
        space: the Box.
        normalizer: of the observations, None where they are taken raw.
    """

    def __init__(self, actor: Forward, space: Any, normalizer: ObsNormalizer | None) -> None:
        self.actor, self.space = actor, space
        self.normalizer = copy.deepcopy(normalizer)

    def initial_state(self, num_envs: int) -> None:
        """Feed-forward: there is none."""

    def __call__(
        self, obs: np.ndarray, state: None, rng: np.random.Generator | None
    ) -> tuple[np.ndarray, None]:
        """Actions [N, D] for raw observations [N, …]."""
        outputs = self.actor(obs if self.normalizer is None else self.normalizer(obs, update=False))
        if rng is not None:
            return self.draw(outputs, rng, self.space), None
        return to_bounds(np.tanh(outputs[:, : outputs.shape[1] // 2]), self.space), None

    @staticmethod
    def draw(outputs: np.ndarray, rng: np.random.Generator, space: Any) -> np.ndarray:
        """Actions [N, D] from the actor's outputs [N, 2·D]."""
        mean, raw = np.split(outputs, 2, axis=1)
        std = np.exp(LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (np.tanh(raw) + 1))
        noise = rng.standard_normal(mean.shape, dtype=np.float32)
        return to_bounds(np.tanh(mean + std * noise), space)
