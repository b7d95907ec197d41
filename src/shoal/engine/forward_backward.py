"""Forward and backward of the microbatches of one step on one rank.

A rank that holds the whole chain of the model computes one microbatch after the other. A rank that holds some stages of
it follows the table of a pipeline schedule: all ranks of a pipeline have the same samples, a stage computes the context
of its microbatches itself, and only activations and their gradients travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.codec.config import BlockwiseConfig, CastConfig
from shoal.comm.collective import Collective
from shoal.comm.messages import Messages
from shoal.data.sample import Batch, leaves
from shoal.engine.compute import Compute, Microbatch
from shoal.engine.loss import call_model, prediction_in, weighted_sum
from shoal.gradients.gradients import Gradients
from shoal.models.roles import DeclaresParts
from shoal.parallel.pipeline.execute import Computation, Hooks, run_pipeline
from shoal.parallel.pipeline.packing import Packing, packing_of
from shoal.parallel.pipeline.pipedream import Update, run_pipedream
from shoal.parallel.pipeline.stages import Stages
from shoal.schedules.table import Action, ScheduleTable, forward_only

Arrange = Callable[[Sequence[Batch]], Sequence[Batch]]
"""From this rank's samples of a step to the microbatches that it computes."""


def as_they_are(batches: Sequence[Batch]) -> Sequence[Batch]:
    """The microbatches of the feed."""
    return batches


@dataclass(frozen=True)
class Evaluated:
    """A batch, the model's outputs for it, and the loss of each sample or position."""

    batch: Batch
    outputs: Any
    losses: Tensor


class ForwardBackward(Protocol):
    """Everything between the samples and the gradients on one rank."""

    @property
    def compute(self) -> Compute:
        """What this rank computes with: its part of the model, the loss, the device."""
        ...

    def __call__(
        self,
        batches: Sequence[Batch],
        *,
        gradients: Gradients,
        factor: Callable[[], float],
        on_loss: Callable[[Tensor], None],
    ) -> None:
        """Accumulates the gradient of `factor()` x the sum of the losses.

        `on_loss` is called once, as soon as the sum of this rank's losses is there (float64, 0 where others count it).
        """
        ...

    def evaluate(self, batch: Batch) -> Evaluated | None:
        """Forward without gradients; None on a rank that other ranks count for."""
        ...


@dataclass(frozen=True)
class SequentialForwardBackward:
    """One microbatch after the other, forward and backward. `counts`: are this rank's losses those that count?"""

    compute: Compute
    arrange: Arrange = as_they_are
    counts: bool = True

    def __call__(
        self,
        batches: Sequence[Batch],
        *,
        gradients: Gradients,
        factor: Callable[[], float],
        on_loss: Callable[[Tensor], None],
    ) -> None:
        microbatches = self.arrange(batches)
        total = None
        for index, batch in enumerate(microbatches):
            last = index == len(microbatches) - 1
            loss_sum = self._forward(self.compute.prepared(batch), factor)
            own = loss_sum.detach().to(torch.float64, copy=True)
            total = own if total is None else total + own
            scale = factor()
            if last:
                on_loss(total if self.counts else torch.zeros_like(total))
            self.compute.begin_backward()
            with gradients.backward(last=last), self.compute.randomness.drawing():
                (loss_sum if scale == 1.0 else loss_sum * scale).backward()

    def hessian_product(
        self,
        batches: Sequence[Batch],
        directions: Sequence[tuple[nn.Parameter, Tensor]],
        *,
        gradients: Gradients,
        factor: Callable[[], float],
    ) -> None:
        """Accumulates the gradient of g v in the place of g: the Hessian's product with v, whose part for each
        parameter is in `directions`. Attention is PyTorch's plain one, which has a second derivative.
        """
        microbatches, parameters = self.arrange(batches), [parameter for parameter, _ in directions]
        for index, batch in enumerate(microbatches):
            with sdpa_kernel(SDPBackend.MATH):
                loss = self._forward(self.compute.prepared(batch), factor) * factor()
                found = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
            slope = torch.stack([(g * v).sum() for g, (_, v) in zip(found, directions, strict=True)]).sum()
            with gradients.backward(last=index == len(microbatches) - 1):
                (slope + 0.0 * loss).backward()

    def evaluate(self, batch: Batch) -> Evaluated | None:
        own = self.compute.prepared(batch).batch
        outputs, losses = self.compute.losses(own)
        outputs = self.compute.gathered(outputs)
        return Evaluated(own, outputs, losses) if self.counts else None

    def _forward(self, microbatch: Microbatch, factor: Callable[[], float]) -> Tensor:
        self.compute.announce(microbatch, factor)
        return self.compute.loss_sum(microbatch)


