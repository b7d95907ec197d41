"""Steps taken in turn, of which the quiet ones count: those in which other programs used the machine least.

On a shared machine, a median over all turns measures the neighbours. What they used during a step is the time that all
processors were busy (`/proc/stat`, in ticks of the kernel's clock) beyond what the ranks themselves used.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.bench.groups import slowest_rank
from shoal.comm.collective import Collective

TICK_S = 0.01
WARM_UP_TURNS = 3
QUIET_SHARE = 1 / 3
STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Turn:
    """Seconds of a step on the slowest rank, and processor seconds that other programs used meanwhile."""

    seconds: float
    others_s: float


def quiet_median_s(turns: Sequence[Turn]) -> float:
    """The median of the quietest third, by the others' share of the step."""
    ordered = sorted(turns, key=lambda turn: turn.others_s / turn.seconds)
    return statistics.median(turn.seconds for turn in ordered[: max(1, round(len(ordered) * QUIET_SHARE))])


def in_turn(sides: Mapping[str, Callable[[], Any]], clock: Collective, *, turns: int) -> dict[str, list[Turn]]:
    """The turns of every side, which takes one step a turn, in an order that changes and is the same on all ranks."""
    shuffle, found = random.Random(0), {name: [] for name in sides}
    for number in range(WARM_UP_TURNS + turns):
        order = list(sides)
        shuffle.shuffle(order)
        for name in order:
            turn = _turn(sides[name], clock)
            if number >= WARM_UP_TURNS:
                found[name].append(turn)
    return found


def _turn(step: Callable[[], Any], clock: Collective) -> Turn:
    clock.barrier().wait()
    busy_s, own_s, begin_s = busy_so_far_s(), time.process_time(), time.perf_counter()
    step()
    spent_s, own_s = time.perf_counter() - begin_s, time.process_time() - own_s
    longest_s = slowest_rank(spent_s, clock)
    ranks_s = torch.tensor([own_s], dtype=torch.float64)
    clock.all_reduce(ranks_s).wait()
    return Turn(longest_s, max(0.0, busy_so_far_s() - busy_s - float(ranks_s)))


def busy_so_far_s(stat: Path = STAT) -> float:
    """Processor seconds since the machine started in which it was not idle; 0 where the system has no such file."""
    if not stat.exists():
        return 0.0
    ticks = [int(number) for number in stat.read_text().splitlines()[0].split()[1:]]
    return TICK_S * (sum(ticks[:8]) - ticks[3] - ticks[4])
