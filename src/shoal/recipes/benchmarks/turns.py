"""Several ways of taking a step, taken in turn on all ranks, so that what slows the machine slows all of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal.comm.collective import Collective

WARM_UP_STEPS = 3
Sides = Mapping[str, Callable[[], Any]]
Turns = list[dict[str, float]]


def interleaved(sides: Sides, clock: Collective, *, pairs: int, always: Sequence[str], warm: bool = False) -> Turns:
    """Per turn, the seconds of each side's step on the slowest rank; all ranks shuffle the order in the same way.

    Those that are compared, `always`, stand side by side in every turn, the others in every third. `warm`: a side takes
    three steps in a row, the mean of the last two counts. The first finds in the caches what another side has left
    there; a step of training finds what the step before has.
    """
    shuffle, turns, take = random.Random(0), [], _warm if warm else slowest
    for number in range(WARM_UP_STEPS + pairs):
        order = list(sides) if number % 3 == 0 else list(always)
        shuffle.shuffle(order)
        turns.append({name: take(sides[name], clock) for name in order})
    return turns[WARM_UP_STEPS:]


def slowest(step: Callable[[], Any], clock: Collective) -> float:
    """Seconds of one step, from when all ranks are there, on the rank that took longest."""
    clock.barrier().wait()
    begin_s = time.perf_counter()
    step()
    spent = torch.tensor([time.perf_counter() - begin_s], dtype=torch.float64)
    clock.all_reduce(spent, "max").wait()
    return float(spent)


def _warm(step: Callable[[], Any], clock: Collective) -> float:
    slowest(step, clock)
    return (slowest(step, clock) + slowest(step, clock)) / 2


def ratios(turns: Turns, side: str, *, peer: str) -> list[float]:
    """How many times faster than `peer` `side` was, in each turn that has both."""
    return [turn[peer] / turn[side] for turn in turns if side in turn and peer in turn]
