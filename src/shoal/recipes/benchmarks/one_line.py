"""`shoal bench programs`: plain PyTorch programs on Gloo beside the same programs on Shoal's backend.

A program changes one line, the backend's name. Exposed communication is what a step takes longer than the same program
on a network that takes no time (`programs.ON_INSTANT_NETWORK`, `exposed`), so that what DDP and FSDP2 copy for
themselves is not taken for communication. A step that counts follows one of the same program, as in training.
`alone_ms` is the bare model on the rank's tokens, without DDP or FSDP2 (for tensor parallelism the unsplit model, which
computes twice as much): a step less that is what distribution costs in all.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch._C._distributed_c10d import PrefixStore

import shoal.c10d
from shoal.comm.collective import GroupCollective
from shoal.comm.config import WireConfig
from shoal.comm.ledger import Ledger
from shoal.comm.mesh import connect
from shoal.launch.environment import Place
from shoal.launch.rendezvous import open_store
from shoal.recipes.benchmarks.exposed import AGAIN, ALONE, CALLS, GLOO, INSTANT, OURS, checks, row
from shoal.recipes.benchmarks.gpt_job import corpus_file
from shoal.recipes.benchmarks.programs import ON_INSTANT_NETWORK, PROGRAMS, TENSOR, alone
from shoal.recipes.benchmarks.traffic import again, all_reduces
from shoal.recipes.benchmarks.turns import interleaved

TIMEOUT_S = 600.0
FAKE = "fake"
BACKENDS = {GLOO: GLOO, OURS: shoal.c10d.BACKEND, INSTANT: FAKE, AGAIN: FAKE, ALONE: FAKE}


def measure(place: Place, names: Sequence[str], *, tokens: int, pairs: int) -> dict[str, Any] | None:
    """Rows and checks of these programs for `tokens` a rank and step; None on all ranks but the first."""
    store = open_store(place, os.environ, timeout_s=TIMEOUT_S)
    with ExitStack() as stack:
        corpus = corpus_file(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-"))))
        dist.init_process_group(
            GLOO, store=PrefixStore("programs", store), rank=place.rank, world_size=place.world_size
        )
        stack.callback(dist.destroy_process_group)
        clock = _clock(place, PrefixStore("clock", store))
        parts = [_of_program(name, place, corpus, clock, tokens=tokens, pairs=pairs) for name in names]
    if place.rank != 0:
        return None
    return {"rows": [row for row, _ in parts], "checks": [one for _, checks in parts for one in checks]}


def _of_program(
    name: str, place: Place, corpus: Path, clock: GroupCollective, *, tokens: int, pairs: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    size = TENSOR if name == "tensor" else place.world_size
    groups = {side: _group(backend, place, size) for side, backend in BACKENDS.items()}
    make = {GLOO: PROGRAMS[name], OURS: PROGRAMS[name], ALONE: alone}
    sides: dict[str, Callable[[], Any]] = {
        side: make.get(side, ON_INSTANT_NETWORK[name])(groups[side], corpus, tokens=tokens) for side in BACKENDS
    }
    if calls := all_reduces(sides[AGAIN]):
        sides |= {CALLS + side: again(calls, groups[side]) for side in (GLOO, OURS)}
    turns = interleaved(sides, clock, pairs=pairs, always=[side for side in sides if side != ALONE], warm=True)
    return row(name, place.world_size, turns, tokens=tokens), checks(name, place.world_size, turns, tokens=tokens)


def _group(backend: str, place: Place, size: int) -> Any:
    """The group of this rank among `size` neighbours; every rank takes part in making all of them."""
    firsts = range(0, place.world_size, size)
    made = [dist.new_group(list(range(first, first + size)), backend=backend) for first in firsts]
    return made[place.rank // size]


def _clock(place: Place, store: Any) -> GroupCollective:
    return connect(
        store,
        place.rank,
        place.world_size,
        device=torch.device("cpu"),
        label="clock",
        ledger=Ledger(),
        wire=WireConfig(timeout_s=TIMEOUT_S),
    )
