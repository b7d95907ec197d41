"""The default process group of a run: what PyTorch's own functions say to all ranks, counted, and gone at the end."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from shoal.comm.default_group import default_group
from shoal.comm.mesh import Mesh, build_mesh
from shoal.errors import UserCodeError
from shoal.topology.layout import Layout
from tests.ranks import TestPlace
from tests.waiting import HANG_S

SIZES = [1, 2, 3]


def opened(place: TestPlace) -> Mesh:
    return build_mesh(Layout(replicate=place.size), place.rank, store=place.store, device=torch.device("cpu"))


def said(place: TestPlace) -> dict[str, Any]:
    """The answers of PyTorch's functions in this rank, and which calls the ledger counted."""
    mesh = opened(place)
    mesh.ledger.take()
    with default_group(mesh, store=place.store, timeout_s=HANG_S):
        rank, size = dist.get_rank(), dist.get_world_size()
        summed = torch.tensor([rank + 1.0])
        dist.all_reduce(summed)
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, {"rank": rank})
        rows = [torch.zeros(2) for _ in range(size)]
        dist.all_gather(rows, torch.full((2,), float(rank)))
        first = [f"from {rank}"]
        dist.broadcast_object_list(first, src=0)
        own = torch.zeros(1)
        dist.reduce_scatter_tensor(own, torch.arange(size, dtype=torch.float32))
        dist.barrier()
        counted = {name: entry.calls for name, entry in mesh.ledger.take().items()}
        found = {
            "place": (rank, size),
            "sum": summed.item(),
            "objects": [one["rank"] for one in everyone],
            "rows": [row.tolist() for row in rows],
            "first": first[0],
            "scattered": own.item(),
        }
    return found | {"counted": counted, "left": dist.is_initialized(), "labels": sorted(mesh.opened())}


@pytest.mark.parametrize("size", SIZES)
def test_functions_of_pytorch_speak_to_all_ranks_of_the_run(ranks, size: int) -> None:
    """Numbers, sums, rows and objects are those of all ranks; every call is in the ledger, and the group is the mesh's
    own, where a hang's watch finds it. Nothing is left behind.
    """
    for rank, found in enumerate(ranks(size, said)):
        assert found["place"] == (rank, size)
        assert found["sum"] == size * (size + 1) / 2
        assert found["objects"] == list(range(size))
        assert found["rows"] == [[other, other] for other in range(size)]
        assert found["first"] == "from 0"
        assert found["scattered"] == rank * size
        assert {name: found["counted"][name] for name in ("all_reduce", "reduce_scatter", "barrier")} == {
            "all_reduce": 1,
            "reduce_scatter": 1,
            "barrier": 1,
        }
        assert found["counted"]["all_gather"] >= 1
        assert "world-torch.distributed" in found["labels"]
        assert not found["left"]


def summed_in_pairs(place: TestPlace) -> tuple[float | None, float, bool]:
    """The sum over ranks 0 and 2 in a group of the script's own, over all in one of Gloo; whether the first counts."""
    mesh = opened(place)
    with default_group(mesh, store=place.store, timeout_s=HANG_S):
        ends, all_of_gloo = dist.new_group([0, 2]), dist.new_group(backend="gloo")
        mesh.ledger.take()
        one = torch.tensor(1.0 + place.rank)
        if place.rank != 1:
            dist.all_reduce(one, group=ends)
        counted = "all_reduce" in mesh.ledger.take()
        whole = torch.tensor(1.0)
        dist.all_reduce(whole, group=all_of_gloo)
    return (None if place.rank == 1 else one.item()), whole.item(), counted


def in_lists(place: TestPlace) -> dict[str, Any]:
    """PyTorch's forms with a tensor for each rank, and a gather that hands gradients back."""
    mesh = opened(place)
    with default_group(mesh, store=place.store, timeout_s=HANG_S):
        rank, size = dist.get_rank(), dist.get_world_size()
        rows = [torch.zeros(other + 1, 2) for other in range(size)]
        dist.all_to_all(rows, [torch.full((rank + 1, 2), 10.0 * rank + to) for to in range(size)])
        own = torch.zeros(2, 2)
        dist.reduce_scatter(own, [torch.full((2, 2), rank + to + 0.0) for to in range(size)])
        x = torch.tensor([rank + 1.0], requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            everyone = torch.cat(torch.distributed.nn.functional.all_gather(x))
        ((rank + 1) * everyone.prod()).backward()
        assert x.grad is not None
        return {"rows": [row.tolist() for row in rows], "own": own.tolist(), "slope": x.grad.item()}


@pytest.mark.parametrize("size", SIZES)
def test_the_forms_of_lists_reach_all_ranks(ranks, size: int) -> None:
    """Rank r sends 10 r + t to rank t, r + 1 rows of it. The gradient of what was gathered is the sum over ranks, as a
    contrastive loss over the global batch needs it.
    """
    for rank, found in enumerate(ranks(size, in_lists)):
        assert found["rows"] == [[[10.0 * one + rank] * 2] * (one + 1) for one in range(size)]
        assert found["own"] == [[sum(one + rank for one in range(size))] * 2] * 2
        assert found["slope"] == sum(range(1, size + 1)) * math.factorial(size) / (rank + 1)


def test_a_script_opens_groups_of_its_own(ranks) -> None:
    """`new_group`, of some ranks and of another backend."""
    assert ranks(3, summed_in_pairs) == [(4.0, 3.0, True), (None, 3.0, False), (4.0, 3.0, True)]


def twice(place: TestPlace) -> None:
    with default_group(opened(place), store=place.store, timeout_s=HANG_S):
        dist.init_process_group("gloo", store=place.store, rank=place.rank, world_size=place.size)


def test_a_second_default_group_is_refused_with_the_repair(ranks) -> None:
    for worked, text in ranks.outcomes(2, twice):
        assert not worked
        assert UserCodeError.__name__ in text
        assert "remove the call, and destroy_process_group" in text


def destroyed(place: TestPlace) -> bool:
    with default_group(opened(place), store=place.store, timeout_s=HANG_S):
        dist.destroy_process_group()
    return dist.is_initialized()


def test_a_script_may_destroy_the_group(ranks) -> None:
    """As scripts written for `torchrun` do at their end."""
    assert ranks(2, destroyed) == [False, False]


def lived(place: TestPlace) -> list[float]:
    """The sums of three runs in one process, one after the other, of which the second fails."""
    found = []
    for number in range(3):
        store = dist.PrefixStore(f"run {number}", place.store)
        mesh = build_mesh(Layout(replicate=2), place.rank, store=store, device=torch.device("cpu"), generation=number)
        try:
            with default_group(mesh, store=store, timeout_s=HANG_S):
                one = torch.ones(())
                dist.all_reduce(one)
                found.append(one.item())
                if number == 1:
                    raise ArithmeticError
        except ArithmeticError:
            mesh.abort()
    return found


def test_a_later_run_has_a_group_of_its_own(ranks) -> None:
    """Also behind one that has failed, as behind a generation that lost a rank."""
    assert ranks(2, lived) == [[2.0] * 3, [2.0] * 3]
