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

from shoal.checkpoint.inventory import parts_of
from shoal.checkpoint.save import Saver
from shoal.comm.gather import gather_named
from shoal.data.cursor import Cursor
from shoal.engine.resume import resume
from shoal.launch.environment import Place
from shoal.launch.store_exchange import StoreExchange
from shoal.recipes.assembly import new_feed, new_state, new_step, new_sync
from shoal.recipes.objects import Given
from shoal.recipes.setting import Setting, set_up
from tests.ranks import TestPlace
from tests.recipes.layouts import run_file_of

LR = 2e-3


@dataclass
class Leg:
    """One part of the journey, as rank 0 tells of it: losses, and the whole state as it was at its two ends."""

    losses: list[float]
    came: dict[str, Tensor]
    left: dict[str, Tensor]


def travel(place: TestPlace, tables: dict[str, Any], folder: str, run: str, steps: int) -> Leg | None:
    """Goes on from the newest checkpoint of `run`, takes `steps` and saves, all under the layout of `tables`."""
    directory = Path(folder) / run
    run_file = run_file_of(Path(folder), **tables)
    own = msgspec.structs.replace(run_file.run, processes=place.size, directory=str(directory))
    run_file = msgspec.structs.replace(run_file, run=own)
    here = Place(place.rank, place.size, place.rank, place.size, 0, "shoal")
    setting = set_up(run_file, here, Given(), store=place.store)
    sync = new_sync(setting)
    state = new_state(setting, sync)
    resume(state, directory, announce=setting.announce, warn=print)
    sync.parameters()
    came, step, losses = whole_state(setting, state), new_step(setting, state, sync), []
    with closing(new_feed(setting, state.cursor)) as feed:
        for _ in range(steps):
            fed = feed.next()
            state.step += 1
            state.cursor = Cursor.at(fed.interval.stop)
            losses.append(step(state.step, fed.microbatches, lr=LR).loss)
    left = whole_state(setting, state)
    save(setting, state, directory, place)
    return Leg(losses, came, left) if place.rank == 0 else None


def save(setting: Setting, state: Any, directory: Path, place: TestPlace) -> None:
    """A checkpoint, waited for."""
    saver = Saver(
        directory, rank=place.rank, world_size=place.size, exchange=StoreExchange(place.store), keep=2, split=True
    )
    saver.save(state.step, state.tensors(), state.to_json(), layout=setting.mesh.layout.to_dict())
    (report,) = saver.wait(60.0)
    assert report.committed, report.error
    saver.close()
    setting.mesh.world.barrier().wait()


def whole_state(setting: Setting, state: Any) -> dict[str, Tensor]:
    """Every tensor of the state of all ranks, put together at rank 0."""
    own = [
        (f"{name}|{list(target.global_shape)}|{list(target.offset)}", target.tensor)
        for name, targets in parts_of(state.tensors()).items()
        for target in targets
    ]
    whole: dict[str, Tensor] = {}
    for named in gather_named(own, setting.mesh.world, device=setting.device):
        for key, values in named:
            name, shape, offset = key.split("|")
            box = tuple(slice(o, o + s) for o, s in zip(json.loads(offset), values.shape, strict=True))
            if name not in whole:
                whole[name] = torch.full(json.loads(shape), float("nan"), dtype=values.dtype)
            whole[name][box] = values
    return whole
