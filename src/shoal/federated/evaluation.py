"""The loss and the accuracy of a model on samples, and how both are spread over clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.data.batches import read_batch
from shoal.data.config import Denominator
from shoal.data.sample import Source
from shoal.engine.loss import prediction_in, weighted_losses
from shoal.federated.local_training import LocalTrainer

BATCH = 256


class Figures(NamedTuple):
    """Per sample, float64 [samples]: the loss times its weight, the weight, and 1 where the class was right.

    `right` is NaN where targets are no classes.
    """

    losses: Tensor
    weights: Tensor
    right: Tensor

    def means(self) -> dict[str, float]:
        """`loss/eval`, and `accuracy/eval` where there are classes."""
        found = {"loss/eval": float(self.losses.sum() / self.weights.sum().clamp(min=1e-12))}
        if not bool(self.right.isnan().any()):
            found["accuracy/eval"] = float(self.right.mean())
        return found


@torch.no_grad()
def figures(trainer: LocalTrainer, model: Tensor, source: Source, *, denominator: Denominator) -> Figures:
    """The figures of every sample of `source` under `model` [numel]."""
    trainer.module.eval()
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for first in range(0, len(source), BATCH):
        ids = np.arange(first, min(first + BATCH, len(source)), dtype=np.int64)
        batch = read_batch(source, ids, ids, denominator=denominator).batch
        outputs = trainer.outputs_of(model, batch.inputs)
        losses = weighted_losses(trainer.loss(outputs, batch.targets), batch.weights)
        prediction, targets = prediction_in(outputs), batch.targets
        right = torch.full((len(ids),), torch.nan, dtype=torch.float64)
        if isinstance(targets, Tensor) and prediction is not None and _are_classes(targets, prediction):
            right = torch.eq(prediction.argmax(-1), targets).double()
        per_sample = [one.double().reshape(len(ids), -1).sum(1) for one in (losses, batch.weights)]
        parts.append((per_sample[0], per_sample[1], right))
    losses, weights, right = (torch.cat(column) for column in zip(*parts, strict=True))
    return Figures(losses, weights, right)


def _are_classes(targets: Tensor, prediction: Tensor) -> bool:
    return targets.ndim == 1 and not targets.is_floating_point() and prediction.ndim == 2


def fairness(found: Figures, shards: Mapping[str, np.ndarray]) -> dict[str, float]:
    """How a figure differs from client to client: of their accuracies, or of their losses where there are no classes,
    the worst, the tenth part from below, the median, the best and the standard deviation."""
    classes = not bool(found.right.isnan().any())
    values = found.right if classes else found.losses
    weights = torch.ones_like(values) if classes else found.weights
    each: Sequence[float] = [float(values[ids].sum() / weights[ids].sum().clamp(min=1e-12)) for ids in shards.values()]
    ordered = np.sort(np.asarray(each)) if classes else np.sort(np.asarray(each))[::-1]
    name = "accuracy" if classes else "loss"
    return {
        f"{name}/worst": float(ordered[0]),
        f"{name}/tenth": float(ordered[len(ordered) // 10]),
        f"{name}/median": float(np.median(ordered)),
        f"{name}/best": float(ordered[-1]),
        f"{name}/deviation": float(ordered.std()),
    }
