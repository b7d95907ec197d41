"""`shoal bench products`: what ranks of this machine compute and copy, alone and at once; kept for predictions.

Matrix products and the operators of an eager GPT, with 1 to N processes of one thread at work at the same time: where
ranks outnumber cores, each runs at the rate that the scheduler leaves it; operators are measured where each rank has a
core; what more ranks cost each other is measured on whole steps. The peer of a product is the best of its own dtype,
beside which each rate is shown. What a step costs beside its operators is measured on a GPT so small that little else
is left. Collectives are measured at two sizes; a fit of
`shoal bench comm` through more is kept.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import PrefixStore

from shoal.comm.collective import Collective
from shoal.comm.config import WireConfig
from shoal.comm.mesh import build_mesh
from shoal.launch.environment import Place
from shoal.launch.rendezvous import open_store
from shoal.planning.cluster_here import add_calibration
from shoal.planning.operators import cores
from shoal.recipes.benchmarks import machine
from shoal.recipes.benchmarks.comm import fits_of, swept
from shoal.recipes.benchmarks.comm_options import Sweep
from shoal.recipes.benchmarks.crowd_sweep import crowded_step_s
from shoal.recipes.benchmarks.host_sweep import host_times
from shoal.recipes.benchmarks.operator_sweep import points
from shoal.recipes.benchmarks.step_factor import step_factor
from shoal.recipes.benchmarks.wait_sweep import waits
from shoal.topology.calibration import Calibration, CollectiveFit, Crowd, MatrixProduct, OperatorTime, Wait
from shoal.topology.layout import Layout

TIMEOUT_S = 600.0
TOKENS = (64, 256, 1024, 4096)
FEATURES = (128, 512, 1024)
WINDOWS, WINDOW_S, FEWEST = 3, 0.01, 3
COPY_BYTES = 16 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROUGH = Sweep(
    operations=("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"), backends=("shm",),
    first_bytes=4 << 10, last_bytes=4 << 20, factor=1 << 10, turns=9, dtype="float32",
)  # fmt: skip


def measure(place: Place) -> dict[str, Any] | None:
    """All of one number of ranks at once, means over them; None on all ranks but the first."""
    torch.set_num_threads(1)
    store = open_store(place, os.environ, timeout_s=TIMEOUT_S)
    layout = Layout(replicate=place.world_size)
    mesh = build_mesh(layout, place.rank, store=store, device=torch.device("cpu"), wire=WireConfig(timeout_s=TIMEOUT_S))
    world, ranks = mesh.world, place.world_size
    own_cores = ranks <= cores()
    result = {
        "products": list(_products(world)),
        "operators": [*(_operators(world) if own_cores else ()), *(host_times() if ranks == 1 else ())],
        "waits": list(waits(world)) if ranks > 1 else [],
        "crowd": {"ranks": ranks, "step_s": crowded_step_s(world)},
        "copy_bytes_s": _mean(world, [_copy_bytes_s(world)])[0],
        "collectives": list(fits_of(swept(place, PrefixStore("sweep", store), ROUGH))) if ranks > 1 else [],
    }
    return result if place.rank == 0 else None


def kept(results: Sequence[dict[str, Any]], path: Path) -> Calibration:
    """The calibration file at `path` with the results of all numbers of ranks added, and the factor that follows."""
    about = machine.machine()
    newer = Calibration(
        machine=f"{about['processor']}, {about['cores']} cores",
        torch=about["torch"],
        collectives=tuple(CollectiveFit(**fit) for result in results for fit in result["collectives"]),
        products=tuple(MatrixProduct(**product) for result in results for product in result["products"]),
        operators=tuple(OperatorTime(**operator) for result in results for operator in result["operators"]),
        waits=tuple(Wait(**wait) for result in results for wait in result["waits"]),
        crowds=tuple(Crowd(**result["crowd"]) for result in results),
        memory_bytes_s=results[0]["copy_bytes_s"],
    )
    whole = add_calibration(path, newer)
    factor = step_factor(whole)
    return whole if factor is None else add_calibration(path, msgspec.structs.replace(whole, step_factor=factor))


def rows(products: Iterable[MatrixProduct]) -> Iterator[dict[str, Any]]:
    """Each product, its rate, and the share of the best rate that one rank reached alone in its dtype."""
    products = list(products)
    best = {d: max((p.flops_s for p in products if p.dtype == d and p.ranks == 1), default=0.0) for d in DTYPES}
    for p in products:
        share = p.flops_s / best[p.dtype] if best.get(p.dtype) else None
        yield {
            "product": f"{p.m}x{p.k}x{p.n}",
            "dtype": p.dtype,
            "ranks": p.ranks,
            "gflops_s": round(p.flops_s / 1e9, 2),
            "of_the_best": None if share is None else round(share, 3),
        }


def _products(world: Collective) -> Iterator[dict[str, Any]]:
    for name, (m, (n, k)) in itertools.product(
        DTYPES, itertools.product(TOKENS, itertools.product(FEATURES, FEATURES))
    ):
        if m * n * k > TOKENS[-1] * FEATURES[1] ** 2:
            continue
        a, b = torch.randn(m, k, dtype=DTYPES[name]), torch.randn(k, n, dtype=DTYPES[name])
        out = torch.empty(m, n, dtype=DTYPES[name])
        world.barrier().wait()
        seconds = _mean(world, [_seconds(lambda: torch.mm(a, b, out=out))])[0]  # noqa: B023
        yield {"dtype": name, "m": m, "n": n, "k": k, "ranks": world.size, "flops_s": 2 * m * n * k / seconds}


def _operators(world: Collective) -> Iterator[dict[str, Any]]:
    for point in points(torch.float32):
        world.barrier().wait()
        forward_s, backward_s = _mean(world, point.run())
        for m, n, k in point.sizes:
            yield {
                "operator": point.operator, "dtype": "float32", "m": m, "n": n, "k": k, "ranks": world.size,
                "forward_s": forward_s, "backward_s": backward_s,
            }  # fmt: skip


def _copy_bytes_s(world: Collective) -> float:
    source, target = torch.zeros(COPY_BYTES // 4), torch.zeros(COPY_BYTES // 4)
    world.barrier().wait()
    return 2 * COPY_BYTES / _seconds(lambda: target.copy_(source))


def _seconds(call: Any) -> float:
    """The mean over a window of work; the fastest of a few windows, which no other program has slowed down."""
    call()
    return min(_window_s(call) for _ in range(WINDOWS))


def _window_s(call: Any) -> float:
    begin_s, count = time.perf_counter(), 0
    while count < FEWEST or time.perf_counter() - begin_s < WINDOW_S:
        call()
        count += 1
    return (time.perf_counter() - begin_s) / count


def _mean(world: Collective, values: Sequence[float]) -> list[float]:
    """Over the ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    world.all_reduce(total).wait()
    return (total / world.size).tolist()
