"""How often a job is stopped, as it was published of clusters of each architecture.

    mean time between failures = 1 / (rate x nodes),   rate in failures per 1,000 node-days

A cluster file that states `failures_per_1000_node_days` is believed. Where it states none, the rate is the geometric
mean of those of `PUBLISHED` of the same architecture: a new cluster is taken for one more of them. Single clusters lie
up to 2.5 times above and below it. A node there has eight devices; a node of another size fails in proportion to its
devices, which cause most of the failures (78 % of Llama 3's unexpected interruptions were hardware's).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.topology.cluster import Architecture, Cluster

NODE_DEVICES = 8
"""Devices of a node in every published figure."""

PER_1000_NODE_DAYS_S = 1000 * 86400


@dataclass(frozen=True, kw_only=True)
class PublishedFailures:
    """One cluster or job: failures that stopped a job, per 1,000 days of one node."""

    source: str
    architecture: Architecture
    per_1000_node_days: float


def _counted(source: str, architecture: Architecture, *, failures: float, nodes: int, days: float) -> PublishedFailures:
    rate = 1000 * failures / (nodes * days)
    return PublishedFailures(source=source, architecture=architecture, per_1000_node_days=rate)


PUBLISHED: Sequence[PublishedFailures] = (
    PublishedFailures(source="RSC-1, arXiv:2410.21680", architecture="ampere", per_1000_node_days=6.5),
    PublishedFailures(source="RSC-2, arXiv:2410.21680", architecture="ampere", per_1000_node_days=2.34),
    _counted(
        "OPT-175B, arXiv:2205.01068, section 2.5: 35 restarts by hand and 70 others", "ampere",
        failures=105, nodes=124, days=61,
    ),
    _counted(
        "BLOOM, huggingface.co/blog/bloom-megatron-deepspeed: one or two a week", "ampere",
        failures=1.5, nodes=48, days=7,
    ),
    _counted(
        "Llama 3, arXiv:2407.21783, section 3.3.4: 466 interruptions", "hopper",
        failures=466, nodes=2048, days=54,
    ),
    _counted(
        "504 B200, arXiv:2605.09370: 10 failed devices in 55 days", "blackwell",
        failures=10, nodes=63, days=55,
    ),
)  # fmt: skip


def published_rate(architecture: Architecture) -> float:
    """Failures per 1,000 node-days of eight devices: the geometric mean of the published clusters."""
    rates = [one.per_1000_node_days for one in PUBLISHED if one.architecture == architecture]
    return math.exp(sum(map(math.log, rates)) / len(rates))


def failures_per_s(cluster: Cluster) -> float:
    """Failures per second of a job on all of `cluster`."""
    own = cluster.reliability.failures_per_1000_node_days
    if own is None:
        own = published_rate(cluster.device.architecture) * cluster.machine.devices / NODE_DEVICES
    return own * cluster.nodes / PER_1000_NODE_DAYS_S
