"""The machine that a plan is made for: devices, nodes, and what joins them. Data, in the units of data sheets.

Two levels of links matter to the cost of a collective: `scale_up` inside a node (NVLink, NVSwitch, xGMI, PCIe) and
`scale_out` between nodes (InfiniBand, Ethernet). A link's rate is what one device (one node, for `scale_out`) sends in
one direction; `efficiency` is the share of it that a large ring all-reduce reaches, the "bus bandwidth" of nccl-tests.

Numbers that no machine has are refused here, with the range that machines have: a slip of a thousand in a unit would
otherwise become a confident plan.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from shoal.config.check import Positive, PositiveFloat, Table, says


def check_between(name: str, found: float, low: float, high: float, what: str) -> None:
    """Raises `ValueError`, one sentence, unless `low` <= `found` <= `high`."""
    if math.isfinite(found) and low <= found <= high:
        return
    raise ValueError(
        f"{name} = {found:g}; {what} lies between {low:g} and {high:g}: check the unit, and write it in the one that "
        "the key names"
    )


GB, GIB, TERA, MICRO = 1e9, 2**30, 1e12, 1e-6
Dtype = Literal["float64", "float32", "tfloat32", "float16", "bfloat16", "float8"]
Architecture = Literal["ampere", "hopper", "blackwell"]


class Device(Table, frozen=True):
    """One accelerator."""

    name: Annotated[str, says("What it is called.", min_length=1, max_length=128)]
    memory_gib: Annotated[float, says("Memory of one device, GiB.")]
    memory_gb_s: Annotated[float, says("Rate of that memory, GB/s.")]
    peak_tflops: Annotated[
        dict[Dtype, float], says("Dense matrix-multiply rate by dtype, TFLOP/s, without sparsity.", min_length=1)
    ]
    units: Annotated[int, says("Multiprocessors (SMs, CUs, cores) that share a matrix multiply.", ge=1, le=1 << 16)] = 1
    tile: Annotated[int, says("Edge of the tile that one unit multiplies at its best rate.", ge=1, le=4096)] = 128
    matmul_efficiency: Annotated[float, says("Share of the peak that the best large matrix multiply reaches.")] = 0.8
    architecture: Annotated[
        Architecture, says("Whose published attention kernels its own run like, as a share of the peak.")
    ] = "ampere"
    source: Annotated[str, says("Where the numbers come from.")] = ""

    def __post_init__(self) -> None:
        check_between("memory_gib", self.memory_gib, 0.25, 1024, "GiB of one device")
        check_between("memory_gb_s", self.memory_gb_s, 1, 100_000, "GB/s of one device's memory")
        for dtype, rate in self.peak_tflops.items():
            check_between(f"peak_tflops.{dtype}", rate, 0.001, 100_000, "TFLOP/s of one device")
        check_between("matmul_efficiency", self.matmul_efficiency, 0.05, 1, "a share of the peak")

    @property
    def memory_bytes(self) -> float:
        """Bytes of one device."""
        return self.memory_gib * GIB

    @property
    def memory_bytes_s(self) -> float:
        """Bytes per second of its memory."""
        return self.memory_gb_s * GB

    def peak_flops_s(self, dtype: str) -> float:
        """FLOP per second in `dtype`. Raises `ValueError` where the device states none, with the dtypes that it has."""
        rate = self.peak_tflops.get(dtype)  # type: ignore[call-overload]
        if rate is None:
            raise ValueError(f"{self.name} states no rate for {dtype}; it states {', '.join(self.peak_tflops)}")
        return rate * TERA


class Link(Table, frozen=True):
    """What joins devices in a node, or nodes with each other."""

    kind: Annotated[
        Literal["nvlink", "nvswitch", "xgmi", "pcie", "infiniband", "ethernet", "memory"], says("What it is.")
    ]
    gb_s: Annotated[float, says("GB/s in one direction: of one device inside a node, of all ports of a node between.")]
    efficiency: Annotated[float, says("Share of it that a large ring all-reduce reaches.")] = 0.8
    latency_us: Annotated[float, says("Microseconds of one step of a collective.")] = 5.0

    def __post_init__(self) -> None:
        check_between("gb_s", self.gb_s, 0.001, 20_000, "GB/s of a link in one direction")
        check_between("efficiency", self.efficiency, 0.01, 1, "a share of the rate")
        check_between("latency_us", self.latency_us, 0, 1_000_000, "microseconds")

    @property
    def bytes_s(self) -> float:
        """Bytes per second that a large collective reaches."""
        return self.gb_s * GB * self.efficiency

    @property
    def latency_s(self) -> float:
        """Seconds of one step of a collective."""
        return self.latency_us * MICRO


class Machine(Table, frozen=True):
    """One node."""

    name: Annotated[str, says("What it is called.", min_length=1, max_length=128)]
    devices: Annotated[int, says("Accelerators in one node.", ge=1, le=1024)]
    device: Device
    scale_up: Annotated[Link, says("Between the devices of a node.")]
    scale_out: Annotated[Link, says("Between nodes; the rate is that of all ports of a node together.")]
    start_us: Annotated[float, says("Microseconds until a collective moves its first byte.", ge=0, le=1e6)] = 30.0
    source: Annotated[str, says("Where the numbers come from.")] = ""


class FatTree(Table, frozen=True, tag_field="kind", tag="fat-tree"):
    """Every node reaches every other at its full rate."""

    def share(self, nodes: int) -> float:
        """The share of a node's rate that is left when `nodes` talk to each other."""
        return 1.0


