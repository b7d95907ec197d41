"""`shoal bench wire`: collectives of CPU ranks of one host through shared memory, beside Gloo in the same run.

Every collective is made in turn by Gloo and by the core in C, after a barrier of all ranks; the time is that of the
slowest rank. Beside them stands the bound: the copies and additions that ranks without a window cannot do without,
made by all of them at once and without waiting for each other, in pieces that stay in the cache. Of S bytes, each of n
ranks has to

    all-reduce      copy S (n-1)/n into its place,  add n parts of S/n,  copy S (n-1)/n out of the others' places
    reduce-scatter  copy S (n-1)/n into its place,  add n parts of S/n into the output
    all-gather      copy S/n into its place and S/n into the output,  copy S (n-1)/n out of the others' places
"""

from __future__ import annotations

import ctypes
import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from shoal.comm.collective import Collective, GroupCollective
from shoal.comm.shm.core import CoreMissing
from shoal.comm.shm.group import share_core
from shoal.comm.shm.host import Apart
from shoal.errors import EnvironmentFault
from shoal.launch.environment import Place
from shoal.launch.rendezvous import open_store
from shoal.recipes.benchmarks.paired import check, lower_bound
from shoal.recipes.benchmarks.turns import interleaved, ratios

TIMEOUT_S = 120.0
PIECE_BYTES = 256 << 10
MILLION = 1 << 20
BOUNDS = {
    (2, "all_reduce", 64 << 10): 5.0,
    (2, "all_reduce", 64 * MILLION): 2.0,
    (4, "all_reduce", 64 << 10): 8.0,
    (4, "all_reduce", 64 * MILLION): 2.2,
    (2, "reduce_scatter", 16 * MILLION): 4.0,
    (4, "reduce_scatter", 16 * MILLION): 4.0,
    (2, "all_gather", 16 * MILLION): 2.0,
    (4, "all_gather", 16 * MILLION): 2.0,
}


@dataclass(frozen=True)
class Case:
    """A collective of `size_bytes` in all: what is reduced, or what all ranks have after a gather.

    Where they do not divide by the ranks, it is of a few bytes less. `calls` are made one after the other in each turn:
    ranks leave a barrier further apart than a short call takes.
    """

    operation: str
    size_bytes: int
    pairs: int
    calls: int = 1

    def numel(self, ranks: int) -> int:
        """Elements of four bytes; where each rank has a part of them, a multiple of `ranks`, at least 1 for each."""
        whole = self.size_bytes // 4
        return whole if self.operation == "all_reduce" else max(1, whole // ranks) * ranks


def cases(pairs: int) -> list[Case]:
    """More turns of what is short."""
    small = [Case("all_reduce", size, 2 * pairs, calls=20) for size in (4, 64 << 10)]
    operations = ("all_reduce", "reduce_scatter", "all_gather")
    medium = [Case(operation, size, pairs) for operation in operations for size in (MILLION, 16 * MILLION)]
    return [*small, *medium, Case("all_reduce", 64 * MILLION, pairs)]


def measure(place: Place, *, pairs: int) -> dict[str, Any] | None:
    """Rows and checks of all cases; None on all ranks but the first. Raises `EnvironmentFault` without the core."""
    torch.set_num_threads(1)
    store = open_store(place, os.environ, timeout_s=TIMEOUT_S)
    rank, size = place.rank, place.world_size

    def gloo(name: str) -> Any:
        return dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, timedelta(seconds=TIMEOUT_S))

    with ExitStack() as stack:
        try:
            core = share_core(gloo("beside"), PrefixStore("core", store), timeout_s=TIMEOUT_S)
        except (CoreMissing, Apart) as reason:
            raise EnvironmentFault(f"there is no shared-memory core to measure: {reason}") from None
        stack.callback(core.close)
        groups = {"gloo": GroupCollective(gloo("gloo")), "shm": GroupCollective(core)}
        clock = GroupCollective(gloo("clock"))
        rows = [row_of(case, groups, clock) for case in cases(pairs)]
    return {"rows": rows, "checks": _checks(rows)} if rank == 0 else None


