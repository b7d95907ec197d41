"""GPUs are read by NVML's published interface; a host without it has no figures."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from shoal.observe.device_use import EVERY_S, DeviceUse, OwnGpu, Peak
from shoal.observe.host_usage import GpuUsage
from shoal.observe.profile.first_step import StepOperations

# Signatures and structures are those of nvml.h.
NVML = """
#include <stddef.h>
#include <string.h>
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct device *nvmlDevice_t;
struct device { unsigned int index; };
static struct device devices[2] = {{0}, {1}};
int nvmlInit_v2(void) { return INIT; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) { *device = &devices[index]; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    *device = &devices[strcmp(uuid, "GPU-one") == 0]; return strncmp(uuid, "GPU-", 4) == 0 ? 0 : 2;
}
int nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules) {
    static unsigned long long used = 5000; *millijoules = used += 500000; return device->index == 1 ? 0 : 3;
}
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


def test_a_gpu_is_found_by_its_name(tmp_path: Path) -> None:
    """However CUDA_VISIBLE_DEVICES numbers it; energy where it tells (here: the second alone), nothing of another."""
    usage = GpuUsage(library(tmp_path, init=0))
    assert usage.of_uuid("GPU-one")["energy_joules"] == 505.0
    assert usage.of_uuid("GPU-zero") == {
        "utilization_ratio": 0.40,
        "memory_bytes": 80 * 2**30,
        "memory_used_bytes": 2**30,
        "power_watts": 350.0,
    }
    assert usage.of_uuid("MIG-one") == {}


def test_energy_of_a_token_is_that_between_two_readings(tmp_path: Path) -> None:
    """500 J of this GPU a reading, 2 ranks, 100 tokens of all of them between the readings; none in between."""
    gpu = OwnGpu(GpuUsage(library(tmp_path, init=0)), "GPU-one", ranks=2)
    assert gpu.missing is None  # a reading of its own
    first, between = gpu.figures(1000.0, now_s=0.0), gpu.figures(1050.0, now_s=1.0)
    later = gpu.figures(1100.0, now_s=EVERY_S)
    assert between == {}
    assert first["gpu/energy_joules"] == 0.0
    assert "gpu/joules_per_token" not in first
    assert (later["gpu/energy_joules"], later["gpu/joules_per_token"]) == (500.0, 2 * 500.0 / 100.0)
    assert later["gpu/utilization_ratio"] == 0.41


def test_a_gpu_that_tells_nothing_is_said(tmp_path: Path) -> None:
    """Without the library there are no figures, and a sentence in the facts."""
    gpu = OwnGpu(GpuUsage(str(tmp_path / "none.so")), "GPU-one", ranks=1)
    assert gpu.figures(1.0, now_s=0.0) == {}
    assert "not measured" in str(gpu.missing)


def step(seconds: float) -> dict[str, float]:
    return {"time/step": seconds, "tokens/consumed": 64.0, "throughput/tokens_per_second": 64.0 / seconds}


def test_mfu_is_the_share_of_the_peak() -> None:
    """From the step after the one that was looked at, in proportion to the samples of each."""
    work, told = [None, StepOperations({}, 6e9, 8e9)], []
    use = DeviceUse(lambda: work[0], Peak(1e12, "a data sheet"), told=told.append, ranks=1)
    assert use.figures(step(1.0), samples=8, now_s=0.0) == {}
    work.reverse()
    assert use.figures(step(1.0), samples=8, now_s=1.0) == {}
    assert use.figures(step(0.1), samples=8, now_s=2.0) == pytest.approx(
        {"throughput/mfu": 0.06, "throughput/hfu": 0.08}
    )
    assert use.figures(step(0.1), samples=4, now_s=3.0)["throughput/mfu"] == pytest.approx(0.03)
    assert told == [StepOperations({}, 6e9, 8e9)]


def test_a_device_of_unknown_peak_has_no_mfu() -> None:
    """Nothing is guessed."""
    use = DeviceUse(lambda: StepOperations({}, 6e9, 6e9), Peak(None, "not known"), told=lambda _: None, ranks=1)
    assert [use.figures(step(0.1), samples=8, now_s=0.0) for _ in range(3)] == [{}, {}, {}]


def test_without_library_or_driver_there_are_no_figures(tmp_path: Path) -> None:
    """No such library, or one that finds no driver (9: NVML_ERROR_DRIVER_NOT_LOADED)."""
    assert not list(GpuUsage(str(tmp_path / "none.so")).figures())
    assert not list(GpuUsage(library(tmp_path, init=9)).figures())
