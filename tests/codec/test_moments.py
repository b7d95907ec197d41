"""Vectors in 8 bits: how far they are off, and that what was decoded is encoded as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.codec import moments
from shoal.codec.config import MOMENT_BLOCK as BLOCK
from shoal.codec.moments import TINIEST, Quantised, map_of, quantised, zeros
from tests.codec.test_kernels import kernels_built

CPU = torch.device("cpu")
CODES = {True: torch.int8, False: torch.uint8}
LENGTHS = (0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 10_001)
LAST_BITS = 2**-22
"""Of a number that is divided by its scale, and of a border: both are rounded."""

signs = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def numbers(numel: int, *, signed: bool, seed: int = 0) -> Tensor:
    """Of magnitudes from subnormal ones to 1e30, with zeros among them, a block of zeros, and one that is tiny."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x *= 10.0 ** (75 * torch.rand(numel, generator=generator) - 45)
    x[torch.rand(numel, generator=generator) < 0.05] = 0
    x[:BLOCK] = 0
    x[BLOCK : 2 * BLOCK] *= 1e-38 / x[BLOCK : 2 * BLOCK].abs().amax().clamp(min=1e-38) if numel > BLOCK else 1
    return x if signed else x.abs()


def beside_ones(x: Tensor) -> Tensor:
    """`x`, cut so that every block begins with a 1, which is then its scale."""
    rows = torch.cat([x, torch.ones(-len(x) % (BLOCK - 1))]).view(-1, BLOCK - 1)
    return torch.cat([torch.ones(len(rows), 1), rows], 1).view(-1)


def bits(x: Quantised) -> list[Tensor]:
    return [x.codes, x.scales.view(torch.int32)]


@signs
@given(data=st.data())
def test_decoded_numbers_are_encoded_as_they_were(signed: bool, data: st.DataObject) -> None:
    """Codes and scales, of any float32 numbers: zeros, subnormal ones, blocks whose largest number is tiny. So a
    checkpoint may hold decoded numbers.
    """
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=None if signed else 0.0)
    alike = st.floats(-1, 1, width=32) if signed else st.floats(0, 1, width=32)
    drawn = data.draw(st.lists(floats, max_size=40) | st.lists(alike, max_size=600))
    scale = 2.0 ** data.draw(st.integers(-149, 0))
    first = quantised(torch.tensor(drawn, dtype=torch.float32) * scale, signed=signed)
    again = quantised(first.decoded(), signed=signed)
    assert all(torch.equal(a, b) for a, b in zip(bits(first), bits(again), strict=True))


@signs
@pytest.mark.parametrize("numel", LENGTHS)
def test_decoded_vectors_are_encoded_as_they_were(signed: bool, numel: int) -> None:
    """The same of long ones, in which all levels are there."""
    first = quantised(numbers(numel, signed=signed), signed=signed)
    again = quantised(first.decoded(), signed=signed)
    assert all(torch.equal(a, b) for a, b in zip(bits(first), bits(again), strict=True))
    assert first.decoded().shape == (numel,)


