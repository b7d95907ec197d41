"""The cluster file of a machine, from invented facts and calibrations."""

from __future__ import annotations

import tomllib

import msgspec
import pytest

from shoal.errors import EnvironmentFault
from shoal.planning.cluster_here import Facts, describe
from shoal.topology.calibration import Calibration, CollectiveFit, MatrixProduct
from shoal.topology.cluster import GIB
from shoal.topology.cluster_file import cluster_from

CORES = Facts("tuna", 4, 16 * GIB)
ALPHA_S, BETA_S = 600e-6, 0.3e-9
CALIBRATION = Calibration(
    machine="a processor, 4 cores",
    torch="2.13",
    collectives=(CollectiveFit(backend="shm", operation="all_reduce", ranks=4, alpha_s=ALPHA_S, beta_s=BETA_S),),
    products=(
        MatrixProduct(dtype="float32", m=512, n=512, k=512, ranks=1, flops_s=200e9),
        MatrixProduct(dtype="float32", m=64, n=64, k=64, ranks=1, flops_s=90e9),
        MatrixProduct(dtype="float32", m=512, n=512, k=512, ranks=4, flops_s=150e9),
    ),
    memory_bytes_s=12e9,
)


def test_what_was_measured_stands_in_the_file_and_nothing_of_it_is_assumed() -> None:
    """Best product alone, the share of it with all cores at work, the copy, and a link that gives the fit back."""
    described = describe(CORES, CALIBRATION)
    cluster = cluster_from(tomllib.loads(described.text), file="test")
    machine = cluster.machine
    assert (cluster.devices, machine.device.memory_gib) == (4, 4)
    assert machine.device.peak_flops_s("float32") == pytest.approx(200e9)
    assert machine.device.matmul_efficiency == pytest.approx(0.75)
    assert machine.device.memory_bytes_s == pytest.approx(12e9)
    ring_s = 2 * 3 * machine.scale_up.latency_s + 2 * 3 / 4 * 1e6 / machine.scale_up.bytes_s
    assert ring_s == pytest.approx(ALPHA_S + 1e6 * BETA_S, rel=1e-3)
    assert [sentence for sentence in described.assumed if "network" not in sentence] == []


def test_links_are_those_of_float32_on_one_host() -> None:
    """Fits of other dtypes, and of a lab's hosts, tell nothing of them."""
    others = tuple(
        CollectiveFit(backend="shm", operation="all_reduce", ranks=4, alpha_s=1.0, beta_s=1.0, hosts=hosts, dtype=dtype)
        for hosts, dtype in ((1, "bfloat16"), (2, "float32"))
    )
    more = msgspec.structs.replace(CALIBRATION, collectives=(*others, *CALIBRATION.collectives))
    assert describe(CORES, more).text == describe(CORES, CALIBRATION).text


def test_what_was_not_measured_is_said_with_the_command_that_measures_it() -> None:
    """In the file, too."""
    described = describe(CORES, None)
    assert sum("shoal bench products" in sentence for sentence in described.assumed) == 2
    assert sum("shoal bench comm" in sentence for sentence in described.assumed) == 1
    assert all(f"# assumed: {sentence}" in described.text for sentence in described.assumed)
    assert cluster_from(tomllib.loads(described.text), file="test").devices == 4


@pytest.mark.parametrize(
    ("driver", "device"),
    [
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
    ],
)
def test_known_gpus_are_found_by_the_drivers_name(driver: str, device: str) -> None:
    """One node of as many as there are."""
    described = describe(Facts("tuna", 8, 64 * GIB, (driver, driver)), None)
    cluster = cluster_from(tomllib.loads(described.text), file="test")
    assert (cluster.device.name, cluster.devices) == (device, 2)


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    """Rather than planned for as another."""
    with pytest.raises(EnvironmentFault, match=r"'NVIDIA T1000' is none that is known.*h100-sxm"):
        describe(Facts("tuna", 8, 64 * GIB, ("NVIDIA T1000",)), None)
