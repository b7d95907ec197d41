"""What a mixture costs (`shoal.planning.mixtures`): the peak of the fullest rank, and a step.

Both are what the planner's closed forms or traces say (`shoal.planning.answer`), and what is moved to the host:
activations leave and come once a microbatch, parameters come twice and gradients leave once, at the rate at which a
device's memory is copied.

What `memory.recompute = "budget"` may keep is what a mixture of whole blocks leaves of the budget. Its price lies on
the line between that mixture and the one that keeps all, as if it kept whole blocks: it takes at most as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from shoal import units
from shoal.codec.costs import Matrices
from shoal.cost.footprint import Footprint, StateBytes
from shoal.cost.plan import Plan
from shoal.errors import ShoalError
from shoal.memory.config import BudgetChange, OffloadConfig
from shoal.observe.terminal import ProgressBar
from shoal.planner.predict.predictor import Predictor
from shoal.planner.predict.workload import Stage
from shoal.planning.mixtures import (
    AS_IT_IS,
    RECOMPUTE,
    WORTH,
    Mixture,
    allowed_by,
    by_microbatch,
    keeping,
    part_of,
    with_values,
)
from shoal.runfile.run_file import RunFile

HELD_BLOCKS, HELD_GRADIENTS, SUMMED_GRADIENTS = 2, 3, 2
"""Neighbours whose activations are on the device where they live on the host, and whose parameters; whose gradients;
and whose gradients are there twice in the midst of a backward, as terms and as sums.
"""
PASSES = 4
"""What leaves and comes back is read and written on either way."""
ROOM, LEAST_KEPT = 0.95, 0.05
"""Of the budget, what recomputation may fill, as predictions are off by some percent; and the least of what blocks save
for which it is worth to keep some of it.
"""


PRICING = "memory.budget: pricing the mixtures of keys that may fit"
Predicate = Callable[[Mixture], bool]


class Price(NamedTuple):
    """What tensors of the fullest rank take at their peak, and a step, by prediction."""

    size_bytes: float
    step_s: float


@dataclass(frozen=True)
class _Bill:
    """A step, and what the fullest rank holds in it if nothing of it lives elsewhere, but for the optimizer's state.

    `movable` bytes of what is kept for the backward can leave, and `shares` are what each block has of it. `summed`:
    what a microbatch's gradients are added to; `lent`: those that are whole in a backward and sent away in it. `first`:
    no gradients are there when the backward begins. `together`: the most of activations and of gradients that are on
    their way in it, where that is known.
    """

    footprint: Footprint
    offload: OffloadConfig
    step_s: float
    movable: float
    summed: float
    lent: float
    shares: Sequence[float]
    first: bool
    together: float | None

    @property
    def kept(self) -> float:
        """For the backward, bytes."""
        return self.footprint.activations

    def keeping(self, size_bytes: float, step_s: float) -> _Bill:
        """The same with so much kept, and such a step."""
        together = None if self.together is None else self.together + size_bytes - self.kept
        return replace(
            self, footprint=replace(self.footprint, activations=size_bytes), step_s=step_s, together=together
        )


class Prices:
    """Of the mixtures of one run file."""

    def __init__(self, run_file: RunFile, cluster: Path | None = None, *, bar: ProgressBar | None = None) -> None:
        """On the devices of a cluster's file; None: on this machine's cores. `bar` hears what takes long: models and
        traces of them. Raises `ShoalError` where the run cannot be priced.
        """
        from shoal.planning.answer import predictor_of  # imports torch where a model is traced

        self._bar = bar or ProgressBar()
        self._bar.update(PRICING)
        self._run_file = with_values(run_file, {**part_of(run_file), "memory.budget": None})
        self._room = ROOM * (run_file.memory.budget_bytes or 0)
        self._predictor = predictor_of(_on_device(self._run_file), cluster)
        self._bills: dict[Mixture, _Bill | None] = {}
        self._prices: dict[Mixture, Price | None] = {}
        self._chains: dict[BudgetChange, list[list[Mixture]]] = {}
        self._billed(self._run_file)

    def of(self, mixture: Mixture) -> Price | None:
        """None where the planner has no price for it."""
        if mixture not in self._prices:
            bill = self._bill(mixture)
            self._prices[mixture] = None if bill is None else Price(self._peak(bill), bill.step_s)
        return self._prices[mixture]

    def cost(self, mixture: Mixture) -> tuple[float, int]:
        """What is the least of the mixture that is used: seconds of a step, infinite without a price, and means."""
        price = self.of(mixture)
        return (math.inf if price is None else price.step_s), len(mixture.means)

    def cheapest(self, change: BudgetChange, fits: Predicate, *, wanted: Predicate = lambda _: True) -> Mixture | None:
        """Of `mixtures` that are `wanted` and that fit, as `fits` says, the one with the least `cost`; None: there is
        none.

        Each size of microbatch is one more trace. A smaller one takes no less time and no more memory, so that of those
        that differ in nothing else none is priced behind the first that fits, or that costs more than another does; nor
        where the smallest does not fit.
        """
        best: Mixture | None = None
        for chain in self._cheap_first(change):
            if self.of(chain[0]) is None and self.of(chain[-1]) is None:
                continue
            for one in (*self._first_of(chain, fits, wanted, best), *self._keeping_of(chain, fits, wanted, best)):
                best = one if best is None else min(best, one, key=self.cost)
        return best

    def smallest(self, change: BudgetChange, *, wanted: Predicate) -> list[Mixture]:
        """Of `mixtures` that are `wanted`, those with the smallest microbatches, which need least."""
        ends = ([one for one in chain if wanted(one)][-1:] for chain in self._by_microbatch(change))
        return [one for end in ends for one in end if self.of(one) is not None]

    def _by_microbatch(self, change: BudgetChange) -> list[list[Mixture]]:
        if change not in self._chains:
            self._chains[change] = by_microbatch(self._run_file, change)
        return self._chains[change]

    def _cheap_first(self, change: BudgetChange) -> list[list[Mixture]]:
        return sorted(self._by_microbatch(change), key=lambda chain: self.cost(chain[0].without("microbatch")))

    def _first_of(
        self, chain: Sequence[Mixture], fits: Predicate, wanted: Predicate, best: Mixture | None
    ) -> Iterator[Mixture]:
        """The largest microbatch that fits, if it may cost less than `best`."""
        if self._costs_no_less(chain[0].without("microbatch"), best):
            return
        for place, one in enumerate(chain):
            if self.of(one) is None:
                continue
            if self._costs_no_less(one, best):
                return
            if wanted(one) and fits(one):
                yield one
                return
            if place == 0 and self.of(chain[-1]) is not None and not fits(chain[-1]):
                return

    def _keeping_of(
        self, chain: Sequence[Mixture], fits: Predicate, wanted: Predicate, best: Mixture | None
    ) -> Iterator[Mixture]:
        """Those that keep some of what blocks save; they take no less time than with blocks that keep all."""
        if RECOMPUTE["full"] not in chain[0].means:
            return
        for again in chain:
            if self._costs_no_less(again.recomputing(None), best):
                return
            one = self.keeping_some(again)
            if one is not None and wanted(one) and fits(one):
                yield one
            if one is None and not self._has_room(chain[-1]):
                return

    def _has_room(self, mixture: Mixture) -> bool:
        """By prediction, or as far as is known."""
        bill = self._bill(mixture)
        return bill is None or self._fits(bill)

    def _costs_no_less(self, mixture: Mixture, best: Mixture | None) -> bool:
        return best is not None and self.of(mixture) is not None and self.cost(mixture) >= self.cost(best)

    def keeping_some(self, again: Mixture) -> Mixture | None:
        """None where blocks can keep all, or nearly nothing, or what they keep lives elsewhere."""
        least, most = self._bill(again), self._bill(again.recomputing(None))
        if least is None or most is None or least.offload.activations != "device" or self._fits(most):
            return None
        more, low, high = most.kept - least.kept, 0.0, 1.0
        while high - low > LEAST_KEPT / 4:
            share = (low + high) / 2
            fits = self._fits(least.keeping(least.kept + share * more, least.step_s))
            low, high = (share, high) if fits else (low, share)
        if low < LEAST_KEPT:
            return None
        peak = self._peak(least.keeping(least.kept + low * more, least.step_s))
        others = (self._bill(again.recomputing(RECOMPUTE[how])) for how in ("selective", "operators"))
        weaker = sum(other is not None and self._peak(other) >= peak for other in others)
        return again.recomputing(keeping(low * more, weaker + 0.5))

    def _fits(self, bill: _Bill) -> bool:
        return self._peak(bill) <= self._room

    def _bill(self, mixture: Mixture) -> _Bill | None:
        if mixture not in self._bills:
            by_budget = mixture.values.get("memory.recompute") == "budget"
            self._bills[mixture] = self._between(mixture) if by_budget else self._billed_or_none(mixture)
        return self._bills[mixture]

    def _between(self, mixture: Mixture) -> _Bill | None:
        least, most = (self._bill(mixture.recomputing(how)) for how in (RECOMPUTE["full"], None))
        if least is None or most is None:
            return None
        size_bytes = units.memory_bytes(mixture.values["memory.recompute_budget"])
        share = min(1.0, size_bytes / max(1.0, most.kept - least.kept))
        return least.keeping(least.kept + size_bytes, least.step_s + share * (most.step_s - least.step_s))

    def _billed_or_none(self, mixture: Mixture) -> _Bill | None:
        try:
            return self._billed(with_values(self._run_file, mixture.values))
        except ShoalError:
            return None

    def _billed(self, run_file: RunFile) -> _Bill:
        from shoal.planning.answer import tensor_bytes
        from shoal.planning.plan_file import written_plan
        from shoal.planning.stack import with_optimizer

        self._bar.update(PRICING, done=len(self._bills))
        on_device, offload = _on_device(run_file), run_file.memory.offload
        predictor = with_optimizer(self._predictor, on_device)
        plan = written_plan(on_device, predictor.cluster)
        one = predictor.predict(plan)
        fullest = max(one.footprints, key=tensor_bytes)
        movable = _movable(predictor, plan, fullest)
        moved = _moved(fullest, plan, offload, movable)
        summed = fullest.gradients if plan.microbatches > 1 else 0.0
        state, stage = predictor.stack.state, predictor.stage(plan)
        sent = plan.zero >= 2 and plan.layout.shard > 1 and plan.microbatches == 1 and plan.recompute != "operators"
        lent = stage.numbers * state.gradient if sent and offload.parameters == "device" else 0.0
        alone = plan.world_size == 1 or offload.parameters != "device"
        first = alone and plan.microbatches == 1
        return _Bill(
            footprint=_living_elsewhere(fullest, stage, state, offload),
            offload=offload,
            step_s=one.step_s + moved / predictor.machine.prices(plan.world_size).memory_bytes_s,
            movable=movable,
            summed=summed,
            lent=lent,
            shares=predictor.kept_shares(plan),
            first=first,
            together=predictor.backward_bytes(plan) if first or (plan.zero >= 2 and plan.layout.shard > 1) else None,
        )

    def _peak(self, bill: _Bill) -> float:
        """The larger of two moments: when a backward begins, and of the update. Each block's gradients come when what
        it kept goes, so that the last backward may hold more than the first. Where parameters are the host's, so is
        their update, and the midst of a backward may hold most.
        """
        from shoal.planning.answer import tensor_bytes

        one, offload = bill.footprint, bill.offload
        held, last = _neighbours(bill.shares, HELD_BLOCKS), 1 - 1 / max(1, len(bill.shares))
        stays = offload.activations == "device"
        kept = one.activations - (0.0 if stays else (1 - held) * bill.movable)
        weights, gradients, update = one.weights, one.gradients, one.weights + one.gradients + one.optimizer
        other = tensor_bytes(one) - update - one.activations
        if offload.optimizer == "device":
            other += one.optimizer  # elsewhere, parts of it come for the update
        if not stays:  # what is kept does not make room for them
            other += bill.lent * _most(self._parameter_shares, HELD_GRADIENTS)
        if offload.parameters != "device":
            shares, gone = self._parameter_shares, SUMMED_GRADIENTS / max(1, len(bill.shares)) if stays else 0.0
            weights *= _neighbours(shares, HELD_BLOCKS)
            gradients *= _neighbours(shares, HELD_GRADIENTS)
            twice = bill.summed * _most(shares, SUMMED_GRADIENTS)
            update = other + weights + gradients + twice + max(0.0, 1 - gone) * kept
        if stays and offload.parameters == "device" and bill.together is not None:
            there = 0.0 if bill.first else gradients
            return max(other - one.recomputed - one.buckets + weights + there + bill.together, update)
        if bill.first:
            goes = kept if stays else 0.0
            gradients = max(0.0, min(gradients, last * one.gradients) - last * goes)
        return max(other + weights + gradients + kept, update)

    @cached_property
    def _parameter_shares(self) -> Sequence[float]:
        return self._predictor.parameter_shares


def _movable(predictor: Predictor, plan: Plan, fullest: Footprint) -> float:
    """Bytes kept for the backward that can leave. "operators" holds its outputs itself: inputs of blocks can leave."""
    from shoal.planning.answer import tensor_bytes

    if plan.recompute != "operators":
        return fullest.activations
    return max(predictor.footprints(replace(plan, recompute="full")), key=tensor_bytes).activations


def _moved(fullest: Footprint, plan: Plan, offload: OffloadConfig, movable: float) -> float:
    """Bytes that a step reads and writes to move activations and parameters."""
    moved = PASSES * plan.microbatches * movable if offload.activations == "host" else 0.0
    if offload.parameters != "device":
        moved += PASSES * (fullest.weights + fullest.gradients) * (plan.microbatches + 0.5) / 2
    return moved


def _living_elsewhere(fullest: Footprint, stage: Stage, state: StateBytes, offload: OffloadConfig) -> Footprint:
    """What of it is on the device where the optimizer's state and parameters live elsewhere."""
    gradients, optimizer = fullest.gradients, fullest.optimizer
    if offload.optimizer != "device":
        larger = _larger_parts(stage.matrices, number_bytes=state.weight, part_bytes=offload.part_bytes)
        optimizer = min(max(optimizer, gradients / state.gradient * state.optimizer), larger * optimizer)
        fullest = replace(fullest, optimizer=optimizer)
    if offload.parameters == "device":
        return fullest
    # what is whole is on the device while it is used; pieces are not
    weights = 0.0 if fullest.gathered else fullest.weights
    return replace(fullest, weights=weights, gradients=stage.numbers * state.gradient, buckets=0.0)


