"""The cluster file (TOML) -> `Cluster`. A known machine fills what is not written; every written key wins.

[cluster]
nodes = 16
machine = "dgx-h100"

[scale_out]
gb_s = 50
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from shoal.config.check import checked
from shoal.config.load import read
from shoal.config.table import Table, says
from shoal.errors import ConfigError
from shoal.topology.cluster import Cluster, Device, FatTree, Link, Machine, Network, Price, Reliability
from shoal.topology.devices import DEVICES, MACHINES


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
    known = _known_machine(table.get("machine") if isinstance(table, dict) else None, file)
    device = _known_device(table.get("device") if isinstance(table, dict) else None, file)
    tables = checked(_filled(data, known, device), ClusterFile, file=file)
    return _assembled(tables, known, file)


def known_cluster(machine: str, nodes: int) -> Cluster:
    """A cluster of a known machine type. Raises `ConfigError` for an unknown name."""
    return cluster_from({"cluster": {"machine": machine, "nodes": nodes}}, file="command line")


def _known_machine(name: object, file: str) -> Machine | None:
    if name is None:
        return None
    if not isinstance(name, str) or name not in MACHINES:
        raise ConfigError(f"{file}: cluster.machine: found {name!r}; known machines: {', '.join(MACHINES)}")
    return MACHINES[name]


def _known_device(name: object, file: str) -> Device | None:
    if name is None:
        return None
    if not isinstance(name, str) or name not in DEVICES:
        raise ConfigError(f"{file}: cluster.device: found {name!r}; known devices: {', '.join(DEVICES)}")
    return DEVICES[name]


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
    for name, table in (("device", tables.device), ("scale_up", tables.scale_up), ("scale_out", tables.scale_out)):
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
    assert tables.scale_out is not None
    machine = Machine(
        name=known.name if known else name,
        devices=per_node,
        device=tables.device,
        scale_up=tables.scale_up,
        scale_out=tables.scale_out,
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
