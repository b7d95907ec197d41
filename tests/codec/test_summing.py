"""Sums that are made on the way: what the ranks send adds up to what all of them get."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from shoal.codec.codec import Codec, TensorPlace
from shoal.codec.config import ACPSGDConfig, PowerSGDConfig, RandomKConfig, ScaleComConfig
from shoal.codec.power_sgd import ACPSGD, PowerSGD
from shoal.codec.top_k import RandomK, ScaleCom

PLACES = [TensorPlace("a", 0, (24, 20)), TensorPlace("bias", 480, (24,)), TensorPlace("b", 512, (16, 30))]
NUMEL, RANKS = 1000, 3
FLOAT32 = 1e-4
"""Payloads are float32; the numbers are about 10."""

LINEAR: dict[str, Callable[[], Codec]] = {
    "random_k": lambda: RandomK(RandomKConfig(fraction=0.1)),
    "scale_com": lambda: ScaleCom(ScaleComConfig(fraction=0.1)),
    "power_sgd": lambda: PowerSGD(PowerSGDConfig(rank=2)),
    "acp_sgd": lambda: ACPSGD(ACPSGDConfig(rank=2)),
}
every_linear = pytest.mark.parametrize("name", list(LINEAR))


def on_ranks(name: str, ranks: int = RANKS) -> list[Codec]:
    """The codec as each rank binds it."""
    return [LINEAR[name]().bound(PLACES, key=3, rank=rank, ranks=ranks) for rank in range(ranks)]


def summed(codecs: Sequence[Codec], terms: Sequence[Tensor], key: int) -> list[tuple[Tensor, Tensor]]:
    """(sent, sum) of every rank; payloads are added here."""
    runs, ends = [c.summing(x, key=key) for c, x in zip(codecs, terms, strict=True)], []
    while not ends:
        rounds = []
        for run in runs:
            try:
                rounds.append(next(run))
            except StopIteration as end:
                ends.append(end.value)
        for parts in zip(*rounds, strict=True):
            total = torch.stack(parts).sum(0, dtype=parts[0].dtype)
            for part in parts:
                part.copy_(total)
    return ends


def terms_of(step: int, ranks: int = RANKS) -> list[Tensor]:
    return [torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * step + r)).double() for r in range(ranks)]


@every_linear
def test_what_ranks_have_sent_adds_up_to_the_sum(name: str) -> None:
    """In every step: the same bits on all ranks, and no rank's state differs."""
    codecs = on_ranks(name)
    for step in range(5):
        ends = summed(codecs, terms_of(step), key=step)
        assert all(torch.equal(ends[0][1], total) for _, total in ends)
        assert torch.allclose(sum(sent for sent, _ in ends), ends[0][1], rtol=0, atol=FLOAT32)
        assert bool(ends[0][1].any())
        for other in codecs[1:]:
            for a, b in zip(codecs[0].state.values(), other.state.values(), strict=True):
                assert torch.equal(a, b)


@every_linear
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_on_one_rank_shows_on_all(name: str, bad: float) -> None:
    """Also where the rank that is not finite does not lead; and the next sum is finite again."""
    codecs = on_ranks(name)
    for key in range(6):
        terms = terms_of(key)
        terms[1][7] = bad
        assert not any(total.isfinite().all() for _, total in summed(codecs, terms, key=key))
        assert all(total.isfinite().all() for _, total in summed(codecs, terms_of(key), key=key + 100))


def test_places_are_those_of_the_leader() -> None:
    """Its k largest; every rank leads in some step; every rank sends k numbers, however many ranks there are."""
    codecs, led = [ScaleCom(ScaleComConfig(fraction=0.02), rank=r, ranks=RANKS) for r in range(RANKS)], set()
    for key in range(20):
        terms = terms_of(key)
        leader = codecs[0].leader(key)
        led.add(leader)
        ends = summed(codecs, terms, key=key)
        places = terms[leader].abs().topk(20).indices.sort().values
        for (sent, total), term in zip(ends, terms, strict=True):
            assert torch.equal(sent.nonzero().view(-1), places)
            assert torch.equal(sent[places], term[places])
            assert torch.allclose(total[places], sum(terms)[places], rtol=0, atol=FLOAT32)
    assert led == set(range(RANKS))
    rounds = list(codecs[0].summing(terms_of(0)[0], key=0))
    assert sum(part.numel() * part.itemsize for payload in rounds for part in payload) == 20 * 4 + 20 * 2 + 4


def test_alternating_sums_come_to_a_matrix_of_low_rank() -> None:
    """A constant matrix of rank 2 is whole after both factors were summed; one of rank 3 is not."""
    for rank, exact in ((2, True), (3, False)):
        generator = torch.Generator().manual_seed(rank)
        x = torch.zeros(NUMEL, dtype=torch.float64)
        a, b = (torch.randn(24, rank, generator=generator), torch.randn(rank, 20, generator=generator))
        x[:480] = (a @ b).reshape(-1).double()
        codec = ACPSGD(ACPSGDConfig(rank=2)).bound(PLACES, key=0, rank=0, ranks=1)
        for step in range(3):
            ((_, total),) = summed([codec], [x], key=step)
        assert torch.allclose(total, x, rtol=0, atol=FLOAT32) == exact


def test_alternating_sums_take_half_the_bytes() -> None:
    """Of the thin matrices, in two sums together, what PowerSGD takes in one; the vectors come beside them."""
    (alternating,), (both,) = on_ranks("acp_sgd", 1), on_ranks("power_sgd", 1)
    vectors, nbytes = NUMEL - 24 * 20 - 16 * 30, []
    for step in range(2):
        payloads = list(alternating.summing(terms_of(step)[0], key=step))
        assert len(payloads) == 1
        nbytes.append(4 * payloads[0][0].numel())
    assert sum(nbytes) == both.wire_bytes(NUMEL) + 4 * vectors


def test_alternating_goes_on_from_its_state() -> None:
    """Copied after three sums, the state makes the fourth the same bits."""
    (codec,), (again,) = on_ranks("acp_sgd", 1), on_ranks("acp_sgd", 1)
    for step in range(3):
        summed([codec], [terms_of(step)[0]], key=step)
    for name, tensor in again.state.items():
        tensor.copy_(codec.state[name])
    wanted, found = (summed([one], [terms_of(3)[0]], key=3)[0][1] for one in (codec, again))
    assert torch.equal(wanted, found)
