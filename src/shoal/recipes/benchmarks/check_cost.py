"""`shoal bench check`: what a step costs when ranks compare their collectives, beside the same step without.

Every case is one transport and one layout. Its steps are taken in turn with the check on, off, and off again in a run
of its own (A/A): what a ratio of two runs that do the same is, is noise.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.checkpoint.agreement import LocalExchange
from shoal.comm.backends import Transport
from shoal.comm.collective import Collective
from shoal.comm.config import WireConfig
from shoal.comm.connect import connect
from shoal.comm.ledger import Ledger
from shoal.engine.loop import take_step
from shoal.launch.environment import Place
from shoal.launch.rendezvous import open_store
from shoal.memory.config import MemoryConfig
from shoal.recipes.benchmarks.gpt_job import corpus_file, gpt_job, gpt_run_file
from shoal.recipes.benchmarks.machine import Result
from shoal.recipes.benchmarks.paired import check, milliseconds, spread
from shoal.recipes.benchmarks.turns import Turns, interleaved, ratios
from shoal.recipes.objects import UserObjects
from shoal.recipes.setting import set_up
from shoal.runfile.run_file import RunFile
from shoal.topology.config import LayoutConfig

SIDES = {"on": True, "off": False, "off_again": False}
TRANSPORTS: tuple[Transport, ...] = ("gloo", "shm")
MOST = 1.05
"""What a step with the check may take of one without."""
TIMEOUT_S = 600.0


class Split(NamedTuple):
    """How a case lays out its ranks; `make` takes their number."""

    make: Callable[[int], LayoutConfig]
    zero: int = 3


SPLITS = {
    "replicate": Split(lambda ranks: LayoutConfig(replicate=ranks)),
    "tensor": Split(lambda ranks: LayoutConfig(tensor=ranks)),
    "zero_3": Split(lambda ranks: LayoutConfig(shard=ranks), zero=3),
}


def measure(place: Place, *, tokens: int, pairs: int) -> Result | None:
    """A row and a check for each case, for `tokens` a rank and step; None on all ranks but the first."""
    store = open_store(place, os.environ, timeout_s=TIMEOUT_S)
    clock = connect(
        PrefixStore("clock", store),
        place.rank,
        place.world_size,
        device=torch.device("cpu"),
        label="clock",
        ledger=Ledger(),
        wire=WireConfig(timeout_s=TIMEOUT_S),
    )
    rows, checks = [], []
    for transport in TRANSPORTS:
        for name in SPLITS:
            case = PrefixStore(f"{transport}/{name}", store)
            turns = _turns(place, case, clock, transport, name, tokens=tokens, pairs=pairs)
            rows.append(row := _row(turns, transport, name, tokens=tokens, ranks=place.world_size))
            checks.append(check(f"step with the check, {transport}, {name}", row["on_over_off"], MOST, at_most=True))
    return {"rows": rows, "checks": checks} if place.rank == 0 else None


def _turns(
    place: Place, store: Store, clock: Collective, transport: Transport, name: str, *, tokens: int, pairs: int
) -> Turns:  # fmt: skip
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        run_file = gpt_run_file(folder, corpus_file(folder), tokens * place.world_size)
        sides = {
            side: _step(
                _altered(run_file, transport, SPLITS[name], place, on=on), place, PrefixStore(side, store), stack
            )
            for side, on in SIDES.items()
        }
        return interleaved(sides, clock, pairs=pairs, always=tuple(SIDES))


def _altered(run_file: RunFile, transport: Transport, split: Split, place: Place, *, on: bool) -> RunFile:
    return msgspec.structs.replace(
        run_file,
        layout=split.make(place.world_size),
        memory=MemoryConfig(zero=split.zero),
        wire=WireConfig(transport=transport, check_collectives=on),
    )


def _step(run_file: RunFile, place: Place, store: Store, stack: ExitStack) -> Callable[[], Any]:
    setting = set_up(run_file, place, UserObjects(), store=store)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
    job = gpt_job(setting, folder, stack, exchange=LocalExchange(), ranks=1)
    return lambda: take_step(job)


def _row(turns: Turns, transport: str, layout: str, *, tokens: int, ranks: int) -> dict[str, Any]:
    cost, twins = ratios(turns, "off", peer="on"), ratios(turns, "off", peer="off_again")
    return {
        "transport": transport,
        "layout": layout,
        "tokens_per_rank": tokens,
        "ranks": ranks,
        "pairs": len(cost),
        **milliseconds({side: [turn[side] for turn in turns] for side in SIDES}),
        "on_over_off": round(statistics.median(cost), 4),
        "aa_median": round(statistics.median(twins), 4),
        "aa_spread": [round(value, 4) for value in spread(twins)],
    }
