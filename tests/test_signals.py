"""Signals that ask to stop set a flag; only a second Ctrl-C interrupts."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from rl.signals import StopSignals

STOPPING = [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT]


def send(number: signal.Signals) -> None:
    signal.raise_signal(number)


class TestRequested:
    @pytest.mark.parametrize(
        ("number", "status", "exit_code"),
        [
            (signal.SIGTERM, "preempted", 143),
            (signal.SIGUSR2, "preempted", 140),
            (signal.SIGINT, "interrupted", 130),
        ],
    )
    def test_says_which(
        self, number: signal.Signals, status: str, exit_code: int, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with StopSignals() as stop:
            assert (stop.requested, stop.status, stop.exit_code) == (None, None, None)
            send(number)
            assert (stop.requested, stop.status, stop.exit_code) == (number, status, exit_code)
        assert stop.requested is number
        lines = capfd.readouterr().err.split("\n")
        assert [number.name in line for line in lines if line] == [True]

    def test_the_first_counts(self, capfd: pytest.CaptureFixture[str]) -> None:
        with StopSignals() as stop:
            for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                send(number)
            assert stop.requested is signal.SIGUSR2
        assert capfd.readouterr().err.count("saving") == 1

    def test_a_second_interrupt_is_one(self) -> None:
        with StopSignals() as stop:
            send(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                send(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                send(signal.SIGINT)
            assert stop.requested is signal.SIGINT

    def test_system_calls_go_on(self) -> None:
        reader, writer = os.pipe()
        with StopSignals() as stop, os.fdopen(reader, "rb") as file:

            def disturb() -> None:
                for _ in range(5):
                    time.sleep(0.01)
                    os.kill(os.getpid(), signal.SIGTERM)
                os.write(writer, b"done")
                os.close(writer)

            thread = threading.Thread(target=disturb)
            start = time.perf_counter()
            thread.start()
            time.sleep(0.1)
            assert time.perf_counter() - start >= 0.1
            assert file.read() == b"done" and stop.requested is signal.SIGTERM
            thread.join()

    def test_a_closed_stderr_is_no_obstacle(self) -> None:
        saved = os.dup(2)
        os.close(2)
        try:
            with StopSignals() as stop:
                send(signal.SIGTERM)
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        assert stop.requested is signal.SIGTERM


class TestHandlers:
    def test_are_kept_uncalled_and_put_back(self) -> None:
        calls: list[int] = []

        def former(number: int, frame: Any) -> None:
            calls.append(number)

        originals = {number: signal.signal(number, former) for number in STOPPING}
        try:
            with pytest.raises(ZeroDivisionError), StopSignals() as stop:
                send(signal.SIGTERM)
                assert calls == [] and stop.previous == dict.fromkeys(STOPPING, former)
                assert stop.requested is not None
                chained = stop.previous[stop.requested]
                assert callable(chained)
                chained(stop.requested, None)
                raise ZeroDivisionError
            assert calls == [signal.SIGTERM]
            assert [signal.getsignal(number) for number in STOPPING] == [former] * 3
        finally:
            for number, handler in originals.items():
                signal.signal(number, handler)

    def test_one_after_another(self) -> None:
        before = [signal.getsignal(number) for number in STOPPING]
        with StopSignals():
            send(signal.SIGTERM)
        with StopSignals() as second:
            assert second.requested is None
            with StopSignals() as inner:
                send(signal.SIGUSR2)
            assert (inner.requested, second.requested) == (signal.SIGUSR2, None)
            send(signal.SIGTERM)
            assert second.requested is signal.SIGTERM
        assert [signal.getsignal(number) for number in STOPPING] == before

    def test_in_another_thread_nothing_is_installed(self) -> None:
        before = [signal.getsignal(number) for number in STOPPING]
        seen: list[Any] = []

        def work() -> None:
            with StopSignals() as stop:
                seen.extend(
                    [stop.requested, stop.previous, [signal.getsignal(number) for number in STOPPING]]
                )

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == [None, {}, before]


class TestForkedChild:
    @pytest.mark.parametrize("number", STOPPING)
    def test_terminates_when_told_and_leaves_the_rest_to_its_parent(self, number: signal.Signals) -> None:
        with StopSignals() as stop:
            child = os.fork()
            if child == 0:
                try:
                    for _ in range(3):  # as a terminal sends Ctrl-C to a whole group
                        send(number)
                finally:
                    os._exit(7)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == (-signal.SIGTERM if number is signal.SIGTERM else 7)
            assert stop.requested is None
