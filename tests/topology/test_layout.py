"""The algebra of ranks, coordinates and groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LayoutError
from shoal.topology.layout import BATCH_AXES, DENSE, EXPERT, INSIDE_REPLICA, Axis, Coordinate, Layout
from tests.topology.layouts import ALL_AXES, layouts, readings, some_axes

CUBE = Layout(replicate=2, shard=2, tensor=2, expert=2)


@given(layouts())
def test_every_rank_has_a_coordinate_of_its_own(layout: Layout) -> None:
    """No two are in one place of the box."""
    coordinates = [layout.coordinate(rank) for rank in range(layout.world_size)]
    assert len(set(coordinates)) == layout.world_size


@given(layouts())
def test_rank_follows_the_documented_equation(layout: Layout) -> None:
    """rank = (((replicate * P + pipeline) * D + shard) * C + context) * T + tensor."""
    for rank in range(layout.world_size):
        at = layout.coordinate(rank)
        stage = at.replicate * layout.pipeline + at.pipeline
        assert rank == ((stage * layout.shard + at.shard) * layout.context + at.context) * layout.tensor + at.tensor


@given(layouts())
def test_experts_rank_follows_the_documented_equation(layout: Layout) -> None:
    """rank = ((replicate * P + pipeline) * (D * C * T / E) + expert_shard) * E + expert."""
    for rank in range(layout.world_size):
        at = layout.coordinate(rank)
        stage = at.replicate * layout.pipeline + at.pipeline
        expert_shard, expert = (layout.index(axis, rank) for axis in ("expert_shard", "expert"))
        assert rank == (stage * layout.expert_shard + expert_shard) * layout.expert + expert


@given(layouts(), some_axes())
def test_groups_partition_the_world(layout: Layout, axes: tuple[Axis, ...]) -> None:
    """Every rank is in exactly one group, and every group has the product of the axes' sizes."""
    groups = layout.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {layout.size(axes)}


@given(layouts(), some_axes())
def test_groups_are_what_each_member_says(layout: Layout, axes: tuple[Axis, ...]) -> None:
    """Each member of a group names the same group, in ascending order; groups come by their first rank."""
    groups = layout.groups(axes)
    assert list(groups) == sorted(groups)
    for group in groups:
        assert list(group) == sorted(group)
        assert {layout.group(axes, rank) for rank in group} == {group}


@given(layouts(), readings(), st.data())
def test_a_group_shares_all_other_coordinates(layout: Layout, reading: tuple[Axis, ...], data: st.DataObject) -> None:
    """A group is the ranks with the same index on every axis that is not one of its own, and no others."""
    axes = data.draw(st.lists(st.sampled_from(reading), unique=True))
    rank = data.draw(st.integers(0, layout.world_size - 1))
    others: list[Axis] = [axis for axis in reading if axis not in axes]
    wanted = [layout.index(axis, rank) for axis in others]
    naive = [r for r in range(layout.world_size) if [layout.index(axis, r) for axis in others] == wanted]
    assert list(layout.group(tuple(axes), rank)) == naive


@given(layouts(), readings(), st.data())
def test_two_axes_meet_in_one_rank(layout: Layout, reading: tuple[Axis, ...], data: st.DataObject) -> None:
    """The groups of two different axes of one reading at a rank have that rank in common, and nothing else."""
    first, second = data.draw(st.lists(st.sampled_from(reading), unique=True, min_size=2, max_size=2))
    rank = data.draw(st.integers(0, layout.world_size - 1))
    assert set(layout.group(first, rank)) & set(layout.group(second, rank)) == {rank}


@given(layouts(), st.sampled_from(ALL_AXES))
def test_index_is_the_place_in_the_group(layout: Layout, axis: Axis) -> None:
    """`index` is the position of a rank in its group, as a collective over that group counts it."""
    for rank in range(layout.world_size):
        assert layout.group(axis, rank)[layout.index(axis, rank)] == rank


@given(layouts(), some_axes())
def test_the_order_of_axes_does_not_matter(layout: Layout, axes: tuple[Axis, ...]) -> None:
    """A combined group is a set of axes: neither their order nor a repetition changes it."""
    assert layout.groups(axes) == layout.groups((*reversed(axes), *axes))
    assert layout.size(axes) == layout.size((*reversed(axes), *axes))