@dataclass(frozen=True)
class PipelinedForwardBackward:
    """`ForwardBackward` by `table` over the ranks of `group`, the pipeline, between which go `messages`.

    The number of microbatches that `arrange` gives is a multiple of the table's. `counts`: does this rank hold the last
    stage, and no other holds the same numbers? `splits`: see `Computation`. `codec`
    codes activations and their gradients between ranks; None: they are sent as they are.
    """

    compute: Compute
    table: ScheduleTable
    stages: Stages
    arrange: Arrange
    group: Collective
    messages: Messages
    counts: bool
    splits: bool = True
    codec: CastConfig | BlockwiseConfig | None = None

    def __call__(
        self,
        batches: Sequence[Batch],
        *,
        gradients: Gradients,
        factor: Callable[[], float],
        on_loss: Callable[[Tensor], None],
    ) -> None:
        scale = factor()
        total = torch.zeros((), dtype=torch.float64, device=self.compute.device)
        self.compute.begin_backward()
        with gradients.schedule():
            for microbatches in self._rounds(batches):

                def loss(output: Tensor, index: int, own: Sequence[Microbatch] = microbatches) -> Tensor:
                    loss_sum = self._loss_sum(output, own[index].batch)
                    total.add_(loss_sum.detach())
                    return loss_sum * scale

                self._run(self.table, microbatches, loss, announced=lambda _: scale)
        on_loss(total if self.counts else torch.zeros_like(total))

    def asynchronous(self, microbatches: Sequence[Batch], *, factors: Sequence[float], update: Update) -> Tensor:
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

    def evaluate(self, batch: Batch) -> Evaluated | None:
        microbatch, found = self.compute.prepared(batch), []

        def loss(output: Tensor, index: int) -> Tensor:
            losses = self.compute.loss(output, microbatch.batch.targets)
            found.append(Evaluated(microbatch.batch, self.compute.gathered(output), losses))
            return losses.sum()

        self._run(forward_only(self.table, 1), [microbatch], loss)
        return found[0] if found and self.counts else None

    @cached_property
    def _packing(self) -> Packing:
        return packing_of(self.codec)

    def _rounds(self, batches: Sequence[Batch]) -> Iterator[list[Microbatch]]:
        """As many microbatches at a time as the table takes."""
        arranged, size = self.arrange(batches), self.table.microbatches
        for first in range(0, len(arranged), size):
            yield [self.compute.prepared(batch) for batch in arranged[first : first + size]]

    def _run(
        self,
        table: ScheduleTable,
        microbatches: Sequence[Microbatch],
        loss: Callable[[Tensor, int], Tensor],
        *,
        announced: Callable[[int], float] | None = None,
        update: Update | None = None,
    ) -> None:
        model, cast_inputs = cast(DeclaresParts, self.compute.model), self.compute.precision.cast

        @contextmanager
        def around(action: Action) -> Iterator[None]:
            if action.kind != "F":  # a backward runs in the types of its forward
                with self.compute.randomness.drawing():
                    yield
                return
            if announced is not None:
                self.compute.announce(microbatches[action.microbatch], partial(announced, action.microbatch))
            with self.compute.precision.autocast(self.compute.device), self.compute.randomness.drawing():
                yield

        whole = partial(
            run_pipeline,
            device=self.compute.device,
            messages=self.messages,
            likenesses=_likenesses(microbatches),
            packing=self._packing,
        )
        run = whole if update is None else partial(run_pipedream, update=update, run=whole)
        run(
            table,
            self.group,
            Computation(self.stages.forward, loss, self.stages.weights, splits=self.splits),
            [call_model(model.context, cast_inputs(microbatch.batch.inputs)) for microbatch in microbatches],
            hooks=Hooks(around=around),
        )

    def _loss_sum(self, output: Any, batch: Batch) -> Tensor:
        with self.compute.coupled():
            return weighted_sum(self.compute.loss(output, batch.targets), batch.weights)


def _likenesses(microbatches: Sequence[Microbatch]) -> list[int]:
    """For each microbatch, the first one whose inputs have the same shapes: all ranks of the pipeline see the same."""
    shapes = [tuple(tuple(leaf.shape) for leaf in leaves(microbatch.batch.inputs)) for microbatch in microbatches]
    return [shapes.index(own) for own in shapes]


# Evaluation: the loss over held-out data with the weights of a step, each rank taking its part of the samples.


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and then every module as it was."""
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in was_training.items():
            module.training = training


@torch.no_grad()
def evaluate(
    forward_backward: ForwardBackward, batches: Iterable[Batch], *, group: Collective, device: torch.device
) -> dict[str, float]:
    """`loss/eval`, and `accuracy/eval` where the targets are classes, over all ranks' `batches` together.

    The loss is weighted; of the accuracy every sample counts once, but for those of weight 0. Sums are added in float64
    and divided once at the end, so that uneven batches and ranks change nothing.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, weight, right, counted
    try:
        with evaluating(forward_backward.compute.model):
            for batch in batches:
                evaluated = forward_backward.evaluate(batch)
                if evaluated is not None:
                    sums[0] += weighted_sum(evaluated.losses, evaluated.batch.weights)
                    sums[1] += evaluated.batch.weights.sum(dtype=torch.float64)
                    sums[2:] += _right_and_counted(evaluated.outputs, evaluated.batch)
    finally:
        forward_backward.compute.buffers.refresh()
    if group.size > 1:
        group.all_reduce(sums).wait()
    total, weight, right, counted = sums.tolist()
    if weight == 0:
        return {}
    return {"loss/eval": total / weight} | ({"accuracy/eval": right / counted} if counted else {})


def _right_and_counted(outputs: object, batch: Batch) -> Tensor:
    """How many samples that count were classified rightly, and how many count; 0, 0 where targets are no classes."""
    targets = batch.targets
    none = batch.weights.new_zeros(2, dtype=torch.float64)
    prediction = prediction_in(outputs)
    if not isinstance(targets, Tensor) or prediction is None:
        return none
    if targets.ndim != 1 or targets.is_floating_point() or prediction.ndim != 2:
        return none
    counted = batch.weights > 0
    right = torch.eq(prediction.argmax(-1), targets) & counted
    return torch.stack([right.sum(dtype=torch.float64), counted.sum(dtype=torch.float64)])
