"""A sum of which less is sent."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoal.codec.codec import Codec
from shoal.comm.collective import Alone, Collective
from shoal.comm.exchanges.coded import Coded, CodedExchanges
from shoal.comm.exchanges.exchange import Segment
from tests.codec.every import CONFIGS, codec_of
from tests.comm.local import local_group
from tests.waiting import HANG_S

NUMEL, STEPS = 400, 5
SEGMENTS = (Segment("a", 0, (13, 15)), Segment("b", 208, (183,)))
"""195 numbers, a gap, 183 numbers, a gap."""
FLOAT64 = 1e-11
"""Sums of a few float64 numbers of which the largest is about 100."""
FLOAT32 = 1e-5
"""The same, of payloads that are summed on the way: in float32, as an all-reduce of float32 does."""

every_codec = pytest.mark.parametrize("name", list(CONFIGS))
with_feedback = pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.feedback])
"""Unbiased codecs go without: what they leave out may be more than they were given."""


def on_ranks(size: int, work: Callable[[Collective], object]) -> list:
    """What `work` returned on each of `size` threads."""
    found: list = [None] * size
    groups = local_group(size, timeout_s=HANG_S)

    def run(rank: int) -> None:
        found[rank] = work(groups[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result is not None for result in found), "a rank failed"
    return found


def term(rank: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """This rank's numbers of a step: float32 numbers, zero outside of the segments."""
    numbers = torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * rank + step))
    inside = torch.zeros(NUMEL)
    for segment in SEGMENTS:
        inside[segment.slice] = 1
    return (numbers * inside).to(dtype)


def coded(group: Collective, codec: Codec, *, feedback: bool = True, dtype: torch.dtype = torch.float64) -> Coded:
    return Coded(codec, group, torch.zeros(NUMEL, dtype=dtype), SEGMENTS, feedback=feedback, key=3)


def summed(exchange: Coded, own: Tensor, *, commit: bool = True) -> Tensor:
    """One step; a copy of the result."""
    exchange.start()
    exchange.result.copy_(own)
    exchange.send(exchange.result)
    exchange.settle()
    exchange.wait()
    if commit:
        exchange.commit()
    return exchange.result.clone()


def residual_of(exchange: Coded) -> Tensor:
    assert exchange.residual is not None
    return exchange.residual.clone()


@with_feedback
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_nothing_is_lost(name: str, size: int) -> None:
    """In every step: result + new residuals == terms + old residuals; and every rank has the same bits."""

    def work(group: Collective) -> list[tuple[Tensor, Tensor]]:
        exchange = coded(group, codec_of(name))
        return [(summed(exchange, term(group.rank, step)), residual_of(exchange)) for step in range(STEPS)]

    ranks, before = on_ranks(size, work), torch.zeros(NUMEL, dtype=torch.float64)
    tolerance = FLOAT32 if codec_of(name).linear else FLOAT64
    for step in range(STEPS):
        results = [rank[step][0] for rank in ranks]
        assert all(torch.equal(results[0], result) for result in results)
        after = sum(rank[step][1] for rank in ranks)
        wanted = sum(term(rank, step) for rank in range(size)) + before
        assert torch.allclose(results[0] + after, wanted, rtol=0, atol=tolerance)
        before = after
    gaps = torch.ones(NUMEL, dtype=torch.bool)
    for segment in SEGMENTS:
        gaps[segment.slice] = False
    assert not ranks[0][-1][0][gaps].any()
    assert not before[gaps].any()


@with_feedback
def test_a_forgotten_residual_shows(name: str) -> None:
    """The comparison has teeth: without what is left on one of three ranks, the numbers do not add up."""
    ranks = on_ranks(3, lambda group: (e := coded(group, codec_of(name)), summed(e, term(group.rank, 0))))
    kept = sum(residual_of(exchange) for exchange, _ in ranks[:2])
    wanted = sum(term(rank, 0) for rank in range(3))
    assert not torch.allclose(ranks[0][1] + kept, wanted, rtol=0, atol=FLOAT32)


@with_feedback
@pytest.mark.parametrize("size", [2, 4])
def test_a_step_that_led_to_no_update_is_forgotten(name: str, size: int) -> None:
    """What is not finite on one rank shows on all; the residuals are then those before the step."""

    def work(group: Collective) -> tuple[Tensor, Tensor, Tensor]:
        exchange = coded(group, codec_of(name))
        summed(exchange, term(group.rank, 0))
        before, own = residual_of(exchange), term(group.rank, 1)
        if group.rank == size - 1:
            own[7] = math.nan
        result = summed(exchange, own, commit=False)
        exchange.start()
        return result, before, residual_of(exchange)

    for result, before, after in on_ranks(size, work):
        assert not result.isfinite().all()
        assert before.isfinite().all()
        assert torch.equal(before, after)


