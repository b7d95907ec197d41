"""What the GPUs of a host do, by NVIDIA's management library (NVML, which comes with the driver): load, memory, power.

Every GPU of the host counts, also those that this process does not see. Without the library there are no figures.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress

from shoal.observe.metric_names import Metric

LIBRARY = "libnvidia-ml.so.1"
_MILLIWATT = 1e-3


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

    def _of(self, nvml: ctypes.CDLL, device: ctypes.c_void_p) -> Iterator[tuple[str, float]]:
        load, memory, power = _Utilization(), _Memory(), ctypes.c_uint()
        if nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(load)) == 0:
            yield "shoal_host_gpu_utilization_ratio", load.gpu / 100
        if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
            yield "shoal_host_gpu_memory_bytes", float(memory.total)
            yield "shoal_host_gpu_memory_used_bytes", float(memory.used)
        if nvml.nvmlDeviceGetPowerUsage(device, ctypes.byref(power)) == 0:
            yield "shoal_host_gpu_power_watts", power.value * _MILLIWATT
