"""Accelerators and machine types that are known by name.

Data-sheet rates are dense, without sparsity. `matmul_efficiency` is the best rate found over shapes, divided by the
data sheet's (github.com/stas00/ml-engineering, "Maximum Achievable Matmul FLOPS", bfloat16). Link efficiencies are bus
bandwidths of ring all-reduces:

- NVLink 3, A100: 229 GB/s of 300 (1 GiB, 8 devices; vTrain's nccl-tests table); latency and start from its small sizes
- NVLink 2, V100: 134 GB/s of 150 (same table)
- NVLink 4, H100: 0.8, assumed for the ring; NVLink SHARP reaches 476 GB/s (github.com/NVIDIA/nccl-tests#290)
- 200 Gb/s InfiniBand: 91 GB/s of 4 x 25 (github.com/NVIDIA/nccl-tests#100); 400 Gb/s: 46 to 48 of 50 (#290)

Where no measurement was found, the efficiency is that of the nearest relative, and the source says "assumed".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from shoal.topology.cluster import Architecture, Device, Link, Machine

_MAMF = "matmul_efficiency: MAMF table of stas00/ml-engineering"


def _device(
    name: str, gib: float, gb_s: float, half: float, single: float, units: int, best: float, note: str
) -> Device:
    peak = {"float32": single, "tfloat32": half / 2, "float16": half, "bfloat16": half}
    if name.startswith(("h", "gh", "b", "gb", "l4", "mi3", "rtx-4")):
        peak["float8"] = 2 * half
    return Device(
        name=name,
        memory_gib=gib,
        memory_gb_s=gb_s,
        peak_tflops=peak,  # type: ignore[arg-type]
        units=units,
        matmul_efficiency=best,
        architecture=_ARCHITECTURES.get(name[: name.find("00")], "ampere"),
        source=note,
    )


_ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {"h1": "hopper", "h2": "hopper", "h8": "hopper", "gh2": "hopper", "b2": "blackwell", "b3": "blackwell",
     "gb2": "blackwell", "gb3": "blackwell"}
)  # fmt: skip
"""By the name of the device up to its zeros."""


_DEVICES = (
    Device(
        name="v100-sxm-32gb",
        memory_gib=32,
        memory_gb_s=900,
        peak_tflops={"float32": 15.7, "float16": 125},
        units=80,
        matmul_efficiency=0.8,
        source="NVIDIA V100 data sheet; matmul_efficiency assumed",
    ),
    Device(
        name="t4",
        memory_gib=16,
        memory_gb_s=320,
        peak_tflops={"float32": 8.1, "float16": 65},
        units=40,
        matmul_efficiency=0.64,
        source="NVIDIA T4 data sheet; 41.6 TFLOP/s measured within its 70 W (arXiv:1903.07486, table 4.3)",
    ),
    _device("rtx-3090", 24, 936, 71, 35.6, 82, 0.9, "NVIDIA GA102 white paper; matmul_efficiency assumed"),
    _device("rtx-4090", 24, 1008, 165.2, 82.6, 128, 0.9, "NVIDIA Ada white paper; matmul_efficiency assumed"),
    _device("a100-sxm-40gb", 40, 1555, 312, 19.5, 108, 0.869, f"NVIDIA A100 data sheet; {_MAMF}"),
    _device("a100-sxm-80gb", 80, 2039, 312, 19.5, 108, 0.869, f"NVIDIA A100 data sheet; {_MAMF}"),
    _device("a100-pcie-80gb", 80, 1935, 312, 19.5, 108, 0.811, f"NVIDIA A100 data sheet; {_MAMF}"),
    _device("h100-sxm", 80, 3350, 989, 66.9, 132, 0.803, f"NVIDIA H100 data sheet; {_MAMF}"),
    _device("h100-sxm-96gb", 96, 2400, 989, 66.9, 132, 0.803, "torchtitan's H100 with HBM2e, 500 W; else as H100 SXM"),
    _device("h800-sxm", 80, 3350, 989, 66.9, 132, 0.803, f"NVIDIA H800: an H100 with less NVLink; {_MAMF} of the H100"),
    _device("h200-sxm", 141, 4800, 989, 66.9, 132, 0.803, f"NVIDIA H200 data sheet; {_MAMF} of the H100"),
    _device("gh200", 96, 4000, 989, 66.9, 132, 0.838, f"NVIDIA GH200 data sheet; {_MAMF}"),
    _device("b200-sxm", 180, 7700, 2250, 75, 148, 0.776, f"NVIDIA B200 data sheet; {_MAMF}"),
    _device("b300-sxm", 270, 7700, 2250, 75, 148, 0.786, f"NVIDIA B300 data sheet; {_MAMF}"),
    _device("gb200", 186, 8000, 2500, 80, 152, 0.776, f"NVIDIA GB200 NVL72 data sheet; {_MAMF} of the B200"),
    _device("gb300", 288, 8000, 2500, 80, 160, 0.786, f"NVIDIA GB300 NVL72 data sheet; {_MAMF} of the B300"),
    _device("l4", 24, 300, 121, 30.3, 58, 0.8, "NVIDIA L4 data sheet; matmul_efficiency assumed"),
    _device("l40s", 48, 864, 362, 91.6, 142, 0.8, "NVIDIA L40S data sheet; matmul_efficiency assumed"),
    _device("mi300x", 192, 5300, 1307, 163.4, 304, 0.514, f"AMD MI300X data sheet; {_MAMF}"),
    _device("mi325x", 256, 6000, 1307, 163.4, 304, 0.604, f"AMD MI325X data sheet; {_MAMF}"),
    Device(
        name="cpu-core",
        memory_gib=4,
        memory_gb_s=10,
        peak_tflops={"float32": 0.08, "float64": 0.04, "bfloat16": 0.08},
        units=1,
        tile=16,
        matmul_efficiency=0.7,
        source="one core of a server processor with AVX-512 at 2.6 GHz: 2.6e9 x 32 FLOP; memory rate assumed",
    ),
)
DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in _DEVICES})
"""Known devices by name."""


_FORMS = frozenset({"sxm", "pcie"})
_OTHERS = frozenset({"laptop", "mobile", "max", "d", "nvl", "mig", "grid", "super", "ti"})
"""Words of a driver's name that tell of another device, or of a part of one."""


