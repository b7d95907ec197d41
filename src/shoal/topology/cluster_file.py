"""The cluster file (TOML) -> `Cluster`. A known machine fills what is not written; every written key wins.

    [cluster]
    nodes = 16
    machine = "dgx-h100"

    [scale_out]
    gb_s = 50

`python -m shoal.topology.cluster_file docs/reference/cluster-file.md` writes the reference of its keys anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from shoal.config.check import Table, checked, says
from shoal.config.load import markdown, read
from shoal.errors import ConfigError
from shoal.topology.cluster import Architecture, Cluster, Device, FatTree, Link, Machine, Network, Price, Reliability
from shoal.topology.devices import DEVICES, MACHINES
from shoal.topology.failures import PUBLISHED, published_rate

Known = TypeVar("Known")


class ClusterTable(Table, frozen=True):
    """How many nodes of what."""

    nodes: Annotated[int, says("Nodes.", ge=1, le=1 << 20)]
    name: Annotated[str | None, says("What it is called; default: the machine's name.")] = None
    machine: Annotated[str | None, says("A known machine type; the other tables change parts of it.")] = None
    device: Annotated[str | None, says("A known device in the place of the machine's.")] = None
    devices_per_node: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=1024)] | None, says("Accelerators in one node; default: the machine's.")
    ] = None
    start_us: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None,
        says("Microseconds until a collective moves its first byte; default: the machine's, else 30."),
    ] = None


class ClusterFile(Table, frozen=True):
    """The whole file."""

    cluster: ClusterTable
    device: Device | None = None
    scale_up: Link | None = None
    scale_out: Link | None = None
    network: Annotated[Network, says("How nodes are joined.")] = FatTree()
    price: Price = Price()
    reliability: Reliability = Reliability()


def load_cluster(path: Path) -> Cluster:
    """The cluster of a file. Raises `ConfigError`, one sentence, that names the file and the key."""
    return cluster_from(read(path), file=str(path))


def cluster_from(data: Mapping[str, Any], *, file: str) -> Cluster:
    """The cluster of a file's plain dictionaries. Raises `ConfigError`."""
    table = data.get("cluster")
    known = _known(table, "machine", MACHINES, file)
    device = _known(table, "device", DEVICES, file)
    tables = checked(_filled(data, known, device), ClusterFile, file=file)
    return _assembled(tables, known, file)


def known_cluster(machine: str, nodes: int) -> Cluster:
    """A cluster of a known machine type. Raises `ConfigError` for an unknown name."""
    return cluster_from({"cluster": {"machine": machine, "nodes": nodes}}, file="command line")


def _known(table: object, key: str, known: Mapping[str, Known], file: str) -> Known | None:
    """What `table` names under `key`; None where it names nothing."""
    name = table.get(key) if isinstance(table, dict) else None
    if name is None:
        return None
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"{file}: cluster.{key}: found {name!r}; known {key}s: {', '.join(known)}")
    return known[name]


def _filled(data: Mapping[str, Any], machine: Machine | None, device: Device | None) -> dict[str, Any]:
    """Each table that is written, laid over the known one."""
    result = dict(data)
    base: dict[str, Table | None] = {
        "device": device or (machine.device if machine else None),
        "scale_up": machine.scale_up if machine else None,
        "scale_out": machine.scale_out if machine else None,
    }
    for name, known in base.items():
        written = result.get(name, {})
        if known is not None and isinstance(written, dict):
            result[name] = {**msgspec.to_builtins(known), **written}
    return result


def _assembled(tables: ClusterFile, known: Machine | None, file: str) -> Cluster:
    outside = tables.scale_up if tables.scale_out is None and tables.cluster.nodes == 1 else tables.scale_out
    for name, table in (("device", tables.device), ("scale_up", tables.scale_up), ("scale_out", outside)):
        if table is None:
            raise ConfigError(
                f"{file}: [{name}] is missing, and cluster.machine names no known machine: give the table, or one of "
                f"{', '.join(MACHINES)}"
            )
    head = tables.cluster
    per_node = head.devices_per_node or (known.devices if known else None)
    if per_node is None:
        raise ConfigError(f"{file}: cluster.devices_per_node is missing: say how many devices one node has")
    start_us = head.start_us if head.start_us is not None else (known.start_us if known else 30.0)
    name = head.name or (known.name if known else "cluster")
    assert tables.device is not None
    assert tables.scale_up is not None
    assert outside is not None
    machine = Machine(
        name=known.name if known else name,
        devices=per_node,
        device=tables.device,
        scale_up=tables.scale_up,
        scale_out=outside,
        start_us=start_us,
        source=known.source if known else file,
    )
    return Cluster(
        name=name,
        nodes=head.nodes,
        machine=machine,
        network=tables.network,
        price=tables.price,
        reliability=tables.reliability,
    )


INTRODUCTION = """\
What `shoal plan --cluster C.toml` and `shoal simulate --cluster C.toml` plan for. The shortest one names a known
machine and a number of nodes:

```toml
[cluster]
nodes = 16
machine = "dgx-h100"
```

Every key that is written besides wins over the known machine's; a file without `machine` gives `[device]`,
`[scale_up]`, `[scale_out]` where there are several nodes, and `cluster.devices_per_node` itself. Rates are those of
data sheets, in the units of data sheets; a number that no machine has (a 3 TB GPU, 0 GB/s) is refused, because it is a
slip of the unit.
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
