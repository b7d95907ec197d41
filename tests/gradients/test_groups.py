"""Sums over the right ranks, for parameters whose gradients add up over different ones; the norm; the owned pieces.

Gradients are drawn from (rank, name), so that every rank can compute every sum by itself: there is no wire in the
oracle.
"""

from __future__ import annotations

import itertools
import zlib
from math import prod

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.config import WireConfig
from shoal.comm.mesh import build_mesh
from shoal.gradients.build import build_gradients
from shoal.gradients.config import GradientsConfig
from shoal.state import Trained
from shoal.topology.holding import AlongTensor, Box, Holding, held, held_expert
from shoal.topology.layout import INSIDE_REPLICA, Layout

SUM_ORDER = 1e-13  # float64, sums of at most 8 terms
LAYOUTS = [
    Layout(pipeline=2, shard=2),
    Layout(shard=2, tensor=2),
    Layout(context=2, tensor=2),
    Layout(replicate=2, pipeline=2),
    Layout(shard=2, tensor=2, expert=2),
    Layout(shard=4, expert=2),
]
LARGE = Layout(replicate=2, shard=2, tensor=2, expert=2)


def holdings(layout: Layout, rank: int) -> list[Holding]:
    """Parameters of every kind, as a rank holds them, in the order of its modules."""
    tensor, stage = layout.index("tensor", rank), layout.index("pipeline", rank)
    expert = layout.index("expert", rank)
    tied = held(layout, rank, "tied", (5, 4), tied=range(layout.pipeline))
    own = [
        held(layout, rank, f"stage{stage}.wide", (7, 5)),
        held(layout, rank, f"stage{stage}.norm", (6,), tensor=AlongTensor(partial=True)),
        held(layout, rank, f"stage{stage}.number", ()),
        held(
            layout, rank, f"stage{stage}.split", (4 * layout.tensor, 3), tensor=AlongTensor(split=True),
            boxes=(Box((4 * tensor, 0), (4, 3)),),
        ),
        held_expert(
            layout, rank, f"stage{stage}.experts", (2 * layout.expert, 3, 3), box=Box((2 * expert, 0, 0), (2, 3, 3))
        ),
    ]  # fmt: skip
    return [tied, *own] if stage == 0 else [*own, tied]


def term(rank: int, holding: Holding) -> Tensor:
    """The gradient that a rank computes."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{rank} {holding.name}".encode()))
    return torch.randn(holding.box.shape, generator=generator, dtype=torch.float64)


def total(layout: Layout, holding: Holding) -> Tensor:
    """The sum that this rank should get."""
    of_name = [{h.name: h for h in holdings(layout, q)}[holding.name] for q in holding.sums]
    return torch.stack([term(h.rank, h) for h in of_name]).sum(0)


def whole_norm(layout: Layout, rank: int) -> float:
    """Over the replica of a rank, each number once."""
    replica = layout.group(INSIDE_REPLICA, rank)
    counted = [h for r in replica for h in holdings(layout, r) if h.counts]
    return float(torch.stack([total(layout, h).square().sum() for h in counted]).sum().sqrt())


def reduced(place, layout: Layout, zero: int | None) -> tuple[float, list[tuple[str, Box, tuple[int, ...]]]]:
    """The largest difference, in owned gradients and the norm, over two steps; and what this rank owns."""
    mesh = build_mesh(layout, place.rank, store=place.store, device=torch.device("cpu"), wire=WireConfig(timeout_s=180))
    model = nn.Module()
    trained = []
    for holding in holdings(layout, place.rank):
        parameter = nn.Parameter(torch.ones(holding.box.shape, dtype=torch.float64))
        model.register_parameter(holding.name.replace(".", "_"), parameter)
        trained.append(Trained(holding, parameter))
    sync = build_gradients(
        GradientsConfig(bucket_bytes=400, first_bucket_bytes=100),
        trained,
        zero=zero,
        model=model,
        groups=mesh.ranks,
        replica=mesh.axis(*INSIDE_REPLICA),
    )
    worst = 0.0
    for _ in range(2):
        sync.start()
        with sync.schedule(), sync.full_parameters():
            for t in trained:
                t.parameter.grad = term(place.rank, t.holding)
        norm, wanted = float(sync.reduce()), whole_norm(layout, place.rank)
        worst = max(worst, abs(norm - wanted) / wanted)
        for owned in sync.owned:
            expected, gradient = total(layout, owned.holding), owned.parameter.grad
            assert gradient is not None
            for region in owned.regions:
                piece = gradient.flatten()[region.start : region.start + region.box.numel].view(region.box.shape)
                wanted_piece = expected[region.box.relative_to(owned.holding.box.offset).slices]
                worst = max(worst, float((piece - wanted_piece).abs().max()))
    return worst, [(o.name, region.box, o.holding.shard) for o in sync.owned for region in o.regions]


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("zero", [None, 1, 2, 3])
@pytest.mark.parametrize("layout", [*LAYOUTS, LARGE], ids=Layout.describe)
def test_every_gradient_is_the_sum_over_its_own_ranks(ranks, layout: Layout, zero: int | None) -> None:
    """Dense, partial, split, tied and expert parameters in one model; the norm counts each number once."""
    results = ranks(layout.world_size, reduced, layout, zero)
    assert max(worst for worst, _ in results) < SUM_ORDER
    if zero is not None:
        assert_owned_once(layout, [owned for _, owned in results])


def assert_owned_once(layout: Layout, owned: list[list[tuple[str, Box, tuple[int, ...]]]]) -> None:
    """The ranks of each `shard` own all that they hold, and no element twice."""
    for rank in range(layout.world_size):
        for holding in holdings(layout, rank):
            boxes = [box for r in holding.shard for name, box, _ in owned[r] if name == holding.name]
            assert sum(box.numel for box in boxes) == prod(holding.box.shape)
            elements = [e for box in boxes for e in itertools.product(*map(range_of, box.offset, box.shape))]
            assert len(set(elements)) == len(elements)


def range_of(start: int, size: int) -> range:
    return range(start, start + size)
