"""Evaluation: the loss over held-out data with the weights of a step, each rank taking its part of the samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoal.comm.collective import Collective
from shoal.data.sample import Batch
from shoal.engine.forward_backward import ForwardBackward
from shoal.engine.loss import weighted_sum
from shoal.engine.outputs import prediction_in


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

    Sums are added in float64 and divided once at the end, so that uneven batches and ranks change nothing.
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
