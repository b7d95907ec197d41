"""Which server has what."""

from __future__ import annotations

import random

import pytest

from shoal.sync.server_partition import ALIGNMENT, partition


@pytest.mark.parametrize("whole", [False, True])
def test_every_element_has_one_server(whole: bool) -> None:
    """For any sizes and any number of servers; nobody has two runs of one tensor."""
    draw = random.Random(11)
    for _ in range(500):
        lengths = [draw.choice([1, 3, 64, draw.randint(1, 5000)]) for _ in range(draw.randint(1, 12))]
        parts = partition(lengths, draw.randint(1, 9), whole=whole)
        seen = [[0] * length for length in lengths]
        for part in parts:
            assert len({run.tensor for run in part}) == len(part)
            for run in part:
                seen[run.tensor][run.start : run.stop] = [n + 1 for n in seen[run.tensor][run.start : run.stop]]
        assert all(count == 1 for row in seen for count in row)


def test_parts_are_even_and_a_large_tensor_is_divided() -> None:
    """To a cache line."""
    parts = partition([10, 100_000, 30], 4)
    sizes = [sum(run.numel for run in part) for part in parts]
    assert max(sizes) - min(sizes) <= 2 * ALIGNMENT
    assert all(any(run.tensor == 1 for run in part) for part in parts)


def test_whole_tensors_go_to_the_least_loaded() -> None:
    """Largest first: 5 | 4 + 1 | 3 + 2 of five tensors on three servers."""
    parts = partition([1, 2, 3, 4, 5], 3, whole=True)
    assert [sum(run.numel for run in part) for part in parts] == [5, 5, 5]
