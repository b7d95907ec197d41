"""PipeDream: a pipeline that never drains, with an update for every microbatch and the older weights that it needs.

1F1B without flush, an optimizer step for every microbatch, weights stashed (SOSP 2019, section 3.3). Stage s of S
is S - 1 - s updates behind in its forwards, and uses the same weights again in the backward:

    w_s(t + 1) = w_s(t) - lr * dL/dw_s (w_0(t - S + 1), ..., w_{S-1}(t))

The program is sequential in the microbatches, with weights of known staleness: it has an oracle like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from shoal.comm.collective import Collective
from shoal.parallel.pipeline.execute import Computation, Hooks, PipelineRun
from shoal.schedules.table import Action, ScheduleTable

# `Stash`: older versions of a stage's weights, one for each microbatch whose backward is still to come.
#
# A backward is right only with the weights that its forward saw. So weights that a stored forward used are never
# written: an update first gives the parameters storage of their own, and a backward gets the old storage back for as
# long as it lasts. Versions that several microbatches share are stored once.


class Stash:
    """Of the parameters of one stage."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = tuple(weights)
        self._latest = self._storage()
        self._kept: dict[int, tuple[Tensor, ...]] = {}

    @property
    def versions(self) -> int:
        """Different versions stored, the latest included."""
        return len({id(version) for version in [self._latest, *self._kept.values()]})

    def keep(self, microbatch: int) -> None:
        """The latest weights are those of this microbatch."""
        self._kept[microbatch] = self._latest

    @contextmanager
    def restored(self, microbatch: int) -> Iterator[None]:
        """The weights are those that `microbatch` saw; afterwards the latest again."""
        self._point_to(self._kept[microbatch])
        try:
            yield
        finally:
            self._point_to(self._latest)

    def drop(self, microbatch: int) -> None:
        """The backward of this microbatch is done."""
        del self._kept[microbatch]

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The weights may be written in place.

        Autograd refuses a backward through tensors that were written since; what it guards against cannot happen, for
        the storage that was seen is not the one that is written, so their versions are left as they were.
        """
        if any(version is self._latest for version in self._kept.values()):
            self._latest = tuple(weight.clone() for weight in self._latest)
            self._point_to(self._latest)
        with _unsafe_preserve_version_counter(self._weights):
            yield

    def _storage(self) -> tuple[Tensor, ...]:
        return tuple(weight.data for weight in self._weights)

    def _point_to(self, version: tuple[Tensor, ...]) -> None:
        for weight, data in zip(self._weights, version, strict=True):
            weight.data = data


Update = Callable[[int, int], None]
"""(stage, microbatch): takes an optimizer step of the stage's parameters with the gradient of this microbatch alone,
and clears it."""


def run_pipedream(
    table: ScheduleTable,
    group: Collective,
    computation: Computation,
    contexts: Sequence[Any],
    *,
    update: Update,
    run: Callable[..., PipelineRun],
    hooks: Hooks = Hooks(),
) -> PipelineRun:
    """As `run`, which is `run_pipeline` with all further arguments, with `update` after each backward; the loss is
    divided as for a batch of one microbatch.

    It drains at the end of the table: give it as many microbatches as lie between two checkpoints or evaluations.
    """
    stashes = {held: Stash(computation.weights(held)) for held in table.stages_of(group.rank)}

    @contextmanager
    def around(action: Action) -> Iterator[None]:
        stash, microbatch = stashes[action.stage], action.microbatch
        with hooks.around(action):
            if action.kind == "F":
                stash.keep(microbatch)
                yield
            else:
                with stash.restored(microbatch):
                    yield
                stash.drop(microbatch)

    def after(action: Action) -> None:
        if action.kind == "B":
            with torch.no_grad(), stashes[action.stage].updating():
                update(action.stage, action.microbatch)
        hooks.after(action)

    return run(table, group, computation, contexts, hooks=Hooks(around, after))


def staleness(table: ScheduleTable) -> dict[tuple[int, int], int]:
    """For each (stage, microbatch), the version of its weights: the updates made before its forward."""
    versions = {}
    for row in table.rows:
        updates = dict.fromkeys(table.stages_of(table.placement[row[0].stage]), 0) if row else {}
        for action in row:
            if action.kind == "F":
                versions[action.stage, action.microbatch] = updates[action.stage]
            elif action.kind in "BW":
                updates[action.stage] += 1
    return versions
