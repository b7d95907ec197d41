"""What a host uses, from /proc: processors, memory, network, disks. Counters count since the host started.

Nothing is measured until somebody asks, so it costs a run nothing. On a system without /proc there are no figures.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.observe.sink import Ending, RunStart, Sink

# The names of the measurements in Prometheus: `loss/train` is `shoal_loss_train`, times end in `_seconds`.
#
# Units and suffixes follow https://prometheus.io/docs/practices/naming/. What is per step in the events (bytes sent,
# checkpoint stall) adds up to a counter, so that `rate()` gives it per second whatever the scraping interval.


_LOADS = re.compile(r"moe/load/(.+)/(\d+)")
_LAYER = re.compile(r"grad/norm/(.+)")
_WIRE = re.compile(r"wire/([a-z_]+)/(bytes_sent|exposed_s|hidden_s)")
_COUNTED = {
    "wire/bytes_sent": "shoal_wire_sent_bytes",
    "wire/inside_bytes": "shoal_wire_inside_bytes",
    "wire/between_bytes": "shoal_wire_between_bytes",
    "time/checkpoint_stall": "shoal_checkpoint_stall_seconds",
}
_COUNTED_PARTS = {
    "bytes_sent": "shoal_collective_sent_bytes",
    "exposed_s": "shoal_collective_exposed_seconds",
    "hidden_s": "shoal_collective_hidden_seconds",
}


@dataclass(frozen=True)
class Metric:
    """A name without `_total`, which the exposition of a counter adds; labels beside `run` and `rank`."""

    name: str
    kind: Literal["gauge", "counter"]
    labels: tuple[tuple[str, str], ...] = ()


def metric_of(measurement: str) -> Metric:
    """The metric of a measurement of the events, known or the user's own."""
    if measurement in _COUNTED:
        return Metric(_COUNTED[measurement], "counter")
    if match := _WIRE.fullmatch(measurement):
        return Metric(_COUNTED_PARTS[match[2]], "counter", (("collective", match[1]),))
    if match := _LOADS.fullmatch(measurement):
        return Metric("shoal_moe_load_tokens", "gauge", (("mixture", match[1]), ("expert", match[2])))
    if match := _LAYER.fullmatch(measurement):
        return Metric("shoal_grad_norm_layer", "gauge", (("layer", match[1]),))
    words = re.sub(r"[^a-zA-Z0-9]+", "_", measurement).strip("_")
    seconds = measurement.startswith("time/") or measurement.endswith("_s")
    return Metric(f"shoal_{words.removesuffix('_s')}" + ("_seconds" if seconds else ""), "gauge")


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


# What the GPUs of a host do, by NVIDIA's management library (NVML, which comes with the driver): load, memory, power.
#
# Every GPU of the host counts, also those that this process does not see. Without the library there are no figures.


LIBRARY = "libnvidia-ml.so.1"
_MILLI = 1e-3
"""NVML counts milliwatts and millijoules."""


class _Utilization(ctypes.Structure):
    """`nvmlUtilization_t`: percent of the time since the last sample in which a kernel ran, and memory was accessed."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`, in bytes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class GpuUsage:
    """Opens the library once, and asks it each time."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._nvml: ctypes.CDLL | None = None
        with suppress(OSError):
            nvml = ctypes.CDLL(library)
            if nvml.nvmlInit_v2() == 0:
                self._nvml = nvml

    def figures(self) -> Iterator[tuple[Metric, float]]:
        """Of each GPU, by its index: the share of the time in which it computed, bytes of memory, watts."""
        count = ctypes.c_uint()
        if self._nvml is None or self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return
        for index in range(count.value):
            device = ctypes.c_void_p()
            if self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) == 0:
                for name, value in self._of(self._nvml, device):
                    yield Metric(name, "gauge", (("gpu", str(index)),)), value

    def of_uuid(self, uuid: str) -> dict[str, float]:
        """Of the GPU of this name ("GPU-..."), which is the same however a process numbers its GPUs: the same figures
        by their last words, and `energy_joules` since the driver was loaded. Nothing where NVML does not tell.
        """
        device = ctypes.c_void_p()
        if self._nvml is None or self._nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) != 0:
            return {}
        found = {name.removeprefix("shoal_host_gpu_"): value for name, value in self._of(self._nvml, device)}
        energy = ctypes.c_ulonglong()
        if self._nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(energy)) == 0:
            found["energy_joules"] = energy.value * _MILLI
        return found

    def _of(self, nvml: ctypes.CDLL, device: ctypes.c_void_p) -> Iterator[tuple[str, float]]:
        load, memory, power = _Utilization(), _Memory(), ctypes.c_uint()
        if nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(load)) == 0:
            yield "shoal_host_gpu_utilization_ratio", load.gpu / 100
        if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
            yield "shoal_host_gpu_memory_bytes", float(memory.total)
            yield "shoal_host_gpu_memory_used_bytes", float(memory.used)
        if nvml.nvmlDeviceGetPowerUsage(device, ctypes.byref(power)) == 0:
            yield "shoal_host_gpu_power_watts", power.value * _MILLI


