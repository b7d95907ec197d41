"""`shoal bench noise`: steps to a loss at several batch sizes, predicted from the noise scale at one of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.bench.as_rank import as_rank
from shoal.cli.bench.options import AsJson, Processes, numbers
from shoal.cli.bench.show import show

if TYPE_CHECKING:
    from shoal.launch.environment import Place


def noise(
    batches: Annotated[str, typer.Option(help="Global batches in samples, with commas.")] = "4,8,16,32",
    measured_at: Annotated[int, typer.Option(help="The one whose noise predicts the others.")] = 16,
    seeds: Annotated[int, typer.Option(help="Trainings of each batch size.", min=1)] = 3,
    lr: Annotated[float, typer.Option(help="Learning rate of the batch that is measured at.", min=1e-9)] = 3e-3,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """Steps to a loss at several batch sizes, predicted from the gradient noise scale measured at one of them.

    Example: shoal bench noise --seeds 1
    """
    from shoal.recipes.benchmarks import machine

    sizes = numbers(batches, "--batches", least=processes, multiple_of=processes)
    if measured_at not in sizes:
        raise typer.BadParameter(f"{measured_at}; give one of --batches {batches}", param_hint="--measured-at")
    if machine.is_rank():
        as_rank(lambda place: _noise(place, sizes, measured_at, seeds, lr))
        return
    arguments = ["bench", "noise", "--batches", batches, "--measured-at", str(measured_at), "--seeds", str(seeds)]
    arguments += ["--lr", str(lr), "--processes", str(processes)]
    result = machine.on_ranks(arguments, processes=processes)
    show("noise", result["rows"], result["checks"], as_json)


def _noise(place: Place, sizes: list[int], measured_at: int, seeds: int, lr: float) -> dict[str, Any] | None:
    from shoal.recipes.benchmarks.noise import measure

    return measure(place, os.environ, batches=sizes, measured_at=measured_at, seeds=seeds, lr=lr)
