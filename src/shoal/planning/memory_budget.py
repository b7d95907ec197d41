"""`memory.budget`: the cheapest mixture that fits, measured before any rank starts; what was chosen is written down.

Mixtures (`shoal.planning.mixtures`) that change nothing come first, then those that round otherwise, then, where
`memory.budget_may_change` allows it, moments in 8 bits. Of those that may fit by their predicted peak, the one with the
shortest predicted step is tried, by three steps of the run itself on a simulated device that refuses nothing. What a
trial finds corrects the prediction of its likes. Before a kind of mixtures is given up, the one with the least peak is
tried whatever was predicted. Losses of a trial are compared with those of the run as it is: a mixture that only rounds
waits until that is allowed, and one that changes more is not used.

The peak of a trial is that of every later step where what a step allocates does not depend on its data. Where it does,
as experts get other numbers of tokens, the later steps of a trial differ: what they differ by is asked for once more.
The run is then held to the budget by the same ledger.

The choice lies in `memory.json` of the run directory, with the bill: ranks read it, and a run that goes on keeps it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from shoal import units
from shoal.checkpoint.config import CheckpointConfig
from shoal.config.load import dumps
from shoal.errors import ConfigError, LayoutError, ShoalError
from shoal.files import cache_folder, read_json
from shoal.launcher.devices import gpus, memory_limit
from shoal.launcher.environment import Place
from shoal.memory.config import BudgetChange
from shoal.observe.config import ObserveConfig
from shoal.observe.facts import replace_file
from shoal.planning.mixtures import (
    AS_IT_IS,
    BOUNDLESS,
    CHANGES,
    Means,
    Mixture,
    Price,
    Prices,
    cheapest,
    choices,
    freed,
    ladder,
    mixtures,
    part_of,
    said_of,
    with_values,
)
from shoal.planning.trial import FirstSteps, trial_of
from shoal.runfile.rules import refusal
from shoal.runfile.run_file import RunFile, run_directory

FILE_NAME = "memory.json"
MOST_BYTES = 1 << 20
DOUBT = 1.05
"""A mixture is tried where its predicted peak is at most so much of the budget."""
LAST_TRIALS = 2
"""Mixtures with the least peak that are tried before a kind of them is given up."""
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


class Bill(msgspec.Struct, frozen=True):
    """What was tried for a budget, of a run file whose `digest` says which; the last one is what the run uses.
    `unpriced`: why the planner could not say what a mixture needs; "" where it could.
    """

    budget: str
    digest: str
    tried: list[Tried]
    unpriced: str = ""


Trial = Callable[[RunFile], FirstSteps | str]
"""Some steps of a run; or why there are none."""


def with_budget(
    run_file: RunFile, place: Place | None, *, keeps: bool = True, trial: Trial | None = None
) -> tuple[RunFile, str]:
    """The run file with the mixture, and a sentence on it. `place` is None in the process that starts the ranks. Unless
    it `keeps` something, a bill that the run directory does not have lies in the cache folder. `trial` tries a mixture;
    None: by `first_steps` in processes of their own.

    Raises `ConfigError` where nothing can be tried, `LayoutError` where nothing fits.
    """
    digest = digest_of(run_file)
    own, apart = run_directory(run_file) / FILE_NAME, cache_folder(os.environ) / "budgets" / f"{digest[:16]}.json"
    for path in (own,) if keeps else (own, apart):
        if (bill := _kept(path)) is not None and bill.digest == digest:
            return chosen_by(bill, run_file), said(bill)
    if place is not None:
        raise ConfigError(
            f"memory.budget under {place.launcher}: what fits is tried once, by whoever starts the ranks; start "
            "the run with shoal train, or write the keys that its run.toml has"
        )
    bill = _tried(run_file, digest, trial or trial_of)
    path = own if keeps else apart
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, msgspec.json.encode(bill) + b"\n")
    return chosen_by(bill, run_file), said(bill)


def foreseen(run_file: RunFile, cluster: Path | None) -> str | None:
    """For `shoal plan`, of a run file whose number of processes is known: what the run directory has already, or what
    is predicted on the devices of a cluster's file; None: there is no budget.
    """
    if run_file.memory.budget is None:
        return None
    bill, asked = _kept(run_directory(run_file) / FILE_NAME), f'memory.budget = "{run_file.memory.budget}"'
    if cluster is None and bill is not None and bill.digest == digest_of(run_file):
        return f"{said(bill)}; kept from {run_directory(run_file) / FILE_NAME}"
    try:
        prices = Prices(run_file, cluster)
    except ShoalError as why:
        return f"{asked}: nothing is predicted, and mixtures are tried when the run starts: {why}"
    plain, best = prices.of(AS_IT_IS), cheapest(run_file, prices)
    if plain is None or best is None:
        return (
            f"{asked}: by prediction, no mixture fits; a start tries those that need least, and says what they come to"
        )
    mixture, price = best
    return (
        f"{asked}, as predicted: {mixture.said} needs {units.memory_size(price.size_bytes)} (as it is "
        f"{units.memory_size(plain.size_bytes)}), {said_of(price, plain)}; {_CHANGED[mixture.change]}"
    )


def used_by(run_file: RunFile) -> str:
    """The sentence on the budget by which a run that starts was completed; "" where it has none."""
    bill = _kept(run_directory(run_file) / FILE_NAME)
    if bill is None or bill.budget != run_file.memory.simulate_device:
        return ""
    return said(bill) if with_values(run_file, bill.tried[-1].values) == run_file else ""


def chosen_by(bill: Bill, run_file: RunFile) -> RunFile:
    """The run file with what the run uses, held to the budget."""
    return _held(run_file, bill.tried[-1].values, run_file.memory.budget)


def said(bill: Bill) -> str:
    """What is used, and what was tried beside it."""
    *others, used = bill.tried
    beside = f" ({'; '.join(map(_need, others))})" if others else ""
    longer = "" if not used.longer else f", about {100 * used.longer:+.0f} % of a step"
    return f'memory.budget = "{bill.budget}": {_need(used)}{longer}; {_CHANGED[used.change]}{beside}'


_CHANGED: dict[BudgetChange, str] = {
    "nothing": "losses keep every bit",
    "rounding": "sums have another order, so that losses differ by rounding",
    "moments": "the optimizer's moments have 8 bits",
}


def _need(tried: Tried) -> str:
    if tried.peak_bytes is None:
        return f"{tried.keys}: {tried.why}"
    return f"{tried.keys} needs {units.memory_size(tried.peak_bytes)}"


def _held(run_file: RunFile, values: dict[str, Any], limit: str | None) -> RunFile:
    """With these values, held to `limit`, and without a budget to be met."""
    return with_values(run_file, {**values, "memory.budget": None, "memory.simulate_device": limit})


def _tried(run_file: RunFile, digest: str, trial: Trial) -> Bill:
    _check(run_file)
    search = _Search(run_file, trial)
    allowed = CHANGES[: CHANGES.index(run_file.memory.budget_may_change) + 1]
    if any(search.fits(change) for change in allowed):
        return Bill(run_file.memory.budget or "", digest, search.tried, search.unpriced)
    raise LayoutError(search.short())


def _check(run_file: RunFile) -> None:
    """Raises `ConfigError` where nothing can be tried, or the budget is not one."""
    memory, budget = run_file.memory, run_file.memory.budget_bytes or 0
    if run_file.run.device == "cuda" or (run_file.run.device == "auto" and gpus(os.environ)):
        raise ConfigError(
            'memory.budget is tried on CPUs, by a simulated device: set run.device = "cpu", or choose with shoal plan'
        )
    limit = memory_limit()
    if limit is not None and budget > limit.total_bytes:
        raise ConfigError(
            f'memory.budget = "{memory.budget}" is more than the {units.memory_size(limit.total_bytes)} that '
            f"{limit.limited_by} has: a budget says what a rank may hold of it; lower it, or leave it out"
        )
    if (why := refusal(_held(run_file, {}, memory.budget))) is not None:
        raise ConfigError(f"memory.budget needs a simulated device: {why}")


@dataclass
class _Search:
    """The trials of one budget. `found` has what each tried mixture came to."""

    run_file: RunFile
    trial: Trial
    unpriced: str = ""
    found: dict[Mixture, Tried] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    """Of the run as it is."""

    def __post_init__(self) -> None:
        self._budget = self.run_file.memory.budget_bytes or 0
        self._prices: dict[Mixture, Price | None] = {}
        try:
            self._priced, every = Prices(self.run_file), mixtures(self.run_file)
        except ShoalError as why:
            self._priced, self.unpriced, every = None, str(why), ladder(self.run_file)
        self._every = list(every)

    @property
    def tried(self) -> list[Tried]:
        """In order."""
        return list(self.found.values())

    def fits(self, change: BudgetChange) -> bool:
        """Whether a mixture that changes so much, and no more, does; it is the last that was tried."""
        last = 0
        if (waiting := self._waiting(change)) is not None:
            self.found[waiting] = self.found.pop(waiting)
            return True
        while True:
            left = [one for one in self._of(change) if one not in self.found and self._may(one)]
            likely = [one for one in left if self.expected(one) <= DOUBT * self._budget]
            if AS_IT_IS in left:
                one = AS_IT_IS
            elif likely:
                one = min(likely, key=self._cost)
            elif left and last < LAST_TRIALS:
                one, last = min(left, key=lambda one: (self.expected(one), self._cost(one))), last + 1
            else:
                return False
            if self._fits(one):
                return True

    def _of(self, change: BudgetChange) -> list[Mixture]:
        """Those that change so much; without those that the planner cannot price, where it can price others."""
        return [
            one for one in self._every if one.change == change and (self._priced is None or self.price(one) is not None)
        ]

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
        steps = self.trial(_held(run_file, values, BOUNDLESS))
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
            return culprits <= set(mixture.means)
        changes_more = tried.peak_bytes is None or CHANGES.index(tried.change) > CHANGES.index(mixture.change)
        return changes_more and {means.kind for means in culprits} <= mixture.strengths.keys()

    def _unproven(self, failed: Mixture) -> set[Means]:
        """Its means of which no kind ran in a trial; where all did, all of them."""
        kept = (one for one, tried in self.found.items() if tried.peak_bytes is not None and tried.change == one.change)
        ran = {means.kind for one in kept for means in one.means}
        return {means for means in failed.means if means.kind not in ran} or set(failed.means)

    def price(self, mixture: Mixture) -> Price | None:
        """Predicted, as it is; None where the planner has none."""
        if mixture not in self._prices:
            self._prices[mixture] = None if self._priced is None else self._priced.of(mixture)
        return self._prices[mixture]

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

    def _cost(self, mixture: Mixture) -> tuple[float, int]:
        price = self.price(mixture)
        return (0.0 if price is None else price.step_s), len(mixture.means)

    def short(self) -> str:
        """Why nothing fits: by how much, the least that is met, and what each means alone frees."""
        ran = {one: tried.peak_bytes for one, tried in self.found.items() if tried.peak_bytes is not None}
        if not ran:
            raise LayoutError(f"memory.budget: none of {len(self.tried)} mixtures ran; {_need(self.tried[0])}")
        least = min(ran, key=lambda one: ran[one])
        met_by = self._met_by(least, ran[least])
        short_bytes = units.memory_bytes(met_by) - self._budget
        each = "; ".join(self._singles())
        return (
            f'memory.budget = "{self.run_file.memory.budget}" is short by {units.memory_size(short_bytes)}: the least '
            f"that is met is {met_by}, with {least.said}; raise it to that, or split the model over more ranks"
            + (f". Of the run as it is: {each}" if each else "")
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


def digest_of(run_file: RunFile) -> str:
    """Of what decides the peak: all but how long it runs, what it keeps, and what it tells."""
    run = msgspec.structs.replace(run_file.run, steps=1, name="", directory=None)
    noise = {key: getattr(run_file.observe, key) for key in ("noise_every_steps", "noise_by_layer")}
    observe = msgspec.structs.replace(ObserveConfig(), **noise)
    own = msgspec.structs.replace(run_file, run=run, checkpoint=CheckpointConfig(), observe=observe)
    return blake3(dumps(own).encode()).hexdigest()


def _kept(path: Path) -> Bill | None:
    if not path.is_file():
        return None
    return read_json(path, Bill, limit_bytes=MOST_BYTES, error=ConfigError, repair="remove it; it is written anew")
