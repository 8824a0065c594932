"""Stopping on request: SIGTERM, SIGUSR2 (Slurm's warning) and the first Ctrl-C: save, then leave."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Literal

Handler = Callable[[int, FrameType | None], Any] | int | None

_STDERR = 2


class StopSignals:
    """While active, a signal that asks to stop only sets `requested`; the loop looks at it when it suits.

        with StopSignals() as stop:
            while not finished and not stop.requested:
                …

    The first such signal counts, and one line on stderr acknowledges it; a second Ctrl-C raises
    KeyboardInterrupt at once. A system call that a signal interrupts is continued by Python itself. On
    leaving, the former handlers are installed again. They aren't called here; a cluster launcher that needs
    its own to run calls it once the state is saved:

        handler = stop.previous.get(stop.requested)
        if callable(handler):
            handler(stop.requested, None)

    Handlers belong to the main thread: elsewhere this does nothing, and `requested` stays None. In a forked
    child, which inherits them, Ctrl-C and SIGUSR2 are left to the parent and SIGTERM ends the child, as its
    parent's `terminate()` expects.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        """The first signal that asked to stop."""
        self.previous: dict[signal.Signals, Handler] = {}
        """The handlers before, by signal: callable, SIG_DFL, SIG_IGN, or None for one set outside Python."""
        self._interrupts = 0
        self._pid = os.getpid()

    @property
    def status(self) -> Literal["interrupted", "preempted"] | None:
        """For run.json: "interrupted" by a person, "preempted" by a scheduler; None while nothing asked."""
        if self.requested is None:
            return None
        return "interrupted" if self.requested is signal.SIGINT else "preempted"

    @property
    def exit_code(self) -> int | None:
        """128 + the signal's number, as shells have it; None while nothing asked."""
        return None if self.requested is None else 128 + self.requested

    def __enter__(self) -> StopSignals:
        self._pid = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
                self.previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Only flags, and no logging: its buffers and locks may be in use where this interrupts
        if os.getpid() != self._pid:
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        if self.requested is None:
            self.requested = signal.Signals(number)
            hint = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
            line = f"\n{self.requested.name}: saving and stopping after this iteration{hint}\n"
            with suppress(OSError):
                os.write(_STDERR, line.encode())
