"""`python -m benchmarks.zero`: steps of ZeRO-1 and -2 beside DDP, of ZeRO-3 beside a `fully_shard` script.

All sides train the same model in the same loop. Each peer is measured a second time (A/A, the sides that end in
`_again`), which shows what noise alone does to a ratio.

`--compiled` measures something else: a run of ZeRO-3 whose blocks are compiled (`run.compile = "blocks"`) beside the
same run as it is, and how far their first losses are from each other.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace
from torch._C._distributed_c10d import PrefixStore, Store

from benchmarks.command import run
from benchmarks.zero_scripts import ShardedScript, ZeroScript
from shoal.bench.ddp_script import Script, new_gpt
from shoal.bench.groups import Sides, interleaved, join_default_group, join_group, join_mesh, join_store
from shoal.bench.options import FEWEST_PAIRS, AsJson, Processes
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import (
    Check,
    Result,
    Turns,
    again_cells,
    check,
    columns,
    lower_bound,
    milliseconds,
    print_report,
    ratios,
)
from shoal.bench.training_job import SEQUENCE, corpus_file, gpt_run_file, start_training
from shoal.launcher.environment import Place
from shoal.topology.layout import Layout

PEERS = {"zero_1": ("ddp", 0.97), "zero_2": ("ddp", 0.97), "zero_3": ("fully_shard", 1.0)}
"""The peer of each stage, and what is promised of the 95 % bound of the ratio to it."""
AGAIN = "_again"
EAGER, COMPILED = "zero_3_eager", "zero_3_compiled"
COMPILED_PEERS = {COMPILED: (EAGER, 1.0)}
COMPARED_STEPS, MOST_MILLIONTHS = 3, 10.0
"""How many losses are compared, and how far they may lie apart: fused kernels add float32 in another order."""


def zero(
    tokens: Annotated[int, typer.Option(help="Tokens of a rank and step; a multiple of 128.", min=128)] = 256,
    pairs: Annotated[int, typer.Option(help="Paired steps.", min=6)] = FEWEST_PAIRS,
    processes: Processes = 2,
    compiled: Annotated[bool, typer.Option(help="ZeRO-3 with compiled blocks beside eager, and nothing else.")] = False,
    as_json: AsJson = False,
) -> None:
    """Steps of ZeRO-1 and -2 beside DDP, of ZeRO-3 beside a hand-written fully_shard script.

    Example: python -m benchmarks.zero --pairs 20
    """
    if is_rank():
        run_as_rank(lambda place: measure(place, tokens=tokens, pairs=pairs, compiled=compiled))
        return
    command = ["benchmarks.zero", "--tokens", str(tokens), "--pairs", str(pairs), *["--compiled"] * compiled]
    print_report("zero", on_ranks(command, processes=processes), as_json=as_json)


def measure(place: Place, *, tokens: int, pairs: int, compiled: bool) -> Result | None:
    """A row and a check for each stage, for `tokens` of a rank and step; None on all ranks but rank 0."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        store = join_store(place)
        join_default_group(place, store, stack)
        clock = join_group("clock", place, store)
        losses: dict[str, list[float]] = {}
        if compiled:
            sides = _compiled_sides(place, store, stack, folder, tokens, losses)
        else:
            sides = _sides(place, store, corpus_file(folder), tokens)
        always = [name for name in sides if not name.endswith(AGAIN)]
        turns = interleaved(sides, clock, pairs=pairs, always=always)
    if place.rank != 0:
        return None
    peers = COMPILED_PEERS if compiled else PEERS
    result = _result(turns, peers, tokens=tokens, ranks=place.world_size)
    return {**result, "checks": [*result["checks"], *_apart(losses)]} if compiled else result


def _compiled_sides(
    place: Place, store: Store, stack: ExitStack, folder: Path, tokens: int, losses: dict[str, list[float]]
) -> Sides:
    """Runs of one file, but for what is compiled. Each step's loss goes to `losses`."""
    corpus, sides = corpus_file(folder), {}
    for name, what in ((EAGER, False), (EAGER + AGAIN, False), (COMPILED, "blocks")):
        plain = gpt_run_file(folder / name, corpus, tokens * place.world_size)
        run_file = replace(
            plain,
            run=replace(plain.run, compile=what),
            layout=replace(plain.layout, shard=place.world_size),
            memory=replace(plain.memory, zero=3),
        )
        training = start_training(run_file, place, stack, store=PrefixStore(name, store))
        own = losses.setdefault(name, [])
        sides[name] = lambda training=training, own=own: own.append(training.take_step().loss)
    return sides


def _apart(losses: Mapping[str, Sequence[float]]) -> list[Check]:
    """How far the first losses of both sides are from each other."""
    both = zip(losses[EAGER][:COMPARED_STEPS], losses[COMPILED][:COMPARED_STEPS], strict=True)
    apart = 1e6 * max(abs(own / peer - 1) for peer, own in both)
    what = f"the first {COMPARED_STEPS} losses, compiled beside eager, in millionths"
    return [check(what, apart, MOST_MILLIONTHS, at_most=True)]


def _sides(place: Place, store: Store, corpus: Path, tokens: int) -> Sides:
    mesh = join_mesh(Layout(shard=place.world_size), place, store)
    sizes = {"samples": tokens // SEQUENCE, "sequence": SEQUENCE}
    scripts: dict[str, Script | ShardedScript | ZeroScript] = {
        name: Script(new_gpt(), corpus, rank=place.rank, distributed=True, **sizes) for name in ("ddp", "ddp" + AGAIN)
    }
    scripts |= {
        name: ShardedScript(new_gpt(), corpus, rank=place.rank, world_size=place.world_size, **sizes)
        for name in ("fully_shard", "fully_shard" + AGAIN)
    }
    scripts |= {f"zero_{stage}": ZeroScript(new_gpt(), corpus, mesh, zero=stage, **sizes) for stage in (1, 2, 3)}
    return {name: script.step for name, script in scripts.items()}


def _result(turns: Turns, peers: Mapping[str, tuple[str, float]], *, tokens: int, ranks: int) -> Result:
    times = columns(turns)
    rows: list[dict[str, Any]] = []
    checks = []
    for side, (peer, bound) in peers.items():
        gained = ratios(turns, side, peer=peer)
        rows.append(
            {
                "stage": side,
                "peer": peer,
                "tokens_per_rank": tokens,
                "ranks": ranks,
                "pairs": len(gained),
                **milliseconds({side: times[side], peer: times[peer]}),
                "ratio_median": round(statistics.median(gained), 4),
                "ratio_lower_95": round(lower_bound(gained), 4),
                **again_cells(ratios(turns, peer + AGAIN, peer=peer)),
            }
        )
        checks.append(check(f"{side} against {peer}, 95 % bound, {tokens} tokens a rank", lower_bound(gained), bound))
    return {"rows": rows, "checks": checks}


if __name__ == "__main__":
    run(zero)
