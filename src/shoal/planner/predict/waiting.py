"""What splitting sequences over context ranks costs in a layer where nothing hides it: messages, passes over memory.

With b bytes of this rank's queries, k bytes of its keys and values together, c ranks (`parallel.context`):

    ring       c - 1 shifts of k forward, 2 (c - 1) backward; every block's result is merged into the sum: passes over
               8 b a block forward, 3 b + 6 k backward
    ulysses    all-to-alls of b + k and of b, forward and backward; each is packed and unpacked: passes over 4 (2 b + k)
    allgather  a gather of c k forward, one more and a scattered sum of it backward

Where ranks meet, all wait for the slowest: what that costs in a step, from a sweep of the machine.

    seconds = meetings x wait(seconds of computation between two of them)

`wait` was measured with ranks that compute pieces of several lengths and agree on a few numbers behind each; it is what
that takes beyond the computation. It holds the wake-up of a rank that sleeps, and how unevenly the system shares cores.
So do the bytes that are summed between pieces: they take longer than in ranks that do nothing else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from shoal.cost.plan import Plan
from shoal.cost.wire import Links
from shoal.topology.calibration import Wait

ContextKind = Literal["ring", "ulysses", "allgather"]


@dataclass(frozen=True, kw_only=True)
class ContextExchange:
    """Seconds of one layer."""

    forward_s: float
    backward_s: float


def exchange(
    kind: ContextKind, group: Links, *, query_bytes: float, key_bytes: float, copy_bytes_s: float
) -> ContextExchange:
    """`key_bytes` are keys and values of one rank together."""
    if group.ranks == 1:
        return ContextExchange(forward_s=0.0, backward_s=0.0)
    return {"ring": _ring, "ulysses": _ulysses, "allgather": _allgather}[kind](
        group, query_bytes, key_bytes, copy_bytes_s
    )


def _ring(group: Links, query_bytes: float, key_bytes: float, copy_bytes_s: float) -> ContextExchange:
    hops, shift_s = group.ranks - 1, group.send(key_bytes)
    merged = (2 * key_bytes + group.ranks * 8 * query_bytes) / copy_bytes_s
    added = (2 * key_bytes + group.ranks * (3 * query_bytes + 6 * key_bytes)) / copy_bytes_s
    return ContextExchange(forward_s=hops * shift_s + merged, backward_s=2 * hops * shift_s + added)


def _ulysses(group: Links, query_bytes: float, key_bytes: float, copy_bytes_s: float) -> ContextExchange:
    wires = group.all_to_all(query_bytes + key_bytes) + group.all_to_all(query_bytes)
    one = wires + 4 * (2 * query_bytes + key_bytes) / copy_bytes_s
    return ContextExchange(forward_s=one, backward_s=one)


def _allgather(group: Links, query_bytes: float, key_bytes: float, copy_bytes_s: float) -> ContextExchange:
    gather_s = group.all_gather(group.ranks * key_bytes)
    return ContextExchange(forward_s=gather_s, backward_s=2 * gather_s)


AT_THE_END = 3
"""Sums of a step that are waited for behind the backward: gradients, the norm, the loss."""
HEAD_SUMS = 4
"""Between tensor ranks, forward and backward: embedding, the head's input, the maximum and the sum of the loss."""


@dataclass(frozen=True)
class Waits:
    """(seconds of a piece, seconds beyond it) for one number of ranks, by length; none: waiting costs nothing.

    `byte_s` are the seconds of each byte that is summed between pieces, None where that was not measured.
    """

    measured: tuple[tuple[float, float], ...] = ()
    byte_s: float | None = None

    def seconds(self, piece_s: float) -> float:
        """Of one meeting; between measured lengths by their logarithms, beyond them as at the ends."""
        if not self.measured:
            return 0.0
        if piece_s <= self.measured[0][0]:
            return self.measured[0][1]
        for (low, first), (high, second) in pairwise(self.measured):
            if piece_s <= high:
                share = math.log(piece_s / low) / math.log(high / low)
                return first + share * (second - first)
        return self.measured[-1][1]


def waits_of(measured: Sequence[Wait], ranks: int) -> Waits:
    """Those of the largest measured number of ranks that is not above `ranks`, else of the smallest."""
    counts = {wait.ranks for wait in measured}
    if not counts:
        return Waits()
    chosen = max((count for count in counts if count <= ranks), default=min(counts))
    own = [wait for wait in measured if wait.ranks == chosen]
    return Waits(tuple(sorted((w.piece_s, w.wait_s) for w in own)), statistics.median(w.byte_s for w in own))


def meetings(plan: Plan, layers: float, context: ContextKind | None) -> float:
    """How often a rank waits for others in a step.

    Messages between stages are not counted, which the bubble holds; nor ZeRO-3's gathers, which begin a block ahead.
    """
    layout, recomputed = plan.layout, plan.recompute == "full"
    forward = _in_forward(plan, context)
    each = forward * (3 if recomputed else 2) + _more_in_backward(plan, context)
    head = HEAD_SUMS if layout.tensor > 1 else 0
    ends = AT_THE_END if plan.world_size > 1 else 0
    return plan.microbatches * (layers * each + head) + ends


def _in_forward(plan: Plan, context: ContextKind | None) -> int:
    tensor = (4 if plan.sequence_parallel else 2) if plan.layout.tensor > 1 else 0
    hops = {"ring": plan.layout.context - 1, "ulysses": 2, "allgather": 1, None: 1}[context]
    return tensor + (hops if plan.layout.context > 1 else 0)


def _more_in_backward(plan: Plan, context: ContextKind | None) -> int:
    """A ring sends gradients behind its blocks."""
    return plan.layout.context - 1 if context == "ring" else 0
