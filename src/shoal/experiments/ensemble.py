"""An ensemble: members that differ in their seed alone, trained side by side and evaluated together.

Of classes, the ensemble predicts the mean of the members' probabilities (Lakshminarayanan et al., arXiv:1612.01474),

    p(y | x) = 1/k sum_m softmax(f_m(x)),

whose loss is at most the mean of the members' losses, since -log is convex. Of numbers it predicts the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal.assembly.objects import UserObjects, model_of
from shoal.assembly.process import device_of
from shoal.assembly.workload import Workload, load_workload
from shoal.checkpoint.commit import checkpoint_in, read_manifest
from shoal.checkpoint.load import read_into
from shoal.data.feed import evaluation_batches
from shoal.engine.config import CrossEntropy, SquaredError
from shoal.engine.loss import call_model, described, prediction_in, weighted_sum
from shoal.errors import DataError, UsageError
from shoal.launcher.environment import ALONE
from shoal.runfile.load import load_run
from shoal.runfile.run_file import RunFile
from shoal.topology.layout import Layout


class Evaluated(msgspec.Struct, frozen=True):
    """Held-out loss, and accuracy where targets are classes, of each member and of all together."""

    members: list[dict[str, float]]
    ensemble: dict[str, float]


@torch.no_grad()
def evaluate_together(directories: Sequence[Path]) -> Evaluated:
    """Evaluates the newest checkpoints of several runs of one run file on their held-out data, in this process.

    Raises `DataError` without held-out data, and `UsageError` for a loss of which no mean prediction is known.
    """
    run_files = [load_run(directory / "run.toml") for directory in directories]
    first = run_files[0]
    if not isinstance(first.loss, CrossEntropy | SquaredError):
        raise UsageError(
            "loss.kind = 'python': it is not known whether members' outputs or their probabilities are to be averaged; "
            "evaluate the members one by one with shoal evaluate"
        )
    device = device_of(first.run.device, ALONE)
    workload = load_workload(
        first, UserObjects(), device=device, environ={}, layout=Layout(), micro_samples=None
    )  # fmt: skip
    if workload.data.held_out is None:
        raise DataError("these runs have no held-out data to evaluate on: give [data] some")
    models = [_member(run_file, path, workload, device) for run_file, path in zip(run_files, directories, strict=True)]
    tallies = [_Tally() for _ in range(len(models) + 1)]
    batches = evaluation_batches(
        workload.data.held_out,
        replicas=1,
        replica=0,
        micro_samples=first.batch.micro_samples or first.batch.global_samples,
        denominator=first.batch.denominator,
        limit=first.observe.evaluate_samples,
    )
    for batch in (batch.to(device) for batch in batches):
        predictions = [_prediction(call_model(model, batch.inputs)) for model in models]
        together = combined(predictions, classes=isinstance(first.loss, CrossEntropy))
        for tally, prediction in zip(tallies, [*predictions, together], strict=True):
            tally.add(prediction, batch.targets, batch.weights, workload)
    return Evaluated([tally.values() for tally in tallies[:-1]], tallies[-1].values())


def combined(predictions: Sequence[Tensor], *, classes: bool) -> Tensor:
    """What the members predict together: of logits [..., classes] the logarithm of the mean probability, of numbers
    the mean, in float64."""
    stacked = torch.stack([prediction.double() for prediction in predictions])
    if not classes:
        return stacked.mean(0)
    return torch.logsumexp(torch.log_softmax(stacked, -1), 0) - math.log(len(predictions))


class _Tally:
    """Sums over batches, divided once at the end."""

    def __init__(self) -> None:
        self._loss = self._weight = self._right = self._counted = 0.0

    def add(self, prediction: Tensor, targets: Any, weights: Tensor, workload: Workload) -> None:
        self._loss += float(weighted_sum(workload.loss(prediction, targets), weights))
        self._weight += float(weights.sum(dtype=torch.float64))
        if isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point():
            counted = weights > 0
            self._right += int((torch.eq(prediction.argmax(-1), targets) & counted).sum())
            self._counted += int(counted.sum())

    def values(self) -> dict[str, float]:
        accuracy = {"accuracy/eval": self._right / self._counted} if self._counted else {}
        return {"loss/eval": self._loss / self._weight, **accuracy}


def _member(run_file: RunFile, directory: Path, workload: Workload, device: torch.device) -> torch.nn.Module:
    model = model_of(run_file, UserObjects(), device=device, dtype=workload.dtype)
    folder = checkpoint_in(directory)
    saved = set(model.state_dict(keep_vars=True))
    tensors = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in saved}
    read_into(
        read_manifest(folder), folder.parent.parent, {f"model/{n}": t.detach() for n, t in tensors.items()}, cast=True
    )
    return model.eval()


def _prediction(outputs: Any) -> Tensor:
    found = prediction_in(outputs)
    if found is None:
        raise UsageError(
            f"a member returned {described(outputs)}, in which nothing says which tensor is the prediction"
        )
    return found
