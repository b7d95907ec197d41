"""What a rank keeps of the generations of an elastic run that are over: no thread."""

from __future__ import annotations

import contextlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from shoal.assembly.job import build_job, run_start
from shoal.assembly.objects import UserObjects
from shoal.assembly.process import open_process
from shoal.assembly.splitting import microbatching
from shoal.assembly.workload import build_workload
from shoal.checkpoint.commit import newest_verified
from shoal.elastic.generation import Generations
from shoal.elastic.state_copy import held_state
from shoal.engine.loop import steps
from shoal.launcher.environment import Place
from shoal.observe.sink import Sinks
from shoal.resilience.events import View
from shoal.runfile.run_file import RunFile
from tests.ranks import TestPlace
from tests.verification.layouts import corpus, run_file_of
from tests.waiting import wait_until

GENERATIONS = 10
MEMBERS = ("a", "b")


TABLES: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "gloo": {"wire": {"transport": "gloo"}},
    "checked": {"wire": {"transport": "gloo", "check_collectives": True}},
    "ZeRO-2": {"memory": {"zero": 2}},
    "ZeRO-3": {"memory": {"zero": 3}},
    "priority": {"gradients": {"schedule": "priority"}},
}


def lived(place: TestPlace, folder: str, tables: dict[str, Any]) -> None:
    """Ten generations in which this rank takes two steps; then its threads become as many as after the second."""
    run_file = run_file_of(Path(folder), **tables, checkpoint={"every_steps": 1})
    run = msgspec.structs.replace(run_file.run, processes=place.size, directory=f"{folder}/run", steps=2)
    run_file = msgspec.structs.replace(run_file, run=run)
    here = Place(place.rank, place.size, place.rank, place.size, 0, "shoal")
    process = open_process(run_file, here, store=place.store)
    layout = run_file.layout.layout(place.size)
    micro_samples = microbatching(run_file, layout).samples
    workload = build_workload(run_file, process, UserObjects(), layout=layout, micro_samples=micro_samples)
    generations, early = Generations(run_file, workload), list[str]()
    for number in range(1, GENERATIONS + 1):
        store = dist.PrefixStore(f"generation {number}", place.store)
        _one(run_file, generations, here, store, number)
        early = threads() if number == 2 else early
    wait_until(lambda: len(threads()) <= len(early), lambda: f"{early}, then {threads()}")


def _one(run_file: RunFile, generations: Generations, here: Place, store: dist.Store, number: int) -> None:
    view = View(number, number, MEMBERS, MEMBERS, 0, 0, 0, ())
    run = generations.open(open_process(run_file, here, store=store), view)
    with ExitStack() as stack:
        sinks = stack.enter_context(Sinks())
        job = build_job(run, Path(f"{run_file.run.directory}/{number}"), sinks, stack, stop_requested=lambda: False)
        stack.callback(job.saver.close)
        sinks.start(run_start(run))
        for pending in steps(job):
            pending.result = job.step(pending.number, pending.microbatches, lr=pending.lr)
    run.process.rendezvous.barrier("over")  # nobody is in a collective any more
    run.end()


def threads() -> list[str]:
    """By their names in the kernel."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text().strip())
    return sorted(names)


@pytest.mark.slow
@pytest.mark.parametrize("case", TABLES)
def test_ten_generations_leave_no_thread(ranks, tmp_path: Path, case: str) -> None:
    """Groups, feeds, savers and watches end with the generation that they were made for."""
    corpus(tmp_path)
    ranks(2, lived, str(tmp_path), TABLES[case])


def saves_alone(place: TestPlace, folder: str) -> None:
    """A replica of one rank trains two steps, and saves what it holds when its generation is over."""
    run_file = run_file_of(Path(folder), checkpoint={"every_steps": 0})
    run = msgspec.structs.replace(run_file.run, processes=1, directory=f"{folder}/run", steps=9)
    run_file = msgspec.structs.replace(run_file, run=run)
    here = Place(0, 1, 0, 1, 0, "shoal")
    process = open_process(run_file, here, store=place.store)
    micro_samples = microbatching(run_file, run_file.layout.layout(1)).samples
    layout = run_file.layout.layout(1)
    workload = build_workload(run_file, process, UserObjects(), layout=layout, micro_samples=micro_samples)
    generations = Generations(run_file, workload)
    alone = open_process(run_file, here, store=dist.PrefixStore("first", place.store))
    run = generations.open(alone, View(1, 1, ("a",), ("a",), 0, 0, 0, ()))
    held = []
    with ExitStack() as stack:
        job = build_job(run, Path(folder, "run"), stack.enter_context(Sinks()), stack, stop_requested=lambda: False)
        for pending in steps(job):
            if pending.number == 3:  # two are done
                held.append(held_state(run.state).copied())
                break
            pending.result = job.step(pending.number, pending.microbatches, lr=pending.lr)
    run.end()
    for newest, said in (
        (False, "others have gone on from a newer state"),
        (True, "the state after step 2 is saved"),
        (True, "the checkpoint of step 2 has the newest state"),
    ):
        alone = open_process(run_file, here, store=dist.PrefixStore(said, place.store))
        assert generations.save(held[0], alone, Path(folder, "run"), newest=newest).startswith(said)
    manifest, _ = newest_verified(Path(folder, "run"))
    assert manifest is not None
    assert manifest.step == 2


def test_a_replica_saves_what_it_holds_without_the_others(ranks, tmp_path: Path) -> None:
    """A verified checkpoint of the step; a second replica that holds no newer state leaves it alone."""
    corpus(tmp_path)
    ranks(1, saves_alone, str(tmp_path))
