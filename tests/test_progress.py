"""The display in a terminal of 80 and 120 columns, plain lines elsewhere, and logging around them."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest
from rich.console import Console

from rl import progress
from rl.progress import Progress

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Clock:
    """Stands in for the time module within rl.progress."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def terminal(width: int) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(
        file=out, force_terminal=True, width=width, color_system=None, _environ={"TERM": "xterm"}
    ), out


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=80), out


def last_picture(text: str) -> list[str]:
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).strip() for line in re.split("[\r\n]", text)]
    bars = [i for i, line in enumerate(lines) if "━" in line]
    return [line for line in lines[bars[-1] :] if line]


class TestPlainLines:
    def test_first_after_two_seconds_then_every_interval(self, clock: Clock) -> None:
        console, out = plain()
        with Progress(500_000, console=console, interval=10) as bar:
            bar.update(10_000, 100.0)
            assert out.getvalue() == ""
            clock.now += 2
            bar.update(20_000, 146.8)
            # 20,000 steps in 2 s: 10,000 a second, so 480,000 more take 48 s.
            line = "step 20,000/500,000 (4%)  return 123.4  10,000 steps/s  time left 0:48\n"
            assert out.getvalue() == line
            clock.now += 9.9
            bar.update(30_000)
            assert out.getvalue() == line
            clock.now += 0.2
            bar.update(40_000)
            assert out.getvalue().count("\n") == 2
        assert out.getvalue().count("\n") == 2  # 40,000 was told already

    def test_last_line_says_where_it_ended(self, clock: Clock) -> None:
        console, out = plain()
        with Progress(1000, console=console) as bar:
            clock.now += 1
            bar.update(1000)
        assert out.getvalue() == "step 1,000/1,000 (100%)  return –  1,000 steps/s  time left 0:00\n"

    def test_speed_of_a_resumed_run_is_this_process_s(self, clock: Clock) -> None:
        bar = Progress(1000, done=600, console=plain()[0])
        clock.now += 2
        bar.update(700)
        assert "step 700/1,000 (70%)" in bar.line() and "50 steps/s  time left 0:06" in bar.line()

    def test_return_is_the_mean_of_the_last_100_episodes(self, clock: Clock) -> None:
        bar = Progress(1000, console=plain()[0])
        for step in range(200):
            bar.update(step, 0.0 if step < 150 else 40.0)
        assert "return 20.0 " in bar.line()  # 50 zeros and 50 forties

    def test_long_lines_are_not_broken(self) -> None:
        console, out = plain()
        logger = logging.getLogger("rl.test_progress")
        with Progress(10, console=console):
            logger.warning("[bold] %s", "x" * 200)
        assert out.getvalue() == f"warning: [bold] {'x' * 200}\n"


class TestTerminal:
    @pytest.mark.parametrize(("width", "lines"), [(40, 2), (80, 2), (120, 1)])
    def test_fits(self, clock: Clock, width: int, lines: int) -> None:
        console, out = terminal(width)
        with Progress(500_000, console=console) as bar:
            clock.now += 4
            bar.update(50_000, 123.4)
        picture = last_picture(out.getvalue())
        assert len(picture) == lines
        assert max(map(len, picture)) <= width
        text = "  ".join(picture)
        assert " 10%  50,000/500,000 steps  return 123.4  12,500 steps/s" in text
        if width >= 80:
            assert text.endswith("0:04 elapsed  0:36 left")

    def test_even_large_runs_fit_80_columns(self, clock: Clock) -> None:
        console, out = terminal(80)
        with Progress(10_000_000_000, console=console) as bar:
            clock.now += 3 * 86400
            bar.update(1_000_000_000, -123_456.7)
        picture = last_picture(out.getvalue())
        assert len(picture) == 2 and max(map(len, picture)) <= 80
        assert picture[1] == "return -123,456.7  3,858 steps/s  3d 0:00:00 elapsed  27d 0:00:00 left"

    def test_draws_at_most_four_times_a_second(self, clock: Clock) -> None:
        console, out = terminal(120)
        with Progress(1000, console=console) as bar:
            for step in range(1000):
                clock.now += 0.001
                bar.update(step)
            assert out.getvalue().count("━ ") <= 6  # 1 s, and the first drawing

    def test_records_go_above_the_bar(self, clock: Clock) -> None:
        console, out = terminal(80)
        logger = logging.getLogger("rl.test_progress")
        with Progress(10, console=console) as bar:
            bar.update(5)
            logger.error("something")
        assert re.search(r"\n?[^━\n]*error: something\n.*━", out.getvalue())

    @pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
    def test_cursor_and_logging_are_put_back(self, error: type[BaseException] | None) -> None:
        console, out = terminal(80)
        tree, streams = logging.getLogger("rl"), (sys.stdout, sys.stderr)
        own = logging.StreamHandler(sys.stdout)
        before = [*tree.handlers, own]
        tree.addHandler(own)
        try:
            with Progress(10, console=console) as bar:
                bar.update(5)
                assert own.filters and own.stream is not streams[0]
                if error is not None:
                    raise error
        except (RuntimeError, KeyboardInterrupt) as caught:
            assert type(caught) is error
        finally:
            tree.removeHandler(own)
        assert out.getvalue().rfind(SHOW) > out.getvalue().rfind(HIDE) >= 0
        assert [*tree.handlers, own] == before and not own.filters
        assert own.stream is sys.stdout and (sys.stdout, sys.stderr) == streams

    def test_a_handler_that_writes_to_the_terminal_does_not_repeat_our_records(self) -> None:
        console, out = plain()
        root, logger = logging.getLogger(), logging.getLogger("rl.test_progress")
        stream = io.StringIO()
        handler = logging.StreamHandler(sys.stderr)
        root.addHandler(handler)
        try:
            with Progress(10, console=console):
                handler.setStream(stream)
                logger.warning("ours")
                logging.getLogger("elsewhere").warning("theirs")
        finally:
            root.removeHandler(handler)
        assert out.getvalue() == "warning: ours\n" and stream.getvalue() == "theirs\n"
