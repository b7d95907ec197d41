"""Ranks that call different collectives are named, with the line of code, on every transport.

No group has a timeout here that a test could wait for: what is said, the check has found.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from shoal.comm.collective import Collective
from shoal.comm.config import TransportName, WireConfig
from shoal.comm.diagnosis import disagreement
from shoal.comm.mesh import Mesh, build_mesh
from shoal.errors import CollectiveError
from shoal.topology.layout import Layout
from tests.comm.hosts import on_host
from tests.comm.test_collective import everything, expected
from tests.waiting import NEVER_S

HOSTS = "aab"
REPEATS = 8


def checked(place, transport: TransportName, *, timeout_s: float = NEVER_S) -> Mesh:
    """One replica a rank; for "hierarchical", on two hosts."""
    with on_host(HOSTS[place.rank] if transport == "hierarchical" else "a"):
        return build_mesh(
            Layout(replicate=place.size),
            place.rank,
            store=place.store,
            device=torch.device("cpu"),
            wire=WireConfig(timeout_s=timeout_s, transport=transport, check_collectives=True),
        )


def shape(world: Collective, odd: bool) -> None:
    world.all_reduce(torch.ones(4 if odd else 3)).wait()


def dtype(world: Collective, odd: bool) -> None:
    world.all_reduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32)).wait()


def reduction(world: Collective, odd: bool) -> None:
    world.all_reduce(torch.ones(3), "max" if odd else "sum").wait()


def operation(world: Collective, odd: bool) -> None:
    world.broadcast(torch.ones(3)).wait() if odd else world.all_reduce(torch.ones(3)).wait()


def root(world: Collective, odd: bool) -> None:
    world.broadcast(torch.ones(3), root=int(odd)).wait()


def order(world: Collective, odd: bool) -> None:
    for numel in (5, 3) if odd else (3, 5):
        world.all_reduce(torch.ones(numel)).wait()


def rows(world: Collective, odd: bool) -> None:
    sizes = [1] * world.size
    sizes[0] += odd
    total = sum(sizes)
    world.all_to_all(
        torch.empty(world.size), torch.ones(total), output_sizes=[1] * world.size, input_sizes=sizes
    ).wait()


MISTAKES: dict[str, tuple[Callable[[Collective, bool], None], tuple[str, str]]] = {
    "shape": (shape, ("all_reduce (sum) of float32 [3]", "all_reduce (sum) of float32 [4]")),
    "dtype": (dtype, ("float32 [3]", "float64 [3]")),
    "reduction": (reduction, ("all_reduce (sum)", "all_reduce (max)")),
    "operation": (operation, ("all_reduce (sum) of float32 [3]", "broadcast of float32 [3], root 0")),
    "root": (root, ("root 0", "root 1")),
    "order": (order, ("float32 [3]", "float32 [5]")),
    "rows": (rows, ("sends 2 rows to rank 0", "expects 1")),
}


def mistaken(place, transport: TransportName, names: list[str], rounds: int) -> dict[str, str]:
    """What this rank is told of each mistake of the last rank, each on groups of its own.

    All are right in some `rounds` before.
    """
    told = {}
    for name in names:
        world = checked(_in(place, name), transport).world
        world.all_reduce(torch.ones(3)).wait()
        for _ in range(rounds):
            _mistake(name, world, False)
        with pytest.raises(CollectiveError) as error:
            _mistake(name, world, place.rank == place.size - 1)
        told[name] = str(error.value)
        with pytest.raises(CollectiveError):  # the group stays refused, nobody goes on with half of it
            world.barrier().wait()
    return told


def _mistake(name: str, world: Collective, odd: bool) -> None:
    """A rank that waits for nobody in a call, such as a broadcast's root in shared memory, hears of it in the next."""
    MISTAKES[name][0](world, odd)
    world.barrier().wait()


def _in(place, name: str):
    return type(place)(place.rank, place.size, torch.distributed.PrefixStore(name, place.store))


@pytest.mark.parametrize(
    ("transport", "rounds", "names"),
    [
        ("gloo", 0, list(MISTAKES)),
        ("shm", 0, list(MISTAKES)),
        ("hierarchical", 0, list(MISTAKES)),
        ("gloo", REPEATS, list(MISTAKES)),
        ("shm", REPEATS, list(MISTAKES)),
        ("hierarchical", REPEATS, ["shape", "order"]),
    ],
)
def test_each_mistake_is_named_by_all_ranks(ranks, transport: TransportName, rounds: int, names: list[str]) -> None:
    """Shape, dtype, reduction, operation, root, order, rows: both calls, who made them and where, the same on all.

    Whether it is made at the start or after a while.
    """
    results = ranks(3, mistaken, transport, names, rounds)
    for name in names:
        function, says = MISTAKES[name]
        (sentence,) = {result[name] for result in results}
        for part in says:
            assert part in sentence, sentence
        if name == "rows":
            continue
        assert "rank 0 (host" in sentence
        assert "rank 2 (host" in sentence
        line = function.__code__.co_firstlineno
        assert f"test_checked.py:{line + 1}" in sentence or f"test_checked.py:{line + 2}" in sentence, sentence