class LeafSpine(Table, frozen=True, tag_field="kind", tag="leaf-spine"):
    """Nodes under one leaf talk at full rate; between leaves the rate is divided by the oversubscription."""

    nodes_per_leaf: Annotated[Positive, says("Nodes under one leaf switch.")]
    oversubscription: Annotated[float, says("Rate into a leaf over rate out of it.", ge=1, le=64)] = 1.0

    def share(self, nodes: int) -> float:
        """The share of a node's rate that is left when `nodes` talk to each other."""
        return 1.0 if nodes <= self.nodes_per_leaf else 1.0 / self.oversubscription


class RailOptimised(Table, frozen=True, tag_field="kind", tag="rail-optimised"):
    """One switch plane for each device's place in its node: full rate for collectives of equal places."""

    def share(self, nodes: int) -> float:
        """The share of a node's rate that is left when `nodes` talk to each other."""
        return 1.0


Network = FatTree | LeafSpine | RailOptimised


class Price(Table, frozen=True):
    """What the cluster costs; left out where nobody asks."""

    device_hour: Annotated[PositiveFloat | None, says("Money for one device and hour, in any currency.")] = None
    device_watts: Annotated[PositiveFloat | None, says("Power of one device with its share of the node, W.")] = None


class Reliability(Table, frozen=True):
    """How often it breaks, and how fast a checkpoint leaves it."""

    failures_per_1000_node_days: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=1e5)] | None,
        says(
            "Failures that stop a job; default: the mean of what is published of its architecture (5.5 ampere, "
            "4.2 hopper, 2.9 blackwell), in proportion to the devices of a node."
        ),
    ] = None
    recovery_s: Annotated[float, says("Seconds from a failure to the first new step.", ge=0, le=1e7)] = 600.0
    staging_gb_s: Annotated[
        float, says("GB/s at which a rank copies its share to host memory, while the step waits.", gt=0, le=1e4)
    ] = 10.0
    storage_gb_s: Annotated[
        float,
        says("GB/s that storage takes from a node (Llama 3: 2 TB/s from 2,048 nodes, arXiv:2407.21783).", gt=0, le=1e4),
    ] = 1.0


class Cluster(Table, frozen=True):
    """Everything a prediction knows about the place where it runs."""

    name: Annotated[str, says("What it is called.", min_length=1, max_length=128)]
    nodes: Annotated[int, says("Nodes.", ge=1, le=1 << 20)]
    machine: Machine
    network: Annotated[Network, says("How nodes are joined.")] = FatTree()
    price: Price = Price()
    reliability: Reliability = Reliability()

    @property
    def device(self) -> Device:
        """The accelerator, the same everywhere."""
        return self.machine.device

    @property
    def devices(self) -> int:
        """Accelerators in all."""
        return self.nodes * self.machine.devices

    def at_speed(self, factor: float) -> Cluster:
        """The same with devices that compute, and move memory, `factor` times as fast."""
        device = self.device
        faster = msgspec.structs.replace(
            device,
            memory_gb_s=device.memory_gb_s * factor,
            peak_tflops={dtype: rate * factor for dtype, rate in device.peak_tflops.items()},
        )
        return msgspec.structs.replace(self, machine=msgspec.structs.replace(self.machine, device=faster))

    def with_nodes(self, nodes: int) -> Cluster:
        """The same cluster with another number of nodes."""
        return msgspec.structs.replace(self, nodes=nodes)

    def with_devices(self, devices: int) -> Cluster:
        """The same with so many accelerators: whole nodes, or a part of one. Raises `ValueError` for all else."""
        per_node = self.machine.devices
        if devices % per_node == 0:
            return self.with_nodes(devices // per_node)
        if devices > per_node:
            down = devices - devices % per_node
            raise ValueError(f"{devices} devices do not fill nodes of {per_node}; nearest: {down}, {down + per_node}")
        return msgspec.structs.replace(self, nodes=1, machine=msgspec.structs.replace(self.machine, devices=devices))
