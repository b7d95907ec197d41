"""Who holds what, told apart: compared with counting the holders of every element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.plan import atoms_of, minus
from shoal.errors import UsageError
from shoal.topology.holding import Box, whole
from tests.checkpoint.cuts import held, shapes
from tests.checkpoint.states import light

RANKS = range(5)


def by_box(layout):
    """The ranks of each box, as `atoms_of` takes them."""
    boxes = {box for boxes in layout.values() for box in boxes}
    return {box: tuple(rank for rank in sorted(layout) if box in layout[rank]) for box in boxes}


def painted(shape, boxes):
    """How often each element lies in `boxes`."""
    count = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        count[box.slices] += 1
    return count


@light
@given(st.data(), shapes)
def test_atoms_tile_the_tensor_and_name_exactly_the_holders(data, shape):
    """Each element is in one atom, and the atom's ranks are those that hold the element."""
    layout = data.draw(held(shape, RANKS))
    atoms = atoms_of("w", shape, by_box(layout))
    assert torch.equal(painted(shape, [atom.box for atom in atoms]), torch.ones(shape, dtype=torch.int64))
    for rank in RANKS:
        mine = painted(shape, [atom.box for atom in atoms if rank in atom.ranks])
        assert torch.equal(mine, painted(shape, layout.get(rank, [])))
    assert atoms == sorted(atoms)


@light
@given(st.data(), shapes.filter(lambda shape: 0 not in shape))
def test_equal_and_disjoint_boxes_stay_as_they_are(data, shape):
    """No cut is made that no border asks for: as many atoms as boxes."""
    layout = data.draw(held(shape, [0]))
    layout |= {1: layout[0]}
    assert {atom.box for atom in atoms_of("w", shape, by_box(layout))} == set(layout[0])


@light
@given(st.data(), shapes)
def test_a_part_that_nobody_holds_is_named(data, shape):
    """Whatever element is taken away from all: the sentence has the tensor, and a box that nobody holds."""
    layout = data.draw(held(shape, RANKS).filter(lambda layout: any(b.numel for bs in layout.values() for b in bs)))
    victim = data.draw(st.sampled_from([box for box in by_box(layout) if box.numel]))
    hole = Box(victim.offset, (1,) * len(victim.shape))
    holed = {rank: [part for box in boxes for part in minus(box, hole)] for rank, boxes in layout.items()}
    with pytest.raises(UsageError, match=r"no rank holds \[.*\] of w, whose shape is"):
        atoms_of("w", shape, by_box(holed))


@light
@given(st.data(), shapes)
def test_minus_leaves_the_rest_once(data, shape):
    """The pieces and the hole together are the box."""

    def some_box() -> Box:
        start = tuple(data.draw(st.integers(0, size)) for size in shape)
        return Box(start, tuple(data.draw(st.integers(0, size - at)) for size, at in zip(shape, start, strict=True)))

    box, hole = some_box(), some_box()
    rest = painted(shape, minus(box, hole))
    assert torch.equal(rest, painted(shape, [box]) * (1 - painted(shape, [hole])))


def test_a_part_that_two_ranks_own_is_refused_by_name():
    """Parts that overlap and are not whole copies: the sentence has both ranks, both boxes and the tensor."""
    overlapping = {Box((0,), (6,)): (0,), Box((4,), (6,)): (1,)}
    with pytest.raises(UsageError, match=r"rank 0 holds \[0:6\] of w and rank 1 holds \[4:10\]"):
        atoms_of("w", (10,), overlapping)
    with pytest.raises(UsageError, match=r"rank 0 holds \[0:6\] of w and rank 2 holds \[0:10\]"):
        atoms_of("w", (10,), {whole((10,)): (2,), Box((0,), (6,)): (0,)})


def test_uneven_replicas_are_no_mistake():
    """Three places along an axis hold two heads: the first of them lies on two ranks."""
    atoms = atoms_of("w", (4, 2), {Box((0, 0), (2, 2)): (0, 1), Box((2, 0), (2, 2)): (2,)})
    assert [atom.ranks for atom in atoms] == [(0, 1), (2,)]
