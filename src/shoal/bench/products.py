"""`shoal bench products`: what the ranks of this machine compute and copy, alone and at once, kept for predictions.

1 to N processes of one thread measure at the same time:

    products      matrix products; the peer is the best rate that one rank reached alone in the same dtype
    operators     those of an eager GPT, where every rank has a core of its own
    overheads     Python, contention between ranks that share cores, waiting for each other
    collectives   at two sizes; a fit of `shoal bench comm` through more sizes is kept

One measured step of a small GPT then gives the machine's factor. Operators are measured one at a time with warm caches,
while a step runs all of them over all of its data: the factor says how much longer it takes than their sum.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal import units
from shoal.bench.options import AsJson, Sweep, world_sizes
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import machine_facts, print_report

if TYPE_CHECKING:
    from shoal.launcher.environment import Place
    from shoal.topology.calibration import Calibration, MatrixProduct

ROUGH = Sweep(
    operations=("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"), backends=("shm",),
    first_bytes=4 << 10, last_bytes=4 << 20, factor=1 << 10, turns=9, dtype="float32",
)  # fmt: skip


def products(
    processes: Annotated[
        str, typer.Option(help="Numbers of ranks at once, several with commas; 1 is the peer.")
    ] = "1,2,4",
    as_json: AsJson = False,
) -> None:
    """Matrix products, operators and copies of 1 to N ranks at once; kept as this machine's calibration.

    Example: shoal bench products --processes 1,2
    """
    from shoal.planning.calibration import calibration_path

    if is_rank():
        run_as_rank(measure)
        return
    counts = world_sizes(processes, least=1)
    if 1 not in counts:
        raise typer.BadParameter(f"'{processes}'; give numbers of ranks, 1 among them", param_hint="--processes")
    results = [
        on_ranks(["shoal", "bench", "products"], processes=count, part=f"{units.plural(count, 'rank')} at once")
        for count in counts
    ]
    path = calibration_path(os.environ)
    calibration = keep(results, path)
    print_report("products", {"rows": list(product_rows(calibration.products)), "checks": []}, as_json=as_json)
    if not as_json:
        print(f"Kept: {path}")


def _machine() -> tuple[str, str]:
    """What a calibration is of: the processor with its cores, and torch."""
    facts = machine_facts()
    return f"{facts['processor']}, {facts['cores']} cores", facts["torch"]


def measure(place: Place) -> dict[str, Any] | None:
    """Everything that is measured with this number of ranks; None on all ranks but rank 0."""
    from torch._C._distributed_c10d import PrefixStore

    from shoal.bench.collective_times import collective_rows, fits_of
    from shoal.bench.groups import join_mesh, join_store
    from shoal.bench.operator_times import (
        PIECES,
        TINY_SIZES,
        copy_bytes_s,
        crowded_step_s,
        host_times,
        operator_times,
        product_times,
        wait_times,
    )
    from shoal.bench.report import told
    from shoal.launcher.devices import cores
    from shoal.topology.layout import Layout

    store, ranks = join_store(place), place.world_size
    world = join_mesh(Layout(replicate=ranks), place, store).world
    own_cores, several = ranks <= cores(), ranks > 1
    result = {
        "products": list(told(product_times(world), "matrix products")),
        "operators": [
            *(told(operator_times(world), "operators") if own_cores else ()),
            *(() if several else told(host_times(), "tiny models", total=len(TINY_SIZES))),
        ],
        "waits": list(told(wait_times(world), "waiting for each other", total=len(PIECES))) if several else [],
        "crowd": {"ranks": ranks, "step_s": crowded_step_s(world)},
        "copy_bytes_s": copy_bytes_s(world),
        "collectives": list(fits_of(collective_rows(place, PrefixStore("sweep", store), ROUGH))) if several else [],
    }
    return result if place.rank == 0 else None


def keep(results: Sequence[dict[str, Any]], path: Path) -> Calibration:
    """Adds the results of all numbers of ranks, and the factor that follows from them, to the calibration file."""
    import msgspec

    from shoal.planning.calibration import add_calibration
    from shoal.topology.calibration import Calibration, CollectiveFit, Crowd, MatrixProduct, OperatorTime, Wait

    machine, torch = _machine()
    newer = Calibration(
        machine=machine,
        torch=torch,
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


def step_factor(calibration: Calibration) -> float | None:
    """Measured over predicted seconds of the small GPT's step, alone on its core.

    None where the step, operators or collectives are missing in the calibration.
    """
    from shoal.bench.operator_times import crowd_run
    from shoal.launcher.devices import cores
    from shoal.planner.predict.measured import measured_of
    from shoal.planning.answer import cluster_of, predictor_on
    from shoal.planning.calibration import SWEPT
    from shoal.planning.plan_file import written_plan

    alone_s = next((crowd.step_s for crowd in calibration.crowds if crowd.ranks == 1), None)
    backend = next((name for name in SWEPT if any(fit.backend == name for fit in calibration.collectives)), None)
    if alone_s is None or backend is None or not calibration.operators:
        return None
    run_file = crowd_run(Path(), Path("tokens.bin"))
    measured = measured_of(calibration, cores=cores(), dtype="float32", backend=backend)
    predictor = predictor_on(run_file, cluster_of(run_file, None), measured=measured)
    return alone_s / predictor.bill(written_plan(run_file, predictor.cluster)).total


def product_rows(products: Iterable[MatrixProduct]) -> Iterator[dict[str, Any]]:
    """Each product, its rate, and its share of the best rate that one rank reached alone in the same dtype."""
    products = list(products)
    best: dict[str, float] = {}
    for product in products:
        if product.ranks == 1:
            best[product.dtype] = max(best.get(product.dtype, 0.0), product.flops_s)
    for product in products:
        share = product.flops_s / best[product.dtype] if best.get(product.dtype) else None
        yield {
            "product": f"{product.m}x{product.k}x{product.n}",
            "dtype": product.dtype,
            "ranks": product.ranks,
            "gflops_s": round(product.flops_s / 1e9, 2),
            "of_the_best": None if share is None else round(share, 3),
        }