def known_device(driver: str) -> Device | None:
    """The device of `DEVICES` that the driver's name means ("NVIDIA H100 80GB HBM3"); None: it is none of them.

    All words of the model stand in the driver's name, and no word there speaks of another form or kind of it. Of those
    left, the one whose form and memory stand there too.
    """
    words = {re.sub(r"^sxm\d$", "sxm", word) for word in re.split(r"[^a-z0-9]+", driver.lower())}
    found = [device for device in DEVICES.values() if _may_be(set(device.name.split("-")), words)]
    return max(found, key=lambda device: len(words.intersection(device.name.split("-"))), default=None)


def _may_be(parts: set[str], words: set[str]) -> bool:
    model = {part for part in parts - _FORMS if not re.fullmatch(r"\d+gb", part)}
    other_form = parts & _FORMS and words & _FORMS and not parts & words & _FORMS
    return model <= words and not words & _OTHERS - parts and not other_form


_NVLINK2 = Link(kind="nvswitch", gb_s=150, efficiency=0.89, latency_us=4.0)
_NVLINK3 = Link(kind="nvswitch", gb_s=300, efficiency=0.783, latency_us=3.8)
_NVLINK4 = Link(kind="nvswitch", gb_s=450, efficiency=0.804, latency_us=3.0)
_NVLINK5 = Link(kind="nvswitch", gb_s=900, efficiency=0.8, latency_us=3.0)
_XGMI3 = Link(kind="xgmi", gb_s=448, efficiency=0.7, latency_us=5.0)
_NVLINK4_HALF = Link(kind="nvswitch", gb_s=200, efficiency=0.804, latency_us=3.0)
_PCIE3_X8 = Link(kind="pcie", gb_s=8, efficiency=0.7, latency_us=10.0)
_PCIE4 = Link(kind="pcie", gb_s=32, efficiency=0.7, latency_us=10.0)


def _infiniband(ports: int, gbit_s: float) -> Link:
    return Link(kind="infiniband", gb_s=ports * gbit_s / 8, efficiency=0.91, latency_us=10.0)


def _ethernet(gbit_s: float) -> Link:
    return Link(kind="ethernet", gb_s=gbit_s / 8, efficiency=0.8, latency_us=25.0)


