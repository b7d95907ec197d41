"""Fingerprints of tensors."""

from __future__ import annotations

import pytest
import torch

from shoal.maths.fingerprint import BLOCK_WORDS, fingerprint


def test_every_flipped_bit_changes_it() -> None:
    """All 32 bits of elements at the start, in the middle, at borders of blocks and at the ragged end."""
    values = torch.randn(4 * BLOCK_WORDS + 7, generator=torch.Generator().manual_seed(0))
    bits = values.view(torch.int32)
    seen = {fingerprint({"w": values})}
    for index in (0, 1, 2 * BLOCK_WORDS - 1, 2 * BLOCK_WORDS, 50_000, values.numel() - 7, values.numel() - 1):
        for bit in range(32):
            flipped = -(2**31) if bit == 31 else 1 << bit
            bits[index] ^= flipped
            seen.add(fingerprint({"w": values}))
            bits[index] ^= flipped
    assert len(seen) == 1 + 7 * 32


def test_elements_that_change_places_change_it() -> None:
    """Two neighbours, and the same place of two blocks."""
    values = torch.arange(4 * BLOCK_WORDS, dtype=torch.float64)
    first = fingerprint({"w": values})
    for a, b in ((0, 1), (3, BLOCK_WORDS + 3)):
        swapped = values.clone()
        swapped[a], swapped[b] = values[b], values[a]
        assert fingerprint({"w": swapped}) != first


def test_names_shapes_and_types_are_part_of_it() -> None:
    """The same bytes under another name or shape are other parameters; the order of the mapping is not in it."""
    values, other = torch.ones(6), torch.zeros(3, dtype=torch.float16)
    first = fingerprint({"a": values, "b": other})
    assert fingerprint({"b": other, "a": values}) == first
    assert fingerprint({"b": values, "a": other}) != first
    assert fingerprint({"a": values.view(2, 3), "b": other}) != first
    assert fingerprint({"a": values.view(torch.int32), "b": other}) != first


@pytest.mark.parametrize("threads", [1, 2])
def test_it_does_not_depend_on_threads_or_memory_layout(threads: int) -> None:
    """A slice that is not aligned has the fingerprint of its copy."""
    base = torch.arange(300_001, dtype=torch.float16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert fingerprint({"w": base[1:]}) == fingerprint({"w": base[1:].clone()})
    finally:
        torch.set_num_threads(before)
