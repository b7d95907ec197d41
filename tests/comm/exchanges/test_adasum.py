"""Adasum beside its equations, in float64 (arXiv:2006.02924, section 3)."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from shoal.comm.exchanges.adasum import Adasum, adasum
from shoal.comm.exchanges.exchange import Segment
from tests.comm.local import local_group
from tests.waiting import HANG_S

SAME = 1e-14
SHAPES = ((3, 4), (5,), (), (0, 2))


def drawn(seed: int, shape: tuple[int, ...] = (6,)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(a: Tensor, b: Tensor) -> Tensor:
    """Equation 3, with the projections written out."""
    along_a = (a * b).sum() / (a * a).sum() * a
    along_b = (a * b).sum() / (b * b).sum() * b
    return a - along_a / 2 + b - along_b / 2


def test_a_pair_is_the_equation() -> None:
    """In both orders."""
    a, b = drawn(0), drawn(1)
    assert torch.allclose(adasum([a, b]), pair(a, b), rtol=SAME)
    assert torch.allclose(adasum([b, a]), pair(a, b), rtol=SAME)


def test_right_angles_add_and_equals_average() -> None:
    """The two ends of what it adapts to; and a change of nothing leaves the other as it is."""
    a = drawn(0)
    b = drawn(1)
    b -= (a @ b) / (a @ a) * a
    assert torch.allclose(adasum([a, b]), a + b, rtol=1e-12)
    assert torch.allclose(adasum([a, a]), a, rtol=SAME)
    assert torch.equal(adasum([a, torch.zeros(6, dtype=torch.float64)]), a)
    assert torch.equal(adasum([torch.zeros(6), torch.zeros(6)]), torch.zeros(6))


def test_more_than_two_are_a_tree_of_pairs() -> None:
    """Of halves; of three, the first is alone."""
    a, b, c, d = (drawn(seed) for seed in range(4))
    assert torch.allclose(adasum([a, b, c, d]), pair(pair(a, b), pair(c, d)), rtol=1e-12)
    assert torch.allclose(adasum([a, b, c]), pair(a, pair(b, c)), rtol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rank_has_the_same_sum_of_each_parameter_by_itself(size: int) -> None:
    """Bit by bit, twice over one buffer."""
    groups, found = local_group(size, timeout_s=HANG_S), [list[Tensor]() for _ in range(size)]
    starts = [0, 12, 17, 18]
    segments = [Segment(str(i), start, shape) for i, (start, shape) in enumerate(zip(starts, SHAPES, strict=True))]

    def changes(rank: int, turn: int) -> Tensor:
        return drawn(10 * rank + turn, (18,))

    def run(rank: int) -> None:
        buffer = torch.zeros(18, dtype=torch.float64)
        exchange = Adasum(groups[rank], buffer, segments)
        for turn in range(2):
            buffer.copy_(changes(rank, turn))
            exchange.start()
            exchange.send(buffer)
            exchange.settle()
            exchange.wait()
            exchange.commit()
            found[rank].append(exchange.result.clone())

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    for turn in range(2):
        for rank in range(size):
            assert torch.equal(found[rank][turn], found[0][turn])
        for segment in segments[:3]:
            parts = [changes(rank, turn)[segment.slice] for rank in range(size)]
            assert torch.equal(found[0][turn][segment.slice], adasum(parts))
