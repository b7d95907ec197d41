"""`Evaluation`: what a script's own loop computes without training, between two steps or behind an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shoal.assembly.run import Run
from shoal.data.feed import evaluation_batches
from shoal.data.sample import Batch, Source
from shoal.engine.forward_backward import evaluating
from shoal.errors import UserCodeError


class Evaluation:
    """The loops over `held_out()` that are under way, in which the model is evaluated and no gradient is recorded."""

    def __init__(self) -> None:
        self._loops = 0

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Around one of them."""
        self._loops += 1
        try:
            yield
        finally:
            self._loops -= 1

    def check(self) -> None:
        """Raises `UserCodeError` for a backward within one, as where a loop goes on with both by `zip` or `next`."""
        if self._loops:
            raise UserCodeError(
                "backward() was called inside a loop over held_out(), where the model is in evaluation mode and "
                "records no gradient: end that loop first, or take its batches beforehand, list(run.held_out())"
            )


class EvaluationOfRank(Evaluation):
    """The same on one rank of `run`. `given_of`: what the script gets of a batch."""

    def __init__(self, run: Run, given_of: Callable[[Batch], Any]) -> None:
        super().__init__()
        self._run, self._given_of, self._compute = run, given_of, run.step.compute

    def held_out(self, source: Source) -> Iterator[Any]:
        """This rank's batches of the samples of `source`, as the script gets them."""
        run_file, (share, shares) = self._run.run_file, self._run.mesh.batch_share
        batches = evaluation_batches(
            source,
            replicas=shares,
            replica=share,
            micro_samples=self._run.generation.microbatching.samples or max(1, run_file.batch.global_samples // shares),
            denominator="samples",
            limit=run_file.observe.evaluate_samples,
        )
        with self.evaluating(), self.under_way():
            for batch in batches:
                yield self._given_of(self._compute.prepared(batch).batch)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, every rank has all parameters, the model is in evaluation mode, and nothing has a gradient."""
        with self._run.generation.gradients.full_parameters(), torch.no_grad(), evaluating(self._run.model):
            yield
        self._compute.buffers.refresh()
