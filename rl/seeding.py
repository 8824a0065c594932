"""One seed, and the independent random streams that are spawned from it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

MAX_SEED = 2**31 - 1  # some environments hand their seed to C code or to `np.random.seed`, which take no more
STREAMS = ("envs", "actions", "networks", "minibatches", "replay", "evaluation", "others", "updates")


class Streams:
    """Named streams of one seed: a child of `SeedSequence(seed)` each, so neighbouring seeds and streams
    share nothing."""

    def __init__(self, seed: int) -> None:
        self._children = dict(zip(STREAMS, np.random.SeedSequence(seed).spawn(len(STREAMS)), strict=True))

    def sequence(self, name: str, *key: int) -> np.random.SeedSequence:
        """The seed sequence of a stream, or of its child with the given key; the same one at every call."""
        child = self._children[name]
        return np.random.SeedSequence(child.entropy, spawn_key=(*child.spawn_key, *key))

    def generator(self, name: str, *key: int) -> np.random.Generator:
        """A generator at the beginning of a stream."""
        return np.random.Generator(np.random.PCG64(self.sequence(name, *key)))

    def integer(self, name: str, *key: int) -> int:
        """A 64-bit seed from a stream, for libraries that take one number."""
        return int(self.sequence(name, *key).generate_state(1, np.uint64)[0])


def seed_of(seed: np.random.SeedSequence, *key: int) -> int:
    """The integer that descendant `key` of `seed` gives to an environment's `reset(seed=…)`."""
    child = np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, *key), pool_size=seed.pool_size)
    return int(child.generate_state(1, np.uint64)[0]) & MAX_SEED


def sequence_state(seed: np.random.SeedSequence) -> dict[str, Any]:
    """A seed sequence as JSON can hold it."""
    entropy = seed.entropy
    if entropy is not None and not isinstance(entropy, int):
        entropy = [int(part) for part in np.atleast_1d(entropy)]
    return {"entropy": entropy, "spawn_key": [int(key) for key in seed.spawn_key]}


def sequence_of(state: Mapping[str, Any]) -> np.random.SeedSequence:
    """The seed sequence of which `sequence_state` was taken."""
    return np.random.SeedSequence(state["entropy"], spawn_key=tuple(state["spawn_key"]))


def generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """The state of a generator as JSON can hold it."""
    return dict(generator.bit_generator.state)


def set_generator_state(generator: np.random.Generator, state: dict[str, Any]) -> None:
    """Continue a generator where `generator_state` was taken."""
    generator.bit_generator.state = state


def seed_global_generators(streams: Streams) -> None:
    """Seed the global generators of Python, NumPy and torch: nothing here draws from them, a user's env or
    network may."""
    import torch

    seed = streams.integer("others")
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def global_generators_state() -> dict[str, Any]:
    """The states of the global generators of Python, NumPy and torch, for a checkpoint."""
    import torch

    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    version, words, gauss_next = random.getstate()
    return {
        "python": {"version": version, "words": np.array(words, dtype=np.int64), "gauss_next": gauss_next},
        "numpy": {"name": name, "keys": keys, "position": position, "has_gauss": has_gauss, "gauss": gauss},
        "torch": torch.get_rng_state(),
    }


def set_global_generators_state(state: dict[str, Any]) -> None:
    """Continue the global generators where `global_generators_state` was taken."""
    import torch

    python, legacy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(int(word) for word in python["words"]), python["gauss_next"]))
    gauss = (legacy["has_gauss"], legacy["gauss"])
    np.random.set_state((legacy["name"], legacy["keys"], legacy["position"], *gauss))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
