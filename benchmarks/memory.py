"""`python -m benchmarks.memory`: what a rank of four keeps, counted by storages, beside closed forms.

Three parts: model state under ZeRO (`memory_state`), activations of a long sequence over context ranks, and activations
under recomputation (both `memory_activations`). What one process measures alone, rank 0 measures after the others are
done.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from torch._C._distributed_c10d import PrefixStore

from benchmarks import memory_activations, memory_state
from benchmarks.command import run
from shoal.bench.groups import join_default_group, join_mesh, join_store
from shoal.bench.options import AsJson
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, merged, print_report
from shoal.bench.training_job import corpus_file
from shoal.launcher.environment import Place
from shoal.topology.layout import Layout

RANKS = 4


def memory(
    tokens: Annotated[int, typer.Option(help="Tokens of the long sequence; a multiple of 8.", min=64)] = 32768,
    pairs: Annotated[int, typer.Option(help="Paired steps with recomputation and without.", min=3)] = 15,
    as_json: AsJson = False,
) -> None:
    """What a rank of four keeps: model state under ZeRO, activations of a long sequence and under recomputation.

    Example: python -m benchmarks.memory --tokens 4096 --pairs 5
    """
    if is_rank():
        run_as_rank(lambda place: measure(place, tokens=tokens, pairs=pairs))
        return
    if tokens % (2 * RANKS):
        raise typer.BadParameter(
            f"{tokens}; four ranks hold two equal parts each: give a multiple of 8", param_hint="--tokens"
        )
    command = ["benchmarks.memory", "--tokens", str(tokens), "--pairs", str(pairs)]
    print_report("memory", on_ranks(command, processes=RANKS), as_json=as_json)


def measure(place: Place, *, tokens: int, pairs: int) -> Result | None:
    """Rows and checks: `tokens` of the long sequence, `pairs` of recomputed steps. None on all ranks but rank 0."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        corpus, store = corpus_file(Path(folder)), join_store(place)
        with ExitStack() as stack:
            join_default_group(place, store, stack)
            state = memory_state.by_stage(join_mesh(Layout(shard=place.world_size), place, store), corpus)
        mesh = join_mesh(Layout(context=place.world_size), place, PrefixStore("context", store))
        kinds = memory_activations.by_context_kind(mesh, tokens=tokens)
        if place.rank != 0:
            return None
        whole = memory_activations.one_process(tokens=tokens)
        context = memory_activations.context_result(kinds, whole, tokens=tokens, ranks=place.world_size)
        return merged([state, context, memory_activations.recompute_result(corpus, pairs=pairs)])


if __name__ == "__main__":
    run(memory)
