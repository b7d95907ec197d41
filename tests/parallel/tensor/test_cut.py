"""Cuts of a dimension."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LayoutError
from shoal.parallel.tensor.layers import even_cut, grouped_cut, uneven_cut

SIZES = st.integers(1, 9)


@given(total=st.integers(0, 40), size=SIZES)
def test_uneven_cuts_are_those_of_tensor_split(total: int, size: int) -> None:
    cuts = [uneven_cut(total, place, size) for place in range(size)]
    expected = torch.arange(total).tensor_split(size)
    assert [cut.length for cut in cuts] == [len(part) for part in expected]
    assert [cut.offset for cut in cuts if cut.length] == [int(part[0]) for part in expected if len(part)]


@given(heads=st.integers(1, 12), size=SIZES, unit=st.integers(1, 4))
def test_even_cuts_are_whole_units_or_refused(heads: int, size: int, unit: int) -> None:
    if heads % size:
        with pytest.raises(LayoutError, match=rf"has {heads} .* tensor={size} does not divide"):
            even_cut(heads * unit, 0, size, what="q", unit=unit)
        return
    cuts = [even_cut(heads * unit, place, size, what="q", unit=unit) for place in range(size)]
    assert [cut.offset for cut in cuts] == [place * heads * unit // size for place in range(size)]
    assert all(cut.length == heads * unit // size and cut.length % unit == 0 for cut in cuts)


@given(shared=st.integers(1, 6), groups=st.integers(1, 4), size=SIZES, unit=st.integers(1, 3))
def test_every_place_has_the_shared_heads_of_its_query_heads(shared: int, groups: int, size: int, unit: int) -> None:
    """And no others, each for the same number of its queries; places with the same ones are twins. Or it is refused."""
    heads = shared * groups
    if heads % size:
        return  # refused for the query heads
    if shared % size and size % shared:
        with pytest.raises(LayoutError, match=rf"{shared} heads that the {heads} query heads share"):
            grouped_cut(shared * unit, 0, size, what="k", unit=unit, heads=heads)
        return
    cuts = [grouped_cut(shared * unit, place, size, what="k", unit=unit, heads=heads) for place in range(size)]
    for place, cut in enumerate(cuts):
        queries = range(place * heads // size, (place + 1) * heads // size)
        wanted = sorted({query // groups for query in queries})
        assert [cut.offset // unit + i for i in range(cut.length // unit)] == wanted
        assert cut.length % unit == 0
        assert cut.twins == tuple(p for p, other in enumerate(cuts) if other.offset == cut.offset)
