"""The search for the cheapest mixture that fits a budget, by trials that predictions choose.

Mixtures that change nothing come first, unless they take much longer, then those that round otherwise, then, where that
is allowed, moments in 8 bits. Of those that may fit by their predicted peak, the one with the shortest predicted step
is tried. What a trial finds corrects the prediction of its likes, and rules out what frees less. Before it is said that
nothing fits, the mixture with the least peak is tried whatever was predicted, and then with one means more after the
other. Losses of a trial are compared with those of the run as it is: a mixture that only rounds waits until that is
allowed, and one that changes more is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal import units
from shoal.errors import LayoutError, ShoalError
from shoal.memory.config import BudgetChange
from shoal.observe.terminal import ProgressBar
from shoal.planning.mixture_prices import Price, Prices, freed
from shoal.planning.mixtures import (
    AS_IT_IS,
    BOUNDLESS,
    CHANGES,
    WORTH,
    Means,
    Mixture,
    choices,
    ladder,
    part_of,
    possible,
    with_values,
)
from shoal.planning.trial import FirstSteps
from shoal.runfile.run_file import RunFile

DOUBT = 1.05
"""A mixture is tried where its predicted peak is at most so much of the budget."""
ROUNDING = {"float64": 1e-9, "float32": 1e-4}
"""Relative: how far losses of the first steps are off where sums have another order; of narrower numbers below."""
NARROW_ROUNDING = 2e-2


class Tried(msgspec.Struct, frozen=True):
    """A mixture: how one writes its keys, their values, what it changes as far as losses say, and its peak on the
    fullest rank; None: it did not run, or changed more than it may, for `why`. `longer` is its predicted step over that
    of the run as it is, less one, and `predicted_bytes` its peak as it was predicted before the trial.
    """

    keys: str
    values: dict[str, Any]
    change: BudgetChange
    peak_bytes: int | None
    why: str = ""
    step_s: float | None = None
    longer: float | None = None
    predicted_bytes: int | None = None


Trial = Callable[[RunFile], FirstSteps | str]
"""Some steps of a run; or why there are none."""


def need(tried: Tried) -> str:
    """What a mixture came to, for people."""
    if tried.peak_bytes is None:
        return f"{tried.keys}: {tried.why}"
    return f"{tried.keys} needs {units.memory_size(tried.peak_bytes)}"


def held(run_file: RunFile, values: dict[str, Any], limit: str | None) -> RunFile:
    """With these values, held to `limit`, and without a budget to be met."""
    return with_values(run_file, {**values, "memory.budget": None, "memory.simulate_device": limit})


@dataclass
class Search:
    """The trials of one budget. `found` has what each tried mixture came to; `bar` hears what is being tried."""

    run_file: RunFile
    trial: Trial
    bar: ProgressBar = field(default_factory=ProgressBar)
    unpriced: str = ""
    found: dict[Mixture, Tried] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    """Of the run as it is."""

    def __post_init__(self) -> None:
        self._budget = self.run_file.memory.budget_bytes or 0
        self._given_up: set[BudgetChange] = set()
        try:
            self._priced = Prices(self.run_file, bar=self.bar)
        except ShoalError as why:
            self._priced, self.unpriced = None, str(why)

    @property
    def tried(self) -> list[Tried]:
        """In order."""
        return list(self.found.values())

    def rounds(self, allowed: Sequence[BudgetChange]) -> Iterator[tuple[BudgetChange, float]]:
        """What mixtures that are tried may change, and their longest predicted step (s): what keeps every bit while
        that is worth it, then all such, then all. What rounds is not priced before it is needed.
        """
        yield allowed[0], WORTH * self._cost(AS_IT_IS)[0]
        likely = [one for change in allowed[:2] if (one := self._likely(change, wanted=lambda _: True)) is not None]
        worth_s = WORTH * min((self._cost(one)[0] for one in likely), default=math.inf)
        for longest_s in (worth_s, math.inf):
            for change in allowed:
                yield change, longest_s

    def fits(self, change: BudgetChange, longest_s: float) -> bool:
        """Whether a mixture that changes so much, and no more, does, with a step of at most `longest_s`; it is the last
        that was tried.
        """
        if (waiting := self._waiting(change)) is not None:
            self.found[waiting] = self.found.pop(waiting)
            return True
        while True:
            one = self._likely(change, wanted=self._is_open)
            if one is None and longest_s == math.inf and change not in self._given_up:
                one = self._least_expected(change)
                self._given_up.add(change)
            if one is None or self._cost(one)[0] > longest_s:
                return False
            if self._fits(one):
                return True

    def as_it_is(self) -> bool:
        """Whether the run needs nothing."""
        return self._fits(AS_IT_IS)

    def descends(self, allowed: Sequence[BudgetChange]) -> bool:
        """Whether the mixture with the least peak fits with the strongest means of another kind, or of one more and one
        more; each is kept where it frees something, until none does.
        """
        strongest = [own[-1] for own in choices(self.run_file) if own[-1].change in allowed]
        before = None
        while (least := self._least()) is not None and least != before:
            before = least
            if any(self._fits_with(means, allowed) for means in strongest):
                return True
        return False

    def _fits_with(self, means: Means, allowed: Sequence[BudgetChange]) -> bool:
        """Whether the mixture with the least peak fits with these means, too."""
        least = self._least()
        more = Mixture((*(one for one in (least or AS_IT_IS).means if one.kind != means.kind), means))
        if more in self.found or not self._may(more) or not possible(self.run_file, more):
            return False
        self._fits(more)
        tried = self.found[more]
        return tried.change in allowed and (tried.peak_bytes or math.inf) <= self._budget

    def _least(self) -> Mixture | None:
        """The one with the least peak so far; None: none ran."""
        ran = {one: tried.peak_bytes for one, tried in self.found.items() if tried.peak_bytes is not None}
        return min(ran, key=lambda one: ran[one], default=None)

    def _likely(self, change: BudgetChange, *, wanted: Callable[[Mixture], bool]) -> Mixture | None:
        """The one that costs least of those that change so much, are `wanted` and may fit; None: there is none."""
        if self._priced is not None:
            return self._priced.cheapest(change, self._may_fit, wanted=wanted)
        return min(filter(wanted, self._rungs(change)), key=self._cost, default=None)

    def _least_expected(self, change: BudgetChange) -> Mixture | None:
        """The one with the least peak of those that are left, whatever the budget."""
        left = [] if self._priced is None else self._priced.smallest(change, wanted=self._is_open)
        return min(left, key=lambda one: (self.expected(one), self._cost(one)), default=None)

    def _rungs(self, change: BudgetChange) -> list[Mixture]:
        return [one for one in ladder(self.run_file) if one.change == change]

    def _is_open(self, mixture: Mixture) -> bool:
        return mixture not in self.found and self._may(mixture)

    def _waiting(self, change: BudgetChange) -> Mixture | None:
        """One that fitted, and changed more than it was tried for, and no more than this."""
        fitting = (
            one
            for one, tried in self.found.items()
            if tried.change == change != one.change and (tried.peak_bytes or math.inf) <= self._budget
        )
        return min(fitting, key=self._cost, default=None)

    def _fits(self, mixture: Mixture) -> bool:
        self.found[mixture] = tried = self._try(mixture, self.run_file)
        return tried.change == mixture.change and (tried.peak_bytes or math.inf) <= self._budget

    def _try(self, mixture: Mixture, run_file: RunFile) -> Tried:
        values = {**mixture.values, **part_of(run_file)}
        price, plain = self.price(mixture), self.price(AS_IT_IS)
        longer = None if price is None or plain is None else price.step_s / plain.step_s - 1
        predicted = None if price is None else round(self.expected(mixture))
        self.bar.update(f"memory.budget: trial {len(self.found) + 1}, of {mixture.said}")
        steps = self.trial(held(run_file, values, BOUNDLESS))
        change, peak_bytes, why, step_s = mixture.change, None, "", None
        if isinstance(steps, str):
            why = f"did not run: {steps}"
        else:
            self.losses = self.losses or steps.losses
            step_s, apart = steps.step_s, self._apart(steps.losses)
            if change != "moments" and apart > self._rounding:
                why = f"changes the losses, by {apart:.1g} of one"
            else:
                peak_bytes, change = steps.peak_bytes, "rounding" if change == "nothing" and apart else change
        return Tried(mixture.said, values, change, peak_bytes, why, step_s, longer, predicted)

    @property
    def _rounding(self) -> float:
        return ROUNDING.get(self.run_file.precision.variant, NARROW_ROUNDING)

    def _apart(self, losses: Sequence[float]) -> float:
        """How far they are off those of the run as it is, relative; NaN beside NaN is not."""
        pairs = ((a, b) for a, b in zip(losses, self.losses, strict=False) if not (a == b or (a != a and b != b)))
        return max((abs(a - b) / abs(b) if b and a == a and b == b else math.inf for a, b in pairs), default=0.0)

    def _may(self, mixture: Mixture) -> bool:
        """Whether trials so far leave it open that it runs and fits."""
        return not any(self._rules_out(other, tried, mixture) for other, tried in self.found.items())

    def _rules_out(self, other: Mixture, tried: Tried, mixture: Mixture) -> bool:
        """What frees less than one that was too large is too large, too. What did not run with some means does not run
        with them and others; what they changed, stronger ones of their kind change, too.
        """
        if tried.peak_bytes is not None and tried.peak_bytes > self._budget and other.frees_as_much_as(mixture):
            return True
        culprits = self._unproven(other)
        if tried.step_s is None:
            own, kinds = set(mixture.means), mixture.strengths.keys() - {"recompute"}  # which may need kinds of layers
            return all(means in own or means.kind in kinds for means in culprits)
        changes_more = tried.peak_bytes is None or CHANGES.index(tried.change) > CHANGES.index(mixture.change)
        return changes_more and {means.kind for means in culprits} <= mixture.strengths.keys()

    def _unproven(self, failed: Mixture) -> set[Means]:
        """Its means of which no kind ran in a trial; where all did, all of them."""
        kept = (one for one, tried in self.found.items() if tried.peak_bytes is not None and tried.change == one.change)
        ran = {means.kind for one in kept for means in one.means}
        return {means for means in failed.means if means.kind not in ran} or set(failed.means)

    def price(self, mixture: Mixture) -> Price | None:
        """Predicted, as it is; None where the planner has none."""
        return None if self._priced is None else self._priced.of(mixture)

    def expected(self, mixture: Mixture) -> float:
        """Its peak in bytes: as predicted, times what the trial that is most like it was off by; 0 without a price."""
        price = self.price(mixture)
        if price is None:
            return 0.0
        ran = [one for one, tried in self.found.items() if tried.peak_bytes is not None and self.price(one) is not None]
        like = min(ran, key=lambda one: one.apart_from(mixture), default=None)
        if like is None:
            return price.size_bytes
        known = self.price(like)
        return price.size_bytes * (self.found[like].peak_bytes or 0) / (known.size_bytes if known else 1.0)

    def _may_fit(self, mixture: Mixture) -> bool:
        return self.expected(mixture) <= DOUBT * self._budget

    def _cost(self, mixture: Mixture) -> tuple[float, int]:
        price = self.price(mixture)
        return (0.0 if price is None else price.step_s), len(mixture.means)

    def short(self) -> str:
        """Why nothing fits: by how much, the least that is met, and what each means alone frees."""
        least = self._least()
        if least is None:
            raise LayoutError(f"memory.budget: none of {len(self.tried)} mixtures ran; {need(self.tried[0])}")
        met_by = self._met_by(least, self.found[least].peak_bytes or 0)
        short_bytes = units.memory_bytes(met_by) - self._budget
        each = "; ".join(self._singles())
        return (
            f'memory.budget = "{self.run_file.memory.budget}" is short by {units.memory_size(short_bytes)}: the least '
            f"that is met is {met_by}, with {least.said}; raise it to that, or split the model over more ranks"
            + (f". As predicted, of the run as it is: {each}" if each else "")
        )

    def _singles(self) -> Iterator[str]:
        plain = self.price(AS_IT_IS)
        allowed = CHANGES.index(self.run_file.memory.budget_may_change)
        for means in (one for own in choices(self.run_file) for one in own):
            mixture = Mixture((means,))
            price = self.price(mixture)
            if plain is None or price is None or price.size_bytes >= plain.size_bytes:
                continue
            beyond = CHANGES.index(means.change) > allowed
            with_key = f' and memory.budget_may_change = "{means.change}"' if beyond else ""
            yield f"{means.said}{with_key} frees {freed(plain, price)}"

    def _met_by(self, least: Mixture, peak_bytes: int) -> str:
        """A budget that the mixture meets, as one writes it. Parts of the state grow with the budget, and the peak with
        them: where they would, the budget is tried.
        """
        part = part_of(self.run_file)
        while True:
            budget = _no_less(peak_bytes)
            raised = with_values(self.run_file, {"memory.budget": budget})
            if part_of(raised) == part:
                return budget
            tried = self._try(least, raised)
            if tried.peak_bytes is None:
                raise LayoutError(f"memory.budget: {least.said} ran with less, and not with {budget}: {tried.why}")
            if tried.peak_bytes <= units.memory_bytes(budget):
                return budget
            part, peak_bytes = part_of(raised), tried.peak_bytes


def _no_less(size_bytes: int) -> str:
    """The size as one writes it, and not less."""
    text = units.memory_size(size_bytes)
    while units.memory_bytes(text) < size_bytes:
        size_bytes += size_bytes // 1000 + 1
        text = units.memory_size(size_bytes)
    return text