def _neighbours(shares: Sequence[float], number: int) -> float:
    """What is there of a whole that comes and goes block by block: what is in no block, and the `number` neighbouring
    blocks that have most.
    """
    return max(0.0, 1 - sum(shares)) + _most(shares, number)


def _most(shares: Sequence[float], number: int) -> float:
    """Of `number` neighbouring blocks."""
    return max((sum(shares[n : n + number]) for n in range(len(shares))), default=0.0)


def _larger_parts(matrices: Iterable[Matrices], *, number_bytes: float, part_bytes: int) -> float:
    """How many times as large as they should be the parts of the state are, as one parameter may be larger than a part:
    the mean of as many as are on the device at a time.
    """
    from shoal.planning.stack import PARTS

    sizes = [one.rows * one.columns for one in matrices for _ in range(min(PARTS, max(1, int(one.copies))))]
    largest = sorted((max(1.0, size * number_bytes / part_bytes) for size in sizes), reverse=True)[:PARTS]
    return sum(largest) / len(largest) if largest else 1.0


def _on_device(run_file: RunFile) -> RunFile:
    """What the planner prices: activations and parameters where they are computed."""
    return with_values(run_file, {"memory.offload.activations": "device", "memory.offload.parameters": "device"})


def cheapest(run_file: RunFile, prices: Prices) -> tuple[Mixture, Price] | None:
    """The one that a start would use, if trials came to what is predicted: the run as it is where it fits; None: none
    does.
    """
    budget, allowed = run_file.memory.budget_bytes or 0, allowed_by(run_file)

    def fits(mixture: Mixture) -> bool:
        price = prices.of(mixture)
        return price is not None and price.size_bytes <= budget

    if fits(AS_IT_IS):
        return _with_price(AS_IT_IS, prices)
    same = prices.cheapest("nothing", fits)
    if same is not None and prices.cost(same)[0] <= WORTH * prices.cost(AS_IT_IS)[0]:
        return _with_price(same, prices)
    other = prices.cheapest("rounding", fits) if "rounding" in allowed else None
    if same is not None and (other is None or prices.cost(same)[0] <= WORTH * prices.cost(other)[0]):
        return _with_price(same, prices)
    if other is None and "moments" in allowed:
        other = prices.cheapest("moments", fits)
    return None if other is None else _with_price(other, prices)


def _with_price(mixture: Mixture, prices: Prices) -> tuple[Mixture, Price] | None:
    price = prices.of(mixture)
    return None if price is None else (mixture, price)


def said_of(price: Price, plain: Price) -> str:
    """How much longer a step takes: "+18 % of a step"."""
    return f"{100 * (price.step_s / plain.step_s - 1):+.0f} % of a step"


def freed(plain: Price, price: Price) -> str:
    """Bytes that it frees, and what it costs."""
    return f"{units.memory_size(plain.size_bytes - price.size_bytes)} for {said_of(price, plain)}"
