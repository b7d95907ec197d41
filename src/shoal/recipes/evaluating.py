"""One rank of `shoal evaluate`: the weights of a checkpoint on the held-out data, without training."""

from __future__ import annotations

from pathlib import Path

from shoal.engine.resume import load_weights
from shoal.errors import DataError
from shoal.launch.environment import Place
from shoal.recipes.assembly import new_state, new_sync
from shoal.recipes.objects import Given
from shoal.recipes.setting import set_up
from shoal.runfile.run_file import RunFile


def evaluate_rank(run_file: RunFile, place: Place, given: Given, *, source: Path) -> dict[str, float]:
    """The measurements on the held-out data, and the `step` that the weights are from. The same on every rank."""
    setting = set_up(run_file, place, given)
    step = load_weights(new_state(setting, new_sync(setting)), source, announce=setting.announce)
    values = setting.evaluate()
    if not values:
        raise DataError("this run has no held-out data to evaluate on")
    setting.mesh.world.barrier().wait()
    return {"step": step, **values}
