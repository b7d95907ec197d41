"""Ranks that call differently in shared memory are told, whatever differs, and nobody waits for long."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from tests.comm.shm.test_group import options, shared

Call = Callable[[Any, Tensor], Any]
TOLD_S = 5.0
"""Far below the timeout."""


def rooted(name: str, root: int) -> Call:
    """A call of this root; blocks and outputs for whoever needs some."""

    def call(group: Any, x: Tensor) -> Any:
        kind = {"broadcast": c10d.BroadcastOptions, "reduce": c10d.ReduceOptions}.get(name)
        if kind is not None:
            return getattr(group, name)([x], options(kind, root=root))
        blocks = [torch.empty_like(x) for _ in range(group.size())] if group.rank() == root else []
        if name == "gather":
            return group.gather([blocks], [x], options(c10d.GatherOptions, root=root))
        return group.scatter([x], [blocks], options(c10d.ScatterOptions, root=root))

    return call


def unrooted(name: str) -> Call:
    def call(group: Any, x: Tensor) -> Any:
        if name == "all_reduce":
            return group.allreduce([x], options(c10d.AllreduceOptions))
        if name == "all_gather":
            return group.all_gather_single(x.new_empty(group.size() * x.numel()), x)
        if name == "all_to_all":
            return group.all_to_all_single(torch.empty_like(x), x, [], [])
        return group.barrier()

    return call


ROOTED = ("broadcast", "reduce", "gather", "scatter")
CALLS = {f"{name} to {root}": rooted(name, root) for name in ROOTED for root in (0, 1)}
CALLS |= {name: unrooted(name) for name in ("all_reduce", "all_gather", "all_to_all", "barrier")}
SMALL, LARGE = 12, 1 << 19


def cases() -> dict[str, tuple[tuple[Call, Tensor], tuple[Call, Tensor]]]:
    """What the two ranks call, by name: every two calls, with tensors that go in one turn and in several; and every
    call with another dtype.
    """
    found = {}
    for numel in (SMALL, LARGE):
        x = torch.ones(numel)
        for one, mine in CALLS.items():
            for other, theirs in CALLS.items():
                if one != other:
                    found[f"{one}, {other} of {numel}"] = ((mine, x), (theirs, x))
            if one != "barrier":
                found[f"{one} of {numel} of two dtypes"] = ((mine, x), (mine, x.view(torch.int32)))
    return found


def all_cases(place: Any) -> dict[str, tuple[list[str], float]]:
    """The errors of each case and of the next call in its group, and the seconds until then."""
    found = {}
    for name, calls in cases().items():
        group = shared(place, name)
        call, x = calls[place.rank]
        begin_s, said = time.perf_counter(), []
        for each in (call, unrooted("barrier")):
            try:
                each(group, x.clone()).wait()
                said.append("")
            except RuntimeError as error:
                said.append(str(error))
        found[name] = said, time.perf_counter() - begin_s
        group.close()
    return found


@pytest.mark.slow
def test_ranks_that_call_differently_are_told(ranks: Any) -> None:
    """At the latest with the next call, and one of them with both calls; two roots, of which each waits for the other,
    as well.
    """
    first, second = ranks(2, all_cases)
    assert len(first) > 250
    for name in first:
        both = [first[name], second[name]]
        assert any(" called " in each and "in the same order" in each for said, _ in both for each in said), (
            name,
            both,
        )
        assert all(any(said) for said, _ in both), (name, both)
        assert max(seconds for _, seconds in both) < TOLD_S, (name, both)


def disagreement(place) -> str:
    """Rank 0 sums, rank 1 broadcasts something else."""
    group = shared(place)
    try:
        if place.rank == 0:
            group.allreduce([torch.ones(5)]).wait()
        else:
            group.broadcast([torch.ones(7)], options(c10d.BroadcastOptions, root=1)).wait()
            group.barrier().wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_ranks_that_disagree_are_told(ranks) -> None:
    """Who called what, on the rank that finds out, at once."""
    first, second = ranks(2, disagreement)
    assert first == (
        "rank 0 called all_reduce of 20 bytes (sum of float32), rank 1 of the group broadcast of 28 bytes in "
        "float32 with root 1: all ranks must make the same calls in the same order"
    )
    assert second != "no error"


def of_wrong_size(place) -> str:
    group = shared(place)
    try:
        if place.rank == 0:
            group.send([torch.ones(5)], 1, 0).wait()
            group.barrier().wait()
        group.recv([torch.ones(4)], 0, 0).wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_message_of_another_size_is_an_error(ranks) -> None:
    """Nothing is cut off or left over."""
    assert ranks(2, of_wrong_size)[1] == "rank 0 of the group sends 20 bytes, rank 1 expects 16"


def of_another_dtype(place: Any) -> list[str]:
    """A message that is asked for before it comes, and one that waits for who asks."""
    said = []
    for asked_first in (True, False):
        group = shared(place, f"asked first: {asked_first}")
        try:
            if place.rank == 0:
                group.barrier().wait() if asked_first else None
                group.send([torch.ones(4)], 1, 0).wait()
                group.barrier().wait() if not asked_first else None
            elif asked_first:
                work = group.recv([torch.ones(4, dtype=torch.int32)], 0, 0)
                with suppress(RuntimeError):  # where the message came before it, the group has failed
                    group.barrier().wait()
                work.wait()
            else:
                group.barrier().wait()
                group.recv([torch.ones(4, dtype=torch.int32)], 0, 0).wait()
        except RuntimeError as error:
            said.append(str(error))
        group.close()
    return said


def test_a_message_of_another_dtype_is_an_error(ranks: Any) -> None:
    """Its bits would be other numbers."""
    wanted = "rank 1 called recv of 16 bytes in int32, rank 0 of the group send of 16 bytes in float32: all ranks must"
    said = ranks(2, of_another_dtype)[1]
    assert len(said) == 2
    assert all(each.startswith(wanted) for each in said), said


def in_turn(place: Any) -> str:
    """A call that fails, and another one."""
    group, said = shared(place), ""
    for tensor in (torch.ones(4), torch.ones(4, dtype=torch.int32))[place.rank], torch.ones(4):
        try:
            group.allreduce([tensor]).wait()
        except RuntimeError as error:
            said = str(error)
    return said


def test_a_call_after_one_that_failed_does_not_take_its_fault_for_its_own(ranks: Any) -> None:
    """It says that an earlier one has failed, or that a rank gave up on another."""
    for said in ranks(2, in_turn):
        assert said.startswith(
            ("an earlier call of this group has failed because of rank ", "another rank of the group")
        )
