"""Schedules over a run."""

from __future__ import annotations


def linear_schedule(start: float, end: float, duration: float, t: float) -> float:
    """From `start` at t = 0 linearly to `end` at t = `duration`, and `end` from then on."""
    return start + (end - start) * min(1.0, t / duration) if duration > 0 else end
