"""What it costs ranks to meet: pieces of computation of several lengths, with an agreement behind each and without.

Of a few windows of each the fastest counts, which no other program has slowed down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.collective import Collective

WIDTH, INNER = 128, 384
PIECES = ((64, 1), (256, 2), (1024, 2), (1024, 8))
"""Tokens, and how many feed-forwards of them: from a tenth of a millisecond to some twenty."""
WINDOW_S, REPEATS = 0.1, 5
MANY_BYTES = 1 << 20


def waits(world: Collective) -> Iterator[dict[str, Any]]:
    """A row of the calibration for each length; the same on all ranks."""
    few, many = torch.zeros(8), torch.zeros(MANY_BYTES // 4)
    for tokens, layers in PIECES:
        work = _piece(tokens, layers)
        count = max(3, int(WINDOW_S / _seconds(world, work, 3)))
        sides = (work, _behind(work, world, few), _behind(work, world, many))
        times = [[_seconds(world, side, count) for side in sides] for _ in range(REPEATS)]
        piece_s, agreed_s, summed_s = map(min, zip(*times, strict=True))
        yield {
            "ranks": world.size,
            "piece_s": piece_s,
            "wait_s": max(0.0, agreed_s - piece_s),
            "byte_s": max(0.0, (summed_s - agreed_s) / MANY_BYTES),
        }


def _behind(work: Callable[[], None], world: Collective, numbers: Tensor) -> Callable[[], None]:
    """The piece, and a sum behind it."""

    def both() -> None:
        work()
        world.all_reduce(numbers).wait()

    return both


def _piece(tokens: int, layers: int) -> Callable[[], None]:
    x, up, down = torch.randn(tokens, WIDTH), torch.randn(INNER, WIDTH), torch.randn(WIDTH, INNER)

    def work() -> None:
        for _ in range(layers):
            y = F.linear(F.silu(F.linear(x, up)), down)
            F.rms_norm(y + x, (WIDTH,))

    return work


def _seconds(world: Collective, work: Callable[[], None], count: int) -> float:
    """Seconds of one of `count`, mean over the ranks, who begin together."""
    world.barrier().wait()
    begin_s = time.perf_counter()
    for _ in range(count):
        work()
    spent = torch.tensor([(time.perf_counter() - begin_s) / count], dtype=torch.float64)
    world.all_reduce(spent).wait()
    return float(spent) / world.size
