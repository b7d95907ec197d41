"""`shoal bench programs`: plain PyTorch programs on Gloo beside the same programs on Shoal's backend.

A program changes one line, the backend's name. Exposed communication is what a step takes longer than without any: for
DDP and FSDP2 than the same model alone on the rank's tokens, for tensor parallelism than the same split on PyTorch's
fake backend, whose sums are whatever was there.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch._C._distributed_c10d import PrefixStore

import shoal.c10d
from shoal.comm.collective import GroupCollective
from shoal.comm.ledger import Ledger
from shoal.comm.mesh import connect
from shoal.launch.environment import Place
from shoal.launch.rendezvous import open_store
from shoal.recipes.benchmarks.gpt_job import corpus_file
from shoal.recipes.benchmarks.paired import check, lower_bound, milliseconds
from shoal.recipes.benchmarks.programs import PROGRAMS, TENSOR, alone, tensor
from shoal.recipes.benchmarks.turns import Turns, interleaved, ratios

TIMEOUT_S = 600.0
GLOO, OURS, FAKE = "gloo", shoal.c10d.BACKEND, "fake"
FLOOR_S = 1e-4
"""Less exposed than this cannot be told from none between steps of a tenth of a second."""
EXPOSED_LESS, NO_SLOWER, FSDP2_FASTER, FSDP2_TOKENS = 2.0, 1.0, 1.5, 256


def measure(place: Place, *, tokens: int, pairs: int) -> dict[str, Any] | None:
    """Rows and checks for `tokens` a rank and step; None on all ranks but the first."""
    store = open_store(place, os.environ, timeout_s=TIMEOUT_S)
    with ExitStack() as stack:
        corpus = corpus_file(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-"))))
        dist.init_process_group(
            GLOO, store=PrefixStore("programs", store), rank=place.rank, world_size=place.world_size
        )
        stack.callback(dist.destroy_process_group)
        clock = _clock(place, PrefixStore("clock", store))
        parts = [_of_program(name, place, corpus, clock, tokens=tokens, pairs=pairs) for name in PROGRAMS]
    if place.rank != 0:
        return None
    return {"rows": [row for row, _ in parts], "checks": [one for _, checks in parts for one in checks]}


def _of_program(
    name: str, place: Place, corpus: Path, clock: GroupCollective, *, tokens: int, pairs: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    make, size = PROGRAMS[name], TENSOR if name == "tensor" else place.world_size
    groups = {backend: _group(backend, place, size) for backend in (GLOO, OURS, FAKE)}
    silent = tensor if name == "tensor" else alone
    sides: dict[str, Callable[[], Any]] = {
        backend: make(groups[backend], corpus, tokens=tokens) for backend in (GLOO, OURS)
    }
    sides["no_communication"] = silent(groups[FAKE], corpus, tokens=tokens)
    turns = interleaved(sides, clock, pairs=pairs, always=tuple(sides))
    return _row(name, place.world_size, turns, tokens=tokens), _checks(name, place.world_size, turns, tokens=tokens)


def _group(backend: str, place: Place, size: int) -> Any:
    """The group of this rank among `size` neighbours; every rank takes part in making all of them."""
    firsts = range(0, place.world_size, size)
    made = [dist.new_group(list(range(first, first + size)), backend=backend) for first in firsts]
    return made[place.rank // size]


def _exposed_s(turns: Turns, backend: str) -> float:
    """The median, over the turns, of what a step took longer than its neighbour without communication."""
    return statistics.median(turn[backend] - turn["no_communication"] for turn in turns)


def _row(name: str, ranks: int, turns: Turns, *, tokens: int) -> dict[str, Any]:
    faster = ratios(turns, OURS, peer=GLOO)
    return {
        "program": name,
        "ranks": ranks,
        "tokens_per_rank": tokens,
        "pairs": len(turns),
        **milliseconds({side: [turn[side] for turn in turns] for side in turns[0]}),
        "exposed_gloo_ms": round(1e3 * _exposed_s(turns, GLOO), 2),
        "exposed_shoal_ms": round(1e3 * _exposed_s(turns, OURS), 2),
        "faster_median": round(statistics.median(faster), 4),
        "faster_lower_95": round(lower_bound(faster), 4),
    }


def _checks(name: str, ranks: int, turns: Turns, *, tokens: int) -> list[dict[str, Any]]:
    where = f"{name}, {ranks} ranks, {tokens} tokens a rank"
    faster = ratios(turns, OURS, peer=GLOO)
    ours_s = max(_exposed_s(turns, OURS), FLOOR_S)
    checks = [
        check(f"{where}: exposed communication on Gloo over Shoal's", _exposed_s(turns, GLOO) / ours_s, EXPOSED_LESS),
        check(f"{where}: step against Gloo's, median", statistics.median(faster), NO_SLOWER),
    ]
    if name == "fsdp2" and tokens == FSDP2_TOKENS:
        checks.append(check(f"{where}: FSDP2's step against Gloo's", statistics.median(faster), FSDP2_FASTER))
    return checks


def _clock(place: Place, store: Any) -> GroupCollective:
    return connect(
        store, place.rank, place.world_size,
        device=torch.device("cpu"), label="clock", ledger=Ledger(), timeout_s=TIMEOUT_S,
    )  # fmt: skip
