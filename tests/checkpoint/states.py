"""States to save, savers for threads, and what a run directory must look like when nobody saves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from hypothesis import settings
from torch import Tensor

from shoal.checkpoint.agreement import LocalExchange
from shoal.checkpoint.commit import checkpoints, read_manifest
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.objects import TEMPORARY, Places
from shoal.checkpoint.plan import Item, plan_for
from shoal.checkpoint.save import Saver, SaveReport
from shoal.checkpoint.tensorfile import Parcel, TensorSpec
from shoal.topology.holding import whole
from tests.waiting import HANG_S

light = settings(deadline=None, max_examples=50)
"""Properties on machines whose cores are busy: fewer examples, and no verdict on time."""

OBJECT_BYTES = 4096
"""Small enough that a few kilobytes of state take several objects."""

LAYOUT = {"replicate": 1}


def state_of(step: int) -> dict[str, Tensor]:
    """Seeded tensors of several types and shapes, larger and smaller than an object; `model/frozen` never changes."""
    draw = torch.Generator().manual_seed(step)
    return {
        "model/weight": torch.randn(70, 41, generator=draw),
        "model/bias": torch.randn(41, generator=draw).to(torch.bfloat16),
        "model/frozen": torch.arange(4096, dtype=torch.int64),
        "model/mask": torch.rand(5, generator=draw) > 0.5,
        "model/empty": torch.empty(0, 3),
        "optimizer/step": torch.tensor(float(step)),
        "optimizer/moment": torch.randn(70, 41, generator=draw, dtype=torch.float64),
    }


def saver_for(directory: Path, **options: Any) -> Saver:
    """A saver of one rank, with small objects; `options` are arguments of `Saver` and keys of `[checkpoint]`."""
    keys = {name: options.pop(name) for name in CheckpointConfig.__struct_fields__ if name in options}
    defaults: dict[str, Any] = {"rank": 0, "world_size": 1, "exchange": LocalExchange(), "timeout_s": HANG_S}
    config = msgspec.structs.replace(CheckpointConfig(object_bytes=OBJECT_BYTES), **keys)
    return Saver(directory, **{**defaults, "config": config, **options})


def save(saver: Saver, step: int, tensors: Mapping[str, Tensor] | None = None) -> SaveReport:
    """Save the state of `step` and wait for what became of it."""
    saver.save(step, state_of(step) if tensors is None else tensors, {"step": step}, layout=LAYOUT)
    (report,) = saver.wait(HANG_S)
    return report


def on_ranks(world_size: int, work: Callable[[int], None]) -> None:
    """Run `work(rank)` on a thread a rank; the first exception is raised here."""
    failures: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    if failures:
        raise failures[0]


def parcels(specs: Iterable[TensorSpec], object_bytes: int) -> list[Parcel]:
    """The objects of one rank that holds whole tensors of these `specs`."""
    items = [Item(spec.name, spec.dtype, spec.shape, (whole(spec.shape),)) for spec in specs]
    return plan_for({(0,): items}, world_size=1, object_bytes=object_bytes).parcels


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Equal names, types, shapes and bits."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and torch.equal(a[name], b[name])
        for name in a
    )


def leftovers(directory: Path) -> list[str]:
    """Temporary files, and objects that no checkpoint names: a directory at rest has none."""
    places = Places(directory)
    named = {places.object(digest).name for path in checkpoints(directory) for digest in read_manifest(path).objects}
    found = [path.name for folder in (places.root, places.objects) for path in folder.iterdir()]
    return [
        name for name in found if name.startswith(TEMPORARY) or (name.endswith(".safetensors") and name not in named)
    ]
