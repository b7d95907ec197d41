"""Bytes between the tiers of a rank's memory, counted where they are moved, and what waiting for them took."""

from __future__ import annotations

import threading


class Traffic:
    """Since the last `take_figures`; the lanes add to it.

    memory/to_device_bytes, memory/to_host_bytes        between device and host
    memory/disk_read_bytes, memory/disk_written_bytes   in whole blocks
    memory/exposed_s                                    what the step stood still for moves and for the disk
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures: dict[str, float] = dict.fromkeys(NAMES, 0.0)

    def add(self, **figures: float) -> None:
        """Counts them."""
        with self._lock:
            for name, value in figures.items():
                self._figures[name] += value

    def take_figures(self) -> dict[str, float]:
        """The measurements of a step, by name, and forgets them."""
        with self._lock:
            found = {f"memory/{name}": value for name, value in self._figures.items()}
            self._figures = dict.fromkeys(NAMES, 0.0)
        return found


class DiskTraffic(Traffic):
    """Of state that goes between disk and host alone: what is copied there never sees the device."""

    def __init__(self, whole: Traffic) -> None:
        super().__init__()
        self._whole = whole

    def add(self, **figures: float) -> None:
        """Counts what the disk moved, and what waited for it."""
        self._whole.add(
            **{name: value for name, value in figures.items() if name not in ("to_device_bytes", "to_host_bytes")}
        )


NAMES = ("to_device_bytes", "to_host_bytes", "disk_read_bytes", "disk_written_bytes", "exposed_s")
