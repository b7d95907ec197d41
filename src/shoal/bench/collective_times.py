"""Times of collectives by operation, size and backend, and the line through them: alpha + beta S.

The conventions are those of nccl-tests (its PERFORMANCE.md). S is the size of the whole vector: for all-to-all what one
rank holds, for gather and scatter what the root holds, for send one message. `algbw` is S / t. `busbw` is `algbw` times
what the slowest link has to carry, so that it does not depend on the number of ranks n:

    all_reduce 2 (n-1)/n    all_gather, reduce_scatter, all_to_all, gather, scatter (n-1)/n    broadcast, reduce, send 1

`send` is a ring: every rank sends to the next one and receives from the one before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.bench.groups import interleaved, join_group, join_store, repeat
from shoal.bench.options import PEER, Sweep
from shoal.bench.report import lower_bound, ratios, tell
from shoal.comm.collective import Collective, GroupCollective
from shoal.comm.config import TransportName
from shoal.comm.seam import Seam
from shoal.cost.alpha_beta import fit
from shoal.launcher.environment import Place

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
}
LONG_BYTES = 1 << 20
"""Above this size there are half as many turns."""
SHORT_BYTES, SHORT_CALLS = 64 << 10, 10
"""Below this size a turn makes several calls, because ranks leave a barrier further apart than a short call takes."""


def measure(place: Place, sweep: Sweep) -> dict[str, Any] | None:
    """`rows` of each operation, size and backend, and `fits`; None on all ranks but rank 0."""
    rows = collective_rows(place, join_store(place), sweep)
    return {"rows": rows, "fits": list(fits_of(rows))} if place.rank == 0 else None


def collective_rows(place: Place, store: Store, sweep: Sweep) -> list[dict[str, Any]]:
    """A row of each operation, size and backend, Gloo's beside the others'; the same on all ranks."""
    backends = (PEER, *(name for name in sweep.backends if name != PEER))
    groups = [join_group(f"comm/{name}", place, store, transport=cast(TransportName, name)) for name in backends]
    clock = join_group("comm/clock", place, store, transport=PEER)
    hosts = _hosts(place, clock)
    by_backend = {_backend(group): group for group in groups}
    rows = []
    for number, operation in enumerate(sweep.operations):
        tell(operation, done=number, total=len(sweep.operations))
        rows += [{**row, "hosts": hosts} for row in _rows(operation, by_backend, clock, sweep)]
    return rows


def fits_of(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """alpha and beta of every collective that has two sizes or more, as the arguments of `CollectiveFit`."""
    keys = ("backend", "operation", "ranks", "hosts", "dtype")
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        own = [row for row in rows if tuple(row[name] for name in keys) == key]
        if len(own) < 2:
            continue
        line = fit([row["bytes"] for row in own], [row["time_us"] / 1e6 for row in own])
        yield {
            **dict(zip(keys, key, strict=True)),
            "alpha_s": line.alpha_s, "beta_s": line.beta_s, "worst_off": line.worst_off, "sizes": len(own),
        }  # fmt: skip


def bus_factor(operation: str, ranks: int) -> float:
    """busbw over algbw."""
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "broadcast": 1.0, "reduce": 1.0, "send": 1.0}.get(operation, share)


def numels(sweep: Sweep, *, ranks: int) -> list[int]:
    """The sizes of a sweep in elements, ascending: the nearest multiple of `ranks` below each, without repetitions."""
    itemsize = DTYPES[sweep.dtype].itemsize
    return list(dict.fromkeys(max(1, size // itemsize // ranks) * ranks for size in sweep.sizes))


def call_of(operation: str, group: Collective, numel: int, dtype: torch.dtype) -> Callable[[], Any]:
    """A call of the collective over memory of its own, of `numel` elements in all, a multiple of the ranks."""
    whole, other = torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
    part = torch.zeros(numel // group.size, dtype=dtype)
    parts = whole.tensor_split(group.size) if group.rank == 0 else ()
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.all_reduce(whole).wait(),
        "all_gather": lambda: group.all_gather(whole, part).wait(),
        "reduce_scatter": lambda: group.reduce_scatter(part, whole).wait(),
        "all_to_all": lambda: group.all_to_all(other, whole).wait(),
        "broadcast": lambda: group.broadcast(whole).wait(),
        "reduce": lambda: group.reduce(whole).wait(),
        "gather": lambda: group.gather(parts, part).wait(),
        "scatter": lambda: group.scatter(part, parts).wait(),
        "send": lambda: _ring(group, whole, other),
    }
    return calls[operation]


def _rows(
    operation: str, groups: dict[str, GroupCollective], clock: Collective, sweep: Sweep
) -> Iterator[dict[str, Any]]:
    dtype = DTYPES[sweep.dtype]
    for numel in numels(sweep, ranks=clock.size):
        size_bytes = numel * dtype.itemsize
        calls = SHORT_CALLS if size_bytes < SHORT_BYTES else 1
        sides = {
            name: partial(repeat, call_of(operation, group, numel, dtype), calls) for name, group in groups.items()
        }
        pairs = sweep.turns if size_bytes <= LONG_BYTES else max(3, sweep.turns // 2)
        turns = interleaved(sides, clock, pairs=pairs, always=tuple(sides))
        for name in groups:
            seconds = statistics.median(turn[name] for turn in turns) / calls
            gained = ratios(turns, name, peer=PEER)
            yield {
                "operation": operation, "bytes": size_bytes, "dtype": sweep.dtype, "ranks": clock.size,
                "backend": name, "time_us": round(1e6 * seconds, 2),
                "algbw_gb_s": round(size_bytes / seconds / 1e9, 4),
                "busbw_gb_s": round(size_bytes / seconds / 1e9 * bus_factor(operation, clock.size), 4),
                "times_gloo": round(statistics.median(gained), 3),
                "times_gloo_lower_95": round(lower_bound(gained), 3),
            }  # fmt: skip


def _backend(group: GroupCollective) -> str:
    """The backend that was opened, which may differ from the one that was asked for."""
    assert isinstance(group.group, Seam)
    return group.group.backend


def _hosts(place: Place, clock: Collective) -> int:
    """On how many hosts the ranks are."""
    last = torch.tensor([place.node_rank])
    clock.all_reduce(last, "max").wait()
    return int(last) + 1


def _ring(group: Collective, whole: Tensor, other: Tensor) -> None:
    sent = group.send(whole, to=(group.rank + 1) % group.size)
    group.recv(other, source=(group.rank - 1) % group.size).wait()
    sent.wait()
