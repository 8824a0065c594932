"""What one sees while a run trains: a live bar in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from types import TracebackType
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

REFRESH_SECS = 0.25  # between two drawings in a terminal
FIRST_LINE_SECS = 2.0  # until the first plain line
EPISODES = 100  # the return shown is the mean of this many latest episodes


class Progress:
    """Shows env steps, return, steps/s and time left, and prints the `rl` loggers' records above them.

    Draws only within `update`, so it needs no thread; between drawings a call costs about a microsecond.
    Use as a context manager: it leaves the terminal and the logging as they were, whatever the block raises.
    """

    def __init__(
        self, total_timesteps: int, done: int = 0, console: Console | None = None, interval: float = 10.0
    ) -> None:
        """`done`: env steps of earlier processes, not in steps/s. `interval`: seconds between plain lines."""
        self.total_timesteps = total_timesteps
        self.env_steps = self._start_steps = done
        self.console = console if console is not None else Console(stderr=True)
        self.interval = interval
        self._returns: deque[float] = deque(maxlen=EPISODES)
        self._live: Live | None = None
        self._handler = _ConsoleHandler(self.console)
        self._diverted: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        self._shown_steps = -1
        self._started = self._next = time.monotonic()

    def update(self, env_steps: int, episodic_return: float | None = None) -> None:
        """Note where the run stands and, per finished episode, its return; draw if it is time to."""
        self.env_steps = env_steps
        if episodic_return is not None:
            self._returns.append(episodic_return)
        now = time.monotonic()
        if now >= self._next:
            self._show(now)

    def line(self) -> str:
        """Where the run stands, as one plain line."""
        percent = f"{self._fraction():.0%}"
        parts = [f"step {self.env_steps:,}/{self.total_timesteps:,} ({percent})", *self._figures()]
        return "  ".join([*parts, f"time left {clock(self._seconds_left())}"])

    def __enter__(self) -> Progress:
        self._started = now = time.monotonic()
        terminal_streams = sys.stdout, sys.stderr
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._next = now
            self._live = Live(_Display(self), console=self.console, auto_refresh=False)
            self._live.start()
        else:
            self._next = now + min(FIRST_LINE_SECS, self.interval)
        self._attach(terminal_streams)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._live is not None:
                self._live.stop()  # draws once more, and shows the cursor again
            elif self._shown_steps != self.env_steps and self.env_steps > self._start_steps:
                self._handler.write(self.line())
        finally:
            self._live = None
            self._detach()

    def _show(self, now: float) -> None:
        self._shown_steps = self.env_steps
        if self._live is not None:
            self._next = now + REFRESH_SECS
            self._live.refresh()
        else:
            self._next = now + self.interval
            self._handler.write(self.line())

    def _attach(self, terminal_streams: tuple[TextIO, TextIO]) -> None:
        """Take the `rl` loggers' records over from handlers that write to the terminal themselves.

        What else those handlers print goes through the stream that the live display put in its place.
        """
        tree = logging.getLogger("rl")
        for handler in [*tree.handlers, *logging.getLogger().handlers]:
            if type(handler) is logging.StreamHandler and handler.stream in terminal_streams:
                self._diverted.append((handler, handler.stream))
                handler.addFilter(_not_ours)
                handler.setStream(sys.stdout if handler.stream is terminal_streams[0] else sys.stderr)
        tree.addHandler(self._handler)

    def _detach(self) -> None:
        logging.getLogger("rl").removeHandler(self._handler)
        for handler, stream in self._diverted:
            handler.setStream(stream)
            handler.removeFilter(_not_ours)
        self._diverted.clear()

    def _fraction(self) -> float:
        return min(1.0, self.env_steps / self.total_timesteps) if self.total_timesteps else 1.0

    def _steps_per_second(self) -> float:
        return (self.env_steps - self._start_steps) / max(1e-9, time.monotonic() - self._started)

    def _seconds_left(self) -> float | None:
        speed = self._steps_per_second()
        return max(0, self.total_timesteps - self.env_steps) / speed if speed > 0 else None

    def _figures(self) -> list[str]:
        mean = sum(self._returns) / len(self._returns) if self._returns else None
        speed = self._steps_per_second()
        return [
            "return –"
            if mean is None
            else f"return {mean:,.1f}"
            if abs(mean) >= 10
            else f"return {mean:.3g}",
            f"{speed:,.0f} steps/s" if speed >= 10 or speed == 0 else f"{speed:.2g} steps/s",
        ]


class _Display:
    """What `Live` draws: a line where a bar of some length fits, otherwise the bar above the figures."""

    MIN_BAR = 20  # columns

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        progress = self.progress
        elapsed = time.monotonic() - progress._started
        percent = Text(f"{progress._fraction():4.0%}", "bold")
        steps = Text(f"{progress.env_steps:,}/{progress.total_timesteps:,} steps", "green")
        mean, speed = progress._figures()
        times = Text(f"{clock(elapsed)} elapsed  {clock(progress._seconds_left())} left", "cyan")
        figures = [Text(mean, "bold magenta"), Text(speed, "yellow"), times]
        bar = ProgressBar(total=max(1, progress.total_timesteps), completed=progress.env_steps)
        gaps = 2 * 5
        if self.MIN_BAR + sum(len(text) for text in [percent, steps, *figures]) + gaps <= options.max_width:
            yield _row(bar, percent, steps, *figures)
        else:
            yield _row(bar, percent, steps)
            figures_line = Text("  ").join(figures)
            figures_line.no_wrap, figures_line.overflow = True, "ellipsis"
            yield figures_line


def _row(bar: ProgressBar, *texts: Text) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(ratio=1)
    for _ in texts:
        table.add_column(no_wrap=True)
    table.add_row(bar, *texts)
    return table


class _ConsoleHandler(logging.Handler):
    """Prints records through the console, above the live display; warnings and worse with their level."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        try:
            style = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}.get(record.levelname, "")
            prefix = f"{record.levelname.lower()}: " if style else ""
            self.write(prefix + self.format(record), style)
        except Exception:
            self.handleError(record)

    def write(self, line: str, style: str = "") -> None:
        """Print a line as it is: no markup, no colouring of numbers, no wrapping into hard line ends."""
        self.console.print(Text(line, style), soft_wrap=True, highlight=False)


def _not_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] != "rl"


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 10 or value == 0 else f"{value:.3g}"


def clock(seconds: float | None) -> str:
    """0:36, 1:02:03, 2d 3:04:05; – when unknown."""
    if seconds is None:
        return "–"
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}:{secs:02}"
    days, hours = divmod(hours, 24)
    return f"{f'{days}d ' if days else ''}{hours}:{minutes:02}:{secs:02}"
