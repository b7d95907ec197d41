"""What a federated run leaves in its directory: `federated.json`, the model, and a line for each round."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import save
from torch import Tensor

from shoal.federated.simulation import RoundFigures

REPORT, WEIGHTS = "federated.json", "model.safetensors"
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
    rows: Sequence[RoundFigures], *, facts: Mapping[str, Any], fairness: Mapping[str, float], refused: Sequence[str]
) -> dict[str, Any]:
    """One JSON object: what the run was, totals, each round, how clients fare, and who was refused."""
    return {
        **facts,
        "totals": {
            "rounds": len(rows),
            "time_s": rows[-1].time_s if rows else 0.0,
            **{name: sum(getattr(row, name) for row in rows) for name in ("counted", "lost", "late")},
            "up_bytes": sum(row.up_bytes for row in rows),
            "down_bytes": sum(row.down_bytes for row in rows),
        },
        "fairness": dict(fairness),
        "refused": list(refused),
        "rounds": [asdict(row) for row in rows],
    }


def row_of(row: Mapping[str, Any]) -> RoundFigures:
    """The figures of a round, from a line that they were written to."""
    return msgspec.convert(row, RoundFigures)


def write(directory: Path, result: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
    """Writes both files, each whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    replace(directory / REPORT, json.dumps(result, indent=1).encode())
    replace(directory / WEIGHTS, save({name: tensor.contiguous() for name, tensor in parameters.items()}))


def replace(path: Path, content: bytes) -> None:
    """Writes a file that survives a crash: the old one, or all of the new one."""
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _figure(values: Mapping[str, float], *names: str) -> str:
    found = next((values[name] for name in names if name in values), None)
    return "" if found is None else f"{found:.4f}"
