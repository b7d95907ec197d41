"""A zero-bubble schedule for stages whose F, I and W do not take equally long, under a limit on stored activations.

ZB-H2 assumes F = I = W: rank r of P forwards 2 (P - 1 - r) microbatches before its first backward, and puts 2 r weight
gradients off. In general a step has no bubble where every rank is busy from its first forward on, equally long. The
first gradient comes back to rank r after the P - 1 - r stages behind it have done F and I, with a transfer c each way,
and in that time the rank must forward; and rank r starts r (F + c) after the first and gets its last gradient
r (I + c) before it, so that so much more work must be left for the end:

    warm-up of rank r    (P - 1 - r) (F + I + 2c) / F     forwards
    lag of rank r        r (F + I + 2c) / W               weight gradients

With F = I = W and c = 0 these are ZB-H2's numbers. Neither may store more than `most_stored` activations; a gradient of
weights that waits counts `weight_share` of one. Rounding is tried in a few ways, and the schedule with the shortest
period is taken: what the heuristic of arXiv:2401.10241, section 3.1, searches for step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from shoal.errors import LayoutError
from shoal.schedules.placement import looped
from shoal.schedules.table import Table
from shoal.schedules.timeline import timeline
from shoal.schedules.woven import woven

_STRETCHES = (0.8, 0.9, 1.0, 1.1)
_ROUNDINGS: tuple[Callable[[float], int], ...] = (math.ceil, round)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of one microbatch on one stage, all stages alike, and of one transfer."""

    forward_s: float
    input_s: float
    weight_s: float
    send_s: float = 0.0

    @property
    def round_trip_s(self) -> float:
        """From a forward's end to its gradient's return, for each stage behind."""
        return self.forward_s + self.input_s + 2 * self.send_s


def zero_bubble(ranks: int, microbatches: int, *, times: Times, most_stored: int, weight_share: float = 1.0) -> Table:
    """One stage a rank. `most_stored` 2 P is the paper's ZB-2p, P its ZB-1p.

    Raises `LayoutError` where a rank may not even store what 1F1B does.
    """
    if most_stored < ranks:
        raise LayoutError(
            f"{most_stored} stored activations on {ranks} ranks: the first rank of 1F1B stores {ranks}; allow as many"
        )
    tables = _candidates(ranks, microbatches, times, most_stored, weight_share)
    return min(tables, key=lambda table: _period_s(table, times))


def _candidates(ranks: int, microbatches: int, times: Times, most: int, share: float) -> Iterator[Table]:
    for stretch, rounded in product(_STRETCHES, _ROUNDINGS):
        rows = []
        for rank in range(ranks):
            ahead = min(rounded((ranks - 1 - rank) * times.round_trip_s / times.forward_s), most - 1 - rank)
            lag = rounded(stretch * rank * times.round_trip_s / times.weight_s)
            visits = [(rank, microbatch) for microbatch in range(microbatches)]
            rows.append(woven(visits, visits, warmup=ahead, lag=min(lag, int((most - 1 - ahead) / share))))
        yield Table("zero bubble", ranks, ranks, microbatches, looped(ranks, 1), tuple(rows))


def _period_s(table: Table, times: Times) -> float:
    """The longest time from a rank's first to its last action: what a step takes where no rank waits between steps."""
    played = timeline(
        table,
        forward_s=times.forward_s,
        backward_input_s=times.input_s,
        backward_weight_s=times.weight_s,
        send_s=times.send_s,
    )
    return max(row[-1][2] - row[0][1] for row in played.spans)
