"""The grid: every element in exactly one box, boxes of bounded size, and nothing but shapes decides."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.tensorfile import MAX_PIECES, TensorSpec, assign, boxes_within, family
from shoal.topology.holding import Box, intersection, whole
from tests.checkpoint.states import light, parcels

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
limits = st.integers(1, 60)


def cells(box: Box) -> Counter[tuple[int, ...]]:
    return Counter(product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))))


@light
@given(shapes, limits)
def test_boxes_tile_a_tensor_and_stay_within_the_limit(shape, limit):
    """Each element lies in exactly one box, and no box has more elements than the limit."""
    cut = list(boxes_within(whole(shape), shape, limit))
    covered: Counter[tuple[int, ...]] = Counter()
    for box in cut:
        covered.update(cells(box))
    assert covered == cells(Box((0,) * len(shape), shape))
    assert all(prod(box.shape) <= limit for box in cut)
    assert len(cut) >= 1


@light
@given(shapes, limits)
def test_boxes_are_runs_of_memory(shape, limit):
    """In a row-major tensor each box is one run of bytes: a dim that is cut has only dims of size one before it."""
    for box in boxes_within(whole(shape), shape, limit):
        cut = [dim for dim, (size, all_of_it) in enumerate(zip(box.shape, shape, strict=True)) if size < all_of_it]
        assert prod(box.shape[: max(cut)]) == 1 if cut else box.shape == shape


@light
@given(st.data(), shapes)
def test_intersection_is_that_of_the_sets_of_elements(data, shape):
    """The shared box has exactly the elements that both boxes have; None when there is none."""

    def some_box() -> Box:
        start = tuple(data.draw(st.integers(0, size)) for size in shape)
        return Box(start, tuple(data.draw(st.integers(0, size - at)) for size, at in zip(shape, start, strict=True)))

    a, b = some_box(), some_box()
    shared = intersection(a, b)
    assert (cells(shared) if shared else Counter()) == cells(a) & cells(b)


TYPES = {1: "uint8", 2: "int16", 4: "float32", 8: "float64"}
specs = st.lists(
    st.tuples(st.sampled_from(["model/", "optimizer/", ""]), st.integers(0, 99), st.sampled_from([1, 2, 4, 8]), shapes),
    max_size=12,
    unique_by=lambda item: item[:2],
).map(lambda items: [TensorSpec(f"{prefix}{n}", TYPES[size], size, shape) for prefix, n, size, shape in items])


@light
@given(specs, st.integers(8, 300), st.randoms())
def test_parcels_hold_everything_once_whatever_the_order_of_the_names(drawn, object_bytes, random):
    """Every box in one parcel, parcels within the limit and of one family, and the order of the mapping is nothing."""
    cut = parcels(drawn, object_bytes)
    pieces = [piece for parcel in cut for piece in parcel]
    assert len(set(pieces)) == len(pieces)
    assert {piece.spec for piece in pieces} == set(drawn)
    assert sum(piece.nbytes for piece in pieces) == sum(prod(spec.shape) * spec.itemsize for spec in drawn)
    assert all(sum(piece.nbytes for piece in parcel) <= object_bytes for parcel in cut)
    assert all(len({family(piece.spec.name) for piece in parcel}) == 1 for parcel in cut)
    shuffled = list(drawn)
    random.shuffle(shuffled)
    assert parcels(shuffled, object_bytes) == cut


def test_small_tensors_share_an_object_and_objects_stay_countable():
    """A thousand scalars are one file, and more than `MAX_PIECES` are more, so that a header stays bounded."""
    scalars = [TensorSpec(f"optimizer/{n:05d}/step", "float32", 4, ()) for n in range(MAX_PIECES + 1)]
    assert [len(parcel) for parcel in parcels(scalars, 8 << 20)] == [MAX_PIECES, 1]


@light
@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 5))
def test_work_is_shared_evenly(sizes, ranks):
    """Each parcel has one writer, and no rank has more than the mean and one parcel beside it."""
    shares = assign(sizes, ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in share) for share in shares]
    assert max(loads) <= sum(sizes) / ranks + max(sizes, default=0)
