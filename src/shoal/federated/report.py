"""What was measured and what a run leaves: loss and accuracy, how both are spread over clients, the figures of a round;
`federated.json`, the model, and a line for each round.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from shoal.data.batches import read_batch
from shoal.data.config import Denominator
from shoal.data.sample import Source
from shoal.engine.loss import prediction_in, weighted_losses
from shoal.federated.local_training import LocalTrainer
from shoal.federated.page import REPORT, write_page
from shoal.observe.facts import replace_file

BATCH = 256


@dataclass
class RoundFigures:
    """What one model cost: simulated seconds since the start, clients, bytes; and what was measured."""

    round: int
    time_s: float = 0.0
    asked: int = 0
    counted: int = 0
    lost: int = 0
    late: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    attempts: int = 1
    values: dict[str, float] = field(default_factory=dict)


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


def of_each(found: Figures, shards: Iterable[np.ndarray]) -> tuple[str, list[float]]:
    """The accuracy of each client on its samples; its loss where there are no classes. And which it is."""
    classes = not bool(found.right.isnan().any())
    values = found.right if classes else found.losses
    weights = torch.ones_like(values) if classes else found.weights
    each = [float(values[ids].sum() / weights[ids].sum().clamp(min=1e-12)) for ids in shards]
    return "accuracy" if classes else "loss", each


def fairness(name: str, each: Sequence[float]) -> dict[str, float]:
    """How a figure differs from client to client: the worst, the tenth part from below, the median, the best and the
    standard deviation."""
    ordered = np.sort(np.asarray(each)) if name == "accuracy" else np.sort(np.asarray(each))[::-1]
    return {
        f"{name}/worst": float(ordered[0]),
        f"{name}/tenth": float(ordered[len(ordered) // 10]),
        f"{name}/median": float(np.median(ordered)),
        f"{name}/best": float(ordered[-1]),
        f"{name}/deviation": float(ordered.std()),
    }


WEIGHTS = "model.safetensors"
COLUMNS = ("round", "time", "clients", "lost", "up", "loss", "accuracy")


def line_of(row: RoundFigures) -> str:
    """A round in one line, under `heading`."""
    cells = [
        str(row.round),
        f"{row.time_s:.1f} s",
        f"{row.counted}/{row.asked}",
        str(row.lost),
        f"{row.up_bytes / 1e6:.2f} MB",
        _figure(row.values, "loss/eval", "loss/train"),
        _figure(row.values, "accuracy/eval"),
    ]
    return "  ".join(cell.rjust(10) for cell in cells)


def heading() -> str:
    """The names of the columns of `line_of`."""
    return "  ".join(name.rjust(10) for name in COLUMNS)


def result_of(
    rows: Sequence[RoundFigures],
    *,
    facts: Mapping[str, Any],
    clients: Mapping[str, Sequence[float]],
    refused: Sequence[str],
) -> dict[str, Any]:
    """One JSON object: what the run was, totals, each round, how clients fare, and who was refused. `clients`: of each
    its samples, the rounds in which it counted and, where that is known, its accuracy or its loss.
    """
    measured = next((name for name in ("accuracy", "loss") if name in clients), None)
    return {
        **facts,
        "totals": {
            "rounds": len(rows),
            "time_s": rows[-1].time_s if rows else 0.0,
            **{name: sum(getattr(row, name) for row in rows) for name in ("counted", "lost", "late")},
            "up_bytes": sum(row.up_bytes for row in rows),
            "down_bytes": sum(row.down_bytes for row in rows),
        },
        "fairness": {} if measured is None else fairness(measured, clients[measured]),
        "clients": {name: list(values) for name, values in clients.items()},
        "refused": list(refused),
        "rounds": [asdict(row) for row in rows],
    }


def row_of(row: Mapping[str, Any]) -> RoundFigures:
    """The figures of a round, from a line that they were written to. One that was not finite is null there, and left
    out here."""
    values = {name: value for name, value in row.get("values", {}).items() if value is not None}
    return msgspec.convert({**row, "values": values}, RoundFigures)


def write(directory: Path, result: Mapping[str, Any], models: Sequence[Mapping[str, Tensor]]) -> None:
    """Writes the report, its page and the models, each whole or not at all: `model.safetensors`, of several also
    `model-2.safetensors` and so on."""
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / REPORT, json.dumps(result, indent=1).encode())
    for number, parameters in enumerate(models, start=1):
        path = directory / (WEIGHTS if number == 1 else f"model-{number}.safetensors")
        replace_file(path, save({name: tensor.contiguous() for name, tensor in parameters.items()}))
    write_page(directory)


def _figure(values: Mapping[str, float], *names: str) -> str:
    found = next((values[name] for name in names if name in values), None)
    return "" if found is None else f"{found:.4f}"