@pytest.mark.parametrize("name", ["int8", "sign", "top_k", "random_k"])
def test_a_small_number_is_sent_in_the_end(name: str) -> None:
    """With error feedback the sum of all results nears the sum of all terms; without it, it does not."""
    steps, own = 200, torch.zeros(NUMEL, dtype=torch.float64)
    for segment in SEGMENTS:
        own[segment.slice] = torch.linspace(0.001, 1, segment.slice.stop - segment.slice.start, dtype=torch.float64)

    def error(feedback: bool) -> float:
        def work(group: Collective) -> Tensor:
            exchange = coded(group, codec_of(name), feedback=feedback)
            return sum((summed(exchange, own) for _ in range(steps)), torch.zeros(NUMEL, dtype=torch.float64))

        total = on_ranks(2, work)[0]
        return float((total - 2 * steps * own).norm() / (2 * steps * own).norm())

    assert error(feedback=True) < 0.1
    assert error(feedback=False) > 2 * error(feedback=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residuals_of_short_numbers_are_kept_in_float32(dtype: torch.dtype) -> None:
    """A bfloat16 buffer does not round what it has not sent."""
    exchange = coded(Alone(), codec_of("int8"), dtype=dtype)
    assert exchange.residual is not None
    assert exchange.residual.dtype == torch.float32
    assert torch.equal(summed(exchange, term(0, 0, dtype)), term(0, 0, dtype))


def test_parts_of_one_parameter_are_rounded_apart() -> None:
    """Equal terms in two partitions draw other random numbers."""

    def work(group: Collective) -> list[Tensor]:
        new = CodedExchanges(codec_of("terngrad"), feedback=False, seed=0, later=group)
        parts = [new.partition(group, torch.zeros(50), [Segment("a", 0, (50,), skipped)]) for skipped in (0, 50, 100)]
        return [summed(part, torch.linspace(-1, 1, 50)) for part in parts]

    for one, other in itertools.combinations(on_ranks(2, work)[0], 2):
        assert not torch.equal(one, other)


def test_what_arrives_is_sent() -> None:
    """Residuals of ranks that are gone are added to the next term; a rank alone sends all it has."""
    exchange = coded(Alone(), codec_of("top_k"))
    for number in range(2):
        exchange.arrival().copy_(term(5 + number, 0))
    assert torch.equal(residual_of(exchange), term(6, 0) + term(5, 0))
    assert torch.allclose(summed(exchange, term(0, 0)), term(0, 0) + term(5, 0) + term(6, 0))
    assert not residual_of(exchange).any()


class Counting:
    """A group of one thread that notes what it was given."""

    def __init__(self, group: Collective) -> None:
        self._group, self.calls = group, []
        self.rank, self.size = group.rank, group.size

    def all_gather(self, output: Tensor, input: Tensor):
        self.calls.append(("all_gather", input.nbytes))
        return self._group.all_gather(output, input)

    def all_to_all(self, output: Tensor, input: Tensor):
        self.calls.append(("all_to_all", input.nbytes))
        return self._group.all_to_all(output, input)

    def all_reduce(self, tensor: Tensor, op: str = "sum"):
        self.calls.append(("all_reduce", tensor.nbytes))
        return self._group.all_reduce(tensor)


@every_codec
@pytest.mark.parametrize("size", [2, 4])
def test_the_way_that_sends_less(name: str, size: int) -> None:
    """Linear payloads are summed on the way; two ranks gather, and four go by two shots unless that sends more."""

    def work(group: Collective) -> list[tuple[str, int]]:
        counting = Counting(group)
        summed(coded(counting, codec_of(name)), term(group.rank, 0))  # type: ignore[arg-type]
        return counting.calls

    codec = codec_of(name).bound([segment.place for segment in SEGMENTS], key=3, rank=0, ranks=1)
    calls = on_ranks(size, work)[0]
    whole, part = codec.wire_bytes(NUMEL), codec.wire_bytes(NUMEL // size)
    if codec.linear:
        assert {operation for operation, _ in calls} == {"all_reduce"}
        assert sum(nbytes for _, nbytes in calls) == sum(field.nbytes for field in codec.fields(NUMEL))
    elif size == 2:
        assert calls == [("all_gather", whole)]
    else:
        assert calls == [("all_to_all", size * part), ("all_gather", part)]
        assert 2 * part < whole


def test_random_numbers_differ_from_bucket_to_bucket_and_from_round_to_round() -> None:
    """Equal terms are not rounded alike twice, and another seed rounds otherwise."""

    def results(seed: int, name: str) -> list[Tensor]:
        def work(group: Collective) -> list[Tensor]:
            new = CodedExchanges(codec_of("terngrad"), feedback=False, seed=seed)
            exchange = new(group, torch.zeros(NUMEL), [Segment(name, 0, (NUMEL,))])
            return [summed(exchange, torch.linspace(-1, 1, NUMEL)) for _ in range(2)]

        return on_ranks(2, work)[0]

    found = [*results(0, "a"), *results(1, "a"), *results(0, "b")]
    for number, one in enumerate(found):
        for other in found[:number]:
            assert not torch.equal(one, other)
    assert all(torch.equal(a, b) for a, b in zip(results(0, "a"), found[:2], strict=True))
