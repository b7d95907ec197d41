"""Whole tensors on their owners: what is sent comes back, whatever the ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from shoal.comm.config import WireConfig
from shoal.comm.mesh import build_mesh
from shoal.optim import owners
from shoal.optim.adaptive import OwnedAdafactor
from shoal.optim.declared import Dims
from shoal.optim.muon import OwnedDion, OwnedMuon
from shoal.optim.owners import Owners
from shoal.optim.parts import Parts, PartSums
from shoal.optim.preconditioned import OwnedShampoo, OwnedSOAP
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
            own = Parameter(values)
            owned.append(owned_whole(Trained(holding, own), own if layout.shard > 1 else None))
    return Parts(owned, mesh.axis("shard", "tensor"), mesh.world)


def there_and_back(place: TestPlace, layout: Layout, cut: bool) -> tuple[dict[str, int], list[str], bool, bool]:
    """The owners, what this rank owns, and whether it got these whole, and all parts came back; then also without one
    tensor, as in a step in which it has no gradient.
    """
    parts = parts_on(place, layout, cut)
    owned = Owners(parts, lambda shape: float(prod(shape)), wanted=lambda name, shape: name != "d")
    is_whole, same = list[bool](), list[bool]()
    for left_out in ("d", "db"):
        own = {o.name: o.parameter.detach() for o in parts.owned if o.name not in left_out}
        gathered = owned.gather(own).wait()
        assert gathered.keys() == set(owned.mine) - {*left_out}
        is_whole += [torch.equal(tensor, whole_of(name)) for name, tensor in gathered.items()]
        back = owned.scatter({name: tensor * 2 for name, tensor in gathered.items()}, own).wait()
        same += [back.keys() == own.keys(), *(torch.equal(back[name].view(-1), 2 * part) for name, part in own.items())]
    return owned.owner, owned.mine, all(is_whole), all(same)


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


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "muon": OwnedMuon,
    "dion": OwnedDion,
    "soap": partial(OwnedSOAP, every=2),
    "shampoo": partial(OwnedShampoo, start=1, every=2),
    "adafactor": OwnedAdafactor,
}
SAME = 1e-11
"""Relative: bases and roots amplify last bits of float64."""


def with_gaps(kind: str, parameters: dict[str, Parameter], parts: Parts | None) -> None:
    """Four steps, in each of which every third parameter has no gradient."""
    optimizer = OPTIMIZERS[kind]([{"params": list(parameters.values()), "whole": True}])
    if parts is not None:
        optimizer.connect(parts)  # pyright: ignore[reportAttributeAccessIssue]
    held_by_name = {} if parts is None else {own.name: own.holding.boxes for own in parts.owned}
    for step in range(1, 5):
        for name, parameter in parameters.items():
            generator = torch.Generator().manual_seed(100 * step + ord(name))
            gradient = torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)
            if parts is not None:
                gradient = torch.cat([gradient[box.slices].reshape(-1) for box in held_by_name[name]])
            parameter.grad = None if (step + ord(name)) % 3 == 0 else gradient
        optimizer.step()


def gaps_on_ranks(place: TestPlace, layout: Layout, kind: str, bucket: int) -> dict[str, float]:
    """How far this rank's parts are from those of one process, by name; about `bucket` numbers travel together."""
    owners.BUCKET_NUMEL = bucket
    alone = {name: Parameter(whole_of(name) / 100) for name in SHAPES}
    with_gaps(kind, alone, None)
    parts = parts_on(place, layout, False)
    for own in parts.owned:
        own.parameter.data.div_(100)
    with_gaps(kind, {own.name: own.parameter for own in parts.owned}, parts)
    found = {}
    for own in parts.owned:
        wanted = torch.cat([alone[own.name].detach()[box.slices].reshape(-1) for box in own.holding.boxes])
        found[own.name] = float((own.parameter.detach() - wanted).abs().max() / wanted.abs().max())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_has_no_gradient_in_a_step_is_left_alone(ranks, layout: str) -> None:
    """By its owner and by all that hold it; it goes on in a later step, as in one process."""
    chosen = LAYOUTS[layout]
    for kind in OPTIMIZERS:
        for bucket in (50, owners.BUCKET_NUMEL):
            for found in ranks(chosen.world_size, gaps_on_ranks, chosen, kind, bucket):
                assert all(gap < SAME for gap in found.values()), (kind, bucket, found)
