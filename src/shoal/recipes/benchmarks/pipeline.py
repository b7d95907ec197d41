"""`shoal bench pipeline`: bubbles, activations in flight and balance of the stages, on four ranks.

Rank 0 measures the balance when the others are done.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.config import WireConfig
from shoal.comm.mesh import build_mesh
from shoal.launch.environment import Place
from shoal.launch.rendezvous import open_store
from shoal.recipes.benchmarks import balance, bubble, in_flight
from shoal.topology.layout import Layout

TIMEOUT_S = 600.0


def measure(place: Place, *, repeats: int) -> dict[str, Any] | None:
    """Rows and checks; each schedule is rehearsed `repeats` times. None on all ranks but the first."""
    store = open_store(place, os.environ, timeout_s=TIMEOUT_S)
    parts = [_bubbles(place, store, repeats), in_flight.by_schedule(place, PrefixStore("in-flight", store))]
    if place.rank != 0:
        return None
    parts.append(balance.of_uneven_layers(stages=place.world_size))
    return {name: [entry for part in parts for entry in part[name]] for name in ("rows", "checks")}


def _bubbles(place: Place, store: Store, repeats: int) -> dict[str, Any]:
    layout = Layout(pipeline=place.world_size)
    mesh = build_mesh(
        layout,
        place.rank,
        store=PrefixStore("bubble", store),
        device=torch.device("cpu"),
        wire=WireConfig(timeout_s=TIMEOUT_S),
    )
    return bubble.by_schedule(mesh.axis("pipeline"), repeats=repeats)
