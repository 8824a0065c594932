"""Evaluation: episodes on envs of its own, with the normalisers frozen and random streams apart from
training's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rl.algos import Policy
from rl.video import VideoWriter

MOST_ENVS = 16  # episodes played side by side


class EvaluationEpisode(NamedTuple):
    """One evaluation episode: its number in order of starting, raw return and length in steps."""

    episode: int
    episodic_return: float
    length: int


def evaluate(
    policy: Policy,
    env: Any,
    seed: np.random.SeedSequence,
    *,
    episodes: int,
    deterministic: bool,
    videos: dict[int, Path] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[EvaluationEpisode] | None:
    """Play exactly `episodes` episodes and return them in the order in which they started.

    Episodes are counted by which started first, not by which ended first: counting the first to end would
    favour short ones.

    Args:
        env: the env family; `min(episodes, 16)` of its envs are stepped together in this process.
        seed: seeds envs and sampled actions; the same seed gives the same episodes.
        videos: which episodes to film, and where to; only those that start first, one an env, can be.
        stop: asked before every step; once true, evaluation is abandoned.

    Returns:
        The episodes, or None when abandoned.
    """
    count = min(episodes, MOST_ENVS)
    envs = env.make(
        num_envs=count, backend="sync", render_mode="rgb_array" if videos else None, evaluation=True
    )
    count = envs.num_envs  # of several agents, as many as whole games have
    films = {
        number: VideoWriter(path, envs.render_fps)
        for number, path in (videos or {}).items()
        if number < count
    }
    rng = None if deterministic else np.random.default_rng(seed.spawn(1)[0])
    numbers = list(range(count))  # the episode that each env is playing
    finished: dict[int, EvaluationEpisode] = {}
    try:
        obs, state, fresh = envs.reset(seed), policy.initial_state(count), policy.initial_state(count)
        while len(finished) < episodes:
            if stop():
                return None
            for number, film in films.items():
                if number not in finished:
                    film.add(envs.render(number))
            actions, state = policy(obs, state, rng)
            step = envs.step(actions)
            for ended in step.episodes:
                number = numbers[ended.env]
                if number < episodes:
                    finished[number] = EvaluationEpisode(number, ended.episodic_return, ended.length)
                numbers[ended.env] = max(numbers) + 1
            if state is not None:
                ended_at = step.terminated | step.truncated
                state[ended_at] = fresh[ended_at]
            obs = step.obs
        for film in films.values():
            film.close()
        return [finished[number] for number in range(episodes)]
    except OSError:
        if stop():  # a signal to the whole process group ends the video encoder too
            return None
        raise
    finally:
        for film in films.values():
            film.discard()
        envs.close()


def summary(episodes: list[EvaluationEpisode]) -> dict[str, float]:
    """Mean and standard deviation of the returns and the mean length, under their metric names."""
    returns = np.array([episode.episodic_return for episode in episodes])
    return {
        "eval/episodic_return": float(returns.mean()),
        "eval/episodic_return_std": float(returns.std()),
        "eval/episodic_length": float(np.mean([episode.length for episode in episodes])),
    }
