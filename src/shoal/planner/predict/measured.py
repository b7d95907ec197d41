"""What a calibration gives to predictions for its machine: prices of operators, groups, the host's own seconds.

Ranks on CPU cores share them. Prices are those that were measured with as many ranks at work at once; beyond the most
that were measured, each rank gets its share of the cores, and of caches that are emptied at each change of ranks:

    seconds(n ranks) = seconds(measured r <= n) x max(1, n / max(cores, r), step(n) / step(r))

`step` is one step of a small model on ranks that do not talk (`shoal bench products`), where n and r were measured.

So a wait costs nothing where ranks outnumber cores: another rank computes. The lower bound of a step is the work of
all ranks over the cores, the other its critical path at the rates of ranks with a core of their own
(`planner.predict.step`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from shoal.cost.alpha_beta import FittedGroup, Links
from shoal.cost.operators import HostOverhead, Share, host_overhead_of
from shoal.cost.plan import Plan
from shoal.cost.prices import MeasuredPrices
from shoal.cost.sweep import Sweep, sweep_of
from shoal.cost.transformer import Transformer
from shoal.errors import ConfigError
from shoal.topology.calibration import Calibration, CodecTime, CollectiveFit, Crowd, OperatorTime, Wait

# What splitting sequences over context ranks costs in a layer where nothing hides it: messages, passes over memory.
#
# With b bytes of this rank's queries, k bytes of its keys and values together, c ranks (`parallel.context`):
#
#   ring       c - 1 shifts of k forward, 2 (c - 1) backward; every block's result is merged into the sum: passes over
#              8 b a block forward, 3 b + 6 k backward
#   ulysses    all-to-alls of b + k and of b, forward and backward; each is packed and unpacked: passes over 4 (2 b + k)
#   allgather  a gather of c k forward, one more and a scattered sum of it backward


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


# Where ranks meet, all wait for the slowest: what that costs in a step, from a sweep of the machine.
#
#     seconds = meetings x wait(seconds of computation between two of them)
#
# `wait` was measured with ranks that compute pieces of several lengths and agree on a few numbers behind each; it is
# what that takes beyond the computation. It holds the wake-up of a rank that sleeps, and how unevenly the system shares
# cores. So do the bytes that are summed between pieces: they take longer than in ranks that do nothing else.


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


OPERATORS = ("linear", "norm", "gate", "gelu", "rotary", "attention", "embedding", "copy", "loss", "adam")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
TINY = Transformer(layers=1, hidden=32, heads=4, kv_heads=4, head_size=8, feed_forward=32, vocabulary=256, gated=True)
TINY_SEQUENCE = 64
"""The model of `shoal bench products` whose steps tell what the host takes."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One machine. `factor` multiplies all seconds that were measured: 1, or calibrated on one measured step."""

    sweeps: Mapping[int, Mapping[str, Sweep]]
    fits: Mapping[int, Mapping[str, CollectiveFit]]
    host: HostOverhead
    cores: int
    copy_bytes_s: float
    waits: tuple[Wait, ...] = ()
    crowds: tuple[Crowd, ...] = ()
    codecs: tuple[CodecTime, ...] = ()
    factor: float = 1.0
    _prices: dict[int, MeasuredPrices] = field(default_factory=dict, compare=False)

    def calibrated(self, factor: float) -> Measured:
        """The same machine with another factor."""
        return replace(self, factor=factor, _prices={})

    def listed(self) -> Iterator[tuple[str, float, str]]:
        """(name, value, origin) of every number that is no measurement of one operator or collective."""
        yield (
            "factor",
            self.factor,
            "on operators, collectives and waits: one measured step of this machine over its prediction",
        )
        yield "cores", float(self.cores), "what the system lets this process use"
        yield "copy_bytes_s", self.copy_bytes_s, "shoal bench products: a copy of 16 MiB"
        steps = "shoal bench products: steps of tiny GPTs less their operators"
        yield "host.step_s", self.host.step_s, steps
        yield "host.microbatch_s", self.host.microbatch_s, steps
        yield "host.layer_s", self.host.layer_s, steps
        for wait in self.waits:
            name = f"wait of {wait.ranks} ranks behind {1e3 * wait.piece_s:.2g} ms"
            yield name, wait.wait_s, "shoal bench products: an agreement behind pieces of computation"
        for crowd in self.crowds:
            yield (
                f"step of {crowd.ranks} ranks",
                crowd.step_s,
                "shoal bench products: a small GPT on ranks that do not talk",
            )

    def prices(self, ranks: int) -> MeasuredPrices:
        """With `ranks` ranks at work at once."""
        if ranks not in self._prices:
            count = _nearest(self.sweeps, ranks)
            scale = self._scale(count, ranks)
            self._prices[ranks] = MeasuredPrices(self.sweeps[count], self.copy_bytes_s, self.factor * scale)
        return self._prices[ranks]

    def host_s(self, ranks: int, *, microbatches: int, layers: float) -> float:
        """The host's seconds of one rank's step."""
        return self.factor * self._scale(1, ranks) * self.host.seconds(microbatches=microbatches, layers=layers)

    def waiting_s(self, plan: Plan, *, layers: float, computed_s: float, context: ContextKind | None) -> float:
        """What the ranks of `plan` wait for each other, who compute `computed_s` in a step."""
        count = meetings(plan, layers, context)
        known_s = self.fits[_nearest(self.fits, plan.world_size)]["all_reduce"].alpha_s
        each_s = waits_of(self.waits, plan.world_size).seconds(computed_s / self.factor / count) if count else 0.0
        return self.factor * count * max(0.0, each_s - known_s)

    def group(self, ranks: int, world: int) -> FittedGroup:
        """`ranks` of the `world` that are at work, while other such groups talk at the same time."""
        if ranks == 1:
            return FittedGroup(ranks=1, fits={})
        count = _nearest(self.fits, ranks)
        waits = waits_of(self.waits, world)
        idle_byte_s = self.fits[_nearest(self.fits, world)]["all_reduce"].beta_s
        at_work = waits.byte_s / idle_byte_s if waits.byte_s and idle_byte_s else 1.0
        crowd = self.factor * max(at_work, self._scale(count, world))
        return FittedGroup(ranks=ranks, fits=self.fits[count], crowd=crowd)

    def crowding(self, ranks: int) -> float:
        """How much longer than on a core of its own each of `ranks` ranks takes that are at work at once."""
        return self._scale(_nearest(self.sweeps, ranks), ranks)

    def _scale(self, measured: int, ranks: int) -> float:
        steps = {crowd.ranks: crowd.step_s for crowd in self.crowds}
        shared = max(1.0, ranks / max(self.cores, measured))
        if measured not in steps or ranks <= self.cores:
            return shared
        most = _nearest(steps, ranks)
        return max(shared, steps[most] / steps[measured] * ranks / most)


