"""`shoal bench memory`: what a rank keeps, counted by storages, beside closed forms.

Model state under ZeRO; activations of a long sequence over context ranks; recomputation. What one process does alone,
rank 0 does when the others are done.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shoal.comm.config import WireConfig
from shoal.comm.mesh import build_mesh
from shoal.launch.environment import Place
from shoal.launch.rendezvous import open_store
from shoal.recipes.benchmarks import context, recompute, state_memory
from shoal.recipes.benchmarks.gpt_job import corpus_file
from shoal.topology.layout import Layout

TIMEOUT_S = 600.0


def measure(place: Place, *, tokens: int, pairs: int) -> dict[str, Any] | None:
    """Rows and checks; `tokens` of the long sequence, `pairs` of recomputed steps. None on all ranks but the first."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        corpus = corpus_file(Path(folder))
        store = open_store(place, os.environ, timeout_s=TIMEOUT_S)
        state = _state(place, store, corpus)
        kinds = context.by_kind(place, PrefixStore("context", store), tokens=tokens)
        if place.rank != 0:
            return None
        whole = context.alone(tokens=tokens)
        long = context.compared(kinds, whole, tokens=tokens, ranks=place.world_size)
        parts = [state, long, recompute.compared(corpus, pairs=pairs)]
    return {name: [entry for part in parts for entry in part[name]] for name in ("rows", "checks")}


def _state(place: Place, store: Any, corpus: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        peers = PrefixStore("peers", store)
        dist.init_process_group("gloo", store=peers, rank=place.rank, world_size=place.world_size)
        stack.callback(dist.destroy_process_group)
        layout = Layout(shard=place.world_size)
        mesh = build_mesh(
            layout, place.rank, store=store, device=torch.device("cpu"), wire=WireConfig(timeout_s=TIMEOUT_S)
        )
        return state_memory.by_stage(mesh, corpus)
