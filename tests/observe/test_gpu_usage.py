"""GPUs are read by NVML's published interface; a host without it has no figures."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

from shoal.observe.host_usage import GpuUsage

# Signatures and structures are those of nvml.h.
NVML = """
#include <stddef.h>
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct device *nvmlDevice_t;
struct device { unsigned int index; };
static struct device devices[2] = {{0}, {1}};
int nvmlInit_v2(void) { return INIT; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) { *device = &devices[index]; return 0; }
int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    rates->gpu = 40 + device->index; rates->memory = 7; return 0;
}
int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    memory->total = 80ull << 30; memory->used = (device->index + 1ull) << 30; memory->free = 0; return 0;
}
int nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    *milliwatts = 350000; return device->index == 0 ? 0 : 3;  /* 3: not supported */
}
"""


def library(folder: Path, *, init: int) -> str:
    """A library with these answers."""
    (folder / "nvml.c").write_text(NVML)
    compiler = (sysconfig.get_config_var("CC") or "cc").split()
    command = [*compiler, "-shared", "-fPIC", f"-DINIT={init}", "-o", str(folder / "nvml.so"), str(folder / "nvml.c")]
    subprocess.run(command, check=True)
    return str(folder / "nvml.so")


def test_each_gpu_has_its_load_its_memory_and_its_power(tmp_path: Path) -> None:
    """What a GPU does not tell (here: the second's power) is left out."""
    found = {
        (metric.name, dict(metric.labels)["gpu"]): value
        for metric, value in GpuUsage(library(tmp_path, init=0)).figures()
    }
    assert found == {
        ("shoal_host_gpu_utilization_ratio", "0"): 0.40,
        ("shoal_host_gpu_utilization_ratio", "1"): 0.41,
        ("shoal_host_gpu_memory_bytes", "0"): 80 * 2**30,
        ("shoal_host_gpu_memory_bytes", "1"): 80 * 2**30,
        ("shoal_host_gpu_memory_used_bytes", "0"): 2**30,
        ("shoal_host_gpu_memory_used_bytes", "1"): 2 * 2**30,
        ("shoal_host_gpu_power_watts", "0"): 350.0,
    }


def test_without_library_or_driver_there_are_no_figures(tmp_path: Path) -> None:
    """No such library, or one that finds no driver (9: NVML_ERROR_DRIVER_NOT_LOADED)."""
    assert not list(GpuUsage(str(tmp_path / "none.so")).figures())
    assert not list(GpuUsage(library(tmp_path, init=9)).figures())
