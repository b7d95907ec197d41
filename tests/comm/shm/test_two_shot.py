"""The two-shot all-reduce against a plain sum, its ranks being threads that a test puts in any order."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm.shm import two_shot
from shoal.comm.shm.two_shot import PLACES, TwoShot, combine

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8]
PIECE_BYTES = 64  # small, so that few numbers make many pieces


class Turns:
    """Meetings of threads of which one runs at a time; between two meetings they run in a drawn order.

    What a rank writes where another reads in the same interval then shows in some order, without luck.
    """

    def __init__(self, size: int, seed: int) -> None:
        self._random, self._changed = random.Random(seed), threading.Condition()
        self._ranks = list(range(size))
        self._running: list[int] = []
        self._met: list[int] = []
        self._deal()

    def start(self, rank: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._running[:1] == [rank], timeout=20)

    def meet(self, rank: int) -> None:
        with self._changed:
            self._running.pop(0)
            self._met.append(rank)
            if len(self._met) == len(self._ranks):
                self._deal()
            self._changed.notify_all()
        self.start(rank)

    def leave(self) -> None:
        with self._changed:
            self._running.pop(0)
            self._changed.notify_all()

    def _deal(self) -> None:
        self._running, self._met = self._random.sample(self._ranks, len(self._ranks)), []


def reduced(calls: Sequence[Sequence[Tensor]], op: str, seed: int) -> list[list[Tensor]]:
    """`calls[c][r]` is what rank r brings to call c; the same shape, reduced."""
    size = len(calls[0])
    turns, segments = Turns(size, seed), [torch.zeros(PLACES * PIECE_BYTES, dtype=torch.uint8) for _ in range(size)]
    results = [[tensor.clone() for tensor in call] for call in calls]

    def run(rank: int) -> None:
        side = TwoShot(segments, rank, lambda: turns.meet(rank))
        turns.start(rank)
        for call in results:
            side.all_reduce(call[rank], op)  # type: ignore[arg-type]
        turns.leave()

    _threads(size, run)
    return results


def _threads(size: int, run: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


def plain(brought: Sequence[Tensor], op: str) -> Tensor:
    """By definition, from left to right; sums of 16-bit floats in float32."""
    wide = [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in brought]
    return reduce({"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op], wide).to(brought[0].dtype)


def drawn(dtype: torch.dtype, numel: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-100, 100, (numel,), generator=generator).to(dtype)


@given(
    size=st.integers(2, 4),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(["sum", "max", "min"]),
    numels=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60)
def test_every_rank_gets_the_bits_of_the_sum_in_rank_order(size, dtype, op, numels, seed) -> None:
    """For all sizes, dtypes, reductions, calls in a row and orders of ranks: the definition, bit for bit."""
    calls = [[drawn(dtype, n, seed + 10 * c + r) for r in range(size)] for c, n in enumerate(numels)]
    for brought, got in zip(calls, reduced(calls, op, seed), strict=True):
        want = plain(brought, op)
        assert all(torch.equal(tensor, want) for tensor in got)


def wrong_somewhere() -> bool:
    """Whether any of a few orders of three ranks gives another result than the definition."""
    calls = [[drawn(torch.float32, 100, 10 * c + r) for r in range(3)] for c in range(3)]
    return any(
        not torch.equal(tensor, plain(brought, "sum"))
        for seed in range(8)
        for brought, got in zip(calls, reduced(calls, "sum", seed), strict=True)
        for tensor in got
    )


def test_the_orders_find_a_place_that_is_used_again_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two places in place of three, a rank brings where others still take: some order shows it."""
    assert not wrong_somewhere()
    place = TwoShot._place
    monkeypatch.setattr(TwoShot, "_place", lambda self, rank, turn, piece: place(self, rank, turn % 2, piece))
    assert wrong_somewhere()


def test_the_orders_find_a_meeting_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks meet before they bring and not after, they reduce what is not there yet."""

    def early(self: TwoShot, piece: Tensor, turn: int, op) -> None:
        honest(self, piece, turn - 1, op)

    honest = TwoShot._reduce
    monkeypatch.setattr(TwoShot, "_reduce", early)
    assert wrong_somewhere()


def test_a_wrong_part_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that ends one element early leaves an element unreduced."""
    part = TwoShot._part

    def short(self: TwoShot, piece: Tensor, rank: int) -> slice:
        whole = part(self, piece, rank)
        return slice(whole.start, max(whole.start, whole.stop - (rank == 1)))

    monkeypatch.setattr(TwoShot, "_part", short)
    assert wrong_somewhere()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_short_floats_are_rounded_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large number, then small ones that each vanish beside it but not together; added in 16 bits they are lost."""
    large = torch.tensor([2.0 / torch.finfo(dtype).eps], dtype=dtype)
    numbers, out = [large, torch.ones(1, dtype=dtype), torch.ones(1, dtype=dtype)], torch.empty(1, dtype=dtype)
    combine(numbers, "sum", out=out)
    assert out == large + 2
    monkeypatch.setattr(two_shot, "_SHORT", ())
    combine(numbers, "sum", out=out)
    assert out == large


def test_not_a_number_is_never_lost() -> None:
    """A maximum over ranks of which one brings NaN is NaN, whoever brings it."""
    nan, one = torch.tensor([float("nan")]), torch.ones(1)
    for tensors in ([nan, one], [one, nan]):
        out = torch.empty(1)
        combine(tensors, "max", out=out)
        assert out.isnan()
