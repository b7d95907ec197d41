"""The state of servers goes on when a worker is lost: survivors put the parts together, in other roles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from shoal.assembly.run import Run, open_run
from shoal.elastic.committed_state import CommittedState, gather_served, own_parts, served_parts
from shoal.elastic.generation import skip_steps, take_state
from shoal.elastic.state_copy import HeldState, held_state
from shoal.launcher.environment import Place
from shoal.resilience.events import View
from tests.ranks import TestPlace
from tests.verification.layouts import GPT, corpus, run_file_of

Tables = dict[str, Any]
Parts = dict[tuple[str, tuple[int, ...]], Tensor]
LR, STEPS = 1e-2, 4
SMALL = GPT | {"layers": 1, "width": 16, "feed_forward_width": 24}


def servers(admission: str = "sync", number: int = 2, **keys: Any) -> Tables:
    return {"kind": "server", "admission": admission, "servers": number, **keys}


def opened(
    place: TestPlace, folder: str, sync: Tables, *, ranks: list[int], generation: str, codec: Tables | None = None
) -> Run:
    """The run of this process as rank `ranks.index` of those in `ranks`."""
    run_file = run_file_of(
        Path(folder), model=SMALL, sync=sync, batch={"global_samples": 6, "sequence": 8},
        run={"steps": 40, "processes": len(ranks)}, optimizer={"kind": "adamw", "lr": 1e-2, "clip_norm": None},
        precision={"kind": "float64"}, codec=codec or {"kind": "none"},
    )  # fmt: skip
    rank = ranks.index(place.rank)
    here = Place(rank, len(ranks), rank, len(ranks), 0, "shoal")
    return open_run(run_file, here, store=PrefixStore(generation, place.store))


@dataclass
class Found:
    """What one rank came to: the step, how many of them the servers were ahead, and its weights; what it serves, what
    it served before, and what it served at the last agreement before.
    """

    step: int
    ahead: int | None
    weights: dict[str, Tensor]
    parts: Parts
    before: Parts
    agreed: Parts


def parts_of_run(run: Run) -> Parts:
    found = served_parts(run)
    return {(name, tuple(part.offset)): part.tensor.detach().clone() for name, own in found.items() for part in own}


def cut_off(
    place: TestPlace, run: Run, sync: Tables, noted: Callable[[Run], Any], *, steps: int, cut: int
) -> tuple[Any, Any, Any]:
    """`steps` steps and then `cut` of the next round, which nobody ends: what this rank carries over, and what `noted`
    finds at the last agreement and now."""
    committed, progress, agreement = CommittedState(None), run.state.progress, run.generation.agreement
    committed.take_over(run, None)
    with closing(run.feed()) as feed:
        for number in range(1, steps + 1):
            fed = feed.next()
            run.step(number, fed.microbatches, lr=LR)
            progress.advance(fed.interval)
            if agreement.equal:
                committed.commit()
        agreed = noted(run)
        serves = place.rank >= place.size - sync["servers"]
        for number in range(steps + 1, steps + cut + 1):
            if not serves:
                run.step(number, feed.next().microbatches, lr=LR)
            elif number == steps + 1:
                agreement.before_step()
    meet(place, "cut")
    held, now = committed.carried_over(), noted(run)
    meet(place, "held")
    run.end()
    return held, agreed, now


def meet(place: TestPlace, where: str) -> None:
    """All ranks come here."""
    place.store.set(f"{where}/{place.rank}", "")
    place.store.wait([f"{where}/{rank}" for rank in range(place.size)])


def carry_over(place: TestPlace, folder: str, sync: Tables, survivors: list[int], steps: int, cut: int = 0) -> Found:
    """`steps` steps and then `cut` of the next round, which nobody ends; a generation of `survivors`, in that order."""
    run = opened(place, folder, sync, ranks=list(range(place.size)), generation="one")
    held, agreed, before = cut_off(place, run, sync, parts_of_run, steps=steps, cut=cut)
    if place.rank not in survivors:
        return Found(-1, None, {}, {}, before, agreed)
    run = opened(place, folder, sync, ranks=survivors, generation="two")
    ahead = gather_served(run.state, held, run.mesh.axis("replicate"), run.device)
    skip_steps(run, ahead or 0)
    weights = {f"model/{name}": p.detach().clone() for name, p in run.model.named_parameters()}
    found = Found(run.state.progress.step, ahead, weights, parts_of_run(run), before, agreed)
    run.end()
    return found


def joined(parts: list[Parts]) -> Parts:
    return {name: tensor for own in parts for name, tensor in own.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    corpus(folder)
    return folder


@pytest.mark.slow
@pytest.mark.matrix(rows=(0, 3))
@pytest.mark.parametrize(
    ("sync", "cut", "ahead"),
    [
        (servers(), 0, 0),
        (servers(period=4), 2, 0),
        (servers("bounded", bound=0, period=4), 2, 0),
        (servers("async", period=4), 3, 3),
        (servers("bounded", bound=1, period=4), 2, 2),
        (servers("backup", backup=1, period=4), 2, 2),
    ],
    ids=["sync", "sync in a round", "bounded by 0", "async", "bounded", "backup"],
)
def test_a_lost_worker_takes_nothing_along(ranks, folder: Path, sync: Tables, cut: int, ahead: int) -> None:
    """Workers 0, 1, 2 and servers 3, 4 become, without 2, workers 0, 3 and servers 4, 1: every weight and moment of
    the servers is there, that of the last agreement where all updates are of one step, and else the newest; every
    worker computes with it; and the steps that one worker had made count.
    """
    found = ranks(5, carry_over, str(folder), sync, [0, 3, 4, 1], STEPS, cut)
    left = [one for rank, one in enumerate(found) if rank != 2]
    assert {(one.ahead, one.step) for one in left} == {(ahead, STEPS + ahead)}
    wanted = joined([one.before if ahead else one.agreed for one in found])
    now = joined([one.parts for one in left])
    assert any(name.startswith("optimizer/exp_avg/") for name, _ in wanted)
    assert now.keys() == wanted.keys()
    for (name, offset), part in wanted.items():
        if name.startswith("optimizer/"):
            assert torch.equal(now[name, offset], part), name
            continue
        place = tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))
        assert all(torch.equal(one.weights[name][place], part) for one in left), name
    assert moved(found) == (cut > 0)


def unsent(run: Run) -> dict[str, Tensor]:
    """What this rank has not pushed, by parameter."""
    parts = own_parts(held_state(run.state))
    return {name.rpartition("/")[2]: own[0].tensor.detach().clone() for name, own in parts.items()}


def carry_pushes(
    place: TestPlace, folder: str, sync: Tables, survivors: list[int], cut: int
) -> list[dict[str, Tensor]]:
    """What this rank has not pushed: at the last agreement; `cut` steps later, when others are lost; and in the next
    generation of `survivors`, in that order.
    """
    codec = {"kind": "top_k", "fraction": 0.1}
    run = opened(place, folder, sync, ranks=list(range(place.size)), generation="one", codec=codec)
    held, agreed, newest = cut_off(place, run, sync, unsent, steps=STEPS, cut=cut)
    if place.rank not in survivors:
        return [agreed, newest, {}]
    run = opened(place, folder, sync, ranks=survivors, generation="two", codec=codec)
    view = View(1, 2, (), ("all",), STEPS, 0, 0)
    take_state(run, view, CommittedState(held), lambda: None)
    found = [agreed, newest, unsent(run)]
    run.end()
    return found


@pytest.mark.slow
@pytest.mark.matrix(first=1)
@pytest.mark.parametrize(
    ("sync", "cut"), [(servers(period=4), 2), (servers("async", period=4), 3)], ids=["sync in a round", "async"]
)
def test_workers_keep_what_they_have_not_pushed(ranks, folder: Path, sync: Tables, cut: int) -> None:
    """Workers 0, 1, 2 and servers 3, 4 become, without 2, workers 0, 3 and servers 4, 1: what 0 and 1 had not pushed at
    the last agreement, or where servers keep what came later the newest, is 0's; what 2 had not pushed is gone.
    """
    found = ranks(5, carry_pushes, str(folder), sync, [0, 3, 4, 1], cut)
    which = 0 if sync["admission"] == "sync" else 1
    wanted = {name: found[0][which][name] + found[1][which][name] for name in found[0][which]}
    assert all(any(value.any() for value in found[rank][which].values()) for rank in (0, 1, 2))
    assert any(not torch.equal(value, found[0][0][name]) for name, value in found[0][1].items())
    now = found[0][2]
    assert now.keys() == wanted.keys()
    assert all(torch.equal(now[name], value) for name, value in wanted.items())
    assert [found[rank][2] for rank in (3, 4, 1)] == [{}, {}, {}]


def moved(found: list[Found]) -> bool:
    """Whether servers made updates after the last agreement."""
    before, agreed = joined([one.before for one in found]), joined([one.agreed for one in found])
    return any(not torch.equal(before[name], tensor) for name, tensor in agreed.items())


@pytest.mark.parametrize("sync", [servers(), servers("async", period=4)], ids=["sync", "async"])
def test_a_lost_server_is_noticed_by_all(ranks, folder: Path, sync: Tables) -> None:
    """Its part is nowhere else: nobody takes over anything, and all know it."""
    found = ranks(5, carry_over, str(folder), sync, [0, 1, 2, 3], STEPS, 0)
    assert [one.ahead for one in found[:4]] == [None] * 4
    assert [one.step for one in found[:4]] == [0] * 4


def test_where_workers_serve_nothing_is_left(ranks, folder: Path) -> None:
    """Each loss takes a part along: the run resumes from the newest checkpoint."""
    held = ranks(2, held_of, str(folder), {"kind": "server"})
    assert held == [None, None]


def held_of(place: TestPlace, folder: str, sync: Tables) -> HeldState | None:
    run = opened(place, folder, sync, ranks=[0, 1], generation="one")
    committed = CommittedState(None)
    committed.take_over(run, None)
    held = committed.carried_over()
    run.end()
    return held
