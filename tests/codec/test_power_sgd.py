"""PowerSGD on matrices. On vectors, which it sends as they are, it is tested with every codec."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shoal.codec.codec import TensorPlace
from shoal.codec.config import PowerSGDConfig
from shoal.codec.power_sgd import PowerSGD

PLACES = [
    TensorPlace("a", 0, (24, 5, 4)),
    TensorPlace("bias", 480, (24,)),
    TensorPlace("b", 512, (16, 30)),
    TensorPlace("small", 992, (2, 3)),
]
NUMEL = 1000
FLOAT32 = 1e-5
"""Payloads are float32; the numbers are about 1."""


def bound(rank: int) -> PowerSGD:
    return PowerSGD(PowerSGDConfig(rank=rank)).bound(PLACES, key=3, rank=0, ranks=1)


def low_rank(rank: int, seed: int) -> Tensor:
    """A buffer whose matrices have this rank."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.zeros(NUMEL, dtype=torch.float64)
    for _, start, (rows, *others) in PLACES:
        columns = math.prod(others)
        matrix = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
        x[start : start + rows * columns] = matrix.reshape(-1).double()
    return x


def summed(codecs: list[PowerSGD], terms: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """What `summing` returned on every rank; payloads are summed here."""
    runs, ends = [c.summing(x, key=0) for c, x in zip(codecs, terms, strict=True)], []
    while not ends:
        rounds = []
        for run in runs:
            try:
                rounds.append(next(run))
            except StopIteration as end:
                ends.append(end.value)
        for parts in zip(*rounds, strict=True):
            total = torch.stack(parts).sum(0)
            for part in parts:
                part.copy_(total)
    return ends


def test_a_matrix_of_low_rank_comes_whole() -> None:
    """One round finds a basis of the columns; rank 1 does not hold rank 2."""
    for rank, exact in ((2, True), (3, True), (1, False)):
        terms = [low_rank(2, seed) for seed in range(1)]
        ((_, total),) = summed([bound(rank)], terms)
        assert torch.allclose(total, terms[0], rtol=0, atol=100 * FLOAT32) == exact


def test_what_ranks_have_sent_adds_up_to_the_sum() -> None:
    """In every round, on every rank with the same bits; the first sum carries what is in no matrix."""
    codecs = [bound(2) for _ in range(3)]
    for step in range(4):
        terms = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * step + r)).double() for r in range(3)]
        ends = summed(codecs, terms)
        total = ends[0][1]
        assert all(torch.equal(total, other) for _, other in ends)
        assert torch.allclose(sum(sent for sent, _ in ends), total, rtol=0, atol=10 * FLOAT32)
        assert torch.allclose(total[480:504], sum(terms)[480:504], rtol=0, atol=FLOAT32)
        assert float((sum(terms) - total).norm()) < float(sum(terms).norm())
        for a, b in zip(codecs[0].state.values(), codecs[1].state.values(), strict=True):
            assert torch.equal(a, b)


def test_the_basis_follows_the_gradient() -> None:
    """A warm start nears the best approximation of rank 2; one round from a random basis does not."""
    x, codec = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).double(), bound(2)
    errors = [float((x - summed([codec], [x])[0][1])[:480].norm()) for _ in range(40)]
    best = float(torch.linalg.svdvals(x[:480].view(24, 20))[2:].square().sum().sqrt())
    assert errors[-1] == pytest.approx(best, rel=1e-2)
    assert errors[0] > 1.05 * best


def test_bytes_are_those_of_two_thin_matrices() -> None:
    """rank (rows + columns) numbers for a matrix where that is less, all numbers of the rest."""
    rank = 2
    thin, rest = rank * (24 + 20) + rank * (16 + 30), NUMEL - 480 - 480
    assert bound(rank).wire_bytes(NUMEL) == 4 * (thin + rest)
    assert {name: tuple(q.shape) for name, q in bound(rank).state.items()} == {
        "power_sgd/2/a": (20, 2), "power_sgd/2/b": (30, 2),
    }  # fmt: skip
    run, numbers = bound(rank).summing(low_rank(2, 0), key=0), 0
    try:
        while True:
            numbers += sum(part.numel() for part in next(run))
    except StopIteration:
        assert 4 * numbers == bound(rank).wire_bytes(NUMEL)


def test_a_rank_alone_encodes_what_it_would_send() -> None:
    """`encode` and `decode` are both rounds of one rank."""
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(2)).double()
    alone, codec = bound(2), bound(2)
    (_, total) = summed([alone], [x])[0]
    payload = codec.encode(x)
    assert [(p.dtype, p.numel()) for p in payload] == [*codec.fields(NUMEL)]
    assert torch.allclose(codec.decode(payload, NUMEL, dtype=torch.float64), total, rtol=0, atol=10 * FLOAT32)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_and_is_forgotten(bad: float) -> None:
    """The sum is not finite on any rank; the next one is, and so it is after a gradient of zero."""
    codecs, fine = [bound(2), bound(2)], [low_rank(1, 0), low_rank(1, 1)]
    broken = fine[0].clone()
    broken[7] = bad
    assert not any(total.isfinite().all() for _, total in summed(codecs, [broken, fine[1]]))
    zero = torch.zeros_like(broken)
    assert not any(total.any() for _, total in summed(codecs, [zero, zero]))
    for _, total in summed(codecs, fine):
        assert torch.allclose(total, fine[0] + fine[1], rtol=0, atol=100 * FLOAT32)


def test_bases_begin_alike_on_all_ranks() -> None:
    """They follow from the key and the name; another name or key begins elsewhere."""
    first, again = bound(2).state, bound(2).state
    assert all(torch.equal(a, b) for a, b in zip(first.values(), again.values(), strict=True))
    other = PowerSGD(PowerSGDConfig(rank=2)).bound(PLACES, key=4, rank=0, ranks=1).state
    assert not any(torch.equal(a, b) for a, b in zip(first.values(), other.values(), strict=True))
