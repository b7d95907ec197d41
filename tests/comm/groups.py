"""A mesh of replicas for tests."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.comm.conditions import Conditions
from shoal.comm.config import WireConfig
from shoal.comm.mesh import Mesh, build_mesh
from shoal.topology.layout import Layout
from tests.ranks import TestPlace

STOPPED_S = 3.0
"""The timeout where a test has to wait for one. Ranks of a busy machine come to a call less far apart than this."""


def replicas(place: TestPlace, *, timeout_s: float = 60.0, conditions: Conditions | None = None) -> Mesh:
    """One replica a rank."""
    return build_mesh(
        Layout(replicate=place.size),
        place.rank,
        store=place.store,
        device=torch.device("cpu"),
        conditions=conditions,
        wire=WireConfig(timeout_s=timeout_s),
    )


def alone() -> Mesh:
    """A mesh of one rank, in this process."""
    return replicas(TestPlace(0, 1, dist.HashStore()))
