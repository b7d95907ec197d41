"""Streams, clocks and measurements for the tests of displays."""

from __future__ import annotations

import io

VALUES = {
    "loss/train": 2.25,
    "lr": 1e-3,
    "grad/norm": 1.0,
    "samples/consumed": 150.0,
    "memory/peak_bytes": 300 * 2**20,
    "throughput/samples_per_second": 50.0,
    "throughput/tokens_per_second": 14_200.0,
    "time/step": 0.2,
    "time/sync_exposed": 0.01,
    "time/data": 0.001,
}


class Clock:
    """Time that goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True