def row_of(case: Case, groups: dict[str, GroupCollective], clock: GroupCollective) -> dict[str, Any]:
    """What all ranks of `clock` measured of `case`, over the groups `gloo` and `shm` and as the bound."""
    whole = torch.zeros(case.numel(clock.size))
    part = torch.zeros(len(whole) // clock.size or 1)
    sides: dict[str, Callable[[], Any]] = {
        name: _call(case.operation, group, whole, part) for name, group in groups.items()
    }
    sides["bound"] = partial(LEAST_WORK[case.operation], whole, part, scratch_of(whole), ranks=clock.size)
    repeated = {name: partial(_repeat, call, case.calls) for name, call in sides.items()}
    turns = interleaved(repeated, clock, pairs=case.pairs, always=tuple(sides))
    gained = ratios(turns, "shm", peer="gloo")
    medians_s = {name: statistics.median(turn[name] for turn in turns) for name in sides}
    return {
        "operation": case.operation,
        "bytes": whole.nbytes,
        "ranks": clock.size,
        "pairs": len(turns),
        "calls_a_turn": case.calls,
        **{f"{name}_us": round(1e6 * seconds / case.calls, 1) for name, seconds in medians_s.items()},
        "ratio_median": round(statistics.median(gained), 3),
        "ratio_lower_95": round(lower_bound(gained), 3),
        "promised": BOUNDS.get((clock.size, case.operation, whole.nbytes)),
        "of_the_bound": round(statistics.median(ratios(turns, "shm", peer="bound")), 3),
    }


def _repeat(call: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        call()


def _call(operation: str, group: Collective, whole: Tensor, part: Tensor) -> Callable[[], Any]:
    return {
        "all_reduce": lambda: group.all_reduce(whole).wait(),
        "reduce_scatter": lambda: group.reduce_scatter(part, whole).wait(),
        "all_gather": lambda: group.all_gather(whole, part).wait(),
    }[operation]


def least_all_reduce(whole: Tensor, part: Tensor, scratch: Tensor, *, ranks: int) -> None:
    """What one rank cannot do without in a two-shot all-reduce of `whole` [numel], without any waiting."""
    for piece in whole.split(len(scratch)):
        parts = piece.tensor_split(ranks)
        places, shortest = scratch[: len(piece)].tensor_split(ranks), len(parts[-1])
        for place, own in zip(places[1:], parts[1:], strict=True):
            _copy(place, own)
        for place in places[1:]:
            torch.add(parts[0][:shortest], place[:shortest], out=places[0][:shortest])
        for place, own in zip(places[1:], parts[1:], strict=True):
            _copy(own, place)


def least_reduce_scatter(whole: Tensor, part: Tensor, scratch: Tensor, *, ranks: int) -> None:
    """The same, as rank 0, of a reduce-scatter of `whole` [ranks * n] into `part` [n], which becomes a sum."""
    blocks, places = whole.view(ranks, -1), _places(scratch, ranks)
    for at in range(0, len(part), places.shape[1]):
        output = part[at : at + places.shape[1]]
        here = slice(at, at + len(output))
        for place, block in zip(places[1:], blocks[1:], strict=True):
            _copy(place[: len(output)], block[here])
        total = blocks[0, here]
        for place in places[1:]:
            total = torch.add(total, place[: len(output)], out=output)


def least_all_gather(whole: Tensor, part: Tensor, scratch: Tensor, *, ranks: int) -> None:
    """The same, as rank 0, of an all-gather of `part` [n] into `whole` [ranks * n]."""
    blocks, places = whole.view(ranks, -1), _places(scratch, ranks)
    for at in range(0, len(part), places.shape[1]):
        own = part[at : at + places.shape[1]]
        here = slice(at, at + len(own))
        _copy(places[0, : len(own)], own)
        _copy(blocks[0, here], own)
        for place, block in zip(places[1:], blocks[1:], strict=True):
            _copy(block[here], place[: len(own)])


LEAST_WORK: dict[str, Callable[..., None]] = {
    "all_reduce": least_all_reduce,
    "reduce_scatter": least_reduce_scatter,
    "all_gather": least_all_gather,
}


def scratch_of(whole: Tensor) -> Tensor:
    """The places of all ranks, in the cache: as much as a piece, made before anything is timed."""
    return torch.zeros(min(len(whole), PIECE_BYTES // whole.element_size()))


def _copy(to: Tensor, source: Tensor) -> None:
    """memcpy between contiguous tensors: of memory that is not in the cache faster than torch's own copy."""
    ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)


def _places(scratch: Tensor, ranks: int) -> Tensor:
    """[ranks, numel]: the place of each rank."""
    each = len(scratch) // ranks
    return scratch[: each * ranks].view(ranks, each)


def _checks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    checks = []
    for row in rows:
        bound = BOUNDS.get((row["ranks"], row["operation"], row["bytes"]))
        if bound is not None:
            name = f"{row['operation']} of {row['bytes']} bytes against Gloo, {row['ranks']} ranks"
            checks.append(check(name, row["ratio_median"], bound))
    return checks
