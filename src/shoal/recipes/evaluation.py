"""One rank of `shoal evaluate`: the weights of a checkpoint on the held-out data, without training."""

from __future__ import annotations

from pathlib import Path

from shoal.engine.resume import load_weights
from shoal.errors import DataError
from shoal.launch.environment import Place
from shoal.recipes.objects import UserObjects
from shoal.recipes.run import open_run
from shoal.runfile.run_file import RunFile


def evaluate_rank(run_file: RunFile, place: Place, objects: UserObjects, *, source: Path) -> dict[str, float]:
    """The measurements on the held-out data, and the `step` that the weights are from. The same on every rank."""
    run = open_run(run_file, place, objects)
    step = load_weights(run.state, source, announce=run.process.announce)
    values = run.evaluate()
    if not values:
        raise DataError("this run has no held-out data to evaluate on")
    run.mesh.world.barrier().wait()
    return {"step": step, **values}
