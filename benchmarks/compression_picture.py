"""Which codec wins on which link: exposed time by the cost model, with this machine's measured seconds of coding.

    python -m benchmarks.compression_picture --out docs/benchmarks/compression-links.png

A GPT of 25 million parameters, two hosts of one rank (`benchmarks.compression`). Coding is what `shoal bench codec`
measured last on this machine; bytes are those that the codecs state; the wire works beside the backward
(`shoal.comm.exchanges.choice`). "auto" chooses from a probe of the link, as in a run, among its own candidates: sparse
codecs are not among them, for they lose accuracy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import run
from shoal.bench.codec import CODECS
from shoal.bench.options import AsJson
from shoal.bench.pictures import COLOURS, INK, decorate, new_panels
from shoal.bench.report import Row, check, print_report
from shoal.codec.config import AutoConfig, CodecConfig, NoCodec
from shoal.codec.costs import Matrices, stated
from shoal.comm.exchanges.choice import PROBE_BYTES, MeasuredLink, Way, choose, exposed_s
from shoal.cost.plan import Plan
from shoal.cost.transformer import Transformer, matrix_shapes, total_parameters
from shoal.errors import ConfigError
from shoal.planner.predict.coding import gradient_sum, measured_time
from shoal.planner.predict.machine import Machine
from shoal.planner.predict.stack import MODERN, Codecs
from shoal.topology.calibration import CodecTime
from shoal.topology.cluster_file import cluster_from
from shoal.topology.layout import Layout

MODEL = Transformer(
    layers=8, hidden=512, heads=8, kv_heads=8, head_size=64, feed_forward=2048, vocabulary=256, gated=False, tied=False
)
PAIR = Plan(layout=Layout(replicate=2), microbatch=1, microbatches=1)
BUCKET_BYTES, ALPHA_S = 8 << 20, 150e-6
RATES_MBIT = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
NONE, AUTO = "none", "auto"
WITHIN = 1.05
"""Promised: auto's step over the best one of its candidates, in each point."""


def compression_picture(
    out: Annotated[Path | None, typer.Option(help="Draw here (.png, .svg, .pdf).")] = None,
    codecs: Annotated[str, typer.Option(help="Which, with commas.")] = "bfloat16,int8,int4,top_k_sampled,power_sgd",
    backward_s: Annotated[float, typer.Option(help="Seconds of backward beside the wire.", min=0)] = 0.3,
    step_s: Annotated[float, typer.Option(help="Seconds of a step without communication.", min=0)] = 0.47,
    as_json: AsJson = False,
) -> None:
    """Exposed milliseconds of each codec at 10 Mbit/s to 10 Gbit/s; a table, and a picture.

    Example: python -m benchmarks.compression_picture
    """
    from shoal.planning.calibration import calibration_path, read_calibration

    path = calibration_path(os.environ)
    known = read_calibration(path)
    ways = ways_of(
        {NONE: NoCodec(), **{name: CODECS[name] for name in codecs.split(",")}}, known.codecs if known else ()
    )
    rows = exposed_rows(ways, window_s=backward_s)
    if out is not None:
        write_picture(rows, out)
    print_report("compression_picture", {"rows": rows, "checks": [within(rows, step_s=step_s)]}, as_json=as_json)


def ways_of(configs: Mapping[str, CodecConfig], times: Sequence[CodecTime]) -> list[Way]:
    """What each sends and codes in a step of the model. Raises `ConfigError` for a codec that was not measured."""
    numbers = total_parameters(MODEL)
    matrices = [Matrices(*s) for s in matrix_shapes(MODEL, layers=MODEL.layers, embedding=True, head=True)]
    table = {"cluster": {"name": "pair", "nodes": 2, "machine": "cpu-2", "devices_per_node": 1}}
    cluster, buckets = cluster_from(table, file="pair"), -(-4 * numbers // BUCKET_BYTES)
    ways = []
    for name, config in configs.items():
        if isinstance(config, NoCodec):
            ways.append(Way(name, calls=buckets, sent_bytes=4 * numbers, coding_s=0.0))
            continue
        if measured_time(config, times) is None:
            raise ConfigError(
                f"the calibration has no seconds of {name}; shoal bench codec --codecs {name} measures it"
            )
        codecs = Codecs(gradients=config, bucket_bytes=BUCKET_BYTES, times=tuple(times))
        machine = Machine(cluster, stack=replace(MODERN, codecs=codecs))
        one = gradient_sum(PAIR, machine, config, numbers=numbers, matrices=matrices)
        rounds = len(stated(config, numbers, matrices).payloads)
        ways.append(Way(name, calls=buckets * rounds, sent_bytes=one.sent_bytes, coding_s=one.coding_s))
    return ways


def exposed_rows(ways: Sequence[Way], *, window_s: float) -> list[Row]:
    """A row for each rate: exposed milliseconds of each way, and of what auto chooses from a probe."""
    buckets = -(-4 * total_parameters(MODEL) // BUCKET_BYTES)
    candidates = [way for way in ways if way.name in (NONE, *AutoConfig().codecs)]
    rows = []
    for mbit in RATES_MBIT:
        link = MeasuredLink(ALPHA_S, mbit * 125_000)
        probe = MeasuredLink.of(ALPHA_S, ALPHA_S + PROBE_BYTES / link.bytes_s, PROBE_BYTES)
        costs = {way.name: exposed_s(way, link, window_s=window_s, buckets=buckets) for way in ways}
        chosen, _ = choose(candidates, probe, window_s=window_s, buckets=buckets)
        exposed_ms = {name: round(1e3 * cost, 2) for name, cost in costs.items()}
        rows.append({"mbit_s": mbit, **exposed_ms, AUTO: exposed_ms[chosen], "chosen": chosen})
    return rows


def within(rows: Sequence[Row], *, step_s: float) -> dict[str, Any]:
    """Over all rates, the step with auto over the step with the best of its candidates: the worst."""
    found = [name for name in (NONE, *AutoConfig().codecs) if name in rows[0]]
    worst = max((1e3 * step_s + row[AUTO]) / (1e3 * step_s + min(row[name] for name in found)) for row in rows)
    return check("auto's step over that of its best candidate, worst of all rates", worst, WITHIN, at_most=True)


def write_picture(rows: Sequence[Row], path: Path) -> None:
    """A line for each codec over the link's rate, both axes logarithmic; auto is drawn thick behind them."""
    lines = [name for name in rows[0] if name not in ("mbit_s", AUTO, "chosen")]
    figure, (axes,) = new_panels(1, 1, size_inches=(7.2, 4.6))
    rates = [row["mbit_s"] for row in rows]
    axes.plot(rates, [row[AUTO] for row in rows], color=INK, linewidth=7, alpha=0.25, label=AUTO)
    for number, name in enumerate(lines):
        colour, dashes = COLOURS[number % len(COLOURS)], "-" if number < len(COLOURS) else "--"
        axes.plot(rates, [row[name] for row in rows], color=colour, linestyle=dashes, linewidth=1.8, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylabel("exposed time of a step, ms", fontsize=8)
    decorate(axes, "a GPT of 25 M parameters, two hosts", x_label="rate of the link, Mbit/s")
    figure.savefig(path)


if __name__ == "__main__":
    run(compression_picture)
