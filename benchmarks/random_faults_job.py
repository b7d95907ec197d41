"""The small job of `benchmarks.random_faults`, the same on both sides: a model, its data, and a record of what is used.

A step waits in the place of a device's work, as many seconds as the variable that `STEP` names says, so that a host of
few cores has time to start processes. Each forward appends a line to the file that the variable `RECORD` names: when it
was, its step, and the samples. The step is a buffer of the model, so it goes back with the weights where a side goes
back.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

RECORD, STEP = "RANDOM_FAULTS_RECORD", "RANDOM_FAULTS_STEP_S"
SAMPLES, BATCH = 1 << 18, 12


class Used(NamedTuple):
    """A line of the record: Unix time, and the samples of one forward of `step`, counted from 1."""

    time_s: float
    step: int
    ids: list[int]


class Numbers:
    """Sample i is the number i / `SAMPLES`, exact in float32, and its class the remainder by three."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index / SAMPLES, 1.0]), torch.tensor(index % 3)


class Recording(nn.Module):
    """Two linear layers, which write down what they are trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 3))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[batch, 3]` of inputs `[batch, 2]`."""
        if self.training:
            self.step += 1
            ids = (x[:, 0].double() * SAMPLES).round().long().tolist()
            _append(Path(os.environ[RECORD]), Used(time.time(), int(self.step), ids))
            time.sleep(float(os.environ[STEP]))
        return self.layers(x)


def model() -> nn.Module:
    """For `model.build`."""
    return Recording()


def data() -> tuple[Numbers, None]:
    """For `data.build`: nothing is held out."""
    return Numbers(), None


def read_record(path: Path, *, offset: int = 0) -> tuple[list[Used], int]:
    """The whole lines from byte `offset` on, and the byte after them; none where there is no file yet."""
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    return list(_parsed(whole)), offset + len(whole)


def _parsed(content: bytes) -> Iterator[Used]:
    return (Used(*json.loads(line)) for line in content.splitlines())


def _append(path: Path, used: Used) -> None:
    """One write: lines of several ranks do not mix, and a killed rank leaves no half of one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, json.dumps(used).encode() + b"\n")
    os.close(descriptor)
