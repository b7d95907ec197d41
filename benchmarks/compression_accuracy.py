"""`python -m benchmarks.compression_accuracy`: the held-out loss that every codec reaches, beside the run without one.

Two ranks train a task with each codec, with and without error feedback, with 1-bit Adam and 0/1 Adam beside AdamW, and
under ZeRO-3 with coded pieces beside ZeRO-3. Seeds are paired; the interval is two standard errors of the mean ratio.
"""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.command import run
from shoal.bench.codec import CODECS
from shoal.bench.codec_accuracy import PEERED, TASKS, measure_accuracy, measure_peered
from shoal.bench.options import AsJson, names, numbers
from shoal.bench.ranks import is_rank, on_ranks, run_as_rank
from shoal.bench.report import merged, print_report

SIDES = (*CODECS, *PEERED)


def compression_accuracy(
    tasks: Annotated[str, typer.Option(help=f"Of {', '.join(TASKS)}; several, with commas.")] = ",".join(TASKS),
    sides: Annotated[str, typer.Option(help="Codecs, optimizers and zero_3_coded, with commas; default: all.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds of the trainings.")] = "0,1,2",
    steps: Annotated[int, typer.Option(help="Steps of a training; 0: those of the task.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """The table of accuracy: losses with codecs, as ratios to those without, with intervals.

    Example: python -m benchmarks.compression_accuracy --tasks digits --sides sign,one_bit_adam
    """
    chosen, several = names(sides, "--sides", SIDES), numbers(seeds, "--seeds", least=0)
    where = names(tasks, "--tasks", TASKS)
    if is_rank():
        measure = measure_accuracy if chosen[0] in CODECS else measure_peered
        run_as_rank(lambda place: measure(place, where[0], chosen, seeds=several, steps=steps))
        return
    results = []
    for task in where:
        for group in ([one for one in chosen if one in CODECS], [one for one in chosen if one in PEERED]):
            if group:
                own = ["--tasks", task, "--sides", ",".join(group), "--seeds", seeds, "--steps", str(steps)]
                results.append(on_ranks(["benchmarks.compression_accuracy", *own], processes=2))
    print_report("compression_accuracy", merged(results), as_json=as_json)


if __name__ == "__main__":
    run(compression_accuracy)