def crossed(place, transport: TransportName, rounds: int) -> str:
    """Two groups of the same ranks, called in another order by the last one, after some `rounds` in one order."""
    mesh = checked(place, transport)
    groups = [mesh.world, mesh.ranks(range(place.size), lane="other")]
    for group in groups * rounds:
        group.all_reduce(torch.ones(3)).wait()
    if place.rank == place.size - 1:
        groups.reverse()
    try:
        for group in groups:
            group.all_reduce(torch.ones(3)).wait()
    except CollectiveError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "rounds"), [("gloo", 0), ("gloo", REPEATS), ("shm", 0)])
def test_ranks_that_wait_for_each_other_in_different_groups_are_named(
    ranks, transport: TransportName, rounds: int
) -> None:
    """Ranks 0 and 1 wait in one group, rank 2 in another: no call differs, and yet nobody can go on."""
    for sentence in ranks(3, crossed, transport, rounds):
        assert "ranks wait for each other" in sentence
        assert "group 'world'" in sentence
        assert "group 'world-other'" in sentence


def slow(place) -> float:
    """A rank that comes late is no mistake."""
    world = checked(place, "shm").world
    if place.rank == 1:
        time.sleep(3.5)
    total = torch.ones(1)
    world.all_reduce(total).wait()
    return float(total)


@pytest.mark.slow
def test_a_rank_that_is_late_is_waited_for(ranks) -> None:
    """Somebody who computes for longer than the check looks twice is not accused."""
    assert ranks(2, slow) == [2.0, 2.0]


def correct(place, transport: TransportName) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in everything(checked(place, transport).world).items()}


@pytest.mark.parametrize("transport", ["gloo", "shm", "hierarchical"])
def test_what_is_right_is_left_alone(ranks, transport: TransportName) -> None:
    """Under the check every collective gives its defined result."""
    for rank, got in enumerate(ranks(3, correct, transport)):
        for name, want in expected(rank, 3).items():
            assert torch.equal(got[name], want), f"{name} on rank {rank}"


def async_then_message(place, transport: TransportName) -> float:
    """Rank 0 starts a collective, and then wants a message that rank 1 sends when that collective is over."""
    world = checked(place, transport).world
    total, message = torch.ones(1), torch.ones(1)
    handle = world.all_reduce(total)
    if place.rank == 0:
        world.recv(message, source=1).wait()
        handle.wait()
    else:
        handle.wait()
        world.send(message, to=0).wait()
    return float(total)


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_a_call_under_way_needs_nobody_who_waits_for_it(ranks, transport: TransportName) -> None:
    """A collective is made though its caller waits for something else: what ran without the check runs with it."""
    assert ranks(2, async_then_message, transport) == [2.0, 2.0]


def elsewhere(place) -> str:
    """The last rank calls something else than all expect of it; the others wait for it in another group."""
    mesh = checked(place, "gloo")
    world, other = mesh.world, mesh.ranks(range(place.size), lane="other")
    for _ in range(REPEATS):
        world.all_reduce(torch.ones(3)).wait()
    try:
        handle = world.all_reduce(torch.ones(4 if place.rank == place.size - 1 else 3))
        if place.rank == place.size - 1:
            handle.wait()
        other.all_reduce(torch.ones(3)).wait()
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_a_difference_is_heard_of_while_nobody_waits_for_that_call(ranks) -> None:
    """Who called something else is told, and so are the others, although they stand in another group's call."""
    for sentence in ranks(3, elsewhere):
        assert "float32 [3]" in sentence, sentence
        assert "float32 [4]" in sentence


def test_ranks_that_called_the_same_are_named_together() -> None:
    """Hundreds of ranks are told of in one sentence that can be read."""
    members = [f"rank {rank} (host h, pid {rank})" for rank in range(100)]
    sentence = disagreement(["one at a.py:1"] * 99 + ["two at b.py:2"], "call number 1 of group 'world'", members)
    assert "rank 0 (host h, pid 0), rank 1, rank 2" in sentence
    assert "and 91 more called one at a.py:1; rank 99 (host h, pid 99) called two at b.py:2" in sentence
    assert len(sentence) < 500
