"""PipeDream: 1F1B without flush, an optimizer step for every microbatch, weights stashed (SOSP 2019, section 3.3).

Stage s of S is S - 1 - s updates behind in its forwards, and uses the same weights again in the backward:

    w_s(t + 1) = w_s(t) - lr * dL/dw_s (w_0(t - S + 1), ..., w_{S-1}(t))

The program is sequential in the microbatches, with weights of known staleness: it has an oracle like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shoal.comm.collective import Collective
from shoal.parallel.pipeline.execute import Hooks, Loss, PipelineRun, StageForward, run_pipeline
from shoal.parallel.pipeline.passes import Weights
from shoal.parallel.pipeline.stash import Stash
from shoal.schedules.action import Action
from shoal.schedules.table import Table

Update = Callable[[int, int], None]
"""(stage, microbatch): takes an optimizer step of the stage's parameters with the gradient of this microbatch alone,
and clears it."""


def run_pipedream(
    table: Table,
    group: Collective,
    *,
    stage: StageForward,
    contexts: Sequence[Any],
    loss: Loss,
    weights: Weights,
    update: Update,
    device: torch.device,
    back: Collective | None = None,
    hooks: Hooks = Hooks(),
    likenesses: Sequence[int] | None = None,
) -> PipelineRun:
    """As `run_pipeline`, with `update` after each backward; `loss` is divided as for a batch of one microbatch.

    It drains at the end of the table: give it as many microbatches as lie between two checkpoints or evaluations.
    """
    stashes = {held: Stash(weights(held)) for held in table.stages_of(group.rank)}

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

    return run_pipeline(
        table, group, stage=stage, contexts=contexts, loss=loss, weights=weights, device=device, back=back,
        hooks=Hooks(around, after), likenesses=likenesses,
    )  # fmt: skip


def staleness(table: Table) -> dict[tuple[int, int], int]:
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
