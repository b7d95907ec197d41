"""`shoal train` of a few steps in the pool of ranks, with something done between its parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from shoal.assembly.job import build_job, restore, run_start
from shoal.assembly.run import Run
from shoal.engine.loop import steps
from shoal.observe.sink import Sinks
from shoal.state import parts_of
from tests.ranks import TestPlace
from tests.sync.steps import opened

STEPS = 6
BeforeStep = Callable[[Run, int], None]


def trained(
    place: TestPlace, tables: dict[str, Any], folder: str, last: int = STEPS, before_step: BeforeStep | None = None
) -> dict[str, int]:
    """Restores, and trains to step `last`. For each part of the state, its bytes on this rank. `before_step` is called
    with the run and the number of the step.
    """
    directory = Path(folder) / "run"
    run = opened(place, tables, folder, directory, last)
    with ExitStack() as stack:
        sinks = stack.enter_context(Sinks())
        restore(run, directory, sinks)
        job = build_job(run, directory, sinks, stack, stop_requested=lambda: False)
        stack.callback(job.saver.close)
        sinks.start(run_start(run))
        for pending in steps(job):
            if before_step is not None:
                before_step(run, pending.number)
            pending.result = job.step(pending.number, pending.microbatches, lr=pending.lr)
    return {name: sum(t.tensor.nbytes for t in targets) for name, targets in parts_of(run.state.tensors()).items()}


def flipped(place: TestPlace, tables: dict[str, Any], folder: str, name: str, rank: int, step: int) -> dict[str, int]:
    """The same, but on `rank` a bit of the exponent of the tensor `name` flips before the step `step`."""

    def flip(run: Run, number: int) -> None:
        if (place.rank, number) == (rank, step):
            (target, *_) = parts_of(run.state.tensors())[name]
            target.tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 23)

    return trained(place, tables, folder, STEPS, flip)
