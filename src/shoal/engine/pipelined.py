"""Forward and backward of the microbatches of one step, on a rank that holds some stages of the model's chain.

Every rank of a pipeline has the same samples: a stage makes the context of its microbatches itself, and only
activations and their gradients travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.data.sample import Batch
from shoal.engine.compute import Compute, Microbatch
from shoal.engine.loss import call_model, weighted_sum
from shoal.engine.microbatches import leaves
from shoal.engine.passes import Arrange, Judged
from shoal.models.roles import DeclaresParts
from shoal.parallel.pipeline.execute import Hooks, run_pipeline
from shoal.parallel.pipeline.pipedream import Update, run_pipedream
from shoal.parallel.pipeline.stages import Stages
from shoal.schedules.table import Action, Table, forward_only
from shoal.sync.strategy import Sync


@dataclass(frozen=True)
class PipelinedPasses:
    """`Passes` by `table` over the ranks of `group`, the pipeline; `back` is a second group of them.

    The number of microbatches that `arrange` gives is a multiple of the table's. `counts`: does this rank hold the last
    stage, and no other holds the same numbers? `splits`: see `run_pipeline`.
    """

    compute: Compute
    table: Table
    stages: Stages
    arrange: Arrange
    group: Collective
    back: Collective
    counts: bool
    splits: bool = True

    def train(
        self, batches: Sequence[Batch], *, sync: Sync, factor: Callable[[], float], known: Callable[[Tensor], None]
    ) -> None:
        scale = factor()
        total = torch.zeros((), dtype=torch.float64, device=self.compute.device)
        with sync.schedule():
            for microbatches in self._rounds(batches):

                def loss(output: Tensor, index: int, own: Sequence[Microbatch] = microbatches) -> Tensor:
                    loss_sum = self._loss_sum(output, own[index].batch)
                    total.add_(loss_sum.detach())
                    return loss_sum * scale

                self._run(self.table, microbatches, loss, announced=lambda _: scale)
        known(total if self.counts else torch.zeros_like(total))

    def train_asynchronously(
        self, microbatches: Sequence[Batch], *, factors: Sequence[float], update: Update
    ) -> Tensor:
        """All of a step's `microbatches`, arranged already, with an `update` after the backward of each.

        The loss of each is multiplied by its factor. The sum of the losses that this rank counts, float64.
        """
        own = [self.compute.prepared(batch) for batch in microbatches]
        total = torch.zeros((), dtype=torch.float64, device=self.compute.device)

        def loss(output: Tensor, index: int) -> Tensor:
            loss_sum = self._loss_sum(output, own[index].batch)
            total.add_(loss_sum.detach())
            return loss_sum * factors[index]

        self._run(self.table, own, loss, announced=lambda index: factors[index], update=update)
        return total if self.counts else torch.zeros_like(total)

    def judge(self, batch: Batch) -> Judged | None:
        microbatch, found = self.compute.prepared(batch), []

        def loss(output: Tensor, index: int) -> Tensor:
            losses = self.compute.loss(output, microbatch.batch.targets)
            found.append(Judged(microbatch.batch, self.compute.gathered(output), losses))
            return losses.sum()

        self._run(forward_only(self.table, 1), [microbatch], loss)
        return found[0] if found and self.counts else None

    def _rounds(self, batches: Sequence[Batch]) -> Iterator[list[Microbatch]]:
        """As many microbatches at a time as the table takes."""
        arranged, size = self.arrange(batches), self.table.microbatches
        for first in range(0, len(arranged), size):
            yield [self.compute.prepared(batch) for batch in arranged[first : first + size]]

    def _run(
        self,
        table: Table,
        microbatches: Sequence[Microbatch],
        loss: Callable[[Tensor, int], Tensor],
        *,
        announced: Callable[[int], float] | None = None,
        update: Update | None = None,
    ) -> None:
        model = cast(DeclaresParts, self.compute.model)

        @contextmanager
        def around(action: Action) -> Iterator[None]:
            if action.kind != "F":  # a backward runs in the types of its forward
                yield
                return
            if announced is not None:
                self.compute.announce(microbatches[action.microbatch], partial(announced, action.microbatch))
            with self.compute.precision.autocast(self.compute.device):
                yield

        run = partial(run_pipeline, splits=self.splits) if update is None else partial(run_pipedream, update=update)
        run(
            table,
            self.group,
            stage=self.stages.forward,
            contexts=[call_model(model.context, microbatch.batch.inputs) for microbatch in microbatches],
            loss=loss,
            weights=self.stages.weights,
            device=self.compute.device,
            back=self.back,
            hooks=Hooks(around=around),
            likenesses=_likenesses(microbatches),
        )

    def _loss_sum(self, output: Any, batch: Batch) -> Tensor:
        return weighted_sum(self.compute.loss(output, batch.targets), batch.weights)


def _likenesses(microbatches: Sequence[Microbatch]) -> list[int]:
    """For each microbatch, the first one whose inputs have the same shapes: all ranks of the pipeline see the same."""
    shapes = [tuple(tuple(leaf.shape) for leaf in leaves(microbatch.batch.inputs)) for microbatch in microbatches]
    return [shapes.index(own) for own in shapes]
