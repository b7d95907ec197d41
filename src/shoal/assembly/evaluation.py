"""One rank of `shoal evaluate`: the weights of a checkpoint on the held-out data, without training."""

from __future__ import annotations

from pathlib import Path

from shoal.assembly.objects import UserObjects
from shoal.assembly.run import open_run
from shoal.engine.resume import load_weights
from shoal.errors import DataError
from shoal.launch.environment import Place
from shoal.observe.progress_bar import ProgressBar
from shoal.runfile.run_file import RunFile

OTHER_MODEL = "Leave out what changes the model: run.toml in its run directory names the one that was trained"


def evaluate_rank(
    run_file: RunFile, place: Place, objects: UserObjects, *, source: Path, bar: ProgressBar | None = None
) -> dict[str, float]:
    """The measurements on the held-out data, and the `step` that the weights are from. The same on every rank."""
    bar = bar or ProgressBar()
    run = open_run(run_file, place, objects, activity=bar.update)
    bar.update("verifying and reading the checkpoint")
    step = load_weights(run.state, source, announce=run.process.announce, repair=OTHER_MODEL)
    values = run.evaluate(bar)
    if not values:
        raise DataError("this run has no held-out data to evaluate on")
    run.mesh.world.barrier().wait()
    return {"step": step, **values}