@given(layouts())
def test_a_replica_is_consecutive_ranks(layout: Layout) -> None:
    """Replica i is the ranks from i * replica_size on, so that a launcher's hosts hold whole replicas."""
    size = layout.replica_size
    replicas = layout.groups(INSIDE_REPLICA)
    assert replicas == tuple(tuple(range(i * size, (i + 1) * size)) for i in range(layout.replicate))


@given(layouts())
def test_innermost_groups_are_consecutive_ranks(layout: Layout) -> None:
    """Tensor and expert groups are neighbours: they need the fastest link."""
    for axis in ("tensor", "expert"):
        assert all(group == tuple(range(group[0], group[0] + len(group))) for group in layout.groups(axis))


@given(layouts())
def test_experts_reuse_shard_context_and_tensor(layout: Layout) -> None:
    """expert x expert_shard and shard x context x tensor are the same groups of ranks, read in two ways."""
    assert layout.groups(("expert_shard", "expert")) == layout.groups(("shard", "context", "tensor"))
    assert layout.size(EXPERT) == layout.size(DENSE) == layout.world_size


@given(layouts())
def test_a_layout_survives_a_dictionary(layout: Layout) -> None:
    """`from_dict` inverts `to_dict`, and equal layouts are one key of a dictionary."""
    again = Layout.from_dict(layout.to_dict())
    assert again == layout
    assert {layout: "here"}[again] == "here"


@given(layouts())
def test_what_remains_goes_to_replicate(layout: Layout) -> None:
    """From the number of processes and the inner axes alone, the number of replicas is found."""
    given_sizes = {**layout.to_dict(), "replicate": None}
    assert Layout.for_processes(layout.world_size, **given_sizes) == layout
    assert Layout.for_processes(layout.world_size, **layout.to_dict()) == layout


def test_two_by_two_by_two() -> None:
    """The groups of the smallest layout with three axes, written out by hand."""
    assert CUBE.world_size == 8
    assert CUBE.replica_size == 4
    assert CUBE.groups("tensor") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert CUBE.groups("shard") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert CUBE.groups("replicate") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert CUBE.groups(BATCH_AXES) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert CUBE.groups("pipeline") == tuple((rank,) for rank in range(8))
    assert CUBE.groups(()) == tuple((rank,) for rank in range(8))
    assert CUBE.coordinate(6) == Coordinate(replicate=1, shard=1)
    assert CUBE.coordinate(5) == Coordinate(replicate=1, tensor=1)


def test_experts_are_taken_from_the_innermost_ranks() -> None:
    """Four experts over shard 2 x context 2 x tensor 2 lie on context x tensor, and `shard` is their data axis."""
    layout = Layout(shard=2, context=2, tensor=2, expert=4)
    assert layout.groups("expert") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.groups("expert_shard") == layout.groups("shard") == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        (Layout(), "1 replica = 1 rank"),
        (Layout(replicate=4), "4 replicas = 4 ranks"),
        (Layout(replicate=2, shard=2, tensor=2), "2 replicas x (shard 2, tensor 2) = 8 ranks"),
        (Layout(tensor=2, expert=2), "1 replica x (tensor 2, expert 2 on the same ranks) = 2 ranks"),
    ],
)
def test_a_layout_describes_itself(layout: Layout, line: str) -> None:
    """One line for people, without the axes that are not used."""
    assert layout.describe() == line


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    """No coordinate, index or group is invented for a rank that does not exist."""
    for ask in (CUBE.coordinate, lambda r: CUBE.group("tensor", r), lambda r: CUBE.index("expert", r)):
        with pytest.raises(ValueError, match=rf"rank {rank} of 8: it must be in 0 \.\. 7"):
            ask(rank)


def test_axes_of_two_readings_are_refused() -> None:
    """`tensor` and `expert` count the same ranks, so no group is spanned by both."""
    for ask in (lambda: CUBE.group(("tensor", "expert"), 0), lambda: CUBE.size(("tensor", "expert"))):
        with pytest.raises(ValueError, match="'expert' and 'tensor' count the same ranks twice"):
            ask()


def test_an_unknown_axis_is_named() -> None:
    """A misspelt axis raises; it is not an empty group."""
    with pytest.raises(ValueError, match="no axis is called 'tensr'"):
        CUBE.group("tensr", 0)  # pyright: ignore[reportArgumentType]


def test_an_unknown_size_is_refused() -> None:
    """A saved layout with an axis that this version does not know is not read as one without it."""
    with pytest.raises(LayoutError, match="no axis 'sequence'"):
        Layout.from_dict({"sequence": 2})
