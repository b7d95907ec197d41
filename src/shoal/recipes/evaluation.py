"""One rank of `shoal evaluate`: the weights of a checkpoint on the held-out data, without training."""

from __future__ import annotations

from pathlib import Path

from shoal.engine.resume import load_weights
from shoal.errors import DataError
from shoal.launch.environment import Place
from shoal.observe.progress_bar import ProgressBar
from shoal.recipes.objects import UserObjects
from shoal.recipes.run import open_run
from shoal.runfile.run_file import RunFile


def evaluate_rank(
    run_file: RunFile, place: Place, objects: UserObjects, *, source: Path, bar: ProgressBar | None = None
) -> dict[str, float]:
    """The measurements on the held-out data, and the `step` that the weights are from. The same on every rank."""
    bar = bar or ProgressBar()
    bar.update("building the model and reading the checkpoint")
    run = open_run(run_file, place, objects)
    step = load_weights(run.state, source, announce=run.process.announce)
    values = run.evaluate(bar)
    if not values:
        raise DataError("this run has no held-out data to evaluate on")
    run.mesh.world.barrier().wait()
    return {"step": step, **values}
