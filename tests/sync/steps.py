"""Runs of a few steps on real ranks, as the tests of strategies need them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from shoal.assembly.run import Run, open_run
from shoal.engine.recovery import resume
from shoal.launcher.environment import Place
from shoal.runfile.rules import check_across
from tests.assembly.journey import save, whole_state
from tests.ranks import TestPlace
from tests.verification.layouts import run_file_of

Tables = dict[str, Any]
LR, STEPS = 0.05, 12
SGD: Tables = {"optimizer": {"kind": "sgd", "clip_norm": None}, "precision": {"kind": "float64"}}
ADAM: Tables = {"precision": {"kind": "float64"}}
SUM_ORDER = 1e-12  # float64


@dataclass
class Trained:
    """What rank 0 tells of some steps: the whole state, after which steps replicas agreed, and bytes that it sent."""

    state: dict[str, Tensor]
    agreed: list[bool]
    sent: list[int]

    @property
    def weights(self) -> dict[str, Tensor]:
        """Of the model that is shown."""
        return {name: tensor for name, tensor in self.state.items() if name.startswith("model/")}

    def own(self, replica: int) -> dict[str, Tensor]:
        """A replica's own parameters, under the names of the model's."""
        prefix = f"sync/replica-{replica}/x/"
        return {
            f"model/{name.removeprefix(prefix)}": tensor
            for name, tensor in self.state.items()
            if name.startswith(prefix)
        }


def opened(place: TestPlace, tables: Tables, folder: str, directory: Path, steps: int = STEPS) -> Run:
    """A run of `steps` on these ranks."""
    run_file = run_file_of(Path(folder), **tables)
    own = msgspec.structs.replace(run_file.run, processes=place.size, directory=str(directory), steps=steps)
    run_file = msgspec.structs.replace(run_file, run=own)
    check_across(run_file, file="steps.toml")
    return open_run(run_file, Place(place.rank, place.size, place.rank, place.size, 0, "shoal"), store=place.store)


def train(
    place: TestPlace,
    tables: Tables,
    folder: str,
    first: int = 0,
    last: int = STEPS,
    name: str = "",
    rates: Sequence[float] = (),
) -> Trained:
    """Steps `first` + 1 .. `last`, from a checkpoint of `name` if there is one, saved there. `rates`: of the steps."""
    directory = Path(folder) / (name or "unused")
    run, agreed, sent = opened(place, tables, folder, directory), [], []
    if first:
        resume(run.state, directory, announce=run.process.announce, warn=print)
    run.mesh.ledger.take()
    progress = run.state.progress
    with closing(run.feed()) as feed:
        for number in range(first, last):
            fed = feed.next()
            progress.advance(fed.interval)
            lr = rates[number] if rates else LR
            result = run.step(progress.step, fed.microbatches, lr=lr)
            agreed.append(result.agreed is not None)
            sent.append(result.bytes_sent)
    if name:
        save(run, directory, place)
    return Trained(whole_state(run), agreed, sent)


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest relative difference of two sets of tensors of the same names."""
    assert one.keys() == other.keys()
    assert one, "there is nothing to compare"
    return max(float((one[name] - tensor).norm() / tensor.norm()) for name, tensor in other.items())


def mean_of(sets: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Name by name."""
    return {name: sum((one[name] for one in sets[1:]), sets[0][name]) / len(sets) for name in sets[0]}
