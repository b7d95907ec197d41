"""What a mixture costs (`shoal.planning.mixtures`): the peak of the fullest rank, and a step.

Both are what the planner's closed forms or traces say (`shoal.planning.answer`), and what is moved to the host:
activations leave and come once a microbatch, parameters come twice and gradients leave once, at the rate at which a
device's memory is copied.

What `memory.recompute = "budget"` may keep is what a mixture of whole blocks leaves of the budget. Its price lies on
the line between that mixture and the one that keeps all, as if it kept whole blocks: it takes at most as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from shoal import units
from shoal.codec.stated import Matrices
from shoal.cost.footprint import Footprint, StateBytes
from shoal.cost.plan import Plan
from shoal.errors import ShoalError
from shoal.memory.config import BudgetChange, OffloadConfig
from shoal.planner.predict.predictor import Predictor
from shoal.planner.predict.workload import Stage
from shoal.planning.mixtures import CHANGES, RECOMPUTE, WORTH, Mixture, keeping, mixtures, part_of, with_values
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


class Price(NamedTuple):
    """What tensors of the fullest rank take at their peak, and a step, by prediction."""

    size_bytes: float
    step_s: float


@dataclass(frozen=True)
class _Bill:
    """A step, and what the fullest rank holds in it if nothing of it lives elsewhere, but for the optimizer's state.

    `movable` bytes of what is kept for the backward can leave, and `shares` are what each block has of it. `summed`:
    what a microbatch's gradients are added to; `lent`: those that are whole in a backward and sent away in it. `first`:
    no gradients are there when the backward begins.
    """

    footprint: Footprint
    offload: OffloadConfig
    step_s: float
    movable: float
    summed: float
    lent: float
    shares: Sequence[float]
    first: bool

    @property
    def kept(self) -> float:
        """For the backward, bytes."""
        return self.footprint.activations

    def keeping(self, size_bytes: float, step_s: float) -> _Bill:
        """The same with so much kept, and such a step."""
        return replace(self, footprint=replace(self.footprint, activations=size_bytes), step_s=step_s)


class Prices:
    """Of the mixtures of one run file."""

    def __init__(self, run_file: RunFile, cluster: Path | None = None) -> None:
        """On the devices of a cluster's file; None: on this machine's cores. Raises `ShoalError` where the run cannot
        be priced.
        """
        from shoal.planning.answer import predictor_of  # imports torch where a model is traced

        self._run_file = with_values(run_file, {**part_of(run_file), "memory.budget": None})
        self._room = ROOM * (run_file.memory.budget_bytes or 0)
        self._predictor = predictor_of(_on_device(self._run_file), cluster)
        self._bills: dict[Mixture, _Bill | None] = {}
        self._billed(self._run_file)

    def of(self, mixture: Mixture) -> Price | None:
        """None where the planner has no price for it."""
        bill = self._bill(mixture)
        return None if bill is None else Price(self._peak(bill), bill.step_s)

    def mixtures(self, change: BudgetChange) -> Iterator[Mixture]:
        """Those that change so much, and no more; behind those that compute whole blocks again those that keep of them
        what there is room for.
        """
        for one in mixtures(self._run_file, change):
            yield one
            if RECOMPUTE["full"] in one.means and (other := self._keeping(one)) is not None:
                yield other

    def _keeping(self, again: Mixture) -> Mixture | None:
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
        return _Bill(
            footprint=_living_elsewhere(fullest, stage, state, offload),
            offload=offload,
            step_s=one.step_s + moved / predictor.machine.prices(plan.world_size).memory_bytes_s,
            movable=movable,
            summed=summed,
            lent=lent,
            shares=predictor.kept_shares(plan),
            first=alone and plan.microbatches == 1,
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
    """The one that a start would try first, of those that fit by their prices; None: none does."""
    budget, most = run_file.memory.budget_bytes or 0, CHANGES.index(run_file.memory.budget_may_change)
    found: dict[BudgetChange, tuple[Mixture, Price]] = {}
    for change in CHANGES[: most + 1]:
        priced = ((one, prices.of(one)) for one in prices.mixtures(change))
        fitting = [(one, price) for one, price in priced if price is not None and price.size_bytes <= budget]
        if fitting:
            found[change] = min(fitting, key=lambda one: one[1].step_s)
    longest_s = WORTH * min((price.step_s for change, (_, price) in found.items() if change != "moments"), default=0.0)
    within = [found[change] for change in CHANGES if change in found and found[change][1].step_s <= longest_s]
    return next(iter([*within, *found.values()]), None)


def said_of(price: Price, plain: Price) -> str:
    """How much longer a step takes: "+18 % of a step"."""
    return f"{100 * (price.step_s / plain.step_s - 1):+.0f} % of a step"


def freed(plain: Price, price: Price) -> str:
    """Bytes that it frees, and what it costs."""
    return f"{units.memory_size(plain.size_bytes - price.size_bytes)} for {said_of(price, plain)}"
