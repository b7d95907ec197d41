"""Devices, links, clusters, and the file that describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.topology.cluster import FatTree, LeafSpine
from shoal.topology.cluster_file import cluster_from, known_cluster, load_cluster
from shoal.topology.devices import DEVICES, MACHINES, known_device

WHOLE: dict[str, Any] = {
    "cluster": {"nodes": 4, "devices_per_node": 2},
    "device": {"name": "box", "memory_gib": 16, "memory_gb_s": 500, "peak_tflops": {"float32": 10}},
    "scale_up": {"kind": "pcie", "gb_s": 16},
    "scale_out": {"kind": "ethernet", "gb_s": 1.25},
}


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 5090", None),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 PCIe", None),
        ("Tesla V100-PCIE-16GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("", None),
    ],
)
def test_a_drivers_name_means_one_device_or_none(driver: str, name: str | None) -> None:
    """A relative has other rates: none is taken for another."""
    found = known_device(driver)
    assert (None if found is None else found.name) == name


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_every_known_machine_makes_a_cluster(name: str) -> None:
    """The library's numbers pass the checks that a user's must pass, and say where they come from."""
    cluster = known_cluster(name, 3)
    assert cluster.devices == 3 * MACHINES[name].devices
    assert cluster.machine.source
    assert cluster.device.source


def test_known_rates_are_those_of_the_data_sheet() -> None:
    """An A100 has 312 TFLOP/s in bfloat16 and 2,039 GB/s; a rate that is not stated is refused by name."""
    device = DEVICES["a100-sxm-80gb"]
    assert device.peak_flops_s("bfloat16") == 312e12
    assert device.memory_bytes_s == 2039e9
    with pytest.raises(ValueError, match="float8"):
        device.peak_flops_s("float8")


def test_a_written_key_wins_over_the_known_machine() -> None:
    """The rest of the known table stays."""
    cluster = cluster_from({"cluster": {"nodes": 2, "machine": "dgx-h100"}, "scale_out": {"gb_s": 50}}, file="c.toml")
    assert cluster.machine.scale_out.gb_s == 50
    assert cluster.machine.scale_out.efficiency == MACHINES["dgx-h100"].scale_out.efficiency
    assert cluster.device == DEVICES["h100-sxm"]


def test_a_file_without_a_known_machine_is_whole_by_itself(tmp_path: Path) -> None:
    """All of it written out; a fat tree and no prices by default."""
    path = tmp_path / "c.toml"
    path.write_text(
        "[cluster]\nnodes = 4\ndevices_per_node = 2\n[device]\nname = 'box'\nmemory_gib = 16\nmemory_gb_s = 500\n"
        "peak_tflops = {float32 = 10}\n[scale_up]\nkind = 'pcie'\ngb_s = 16\n"
        "[scale_out]\nkind = 'ethernet'\ngb_s = 1.25\n"
    )
    cluster = load_cluster(path)
    assert cluster == cluster_from(WHOLE, file=str(path)).__class__(
        name=cluster.name, nodes=4, machine=cluster.machine, network=FatTree()
    )
    assert cluster.devices == 8


def test_one_node_needs_no_link_to_others() -> None:
    """Nothing leaves it; several nodes need one."""
    alone = {name: table for name, table in WHOLE.items() if name != "scale_out"}
    found = cluster_from({**alone, "cluster": {**WHOLE["cluster"], "nodes": 1}}, file="c.toml")
    assert found.machine.scale_out == found.machine.scale_up
    with pytest.raises(ConfigError, match=r"\[scale_out\] is missing"):
        cluster_from(alone, file="c.toml")


def _changed(table: str, **keys: Any) -> dict[str, Any]:
    return {**WHOLE, table: {**WHOLE[table], **keys}}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (_changed("device", memory_gib=3000), ["memory_gib = 3000", "unit"]),
        (_changed("scale_out", gb_s=0), ["gb_s = 0", "unit"]),
        (_changed("device", peak_tflops={"float32": 312e12}), ["peak_tflops.float32", "unit"]),
        (_changed("device", peak_tflops={}), ["peak_tflops"]),
        (_changed("device", memory_gb_s=float("nan")), ["memory_gb_s = nan"]),
        (_changed("scale_up", efficiency=1.5), ["efficiency = 1.5"]),
        ({name: table for name, table in WHOLE.items() if name != "scale_up"}, ["[scale_up] is missing"]),
        ({**WHOLE, "device": {"name": "box", "memory_gib": 16}}, ["device.memory_gb_s: missing"]),
        ({**WHOLE, "cluster": {"nodes": 4}}, ["devices_per_node"]),
        (_changed("cluster", nodes=0), ["nodes"]),
        (_changed("cluster", machine="dgx"), ["'dgx'", "dgx-h100"]),
        ({**WHOLE, "network": {"kind": "leaf-spine"}}, ["network.nodes_per_leaf"]),
        ({**WHOLE, "network": {"kind": "hypercube"}}, ["hypercube", "fat-tree"]),
        ({**WHOLE, "devise": {}}, ["devise", "device"]),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(data: dict[str, Any], words: list[str]) -> None:
    """The file and the key are named; nothing wraps over lines."""
    with pytest.raises(ConfigError) as caught:
        cluster_from(data, file="c.toml")
    message = str(caught.value)
    assert message.startswith("c.toml: ")
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_spine_that_is_oversubscribed_slows_only_those_who_cross_it() -> None:
    """Under one leaf the full rate, across leaves a share of it."""
    network = LeafSpine(nodes_per_leaf=8, oversubscription=4)
    assert network.share(8) == 1.0
    assert network.share(9) == 0.25
