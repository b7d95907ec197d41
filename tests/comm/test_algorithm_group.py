"""Collectives made of messages, asked for by name or chosen from measured links, behind the seam."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from shoal.comm.algorithms import execute
from shoal.comm.algorithms.group import Followed
from shoal.comm.collective import GroupCollective
from shoal.comm.config import Algorithm, WireConfig
from shoal.comm.mesh import Mesh, build_mesh
from shoal.comm.volume import bytes_sent
from shoal.topology.layout import Layout
from shoal.topology.links import uniform
from tests.comm.test_collective import everything, expected
from tests.waiting import wait_until

NAMED = [name for name in get_args(Algorithm) if name not in ("backend", "auto")]


def mesh_by(place, algorithm: Algorithm, check: bool) -> Mesh:
    return build_mesh(
        Layout(replicate=place.size),
        place.rank,
        store=torch.distributed.PrefixStore(algorithm, place.store),
        device=torch.device("cpu"),
        wire=WireConfig(timeout_s=180, transport="gloo", algorithm=algorithm, check_collectives=check),
    )


def made(place, algorithm: Algorithm, check: bool) -> tuple[dict[str, torch.Tensor], str, int]:
    mesh = mesh_by(place, algorithm, check)
    results = {name: tensor.clone() for name, tensor in everything(mesh.world).items()}
    return results, mesh.world.group.why, mesh.ledger.take()["all_reduce"].calls


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_by_measured_links_are_what_they_are_defined_to_be(ranks, size: int) -> None:
    """`auto` probes the links and takes a table for every collective; the check stands before it."""
    for rank, (got, why, calls) in enumerate(ranks(size, made, "auto", True)):
        assert why == "gloo: asked for; algorithm: auto"
        assert calls == 3  # the ledger counts collectives, not their messages
        for name, want in expected(rank, size).items():
            assert torch.equal(got[name], want), f"{name} on rank {rank}"


def all_named(place) -> list[str]:
    wrong = []
    for algorithm in NAMED:
        got, _, _ = made(place, algorithm, False)
        want = expected(place.rank, place.size)
        wrong += [f"{algorithm}: {name}" for name in want if not torch.equal(got[name], want[name])]
    return wrong


def test_each_name_is_an_all_reduce_that_adds_up(ranks) -> None:
    """Every algorithm that a run file can name, on three ranks; the other collectives stay Gloo's."""
    assert ranks(3, all_named) == [[]] * 3


def counted(place) -> list[int]:
    """Bytes of a sum of 3,000 numbers, of their product, and of their bitwise or."""
    mesh, sent = mesh_by(place, "one-shot", False), []
    assert isinstance(mesh.world, GroupCollective)
    for op, dtype in ((dist.ReduceOp.SUM, torch.int32), (dist.ReduceOp.PRODUCT, torch.int32),
                      (dist.ReduceOp.MAX, torch.bool)):  # fmt: skip
        options = dist.AllreduceOptions()
        options.reduceOp = op
        mesh.world.group.allreduce([torch.ones(3000, dtype=dtype)], options).wait()
        sent.append(mesh.ledger.take()["all_reduce"].bytes_sent)
    return sent


def test_what_is_left_to_gloo_is_counted_as_gloo_s(ranks) -> None:
    """One shot sends everything to everybody; products, and dtypes without a table, go around Gloo's ring."""
    ring = [bytes_sent("all_reduce", size, size=3, backend="gloo") for size in (12_000, 3000)]
    assert ranks(3, counted) == [[24_000, *ring]] * 3


class SlowedClock:
    """Shows a thousand seconds more for each call that is `slowed`: more than a busy machine costs the others."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def perf_counter(self) -> float:
        return time.perf_counter() + self.ahead_s

    def slowed(self, call: Any) -> Any:
        def waited(*given: Any, **named: Any) -> Any:
            self.ahead_s += 1000.0
            return call(*given, **named)

        return waited


def raced(place, slow: str) -> tuple[list[str], list[int], bool]:
    """What makes sums of 8 KiB and of 1 MiB of an "auto" group where tables or Gloo are slow; the bytes of each."""
    clock = SlowedClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.comm.algorithms.group.time", clock)
        if slow == "tables":
            patch.setattr(execute, "all_reduce", clock.slowed(execute.all_reduce))
        else:
            patch.setattr(GroupCollective, "all_reduce", clock.slowed(GroupCollective.all_reduce))
        mesh = mesh_by(place, "auto", False)
    world: Any = mesh.world
    sums = [torch.full((numel,), place.rank + 1.0) for numel in (2 << 10, 1 << 18)]
    short = torch.full((2 << 10,), place.rank + 1, dtype=torch.int16)  # of which Gloo has no sums
    world.all_reduce(short).wait()
    assert (short == 6).all()
    mesh.ledger.take()
    sent = []
    for tensor in sums:
        world.all_reduce(tensor).wait()
        sent.append(mesh.ledger.take()["all_reduce"].bytes_sent)
    names = [world.group.inner.name_for(tensor.nbytes) for tensor in sums]
    return names, sent, all(bool((tensor == 6.0).all()) for tensor in sums)


@pytest.mark.parametrize("slow", ["tables", "Gloo"])
def test_sums_are_left_to_gloo_where_tables_save_nothing(ranks, slow: str) -> None:
    """Both are timed when the group opens; what is Gloo's own is counted as Gloo's."""
    for names, sent, right in ranks(3, raced, slow):
        assert right
        assert {name == "Gloo's own ring" for name in names} == {slow == "tables"}
        if slow == "tables":
            assert sent == [bytes_sent("all_reduce", size, size=3, backend="gloo") for size in (8 << 10, 1 << 20)]


def followed(place) -> list[int]:
    """Bytes of the same sum before and after its table has changed, and after Gloo has taken over."""
    mesh, sent = mesh_by(place, "auto", False), []
    assert isinstance(mesh.world, GroupCollective)
    group: Any = mesh.opened()["world"][1].inner
    slow, fast = uniform(3, latency_s=10.0, bytes_s=1e12), uniform(3, latency_s=1e-9, bytes_s=1e3)
    for known in (Followed(slow), Followed(fast), Followed(fast, (True, True))):
        group.follow(known)
        mesh.world.all_reduce(torch.ones(3000)).wait()
        sent.append(mesh.ledger.take()["all_reduce"].bytes_sent)
    return sent


def test_the_ledger_follows_what_links_have_changed(ranks) -> None:
    """One shot where messages are dear, a ring's bytes where bytes are, and Gloo's."""
    ring = bytes_sent("all_reduce", 12_000, size=3, backend="gloo")
    for one_shot, table, gloos in ranks(3, followed):
        assert one_shot == 24_000 > table
        assert gloos == ring


def dropped(place, algorithm: Algorithm, check: bool) -> bool:
    """Whether a group that was used is gone when its mesh is dropped."""
    mesh = mesh_by(place, algorithm, check)
    world: Any = mesh.world
    world.all_reduce(torch.ones(5)).wait()
    group = weakref.ref(world.group.inner)
    del mesh, world
    gc.collect()
    wait_until(lambda: group() is None)  # a thread may still have it in hand
    return True


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("algorithm", ["ring", "auto"])
def test_a_group_that_is_dropped_is_gone(ranks, algorithm: Algorithm, check: bool) -> None:
    """Nobody else holds it: not the ledger, the diagnosis, nor a thread that waits for calls."""
    assert ranks(2, dropped, algorithm, check) == [True] * 2
