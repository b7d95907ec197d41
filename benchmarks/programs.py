"""`python -m benchmarks.programs`: plain PyTorch programs on Gloo beside the same programs on Shoal's backend.

A program changes one line, the backend's name. Exposed communication (`exposed`) is what a step takes longer than the
same program on a network that takes no time (`plain_programs.ON_INSTANT_NETWORK`), so that the copies that DDP and
FSDP2 make themselves do not count as communication. A measured step follows a step of the same program, as in training.
`alone_ms` is the bare model on the rank's tokens, without DDP or FSDP2; for tensor parallelism it is the unsplit model,
which computes twice as much. The rest of a step is what distribution costs in all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer

import shoal.c10d
from benchmarks.command import run
from benchmarks.exposed import AGAIN, ALONE, CALLS, GLOO, INSTANT, OURS, checks_of, row_of
from benchmarks.plain_programs import ON_INSTANT_NETWORK, PROGRAMS, TENSOR, all_reduces, alone, repeated
from shoal.bench.groups import interleaved, join_default_group, join_group, join_store
from shoal.bench.options import AsJson, names, token_counts, world_sizes
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import Result, merged, print_report
from shoal.bench.training_job import corpus_file
from shoal.comm.collective import Collective
from shoal.launcher.environment import Place

FAKE = "fake"
BACKENDS = {GLOO: GLOO, OURS: shoal.c10d.BACKEND, INSTANT: FAKE, AGAIN: FAKE, ALONE: FAKE}


def programs(
    tokens: Annotated[
        str, typer.Option(help="Tokens of a rank and step, several with commas; multiples of 128.")
    ] = "256,2048",
    pairs: Annotated[int, typer.Option(help="Turns of each program.", min=3)] = 20,
    processes: Annotated[str, typer.Option(help="Numbers of ranks, even for tensor; several with commas.")] = "2,4",
    only: Annotated[str, typer.Option(help="Of ddp, fsdp2, tensor; several with commas. Default: all.")] = "",
    as_json: AsJson = False,
) -> None:
    """DDP, FSDP2 and tensor parallelism of plain PyTorch: the same programs on Gloo and on backend "shoal".

    Example: python -m benchmarks.programs --tokens 256 --pairs 5 --processes 2 --only ddp
    """
    sizes, chosen = token_counts(tokens), names(only, "--only", PROGRAMS)
    if is_rank():
        run_as_rank(lambda place: measure(place, chosen, tokens=sizes[0], pairs=pairs))
        return
    counts = world_sizes(processes)
    if "tensor" in chosen and (odd := [count for count in counts if count % TENSOR]):
        raise typer.BadParameter(
            f"{odd[0]}; tensor parallelism takes pairs: give even numbers", param_hint="--processes"
        )
    results = [
        on_ranks(
            ["benchmarks.programs", "--tokens", str(size), "--pairs", str(pairs), "--only", ",".join(chosen)],
            processes=count,
        )
        for count in counts
        for size in sizes
    ]
    print_report("programs", merged(results), as_json=as_json)


def measure(place: Place, chosen: Sequence[str], *, tokens: int, pairs: int) -> Result | None:
    """Rows and checks of these programs for `tokens` of a rank and step; None on all ranks but rank 0."""
    store = join_store(place)
    with ExitStack() as stack:
        corpus = corpus_file(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-"))))
        join_default_group(place, store, stack)
        clock = join_group("clock", place, store)
        parts = [_measure_program(name, place, corpus, clock, tokens=tokens, pairs=pairs) for name in chosen]
    return merged(parts) if place.rank == 0 else None


def _measure_program(name: str, place: Place, corpus: Path, clock: Collective, *, tokens: int, pairs: int) -> Result:
    size = TENSOR if name == "tensor" else place.world_size
    groups = {side: _group(backend, place, size) for side, backend in BACKENDS.items()}
    make = {GLOO: PROGRAMS[name], OURS: PROGRAMS[name], ALONE: alone}
    sides: dict[str, Callable[[], Any]] = {
        side: make.get(side, ON_INSTANT_NETWORK[name])(groups[side], corpus, tokens=tokens) for side in BACKENDS
    }
    if calls := all_reduces(sides[AGAIN]):
        sides |= {CALLS + side: repeated(calls, groups[side]) for side in (GLOO, OURS)}
    turns = interleaved(sides, clock, pairs=pairs, always=[side for side in sides if side != ALONE], warm=True)
    return {
        "rows": [row_of(name, place.world_size, turns, tokens=tokens)],
        "checks": checks_of(name, place.world_size, turns, tokens=tokens),
    }


def _group(backend: str, place: Place, size: int) -> Any:
    """The group of this rank among `size` neighbours. Every rank takes part in making all groups."""
    firsts = range(0, place.world_size, size)
    made = [dist.new_group(list(range(first, first + size)), backend=backend) for first in firsts]
    return made[place.rank // size]


if __name__ == "__main__":
    run(programs)
