"""`python -m benchmarks.wire`: collectives of CPU ranks of one host through shared memory, beside Gloo in the same run.

Gloo and the core in C make every collective in turn, after a barrier of all ranks; the slowest rank's time counts.
The third side is the bound: the copies and additions that no rank can avoid whose tensors lie outside shared memory,
made by all ranks at once and without waiting for each other, in pieces that stay in the cache. Of S bytes, each of n
ranks has to

    all-reduce      copy S (n-1)/n into its place,  add n parts of S/n,  copy S (n-1)/n out of the others' places
    reduce-scatter  copy S (n-1)/n into its place,  add n parts of S/n into the output
    all-gather      copy S/n into its place and S/n into the output,  copy S (n-1)/n out of the others' places
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from benchmarks.command import run
from benchmarks.wire_picture import write_wire_picture
from shoal.bench.groups import interleaved, join_store, repeat
from shoal.bench.options import AsJson, world_sizes
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Check, Result, check, lower_bound, merged, print_report, ratios
from shoal.cli.arguments import picture_file
from shoal.comm.collective import Collective, GroupCollective
from shoal.comm.shm.core import CoreMissing
from shoal.comm.shm.group import share_core
from shoal.comm.shm.host import Apart
from shoal.errors import EnvironmentFault
from shoal.launcher.environment import Place

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


def wire(
    pairs: Annotated[int, typer.Option(help="Paired turns of each case.", min=3)] = 20,
    processes: Annotated[str, typer.Option(help="Numbers of ranks, several with commas.")] = "2,4",
    plot: Annotated[
        Path | None, typer.Option(help="Draw the ratios here (.png, .svg, .pdf).", callback=picture_file)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Shared memory beside Gloo: collectives of several sizes, and the bound that copying and adding allow.

    Example: python -m benchmarks.wire --pairs 5 --processes 2
    """
    if is_rank():
        run_as_rank(lambda place: measure(place, pairs=pairs))
        return
    command = ["benchmarks.wire", "--pairs", str(pairs)]
    result = merged(on_ranks(command, processes=count) for count in world_sizes(processes))
    if plot is not None:
        write_wire_picture(result["rows"], plot)
    print_report("wire", result, as_json=as_json)


@dataclass(frozen=True)
class Case:
    """A collective of `size_bytes` in all: of what is reduced, or of what all ranks have after a gather.

    Where the bytes do not divide by the ranks, a few are left out. Each turn makes several `calls` of a short
    collective, because ranks leave a barrier further apart than a short call takes.
    """

    operation: str
    size_bytes: int
    pairs: int
    calls: int = 1

    def numel(self, ranks: int) -> int:
        """Elements of four bytes; a multiple of `ranks`, and at least one each, where every rank has a part of them."""
        whole = self.size_bytes // 4
        return whole if self.operation == "all_reduce" else max(1, whole // ranks) * ranks


def cases(pairs: int) -> list[Case]:
    """All cases; the short ones take more turns."""
    small = [Case("all_reduce", size, 2 * pairs, calls=20) for size in (4, 64 << 10)]
    operations = ("all_reduce", "reduce_scatter", "all_gather")
    medium = [Case(operation, size, pairs) for operation in operations for size in (MILLION, 16 * MILLION)]
    return [*small, *medium, Case("all_reduce", 64 * MILLION, pairs)]


def measure(place: Place, *, pairs: int) -> Result | None:
    """Rows and checks of all cases; None on all ranks but rank 0. Raises `EnvironmentFault` without the core."""
    store = join_store(place)
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
    """The row of `case`: over the groups `gloo` and `shm`, and the bound; the same on all ranks of `clock`."""
    whole = torch.zeros(case.numel(clock.size))
    part = torch.zeros(len(whole) // clock.size or 1)
    sides: dict[str, Callable[[], Any]] = {
        name: _call(case.operation, group, whole, part) for name, group in groups.items()
    }
    sides["bound"] = partial(LEAST_WORK[case.operation], whole, part, scratch_of(whole), ranks=clock.size)
    repeated = {name: partial(repeat, call, case.calls) for name, call in sides.items()}
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


def _call(operation: str, group: Collective, whole: Tensor, part: Tensor) -> Callable[[], Any]:
    return {
        "all_reduce": lambda: group.all_reduce(whole).wait(),
        "reduce_scatter": lambda: group.reduce_scatter(part, whole).wait(),
        "all_gather": lambda: group.all_gather(whole, part).wait(),
    }[operation]


def least_all_reduce(whole: Tensor, part: Tensor, scratch: Tensor, *, ranks: int) -> None:
    """The work that one rank cannot avoid in a two-shot all-reduce of `whole` [numel]."""
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
    """The same for rank 0 in a reduce-scatter of `whole` [ranks * n] into `part` [n], which becomes a sum."""
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
    """The same for rank 0 in an all-gather of `part` [n] into `whole` [ranks * n]."""
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
    """The buffers of all ranks, as large as a piece so that they stay in the cache; made before anything is timed."""
    return torch.zeros(min(len(whole), PIECE_BYTES // whole.element_size()))


def _copy(to: Tensor, source: Tensor) -> None:
    """memcpy between contiguous tensors, which is faster than torch's copy for memory outside the cache."""
    ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)


def _places(scratch: Tensor, ranks: int) -> Tensor:
    """`[ranks, numel]`: the buffer of each rank."""
    each = len(scratch) // ranks
    return scratch[: each * ranks].view(ranks, each)


def _checks(rows: list[dict[str, Any]]) -> list[Check]:
    checks = []
    for row in rows:
        bound = BOUNDS.get((row["ranks"], row["operation"], row["bytes"]))
        if bound is not None:
            name = f"{row['operation']} of {row['bytes']} bytes against Gloo, {row['ranks']} ranks"
            checks.append(check(name, row["ratio_median"], bound))
    return checks


if __name__ == "__main__":
    run(wire)
