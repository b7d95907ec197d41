"""Several ways of taking a step, the sides, timed in turn on all ranks, so that what slows the machine slows them all.

In a turn every side takes its step, in an order that changes from turn to turn and is the same on all ranks. The time
of a step is that of the slowest rank, from a barrier on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from shoal.bench.pairs import Turns
from shoal.comm.collective import Collective

WARM_UP_STEPS = 3
Sides = Mapping[str, Callable[[], Any]]


class Tell(Protocol):
    """`shoal.bench.progress.tell`, or another that hears how far the work is."""

    def __call__(self, text: str, *, done: int, total: int) -> None: ...


def interleaved(
    sides: Sides, clock: Collective, *, pairs: int, always: Sequence[str], warm: bool = False, tell: Tell | None = None
) -> Turns:
    """Seconds of each side's step on the slowest rank, for `pairs` turns; warm-up turns are not returned.

    The sides that are compared, `always`, are in every turn, the others in every third. `warm`: a side takes three
    steps in a row, and the mean of the last two counts. The first step finds the caches as another side left them,
    whereas a step of training finds them as the step before it did.
    `tell` hears of each turn before it begins.
    """
    shuffle, turns, take = random.Random(0), [], _warm if warm else slowest
    for number in range(WARM_UP_STEPS + pairs):
        if tell is not None:
            tell("turns of all sides", done=number, total=WARM_UP_STEPS + pairs)
        order = list(sides) if number % 3 == 0 else list(always)
        shuffle.shuffle(order)
        turns.append({name: take(sides[name], clock) for name in order})
    return turns[WARM_UP_STEPS:]


def slowest(step: Callable[[], Any], clock: Collective) -> float:
    """Seconds of one step on the slowest rank, which all ranks of `clock` begin together."""
    clock.barrier().wait()
    begin_s = time.perf_counter()
    step()
    return slowest_rank(time.perf_counter() - begin_s, clock)


def slowest_rank(seconds: float, clock: Collective) -> float:
    """The largest `seconds` of all ranks."""
    longest = torch.tensor([seconds], dtype=torch.float64)
    clock.all_reduce(longest, "max").wait()
    return float(longest)


def repeat(call: Callable[[], Any], times: int) -> None:
    """Calls it so many times."""
    for _ in range(times):
        call()


def _warm(step: Callable[[], Any], clock: Collective) -> float:
    slowest(step, clock)
    return (slowest(step, clock) + slowest(step, clock)) / 2
