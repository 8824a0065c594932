"""What an Optuna study searches: Hydra's sweeps as Optuna's distributions, and its values as overrides."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from rl.errors import ConfigError, one_line
from rl.launchers.sweep import own

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


@dataclass
class Search:
    """What the command line and the sweeper's params ask for."""

    distributions: dict[str, BaseDistribution]
    """By the key as it was written, plus signs included."""
    fixed: list[str]
    """The overrides that every job shares."""
    seeds: list[int]
    """One job of each trial has each of them."""

    @classmethod
    def of(cls, params: Mapping[str, Any], arguments: Sequence[str], n_seeds: int, seed: int) -> Search:
        """Read `params` and the command line's `arguments`, which win; `seed` is the first of the seeds,
        unless the arguments sweep `seed`: then its values are the seeds.

        Raises:
            ConfigError: there is nothing to search, or something cannot be searched.
        """
        words = [*(f"{key}={value}" for key, value in params.items()), *arguments]
        given = {str(word.key_or_group): word for word in OverridesParser.create().parse_overrides(words)}
        seeds = [seed + i for i in range(n_seeds)]
        own_seed = given.pop("seed", None)
        if own_seed is not None and own_seed.is_discrete_sweep():
            seeds = [int(str(value)) for value in own_seed.sweep_iterator()]
        elif own_seed is not None and own_seed.is_sweep_override():
            raise ConfigError(f"{own_seed.input_line}: list the seeds of each trial, e.g. seed=1,2,3")
        swept = [word for word in given.values() if word.is_sweep_override()]
        if not swept:
            raise ConfigError(
                "hydra.sweeper.params: nothing to search; give a range, e.g. "
                "'algo.learning_rate=tag(log, interval(1e-5, 1e-2))'"
            )
        fixed = [str(word.input_line) for word in given.values() if not word.is_sweep_override()]
        return cls({written_key(word): distribution(word) for word in swept}, fixed, seeds)

    def check_against(self, trials: Sequence[FrozenTrial]) -> None:
        """Raise ConfigError where a key was searched in another way in these earlier trials: Optuna can widen
        a range, but neither change a list of choices nor a scale."""
        from optuna.distributions import check_distribution_compatibility

        for trial in trials:
            for key in trial.distributions.keys() & self.distributions.keys():
                try:
                    check_distribution_compatibility(trial.distributions[key], self.distributions[key])
                except ValueError as error:
                    raise ConfigError(
                        f"{key}: earlier trials of this study searched it otherwise: {one_line(error)} Keep "
                        f"{trial.distributions[key]}, or start another study"
                    ) from error


def distribution(word: Override) -> BaseDistribution:
    """Optuna's distribution for a sweep of Hydra's: a choice, `interval(low, high)` (of integers as
    `int(interval(low, high))`, both ends included) or `range(start, stop, step)`; `tag(log, …)` for a
    logarithmic scale.

    Raises:
        ConfigError: Optuna has none for it.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sweep = word.value()
    log = isinstance(sweep, IntervalSweep | RangeSweep) and "log" in sweep.tags
    try:
        if isinstance(sweep, IntervalSweep):
            assert sweep.start is not None and sweep.end is not None
            if isinstance(sweep.start, int) and isinstance(sweep.end, int):
                return IntDistribution(sweep.start, sweep.end, log=log)
            return FloatDistribution(sweep.start, sweep.end, log=log)
        if isinstance(sweep, RangeSweep):
            values = sorted(sweep.range())
            if not values:
                raise ValueError("the range is empty")
            low, high, step = values[0], values[-1], abs(sweep.step)
            if isinstance(low, int):
                return IntDistribution(low, high, step=int(step), log=log)
            return FloatDistribution(low, high, step=None if log else float(step), log=log)
        if isinstance(sweep, ChoiceSweep):
            return CategoricalDistribution([_choice(element) for element in sweep.list])
    except ValueError as error:
        raise ConfigError(
            f"{word.input_line}: {one_line(error)}; write e.g. interval(0.9, 1.0) or choice(1, 2)"
        ) from error
    raise ConfigError(f"{word.input_line}: Optuna cannot search this; list the values: choice(a, b)")


def _choice(element: Any) -> bool | int | float | str | None:
    """A choice as Optuna keeps it: a number as it is, everything else as an override would have it."""
    if element is None or isinstance(element, bool | int | float):
        return element
    return str(Override._get_value_element_as_str(element))


def assignment(key: str, value: bool | int | float | str | None) -> str:
    """The override that gives `key` a value of its distribution; floats keep every digit."""
    if value is None:
        return f"{key}=null"
    if isinstance(value, bool):
        return f"{key}={str(value).lower()}"
    return f"{key}={value if isinstance(value, str) else repr(value)}"


def written_key(word: Override) -> str:
    """The key of an override as it was written, plus signs and package included."""
    return str(word.input_line).split("=", 1)[0]


def command(options: Sequence[str], search: Search, params: Mapping[str, Any]) -> str:
    """The command that trains one run with these values."""
    words = [*own(search.fixed), *(assignment(key, value) for key, value in params.items())]
    if any(
        word.startswith("multirun_templates=") for word in words
    ):  # which asks for a sweep, elsewhere perhaps
        words += ["hydra.mode=RUN", "hydra/launcher=local"]
    return shlex.join(["python", "launch.py", *options, *words, f"seed={search.seeds[0]}"])
