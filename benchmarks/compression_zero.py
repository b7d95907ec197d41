"""`python -m benchmarks.compression_zero`: steps of ZeRO-3 between two hosts, with coded weights and gradients.

A GPT of 25 million parameters, two hosts of one rank each, 256 tokens a rank and step. In every turn, in the same
processes, one after the other:

    no_communication    the same step on each rank alone, nothing divided
    zero_3              Shoal's ZeRO-3, pieces as they are
    zero_3_again        the same a second time (A/A): what noise alone does to a ratio
    zero_3_coded        weights in 8 bits, gradients in 4 (`[shard_codec]`)
    fully_shard         a hand-written script with PyTorch's `fully_shard` on Gloo

Bytes are those that the host's interface counted in a step, headers included. What the codecs do to the loss is
measured by `python -m benchmarks.compression_accuracy --sides zero_3_coded`.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from torch._C._distributed_c10d import PrefixStore

from benchmarks.command import run
from benchmarks.compression import MODEL, TOKENS, two_hosts
from benchmarks.zero_scripts import ShardedScript
from shoal.bench.ddp_script import new_gpt
from shoal.bench.groups import gathered, interleaved, join_default_group, join_group, join_store, while_counting
from shoal.bench.options import AsJson, numbers
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, again_cells, check, columns, lower_bound, merged, print_report, ratios
from shoal.bench.training_job import SEQUENCE, corpus_file, gpt_run_file, start_alone, start_training
from shoal.codec.config import ShardCodecConfig
from shoal.errors import EnvironmentFault
from shoal.launcher.environment import Place
from shoal.launcher.lab.network import why_not
from shoal.runfile.run_file import RunFile
from shoal.topology.config import LayoutConfig

ALONE, PLAIN, AGAIN, CODED, PEER = "no_communication", "zero_3", "zero_3_again", "zero_3_coded", "fully_shard"
CODECS = ShardCodecConfig(weights="int8", gradients="int4")
FEWER_BYTES, AS_FAST, PROMISED_MBIT = 3.0, 1.5, 400
"""Promised of the coded side beside the plain one, at this rate."""


def compression_zero(
    mbit: Annotated[str, typer.Option(help="Rates of the link, Mbit/s, several with commas.")] = "400",
    pairs: Annotated[int, typer.Option(help="Paired steps.", min=3)] = 9,
    as_json: AsJson = False,
) -> None:
    """Training steps of ZeRO-3 over a slow link, as it is and with coded pieces, beside a fully_shard script.

    It needs root and iproute2, as hosts are network namespaces.

    Example: python -m benchmarks.compression_zero --mbit 400
    """
    rates = numbers(mbit, "--mbit", most=40_000)
    if is_rank():
        run_as_rank(lambda place: measure(place, mbit=rates[0], pairs=pairs))
        return
    if reason := why_not():
        raise EnvironmentFault(f"{reason}; this benchmark has no other network")
    results = []
    for rate in rates:
        command = ["benchmarks.compression_zero", "--mbit", str(rate), "--pairs", str(pairs)]
        results.append(on_ranks(command, processes=2, lab=two_hosts(rate)))
    print_report("compression_zero", merged(results), as_json=as_json)


def measure(place: Place, *, mbit: int, pairs: int) -> Result | None:
    """A row for each side; None on all ranks but rank 0."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        store = join_store(place)
        join_default_group(place, store, stack)
        clock, corpus = join_group("clock", place, store, transport="gloo"), corpus_file(folder)
        alone = start_alone(_run_file(folder, corpus, 1, ShardCodecConfig()), stack)
        sides: dict[str, Callable[[], Any]] = {ALONE: alone.take_step}
        for name, codecs in ((PLAIN, ShardCodecConfig()), (AGAIN, ShardCodecConfig()), (CODED, CODECS)):
            run_file = _run_file(folder, corpus, place.world_size, codecs)
            training = start_training(run_file, place, stack, store=PrefixStore(name, store))
            sides[name] = training.take_step
        sizes = {"samples": TOKENS // SEQUENCE, "sequence": SEQUENCE}
        sides[PEER] = ShardedScript(new_gpt(MODEL), corpus, rank=place.rank, world_size=place.world_size, **sizes).step
        turns = interleaved(sides, clock, pairs=pairs, always=(ALONE, PLAIN, CODED))
        sent = {}
        for name, step in sides.items():
            counted = while_counting(clock, lambda step=step: (step(), None)[1])
            sent[name] = max(row[0] for row in gathered(clock, [counted.bytes_sent]))
    if place.rank != 0:
        return None
    rows = []
    for name, times_s in columns(turns).items():
        faster = ratios(turns, name, peer=PLAIN)
        rows.append(
            {
                "mbit": mbit,
                "side": name,
                "turns": len(times_s),
                "step_ms": round(1e3 * statistics.median(times_s), 1),
                "times_as_fast_as_zero_3": round(statistics.median(faster), 3),
                "lower_95": round(lower_bound(faster), 3),
                "interface_bytes": int(sent[name]),
                "fewer_bytes_than_zero_3": None if name == ALONE else round(sent[PLAIN] / sent[name], 2),
            }
        )
    rows.append({"mbit": mbit, "side": "A/A", **again_cells(ratios(turns, AGAIN, peer=PLAIN))})
    checks = []
    if mbit == PROMISED_MBIT:
        checks = [
            check(f"{CODED}, {mbit} Mbit/s: times fewer bytes", sent[PLAIN] / sent[CODED], FEWER_BYTES),
            check(
                f"{CODED}, {mbit} Mbit/s: times as fast", statistics.median(ratios(turns, CODED, peer=PLAIN)), AS_FAST
            ),
        ]
    return {"rows": rows, "checks": checks}


def _run_file(folder: Path, corpus: Path, ranks: int, codecs: ShardCodecConfig) -> RunFile:
    plain = gpt_run_file(folder, corpus, TOKENS * ranks)
    layout = LayoutConfig(shard=ranks) if ranks > 1 else LayoutConfig()
    return msgspec.structs.replace(plain, model=MODEL, layout=layout, shard_codec=codecs)


if __name__ == "__main__":
    run(compression_zero)
