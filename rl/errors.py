"""The errors that the platform itself raises, each with the exit code its user sees."""

from __future__ import annotations


class ConfigError(Exception):
    """The configuration asks for something impossible; the message is one plain line naming the key and what
    would work.

    `launch.py` and `rl` print it without a traceback and exit with code 2.
    """


class NonFiniteError(ArithmeticError):
    """An observation, reward, loss or parameter became NaN or infinite; the message names which one and
    where."""


class DiskFullError(Exception):
    """The run directory has no room left; the message says what can be continued once there is some."""


def one_line(error: BaseException) -> str:
    """The message of `error` on one line, its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
