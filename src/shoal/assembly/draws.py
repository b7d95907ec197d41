"""What keys the random numbers of a run's model."""

from __future__ import annotations

from torch import nn

from shoal.models.checkpointed_draws import key_checkpoints
from shoal.models.config import ForeignModel
from shoal.models.keyed_draws import KeyedDraws, draws_nothing
from shoal.runfile.run_file import RunFile


def draws_of(run_file: RunFile, model: nn.Module, *, one_at_a_time: bool = True) -> KeyedDraws | None:
    """The mode that keys what a user's module draws; None for Shoal's own, for one that draws nothing, and for one that
    is compiled.
    """
    if not isinstance(run_file.model, ForeignModel) or run_file.run.compile or draws_nothing(model):
        return None
    key_checkpoints()
    return KeyedDraws(model, seed=run_file.run.seed, one_at_a_time=one_at_a_time)