@signs
def test_every_code_of_a_block_with_its_largest_number_stands_for_itself(signed: bool) -> None:
    """For scales down to the least, which keeps all products normal."""
    levels = torch.arange(-127, 128) if signed else torch.arange(256)
    codes = torch.stack([levels, torch.full_like(levels, int(levels[-1]))], 1).view(-1)[: 2 * BLOCK]
    for scale in (TINIEST, 1.5 * TINIEST, 1e-20, 0.3, 3e38):
        held = Quantised(codes.to(CODES[signed]), torch.full((-(-len(codes) // BLOCK),), scale))
        again = quantised(held.decoded(), signed=signed)
        assert all(torch.equal(a, b) for a, b in zip(bits(held), bits(again), strict=True)), scale
        values = held.decoded()
        assert bool((values[values != 0].abs() >= torch.finfo(torch.float32).tiny).all())


@signs
def test_a_number_becomes_the_nearest_value(signed: bool) -> None:
    """Of its block's scale times the map, but for positive numbers without sign, which do not become 0."""
    x = torch.rand(200_000, generator=torch.Generator().manual_seed(1)) ** 8
    x = x * torch.sign(torch.randn(x.shape, generator=torch.Generator().manual_seed(2))) if signed else x
    x = beside_ones(x)
    found = quantised(x, signed=signed).decoded().double()
    values = map_of(CODES[signed], CPU).values.double().unique()
    least = values[values > 0].min()
    place = torch.searchsorted(values, x.double()).clamp(1, len(values) - 1)
    gap = torch.minimum((x - values[place - 1]).abs(), (x - values[place]).abs())
    off = (found - x.double()).abs()
    assert bool((off <= gap + LAST_BITS * x.abs())[(x.abs() >= least)].all())
    if not signed:
        assert torch.equal(found[(x > 0) & (x < least)], least.expand(int(((x > 0) & (x < least)).sum())))


@signs
def test_no_number_is_off_by_more_than_half_a_step_of_its_decade(signed: bool) -> None:
    """Of the block's largest number: 0.0070 with a sign, 0.0035 without, but for the last step below 1, which is half
    as long again; and relative to itself 6.6 % and 3.4 % in the highest decade, twice as much in each one below it.
    """
    parts = 64 if signed else 128
    x = torch.cat([torch.linspace(0, 1, 100_001), torch.logspace(-9, 0, 50_000)])
    x = beside_ones(x)
    off = (quantised(x, signed=signed).decoded() - x).abs()
    half = 0.45 / parts
    assert float(off[x <= 1 - 2 * 0.9 / parts].max()) <= half * (1 + 1e-3)
    assert float(off.max()) <= 1.5 * half * (1 + 1e-3)
    for decade, worst in enumerate((half / 0.1, 2 * half / 0.1, 4 * half / 0.1)):
        inside = (x >= 10.0 ** -(decade + 1)) & (x < 10.0**-decade)
        assert float((off / x)[inside].max()) <= worst * (1 + 1e-3)


@signs
def test_a_larger_number_has_a_code_that_is_not_smaller(signed: bool) -> None:
    """In a block; and -x has the code of x with the other sign."""
    low = -1.0 if signed else 0.0
    x = torch.linspace(low, 1, BLOCK)
    x = torch.where(x.abs() < 0.3, x**9, x)
    found = quantised(x, signed=signed).codes.int()
    assert bool((found.diff() >= 0).all())
    if signed:
        assert torch.equal(quantised(-x, signed=True).codes.int(), -found)


@signs
def test_zeros_are_encoded_as_they_begin(signed: bool) -> None:
    """Whatever the length."""
    for numel in LENGTHS:
        x = torch.zeros(numel)
        first, again = zeros(x, signed=signed), quantised(x, signed=signed)
        assert all(torch.equal(a, b) for a, b in zip(bits(first), bits(again), strict=True))
        assert torch.equal(first.decoded(), x)


def test_only_zero_becomes_zero_without_sign() -> None:
    """So that no step divides a first moment by a second one of 0."""
    x = torch.tensor([1.0, 1e-30, torch.finfo(torch.float32).tiny, 0.0])
    assert (quantised(x, signed=False).decoded() > 0).tolist() == [True, True, True, False]


@signs
def test_the_largest_number_is_exact(signed: bool) -> None:
    """Whatever its sign and its size."""
    for largest in (1.0, -1.0, 3e38, -1e-25) if signed else (1.0, 3e38, 1e-25):
        x = torch.linspace(0, 0.999, BLOCK) * largest
        x[17] = largest
        assert float(quantised(x, signed=signed).decoded()[17]) == float(x[17])


@signs
def test_a_part_is_encoded_as_in_the_whole(signed: bool) -> None:
    """From a multiple of a block on, in the memory of the whole."""
    x = numbers(5 * BLOCK + 3, signed=signed)
    whole, other = quantised(x, signed=signed), quantised(torch.zeros_like(x), signed=signed)
    for start, stop in ((0, 2 * BLOCK), (2 * BLOCK, len(x))):
        assert torch.equal(whole.part(start, stop).decoded(), whole.decoded()[start:stop])
        other.part(start, stop).encode_(x[start:stop])
    assert all(torch.equal(a, b) for a, b in zip(bits(whole), bits(other), strict=True))


@kernels_built
@signs
@pytest.mark.parametrize("numel", LENGTHS)
def test_the_kernels_are_the_torch_forms_to_the_bit(signed: bool, numel: int) -> None:
    """Codes, scales and what they are decoded to."""
    x = numbers(numel, signed=signed, seed=3)
    found, wanted = quantised(x, signed=signed), zeros(x, signed=signed).encode_in_torch_(x)
    assert all(torch.equal(a, b) for a, b in zip(bits(found), bits(wanted), strict=True))
    assert torch.equal(found.decoded().view(torch.int32), wanted.decoded_in_torch().view(torch.int32))


def test_what_is_no_number_stays_none() -> None:
    """A step with such a gradient is not committed; if it were, it would be seen."""
    for spoilt in (torch.nan, torch.inf):
        x = torch.ones(2 * BLOCK)
        x[3] = spoilt
        found = quantised(x, signed=True).decoded()
        assert not bool(found[:BLOCK].isfinite().all())
        assert torch.equal(found[BLOCK:], x[BLOCK:])


@pytest.mark.parametrize("default", [torch.set_default_dtype, torch.set_default_device])
def test_what_tensors_are_by_default_changes_nothing(default: Callable[[Any], None]) -> None:
    """Not the maps, which are kept, either: a kernel writes float32, into memory of a CPU."""
    x = numbers(2 * BLOCK + 3, signed=True)
    wanted = quantised(x, signed=True)
    numbers_of = wanted.decoded()
    for kept in (moments._form, moments._packed_form, moments.map_of):
        kept.cache_clear()
    default(torch.float64 if default is torch.set_default_dtype else "meta")
    try:
        found = quantised(x, signed=True)
        decoded, in_torch = found.decoded(), wanted.decoded_in_torch()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(torch.equal(a, b) for a, b in zip(bits(found), bits(wanted), strict=True))
    assert torch.equal(decoded, numbers_of)
    assert torch.equal(in_torch, numbers_of)
