"""`shoal bench layouts`: a run in many layouts on this machine: seconds and bytes of a step beside their predictions.

All layouts stand side by side in the same processes, those of fewer ranks in some of them, and take their steps in
turn, in an order that changes, so that what slows the machine slows all of them; turns in which other programs took
much of the machine do not count (`quiet`). The bytes of tensors at the peak of a step are taken beforehand, each layout
alone. Predictions stand on the calibration of `shoal bench products`, and on one measured step of the machine, whose
row is marked and left out of the figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.collective import Collective
from shoal.comm.config import WireConfig
from shoal.comm.mesh import Mesh, build_mesh
from shoal.launch.environment import Place
from shoal.launch.rendezvous import open_store
from shoal.memory.allocations import allocated
from shoal.recipes.assembly import new_feed, new_state, new_step, new_sync
from shoal.recipes.benchmarks.layout_cases import CASES, TIMEOUT_S, run_file_of
from shoal.recipes.benchmarks.quiet import in_turn, quiet_median_s
from shoal.recipes.objects import UserObjects
from shoal.recipes.setting import set_up
from shoal.runfile.run_file import RunFile
from shoal.topology.layout import Layout

LR = 1e-4


def measure(place: Place, path: Path, *, overrides: Sequence[str], pairs: int) -> dict[str, Any] | None:
    """By case of at most as many ranks: seconds of every turn, the peak of each rank. None but on the first rank."""
    torch.set_num_threads(1)
    store = open_store(place, os.environ, timeout_s=TIMEOUT_S)
    cases = [case for case in CASES if case.ranks <= place.world_size]
    files = {case.name: run_file_of(path, case, overrides) for case in cases}
    places = {case.name: replace(place, world_size=case.ranks, local_world_size=case.ranks) for case in cases}
    clock = _clock(place, store).world
    peaks, sides = {}, {}
    with ExitStack() as stack:
        for name, run_file in files.items():
            takes_part, own = place.rank < places[name].world_size, PrefixStore(f"peak/{name}", store)
            peaks[name] = peak_bytes(run_file, places[name], own) if takes_part else 0
            clock.barrier().wait()
        for name, run_file in files.items():
            takes_part, own = place.rank < places[name].world_size, PrefixStore(f"time/{name}", store)
            sides[name] = _stepper(run_file, places[name], own, stack) if takes_part else _nothing
        turns = in_turn(sides, clock, turns=pairs)
    found = {
        name: {
            "seconds": quiet_median_s(turns[name]),
            "all_seconds": [turn.seconds for turn in turns[name]],
            "others": [turn.others_s for turn in turns[name]],
            "peak_bytes": _of_all(clock, place, peak),
        }
        for name, peak in peaks.items()
    }
    return found if place.rank == 0 else None


def _clock(place: Place, store: Store) -> Mesh:
    """All ranks, to begin each step together."""
    return build_mesh(
        Layout(replicate=place.world_size),
        place.rank,
        store=PrefixStore("clock", store),
        device=torch.device("cpu"),
        wire=WireConfig(timeout_s=TIMEOUT_S),
    )


def _of_all(clock: Collective, place: Place, own: int) -> list[int]:
    every = torch.zeros(place.world_size, dtype=torch.int64)
    every[place.rank] = own
    clock.all_reduce(every).wait()
    return every.tolist()


def _nothing() -> None:
    """The step of a rank that a layout leaves out."""


def _stepper(run_file: RunFile, place: Place, store: Store, stack: ExitStack) -> Callable[[], Any]:
    """A step of the run, its data included."""
    setting = set_up(run_file, place, UserObjects(), store=store)
    sync = new_sync(setting)
    stack.callback(sync.close)
    state = new_state(setting, sync)
    step = new_step(setting, state, sync)
    feed = stack.enter_context(new_feed(setting, state.cursor))
    numbers = iter(range(1, 10**9))
    return lambda: step(next(numbers), feed.next().microbatches, lr=LR)


def peak_bytes(run_file: RunFile, place: Place, store: Store) -> int:
    """Of the second step: what stays from before, and the most that it adds."""
    with ExitStack() as stack:
        steppers: list[Callable[[], Any]] = []

        def begin() -> None:
            steppers.append(_stepper(run_file, place, store, stack))
            steppers[0]()

        before = allocated(begin)
        return before.stayed_bytes + allocated(steppers[0]).peak_bytes
