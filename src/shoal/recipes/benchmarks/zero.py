"""`shoal bench zero`: steps of ZeRO-1 and -2 beside DDP, of ZeRO-3 beside a hand-written `fully_shard` script.

All train the same model in the same loop. Each peer has a twin, whose ratio shows what noise alone makes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shoal.comm.config import WireConfig
from shoal.comm.ledger import Ledger
from shoal.comm.mesh import build_mesh, connect
from shoal.launch.environment import Place
from shoal.launch.rendezvous import open_store
from shoal.models.build import build as build_model
from shoal.models.gpt import GPT
from shoal.models.initialise import initialise
from shoal.recipes.benchmarks.ddp_script import Script
from shoal.recipes.benchmarks.fsdp_script import ShardedScript
from shoal.recipes.benchmarks.gpt_job import MODEL, SEQUENCE, corpus_file
from shoal.recipes.benchmarks.paired import check, lower_bound, milliseconds, spread
from shoal.recipes.benchmarks.turns import Sides, Turns, interleaved, ratios
from shoal.recipes.benchmarks.zero_script import ZeroScript
from shoal.topology.layout import Layout

PEERS = {"zero_1": ("ddp", 0.97), "zero_2": ("ddp", 0.97), "zero_3": ("fully_shard", 1.0)}
TIMEOUT_S = 600.0


def measure(place: Place, *, tokens: int, pairs: int) -> dict[str, Any] | None:
    """A row for each stage and its check, for `tokens` a rank and step; None on all ranks but the first."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        store = open_store(place, os.environ, timeout_s=TIMEOUT_S)
        dist.init_process_group("gloo", store=PrefixStore("peers", store), rank=place.rank, world_size=place.world_size)
        stack.callback(dist.destroy_process_group)
        clock = connect(
            PrefixStore("clock", store),
            place.rank,
            place.world_size,
            device=torch.device("cpu"),
            label="clock",
            ledger=Ledger(),
            wire=WireConfig(timeout_s=TIMEOUT_S),
        )
        sides = _sides(place, store, corpus_file(folder), tokens)
        turns = interleaved(sides, clock, pairs=pairs, always=[name for name in sides if "twin" not in name])
    return _result(turns, tokens=tokens, world=place.world_size) if place.rank == 0 else None


def _sides(place: Place, store: Any, corpus: Path, tokens: int) -> Sides:
    layout = Layout(shard=place.world_size)
    mesh = build_mesh(layout, place.rank, store=store, device=torch.device("cpu"), wire=WireConfig(timeout_s=TIMEOUT_S))
    sizes = {"samples": tokens // SEQUENCE, "sequence": SEQUENCE}
    scripts: dict[str, Script | ShardedScript | ZeroScript] = {
        name: Script(_model(), corpus, rank=place.rank, distributed=True, **sizes) for name in ("ddp", "ddp_twin")
    }
    scripts |= {
        name: ShardedScript(_model(), corpus, rank=place.rank, world=place.world_size, **sizes)
        for name in ("fully_shard", "fully_shard_twin")
    }
    scripts |= {f"zero_{stage}": ZeroScript(_model(), corpus, mesh, zero=stage, **sizes) for stage in (1, 2, 3)}
    return {name: script.step for name, script in scripts.items()}


def _model() -> GPT:
    model = build_model(MODEL)
    initialise(model, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(model, GPT)
    return model


def _result(turns: Turns, *, tokens: int, world: int) -> dict[str, Any]:
    times = {name: [turn[name] for turn in turns if name in turn] for name in {n for turn in turns for n in turn}}
    rows, checks = [], []
    for side, (peer, bound) in PEERS.items():
        gained, twins = ratios(turns, side, peer=peer), ratios(turns, f"{peer}_twin", peer=peer)
        row = {
            "stage": side,
            "peer": peer,
            "tokens_per_rank": tokens,
            "ranks": world,
            "pairs": len(gained),
            **milliseconds({side: times[side], peer: times[peer]}),
            "ratio_median": round(statistics.median(gained), 4),
            "ratio_lower_95": round(lower_bound(gained), 4),
            "aa_median": round(statistics.median(twins), 4),
            "aa_spread": [round(value, 4) for value in spread(twins)],
        }
        rows.append(row)
        checks.append(check(f"{side} against {peer}, 95 % bound, {tokens} tokens a rank", lower_bound(gained), bound))
    return {"rows": rows, "checks": checks}
