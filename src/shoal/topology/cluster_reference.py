"""The reference of the cluster file, from its tables and what is known by name.

`python -m shoal.topology.cluster_reference docs/reference/cluster-file.md` writes it anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from shoal.config.reference import markdown
from shoal.topology.cluster import Architecture, Device, Link, Machine
from shoal.topology.cluster_file import ClusterFile
from shoal.topology.devices import DEVICES, MACHINES
from shoal.topology.failures import PUBLISHED, published_rate

INTRODUCTION = """\
What `shoal plan --cluster C.toml` and `shoal simulate --cluster C.toml` plan for. The shortest one names a known
machine and a number of nodes:

```toml
[cluster]
nodes = 16
machine = "dgx-h100"
```

Every key that is written besides wins over the known machine's; a file without `machine` gives `[device]`,
`[scale_up]`, `[scale_out]` and `cluster.devices_per_node` itself. Rates are those of data sheets, in the units of data
sheets; a number that no machine has (a 3 TB GPU, 0 GB/s) is refused, because it is a slip of the unit.
"""


def reference() -> str:
    """The whole page in Markdown."""
    title, _, tables = markdown(ClusterFile, title="The cluster file").partition("\n\n")
    known = "\n".join([*_machines(), "", *_devices(), "", *_failures()])
    return f"{title}\n\n{INTRODUCTION}\n{tables.rstrip()}\n\n{known}\n"


def _machines() -> Iterator[str]:
    yield from ("## Known machines", "", "| `cluster.machine` | devices | in a node | between nodes | source |")
    yield "|---|---|---|---|---|"
    yield from (_machine(one) for one in MACHINES.values())


def _machine(one: Machine) -> str:
    inside, outside = _link(one.scale_up, "device"), _link(one.scale_out, "node")
    return f"| `{one.name}` | {one.devices} x `{one.device.name}` | {inside} | {outside} | {one.source} |"


def _link(link: Link, of: str) -> str:
    return f"{link.kind} {link.gb_s:g} GB/s a {of}"


def _devices() -> Iterator[str]:
    yield from ("## Known devices", "", "| `cluster.device` | GiB | GB/s | dense TFLOP/s | best share of it | source |")
    yield "|---|---|---|---|---|---|"
    yield from (_device(one) for one in DEVICES.values())


def _device(one: Device) -> str:
    rates = ", ".join(f"{dtype} {rate:g}" for dtype, rate in one.peak_tflops.items())
    sizes = f"{one.memory_gib:g} | {one.memory_gb_s:g}"
    return f"| `{one.name}` | {sizes} | {rates} | {one.matmul_efficiency:g} | {one.source} |"


def _failures() -> Iterator[str]:
    yield from (
        "## Published failures",
        "",
        "| architecture | failures per 1,000 node-days | source |",
        "|---|---|---|",
    )
    for one in PUBLISHED:
        yield f"| {one.architecture} | {one.per_1000_node_days:.2f} | {one.source} |"
    architectures: dict[Architecture, None] = dict.fromkeys(one.architecture for one in PUBLISHED)
    for architecture in architectures:
        yield f"| {architecture}, the default | {published_rate(architecture):.2f} | geometric mean |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