def _machine(name: str, devices: int, device: str, scale_up: Link, scale_out: Link, source: str) -> Machine:
    return Machine(
        name=name, devices=devices, device=DEVICES[device], scale_up=scale_up, scale_out=scale_out, source=source
    )


_MACHINES = (
    _machine("dgx1-v100", 8, "v100-sxm-32gb", _NVLINK2, _infiniband(4, 100), "NVIDIA DGX-1 data sheet"),
    _machine("dgx-a100-40gb", 8, "a100-sxm-40gb", _NVLINK3, _infiniband(8, 200), "NVIDIA DGX A100 data sheet"),
    _machine("dgx-a100-80gb", 8, "a100-sxm-80gb", _NVLINK3, _infiniband(8, 200), "NVIDIA DGX A100; arXiv:2104.04473"),
    _machine("a100-4nic", 8, "a100-sxm-80gb", _NVLINK3, _infiniband(4, 200), "vTrain's cluster: 800 Gb/s a node"),
    _machine("aws-p4d", 8, "a100-sxm-40gb", _NVLINK3, _ethernet(400), "AWS p4d.24xlarge: 400 Gb/s EFA; assumed 0.8"),
    _machine("dgx-h100", 8, "h100-sxm", _NVLINK4, _infiniband(8, 400), "NVIDIA DGX H100 data sheet"),
    _machine("aws-p5", 8, "h100-sxm", _NVLINK4, _ethernet(3200), "AWS p5.48xlarge: 3,200 Gb/s EFA; assumed 0.8"),
    _machine("h100-roce", 8, "h100-sxm", _NVLINK4, _ethernet(3200), "400 Gb/s RoCE a device, as in arXiv:2407.21783"),
    _machine("dgx-h200", 8, "h200-sxm", _NVLINK4, _infiniband(8, 400), "NVIDIA DGX H200 data sheet"),
    _machine("dgx-b200", 8, "b200-sxm", _NVLINK5, _infiniband(8, 400), "NVIDIA DGX B200; efficiency assumed"),
    _machine("dgx-b300", 8, "b300-sxm", _NVLINK5, _infiniband(8, 800), "NVIDIA DGX B300; efficiency assumed"),
    _machine("gb200-nvl72", 72, "gb200", _NVLINK5, _infiniband(72, 400), "NVIDIA GB200 NVL72; efficiency assumed"),
    _machine("gb300-nvl72", 72, "gb300", _NVLINK5, _infiniband(72, 800), "NVIDIA GB300 NVL72; efficiency assumed"),
    _machine("h800-8", 8, "h800-sxm", _NVLINK4_HALF, _infiniband(8, 400), "H800 nodes, as in arXiv:2412.19437"),
    _machine(
        "grand-teton-h100-96gb", 8, "h100-sxm-96gb", _NVLINK4, _ethernet(3200), "torchtitan's H100 nodes; assumed 0.8"
    ),
    _machine("aws-g4dn-12xlarge", 4, "t4", _PCIE3_X8, _ethernet(50), "AWS g4dn.12xlarge: PCIe 3 x8 a T4, 50 Gb/s"),
    _machine("pcie-rtx-4090-8", 8, "rtx-4090", _PCIE4, _ethernet(100), "PCIe 4 x16; efficiencies assumed"),
    _machine("pcie-rtx-3090-8", 8, "rtx-3090", _PCIE4, _ethernet(100), "PCIe 4 x16; efficiencies assumed"),
    _machine("mi300x-8", 8, "mi300x", _XGMI3, _infiniband(8, 400), "AMD MI300X platform; efficiencies assumed"),
    _machine("pcie-l40s-8", 8, "l40s", _PCIE4, _ethernet(100), "PCIe 4 x16; efficiencies assumed"),
    _machine("pcie-l4-4", 4, "l4", _PCIE4, _ethernet(50), "PCIe 4 x16; efficiencies assumed"),
    _machine(
        "cpu-2",
        2,
        "cpu-core",
        Link(kind="memory", gb_s=5, efficiency=0.5, latency_us=30),
        _ethernet(10),
        "two cores of a laptop or a small server, one rank each; assumed",
    ),
)
MACHINES: Mapping[str, Machine] = MappingProxyType({machine.name: machine for machine in _MACHINES})
"""Known machine types by name."""
