"""Seconds that a rank's device computes, to be set against the seconds of the whole schedule.

A GPU is given work and asked for nothing: its seconds lie between events on its stream, read once at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class Stopwatch(Protocol):
    """Runs from its making."""

    def computing(self) -> AbstractContextManager[None]:
        """Around a piece of computation, whose time is added up."""
        ...

    def read(self) -> tuple[float, float]:
        """(seconds of computation, seconds in all), up to now."""
        ...


class HostStopwatch:
    """For devices that are done when the call returns."""

    def __init__(self) -> None:
        self._start_s, self._busy_s = time.perf_counter(), 0.0

    @contextmanager
    def computing(self) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self._busy_s += time.perf_counter() - start_s

    def read(self) -> tuple[float, float]:
        return self._busy_s, time.perf_counter() - self._start_s


class StreamStopwatch:
    """For devices with streams. `read` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start, self._pieces = self._event(), []

    @contextmanager
    def computing(self) -> Iterator[None]:
        start = self._event()
        yield
        self._pieces.append((start, self._event()))

    def read(self) -> tuple[float, float]:
        end = self._event()
        end.synchronize()
        return sum(_seconds(*piece) for piece in self._pieces), _seconds(self._start, end)

    def _event(self) -> Any:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def stopwatch(device: torch.device) -> Stopwatch:
    """The one that tells the truth on `device`."""
    return HostStopwatch() if device.type == "cpu" else StreamStopwatch(device)


def _seconds(start: Any, end: Any) -> float:
    return start.elapsed_time(end) / 1000
