"""A script's model on its way from the host to the ranks of `layout.tensor`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.assembly.generation import _start_equal
from shoal.assembly.own_split import OwnSplit, prepare_split
from shoal.assembly.splitting import Divided
from shoal.comm.mesh import Mesh, build_mesh
from shoal.engine.config import Float32
from shoal.engine.precision import precision_of
from shoal.errors import UserCodeError
from shoal.models.build import build, initialise
from shoal.models.config import GPTConfig
from shoal.parallel.split import split_model
from shoal.topology.layout import Layout
from tests.ranks import TestPlace

SHAPES = [(), (3,), (5, 4), (0, 2)]


def mesh_of(place: TestPlace, layout: Layout) -> Mesh:
    return build_mesh(layout, place.rank, store=place.store, device=torch.device("cpu"))


def started(place: TestPlace) -> list[Tensor]:
    """Parameters and buffers that each rank has drawn for itself: turned, complex and of no dimension too."""
    torch.manual_seed(place.rank)
    model = nn.Module()
    for number, shape in enumerate(SHAPES):
        model.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape)))
    model.register_parameter("turned", nn.Parameter(torch.randn(4, 6).T))
    model.register_buffer("waves", torch.randn(3, dtype=torch.complex64))
    model.register_buffer("counts", torch.randint(9, (4,)))
    _start_equal(model, mesh_of(place, Layout(replicate=2)))
    return [*model.parameters(), *model.buffers()]


def test_ranks_start_from_what_rank_0_has(ranks) -> None:
    zero, one = ranks(2, started)
    torch.manual_seed(0)
    assert torch.equal(zero[1], [torch.randn(shape) for shape in SHAPES][1])
    assert all(map(torch.equal, zero, one))


def cut(place: TestPlace) -> tuple[int, int, list[int]]:
    """Numbers of the model before the cut, of what the device gets, and of the parameters that were split."""
    with torch.device("meta"):
        model = build(GPTConfig(vocabulary=64, layers=1, heads=2, width=16))
    initialise(model, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    mesh, whole = mesh_of(place, Layout(tensor=2)), list(model.parameters())
    numel, own = sum(p.numel() for p in whole), OwnSplit(model, mesh, precision_of(Float32()))
    parts = own.cut(Divided(split_model(model, mesh), None, None))
    kept = {id(p) for p in model.parameters()}
    assert parts.split.vocabulary is None
    return numel, sum(p.numel() for p in model.parameters()), [p.numel() for p in whole if id(p) not in kept]


def test_the_device_gets_parts_and_the_host_keeps_nothing_of_what_was_split(ranks) -> None:
    for numel, here, left in ranks(2, cut):
        assert here < 0.6 * numel
        assert len(left) > 5
        assert not any(left)


def test_a_model_that_says_nothing_of_its_layers_is_refused() -> None:
    with pytest.raises(UserCodeError, match=r"Linear declares no roles of its parameters; let `shoal split` propose"):
        prepare_split(nn.Linear(2, 2), Layout(tensor=2))
