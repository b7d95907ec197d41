"""A run that changes its layout on the way: trained here, saved, loaded there, trained on."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal.assembly.run import Run, open_run
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.save import Saver
from shoal.comm.board import Board
from shoal.comm.collective import gather_named
from shoal.engine.recovery import resume
from shoal.launcher.environment import Place
from shoal.state import parts_of
from tests.ranks import TestPlace
from tests.verification.layouts import run_file_of
from tests.waiting import HANG_S

LR = 2e-3


@dataclass
class Leg:
    """One part of the journey, as rank 0 tells of it: losses, and the whole state as it was at its two ends."""

    losses: list[float]
    came: dict[str, Tensor]
    left: dict[str, Tensor]


def travel(place: TestPlace, tables: dict[str, Any], folder: str, name: str, steps: int) -> Leg | None:
    """Goes on from the newest checkpoint of `name`, takes `steps` and saves, all under the layout of `tables`."""
    directory = Path(folder) / name
    run_file = run_file_of(Path(folder), **tables)
    own = msgspec.structs.replace(run_file.run, processes=place.size, directory=str(directory))
    run_file = msgspec.structs.replace(run_file, run=own)
    here = Place(place.rank, place.size, place.rank, place.size, 0, "shoal")
    run = open_run(run_file, here, store=place.store)
    resume(run.state, directory, announce=run.process.announce, warn=print)
    run.generation.gradients.gather()
    came, losses, progress = whole_state(run), [], run.state.progress
    with closing(run.feed()) as feed:
        for _ in range(steps):
            fed = feed.next()
            progress.advance(fed.interval)
            losses.append(run.step(progress.step, fed.microbatches, lr=LR).loss)
    run.generation.gradients.settle()
    left = whole_state(run)
    save(run, directory, place)
    return Leg(losses, came, left) if place.rank == 0 else None


def save(run: Run, directory: Path, place: TestPlace) -> None:
    """A checkpoint, waited for."""
    saver = Saver(
        directory,
        rank=place.rank,
        world_size=place.size,
        exchange=Board(place.store, timeout_s=180).clone(),
        config=CheckpointConfig(keep=2),
        timeout_s=HANG_S,
        split=True,
    )
    state = run.state
    saver.save(state.progress.step, state.tensors(), state.to_json(), layout=run.mesh.layout.to_dict())
    (report,) = saver.wait(HANG_S)
    assert report.committed, report.error
    saver.close()
    run.mesh.world.barrier().wait()


def whole_state(run: Run) -> dict[str, Tensor]:
    """Every tensor of the state of all ranks, put together at rank 0."""
    own = [
        (f"{name}|{list(target.global_shape)}|{list(target.offset)}", target.tensor)
        for name, targets in parts_of(run.state.tensors()).items()
        for target in targets
    ]
    whole: dict[str, Tensor] = {}
    for named in gather_named(own, run.mesh.world, device=run.device):
        for key, values in named:
            name, shape, offset = key.split("|")
            box = tuple(slice(o, o + s) for o, s in zip(json.loads(offset), values.shape, strict=True))
            if name not in whole:
                nothing = float("nan") if values.is_floating_point() else 0
                whole[name] = torch.full(json.loads(shape), nothing, dtype=values.dtype)
            whole[name][box] = values
    return whole
