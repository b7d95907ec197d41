"""`shoal bench comm`: collectives of many sizes over any backend, beside Gloo in the same run; their alpha and beta.

The conventions are those of nccl-tests (its PERFORMANCE.md): S is the size of the whole vector (for all-to-all what one
rank holds, for send one message), `algbw` = S / t, and `busbw` = algbw times what the slowest link would carry, so
that it does not depend on the number of ranks:

    all_reduce 2 (n-1)/n     all_gather, reduce_scatter, all_to_all (n-1)/n     broadcast, reduce, send 1

`send` is a ring: every rank sends to the next and receives from the one before.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.collective import Collective, GroupCollective
from shoal.comm.connect import connect
from shoal.comm.ledger import Ledger
from shoal.cost.hockney import fit
from shoal.launch.environment import Place
from shoal.launch.rendezvous import open_store
from shoal.recipes.benchmarks import machine
from shoal.recipes.benchmarks.comm_options import PEER, Sweep
from shoal.recipes.benchmarks.paired import lower_bound
from shoal.recipes.benchmarks.turns import interleaved, ratios
from shoal.topology.calibration import Calibration, CollectiveFit

TIMEOUT_S = 120.0
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
}
LONG_BYTES, CALLS_BYTES = 1 << 20, 64 << 10
"""Turns are fewer above the first; below the second, a turn makes several calls: ranks leave a barrier further apart
than a short call takes."""


def measure(place: Place, sweep: Sweep) -> dict[str, Any] | None:
    """`rows` of each operation, size and backend, and `fits`; None on all ranks but the first."""
    torch.set_num_threads(1)
    rows = swept(place, open_store(place, os.environ, timeout_s=TIMEOUT_S), sweep)
    return {"rows": rows, "fits": list(fits_of(rows))} if place.rank == 0 else None


def swept(place: Place, store: Store, sweep: Sweep) -> list[dict[str, Any]]:
    """A row of each operation, size and backend, the same on all ranks; Gloo's beside the others'."""
    names = (PEER, *(name for name in sweep.backends if name != PEER))
    groups = {name: _group(name, place, PrefixStore(f"comm/{name}", store)) for name in names}
    clock = _group(PEER, place, PrefixStore("comm/clock", store))
    return [row for operation in sweep.operations for row in _rows(operation, groups, clock, sweep)]


def calibration_of(results: Sequence[dict[str, Any]]) -> Calibration:
    """The fits of all runs, for the calibration file."""
    about = machine.machine()
    return Calibration(
        machine=f"{about['processor']}, {about['cores']} cores",
        torch=about["torch"],
        collectives=tuple(CollectiveFit(**one) for result in results for one in result["fits"]),
    )


def bus_factor(operation: str, ranks: int) -> float:
    """busbw over algbw."""
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}.get(
        operation, 1.0
    )


def _group(backend: str, place: Place, store: Store) -> GroupCollective:
    return connect(
        store, place.rank, place.world_size, device=torch.device("cpu"), label=backend, ledger=Ledger(),
        timeout_s=TIMEOUT_S, transport=backend,  # pyright: ignore[reportArgumentType]  # Sweep has checked it
    )  # fmt: skip


def _rows(
    operation: str, groups: dict[str, GroupCollective], clock: Collective, sweep: Sweep
) -> Iterator[dict[str, Any]]:
    for size_bytes in sweep.sizes:
        calls = 10 if size_bytes < CALLS_BYTES else 1
        sides: dict[str, Callable[[], Any]] = {
            name: partial(_repeat, _call(operation, group, size_bytes, DTYPES[sweep.dtype]), calls)
            for name, group in groups.items()
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


def fits_of(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """alpha and beta of each operation, backend and number of ranks that has two sizes or more."""
    keys = dict.fromkeys((row["backend"], row["operation"], row["ranks"]) for row in rows)
    for backend, operation, ranks in keys:
        own = [r for r in rows if (r["backend"], r["operation"], r["ranks"]) == (backend, operation, ranks)]
        if len(own) < 2:
            continue
        line = fit([row["bytes"] for row in own], [row["time_us"] / 1e6 for row in own])
        yield {
            "backend": backend, "operation": operation, "ranks": ranks,
            "alpha_s": line.alpha_s, "beta_s": line.beta_s, "worst_off": line.worst_off, "sizes": len(own),
        }  # fmt: skip


def _repeat(call: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        call()


def _call(operation: str, group: Collective, size_bytes: int, dtype: torch.dtype) -> Callable[[], Any]:
    numel = max(group.size, size_bytes // dtype.itemsize // group.size * group.size)
    whole, other = torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
    part = torch.zeros(numel // group.size, dtype=dtype)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: group.all_reduce(whole).wait(),
        "all_gather": lambda: group.all_gather(whole, part).wait(),
        "reduce_scatter": lambda: group.reduce_scatter(part, whole).wait(),
        "all_to_all": lambda: group.all_to_all(other, whole).wait(),
        "broadcast": lambda: group.broadcast(whole).wait(),
        "reduce": lambda: group.reduce(whole).wait(),
        "send": lambda: _ring(group, whole, other),
    }
    return calls[operation]


def _ring(group: Collective, whole: Tensor, other: Tensor) -> None:
    sent = group.send(whole, to=(group.rank + 1) % group.size)
    group.recv(other, source=(group.rank - 1) % group.size).wait()
    sent.wait()
