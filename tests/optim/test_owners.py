"""Whole tensors on their owners: what is sent comes back, whatever the ranks hold."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from torch.nn import Parameter

from shoal.comm.config import WireConfig
from shoal.comm.mesh import build_mesh
from shoal.optim.declared import Dims
from shoal.optim.owners import Owners, dense, product, symmetric_product
from shoal.optim.parts import Parts, PartSums
from shoal.state import Trained, owned_run, owned_whole
from shoal.topology.holding import AlongTensor, Box, held
from shoal.topology.layout import Layout
from tests.ranks import TestPlace

SHAPES: dict[str, Dims] = {"a": (8, 6), "b": (4, 10), "c": (12, 3), "d": (4, 2), "e": (16, 2)}
LAYOUTS = {
    "replicate": Layout(replicate=3),
    "shard": Layout(shard=3),
    "tensor": Layout(tensor=2),
    "replicate x tensor": Layout(replicate=2, tensor=2),
}


def whole_of(name: str) -> torch.Tensor:
    return torch.arange(prod(SHAPES[name]), dtype=torch.float64).view(SHAPES[name]) + ord(name)


def parts_on(place: TestPlace, layout: Layout, cut: bool) -> Parts:
    """Each parameter on this rank: whole (under ZeRO on one rank each), of a packed one two boxes of rows, or a third
    of its elements (`cut`).
    """
    mesh = build_mesh(layout, place.rank, store=place.store, device=torch.device("cpu"), wire=WireConfig(timeout_s=60))
    owned = []
    for number, (name, (rows, columns)) in enumerate(SHAPES.items()):
        index, size = layout.index("tensor", place.rank), layout.tensor
        half = rows // 2
        step = half // size
        boxes = tuple(Box((start + index * step, 0), (step, columns)) for start in (0, half)) if size > 1 else None
        holding = held(layout, place.rank, name, (rows, columns), boxes=boxes, tensor=AlongTensor(split=size > 1))
        values = torch.cat([whole_of(name)[box.slices].reshape(-1) for box in holding.boxes])
        if cut and layout.shard > 1:
            at = [len(values) * n // layout.shard for n in range(layout.shard + 1)]
            start, stop = list(pairwise(at))[layout.index("shard", place.rank)]
            owned.append(owned_run(holding, Parameter(values[start:stop]), start, stop))
        elif number % layout.shard == layout.index("shard", place.rank):
            owned.append(owned_whole(Trained(holding, Parameter(values))))
    return Parts(owned, mesh.axis("shard", "tensor"), mesh.world)


def there_and_back(place: TestPlace, layout: Layout, cut: bool) -> tuple[dict[str, int], list[str], bool, bool]:
    """The owners, what this rank owns, and whether it got these whole, and all parts came back."""
    parts = parts_on(place, layout, cut)
    owners = Owners(parts, lambda shape: float(prod(shape)), wanted=lambda name, shape: name != "d")
    own = {o.name: o.parameter.detach() for o in parts.owned if o.name != "d"}
    gathered = owners.gather(own)
    is_whole = all(torch.equal(tensor, whole_of(name)) for name, tensor in gathered.items())
    back = owners.scatter({name: tensor * 2 for name, tensor in gathered.items()})
    same = back.keys() == own.keys() and all(torch.equal(back[name].view(-1), 2 * part) for name, part in own.items())
    return owners.owner, list(gathered), is_whole, same


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "runs"])
def test_tensors_are_whole_on_one_rank_each_and_come_back(ranks, layout: str, cut: bool) -> None:
    """Every rank knows the same owners, which together own everything that is wanted, about as much each where several
    could own it.
    """
    chosen = LAYOUTS[layout]
    found = ranks(chosen.world_size, there_and_back, chosen, cut)
    owner = found[0][0]
    assert owner.keys() == SHAPES.keys() - {"d"}
    for rank, (same, mine, is_whole, came_back) in enumerate(found):
        assert same == owner
        assert sorted(mine) == sorted(name for name, at in owner.items() if at == rank)
        assert is_whole
        assert came_back
    loads = [sum(prod(SHAPES[name]) for name in mine) for _, mine, _, _ in found]
    alone = layout == "shard" and not cut
    assert alone or max(loads) <= sum(loads) / len(loads) * 4 / 3 + 1


def summed(place: TestPlace, layout: Layout, cut: bool) -> dict[str, list[float]]:
    parts = parts_on(place, layout, cut)
    parameters = [own.parameter for own in parts.owned]
    own = torch.stack([torch.stack([p.detach().sum(), p.detach().square().sum()]) for p in parameters])
    totals = PartSums(parts)(parameters, own)
    return {own.name: total.tolist() for own, total in zip(parts.owned, totals, strict=True)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "runs"])
def test_sums_are_those_of_whole_parameters(ranks, layout: str, cut: bool) -> None:
    """Each number once, however many ranks hold it, on every rank."""
    chosen = LAYOUTS[layout]
    wanted = {name: [float(whole_of(name).sum()), float(whole_of(name).square().sum())] for name in SHAPES}
    found = ranks(chosen.world_size, summed, chosen, cut)
    assert {name for each in found for name in each} == wanted.keys()
    for each in found:
        assert each == {name: wanted[name] for name in each}


FLOAT32 = 1e-6
"""Of a product with some hundred terms, relative to the norm."""


@pytest.mark.parametrize("shape", [(70, 90, 80), (3, 200, 65), (2, 3, 66, 70, 64)])
def test_products_are_those_of_float64(shape: tuple[int, ...]) -> None:
    """Of matrices and of stacks, however their numbers lie, by whichever library."""
    generator = torch.Generator().manual_seed(0)
    *stack, rows, inner, columns = shape
    for turned_a, turned_b in ((False, False), (True, False), (False, True), (True, True)):
        a = torch.randn(*stack, *((inner, rows) if turned_a else (rows, inner)), generator=generator)
        b = torch.randn(*stack, *((columns, inner) if turned_b else (inner, columns)), generator=generator)
        a, b = a.mT if turned_a else a, b.mT if turned_b else b
        wanted = a.double() @ b.double()
        assert float((product(a, b) - wanted).norm() / wanted.norm()) < FLOAT32


@pytest.mark.parametrize("shape", [(600, 40), (1100, 300), (30, 50), (2, 40, 70)])
def test_symmetric_products_are_whole(shape: tuple[int, ...]) -> None:
    """Both halves of a @ a.mT, and of a product of two powers of a matrix, also where one half alone is computed."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(shape, generator=generator)
    wanted = a.double() @ a.double().mT
    found = symmetric_product(a, a)
    assert float((found - wanted).norm() / wanted.norm()) < FLOAT32
    assert torch.equal(symmetric_product(a.mT.contiguous().mT, a), found)
    cube = wanted @ wanted @ wanted
    assert float((symmetric_product((wanted @ wanted).float(), found) - cube).norm() / cube.norm()) < 3 * FLOAT32


def test_matrices_are_multiplied_without_gaps() -> None:
    """Rows of one that lies by columns, and columns of one that lies by rows, are copied; whole ones are not."""
    x = torch.randn(6, 8)
    for whole in (x, x.mT, x[2:4], x.mT[:, 1:3]):
        assert dense(whole) is whole
    for part in (x[:, 2:4], x.mT[1:3], x.mT[:2]):
        assert dense(part).is_contiguous()
        assert torch.equal(dense(part), part)


def test_a_product_of_no_matrices_is_none() -> None:
    """Of sides that oneDNN would multiply."""
    assert product(torch.zeros(0, 64, 70), torch.zeros(0, 70, 80)).shape == (0, 64, 80)
