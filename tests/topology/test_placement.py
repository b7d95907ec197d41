"""For each parameter, the axes over which gradients are summed, and over which numbers are counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.topology.layout import DENSE, EXPERT, Axis, Kind, Layout, Placement, placed
from tests.topology.layouts import layouts

COLUMN = placed("dense", sharded=["tensor"])
PLACEMENTS = {
    "replicated": placed("dense"),
    "tensor-parallel column": COLUMN,
    "norm under sequence parallelism": placed("dense", partial=["tensor"]),
    "tied embedding": placed("dense", partial=["pipeline"]),
    "matrix under ZeRO-3": placed("dense", sharded=["shard", "tensor"]),
    "expert": placed("expert"),
    "expert under ZeRO-3": placed("expert", sharded=["expert_shard"]),
}
each_placement = pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())


def terms(layout: Layout, axes: tuple[Axis, ...]) -> list[int]:
    """A number for each rank that tells ranks apart along `axes` alone: powers of two, so that sums are sets."""
    places = [tuple(layout.index(axis, rank) for axis in axes) for rank in range(layout.world_size)]
    number = {place: 1 << i for i, place in enumerate(sorted(set(places)))}
    return [number[place] for place in places]


@pytest.mark.parametrize(
    ("kind", "axes"),
    [("dense", ("replicate", "shard", "context")), ("expert", ("replicate", "expert_shard"))],
)
def test_sum_axes_of_each_kind(kind: Kind, axes: tuple[Axis, ...]) -> None:
    """Dense gradients are sums over what splits the batch; experts' over their own data axis and the replicas."""
    assert placed(kind).partial == axes


@each_placement
@given(layout=layouts())
def test_a_sum_has_every_term_once(placement: Placement, layout: Layout) -> None:
    """Where terms differ along the partial axes alone, the sum over these is that of all terms, on every rank."""
    term = terms(layout, placement.partial)
    everything = (1 << layout.size(placement.partial)) - 1
    for group in layout.groups(placement.partial):
        assert sum(term[rank] for rank in group) == everything


@given(layouts())
def test_a_forgotten_axis_loses_terms(layout: Layout) -> None:
    """The sum over fewer axes than are partial is short wherever the forgotten one has more than one rank."""
    partial = placed("dense").partial
    term = terms(layout, partial)
    everything = (1 << layout.size(partial)) - 1
    found = sum(term[rank] for rank in layout.group(("replicate", "shard"), 0))
    assert (found == everything) == (layout.context == 1)


@each_placement
@given(layout=layouts())
def test_a_norm_counts_every_piece_once(placement: Placement, layout: Layout) -> None:
    """Over the group of the sharded axes, each piece of the parameter appears exactly once."""
    piece = terms(layout, placement.sharded)
    for group in layout.groups(placement.sharded):
        assert sorted(piece[rank] for rank in group) == [1 << i for i in range(layout.size(placement.sharded))]


@each_placement
@given(layout=layouts())
def test_each_piece_has_as_many_copies_as_its_replicated_axes(placement: Placement, layout: Layout) -> None:
    """Sharded and replicated axes share out the world: pieces times copies is the number of ranks."""
    assert layout.size(placement.sharded) * layout.size(placement.replicated) == layout.world_size


def test_zero_3_scatters_over_shard_and_reduces_over_replicas() -> None:
    """A parameter that is stored in pieces along `shard` gets its gradient there by a reduce-scatter."""
    zero = placed("dense", sharded=["shard", "tensor"])
    assert zero.partial == ("replicate", "shard", "context")
    assert zero.sharded == ("shard", "tensor")
    assert zero.replicated == ("replicate", "pipeline", "context")


def test_a_tensor_parallel_gradient_is_whole_on_its_rank() -> None:
    """A column's gradient needs no sum over `tensor`, or it would be counted once for each of its ranks."""
    assert "tensor" not in COLUMN.partial
    assert "tensor" in COLUMN.sharded


def test_experts_lie_in_pieces_along_expert() -> None:
    """Two ranks along `expert` hold different experts, so no plan need say so, and no norm counts one for another."""
    assert placed("expert").sharded == ("expert",)
    assert placed("expert").replicated == ("replicate", "pipeline", "expert_shard")


@given(st.sampled_from(["dense", "expert"]), st.data())
def test_placement_is_in_the_order_of_the_layout(kind: Kind, data: st.DataObject) -> None:
    """Axes given in any order make equal placements."""
    reading = DENSE if kind == "dense" else EXPERT
    axes = data.draw(st.permutations(reading))
    assert placed(kind, sharded=axes) == placed(kind, sharded=reading)
    assert placed(kind, sharded=axes).sharded == reading


def test_an_axis_of_the_other_reading_is_refused() -> None:
    """An expert has no `tensor` axis of its own: its ranks are counted along `expert`."""
    with pytest.raises(ValueError, match="a parameter of kind 'expert' has no axis 'tensor'"):
        placed("expert", sharded=["tensor"])


def test_an_unknown_kind_is_refused() -> None:
    """A misspelt kind has no default placement."""
    with pytest.raises(ValueError, match="no parameter is of kind 'exprt': kinds are 'dense', 'expert'"):
        placed("exprt")  # pyright: ignore[reportArgumentType]