def measured_of(calibration: Calibration, *, cores: int, dtype: str, backend: str) -> Measured:
    """Raises `ConfigError` where the calibration lacks operators or collectives; it says how to measure them."""
    sweeps = _sweeps(calibration.operators, dtype)
    fits = _fits(calibration.collectives, backend, dtype)
    if calibration.memory_bytes_s is None:
        raise ConfigError("the calibration has no rate of copies; measure it with 'shoal bench products'")
    alone = MeasuredPrices(sweeps[1], calibration.memory_bytes_s)
    steps = {(t.m, t.n): t.forward_s for t in calibration.operators if t.operator == "step" and t.dtype == dtype}
    host = host_overhead_of(steps, lambda layers, microbatches: _tiny_s(alone, layers, microbatches))
    return Measured(
        sweeps=sweeps,
        fits=fits,
        host=host,
        cores=cores,
        copy_bytes_s=calibration.memory_bytes_s,
        waits=calibration.waits,
        crowds=calibration.crowds,
        codecs=calibration.codecs,
    )


def _sweeps(times: Iterable[OperatorTime], dtype: str) -> dict[int, dict[str, Sweep]]:
    found: dict[int, dict[str, list[OperatorTime]]] = {}
    for time in times:
        if time.dtype == dtype and time.operator in OPERATORS:
            found.setdefault(time.ranks, {}).setdefault(time.operator, []).append(time)
    whole = {ranks: by_name for ranks, by_name in found.items() if set(by_name) == set(OPERATORS)}
    if 1 not in whole:
        raise ConfigError(
            f"the calibration has no times of {dtype} operators; measure them with 'shoal bench products'"
        )
    return {ranks: {name: sweep_of(of) for name, of in by_name.items()} for ranks, by_name in whole.items()}


def _fits(collectives: Iterable[CollectiveFit], backend: str, dtype: str) -> dict[int, dict[str, CollectiveFit]]:
    found: dict[int, dict[str, CollectiveFit]] = {}
    for fit in collectives:
        if (fit.backend, fit.hosts, fit.dtype) == (backend, 1, dtype):
            found.setdefault(fit.ranks, {})[fit.operation] = fit
    whole = {ranks: fits for ranks, fits in found.items() if set(OPERATIONS) <= set(fits)}
    if not whole:
        raise ConfigError(
            f"the calibration has no collectives of {dtype} over {backend}; measure them with 'shoal bench comm'"
        )
    return whole


def _nearest(by_ranks: Mapping[int, object], ranks: int) -> int:
    """The largest number of ranks that was measured and is not above `ranks`; else the smallest."""
    return max((count for count in by_ranks if count <= ranks), default=min(by_ranks))


def _tiny_s(prices: MeasuredPrices, layers: int, microbatches: int) -> float:
    share = Share(samples=1, sequence=TINY_SEQUENCE, element_bytes=4, stream_bytes=4, eager=True)
    one = prices.layer(TINY, share)
    return microbatches * (layers * (one.forward + one.backward) + sum(prices.head(TINY, share)))
