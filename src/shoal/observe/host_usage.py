"""What a host uses, from /proc: processors, memory, network, disks. Counters count since the host started.

Nothing is measured until somebody asks, so it costs a run nothing. On a system without /proc there are no figures.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from shoal.observe.metric_names import Metric

PROC = Path("/proc")
_SECTOR_BYTES = 512
"""What /proc/diskstats counts in, whatever the disk (Documentation/admin-guide/iostats.rst of Linux)."""
_JIFFIES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


def host_usage(run_directory: Path, proc: Path = PROC) -> Iterator[tuple[Metric, float]]:
    """Each figure of this host and its value, in seconds and bytes."""
    yield from _processors(proc)
    yield from _memory(proc)
    yield from _network(proc)
    yield from _disks(proc)
    try:
        free_bytes = float(shutil.disk_usage(run_directory).free)
    except OSError:
        return
    yield Metric("shoal_run_directory_free_bytes", "gauge"), free_bytes


def _processors(proc: Path) -> Iterator[tuple[Metric, float]]:
    for words in _lines(proc / "stat"):
        if words[0] == "cpu":
            for mode, jiffies in zip(_JIFFIES, words[1:], strict=False):
                labels = (("mode", mode),)
                yield Metric("shoal_host_cpu_seconds", "counter", labels), float(jiffies) / os.sysconf("SC_CLK_TCK")


def _memory(proc: Path) -> Iterator[tuple[Metric, float]]:
    found = {words[0].rstrip(":"): 1024 * float(words[1]) for words in _lines(proc / "meminfo") if len(words) > 1}
    if {"MemTotal", "MemAvailable"} <= found.keys():
        yield Metric("shoal_host_memory_bytes", "gauge"), found["MemTotal"]
        yield Metric("shoal_host_memory_available_bytes", "gauge"), found["MemAvailable"]


def _network(proc: Path) -> Iterator[tuple[Metric, float]]:
    for words in _lines(proc / "net" / "dev"):
        if words[0].endswith(":") and len(words) > 9:
            labels = (("interface", words[0].rstrip(":")),)
            yield Metric("shoal_host_network_received_bytes", "counter", labels), float(words[1])
            yield Metric("shoal_host_network_sent_bytes", "counter", labels), float(words[9])


def _disks(proc: Path) -> Iterator[tuple[Metric, float]]:
    whole = {path.name for path in Path("/sys/block").glob("*")}
    for words in _lines(proc / "diskstats"):
        if len(words) > 9 and words[2] in whole and not words[2].startswith(("loop", "ram")):
            labels = (("disk", words[2]),)
            yield Metric("shoal_host_disk_read_bytes", "counter", labels), _SECTOR_BYTES * float(words[5])
            yield Metric("shoal_host_disk_written_bytes", "counter", labels), _SECTOR_BYTES * float(words[9])


def _lines(path: Path) -> list[list[str]]:
    try:
        return [words for line in path.read_text().splitlines() if (words := line.split())]
    except OSError:
        return []