# What the host uses, for the exporters that get steps: TensorBoard, MLflow, Weights & Biases.
#
# Prometheus asks for the same figures by itself (`host_usage`). Here they are read in the exporter's own
# thread, at most every `EVERY_S` seconds, and a counter becomes the rate since the figures before: `host/cpu` is the
# share of the processors' time that was used, `host/network_sent_bytes_per_s` all interfaces' bytes but loopback's.


EVERY_S = 10.0
_IDLE = ("idle", "iowait")
Figures = Iterable[tuple[Metric, float]]


class WithHostFigures(Sink):
    """Passes a run on to `sink`, and adds the host's figures to a step every `every_s` seconds."""

    def __init__(self, sink: Sink, run_directory: Path, *, every_s: float = EVERY_S, proc: Path = PROC) -> None:
        self._sink, self._directory, self._every_s, self._proc = sink, run_directory, every_s, proc
        self._gpus = GpuUsage()
        self._last: tuple[float, dict[str, float]] | None = None

    def start(self, run: RunStart) -> None:
        self._sink.start(run)

    def record(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        if self._last is None or time_s - self._last[0] >= self._every_s:
            sums = summed((*host_usage(self._directory, self._proc), *self._gpus.figures()))
            found = dict(figures(sums, self._last, time_s=time_s))
            self._last = (time_s, sums)
            values = {**values, **found}
        self._sink.record(step, values, time_s=time_s)

    def finish(self, ending: Ending) -> None:
        self._sink.finish(ending)


def summed(found: Figures) -> dict[str, float]:
    """Values by name, added up over disks, over interfaces but loopback, and over what processors do; GPUs apart."""
    sums: dict[str, float] = {}
    for metric, value in found:
        labels = dict(metric.labels)
        name = metric.name.removeprefix("shoal_").removeprefix("host_")
        if labels.get("interface") == "lo":
            continue
        if "mode" in labels:
            name = "cpu_idle" if labels["mode"] in _IDLE else "cpu_busy"
        if "gpu" in labels:
            name = f"gpu{labels['gpu']}/{name.removeprefix('gpu_')}"
        sums[name] = sums.get(name, 0.0) + value
    return sums


def figures(
    sums: Mapping[str, float], last: tuple[float, Mapping[str, float]] | None, *, time_s: float
) -> Iterator[tuple[str, float]]:
    """The measurements of these sums at `time_s`, `last` being the time and the sums of the look before."""
    for name, value in sums.items():
        if name.startswith("gpu") or name in ("memory_bytes", "memory_available_bytes", "run_directory_free_bytes"):
            yield f"host/{name}", value
    if last is None or time_s <= last[0]:
        return
    grown = {name: value - last[1].get(name, value) for name, value in sums.items()}
    busy, all_s = grown.get("cpu_busy", 0.0), grown.get("cpu_busy", 0.0) + grown.get("cpu_idle", 0.0)
    if all_s > 0:
        yield "host/cpu", busy / all_s
    for name in ("network_received_bytes", "network_sent_bytes", "disk_read_bytes", "disk_written_bytes"):
        if name in grown:
            yield f"host/{name}_per_s", grown[name] / (time_s - last[0])
