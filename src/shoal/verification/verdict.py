"""What `shoal verify` found, for people and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from shoal.engine.tolerances import SINGLE, Finding, Quantity

_TELLING: tuple[Quantity, ...] = (
    "neighbours",
    "rate",
    "route",
    "gradient",
    "loss",
    "norm",
    "buffer",
    "weight",
    "moment",
    "agreement",
)
"""Most telling first: a wrong gradient explains a wrong norm and a wrong weight, and names its parameter."""

_SUBJECTS: dict[Quantity, str] = {
    "gradient": "the gradient of ",
    "weight": "the weight ",
    "agreement": "after the agreement of replicas the weight ",
    "buffer": "the buffer ",
    "moment": "the moment ",
    "rate": "the learning rate ",
    "route": "the routes of ",
    "neighbours": "the loss changes with its batch: that of ",
}


FAR = 1e4
"""Times the tolerance: no rounding of the type that is compared is so large."""
IN_FLOAT64 = "To rule out rounding, which statistics over few numbers enlarge, compare in float64: --exact"
IN_FLOAT32 = (
    "Every difference is of the size of float32's rounding: where the model or its loss computes a part in float32, as "
    "many of transformers do, no layout is the same to 1e-12; compare without --exact"
)


@dataclass(frozen=True)
class Verdict:
    """Everything that was compared. `axes` says for each parameter over which axes it is summed and split.

    `narrowing`: how to find where a difference far beyond the tolerance comes from. `unkeyed`: a sentence about random
    numbers that depend on the layout, "" where the model draws none. `rule`: how replicas agree, as the one process
    plays it; "" where they are never different.
    """

    layout: str
    exact: bool
    findings: list[Finding]
    axes: dict[str, str]
    notes: tuple[str, ...] = ()
    unkeyed: str = ""
    rule: str = ""
    narrowing: str = ""

    @property
    def holds(self) -> bool:
        """Is every difference within its tolerance?"""
        return all(finding.holds for finding in self.findings)

    @property
    def first(self) -> Finding | None:
        """The finding that tells most: of the first step that differs, the worst of its most telling quantity."""
        broken = [finding for finding in self.findings if not finding.holds]
        if not broken:
            return None
        now = [finding for finding in broken if finding.step == broken[0].step]
        kind = min((finding.quantity for finding in now), key=_TELLING.index)
        return max((f for f in now if f.quantity == kind), key=lambda f: f.difference)

    def sentence(self) -> str:
        """What differs, by how much, and whose sum it is."""
        first = self.first
        if first is None:
            return f"{self.layout} computes what one process computes{self._played}"
        where = f" on rank {first.rank}" if first.rank >= 0 else ""
        alike = [f for f in self.findings if not f.holds and f.step == first.step and f.quantity == first.quantity]
        broken = {finding.name for finding in alike}
        axes = "" if first.quantity == "agreement" else self.axes.get(first.name, "")
        others = f"; with it {len(broken) - 1} others of its kind" if len(broken) > 1 else ""
        return (
            f"{self.layout} differs from one process: at step {first.step} {_SUBJECTS.get(first.quantity, 'the ')}"
            f"{first.name}{where} {_by_how_much(first)}"
            f"{axes}{others}{self._repair(first)}"
        )

    def to_json(self) -> dict[str, Any]:
        """The worst of each quantity in each step, and the first that differs."""
        rows = [_row(finding) | {"holds": finding.holds} for finding in self._worst()]
        first = self.first
        return {
            "layout": self.layout,
            "rule": self.rule,
            "precision": "float64" if self.exact else "float32",
            "holds": self.holds,
            "compared": len(self.findings),
            "rows": rows,
            "first": None if first is None else _row(first) | {"axes": self.axes.get(first.name, "").strip(", ")},
            "notes": [*self.notes, *([self.unkeyed] if self.unkeyed else [])],
        }

    def lines(self) -> Iterator[str]:
        """A table."""
        yield f"{self.layout}, {'float64' if self.exact else 'float32'}, beside one process{self._played}"
        yield f"{'step':>4}  {'quantity':<10} {'worst of':>8}  {'difference':>10}  {'tolerance':>9}      at"
        for finding, count in self._told():
            at = "" if finding.rank < 0 else f"{finding.name} (rank {finding.rank})"
            yield (
                f"{finding.step:>4}  {finding.quantity:<10} {count:>8}  {finding.difference:>10.1e}  "
                f"{finding.tolerance:>9.0e}  {'ok' if finding.holds else '!!'}  {at}"
            ).rstrip()
        yield from self.notes
        if self.unkeyed and self.holds:
            yield self.unkeyed
        yield "the same model" if self.holds else self.sentence()

    @property
    def _played(self) -> str:
        return f" that plays {self.rule}" if self.rule else ""

    def _as_float32_rounds(self, first: Finding) -> bool:
        worst = max(finding.difference for finding in self.findings)
        return FAR * first.tolerance < first.difference and worst <= SINGLE.gradient

    def _repair(self, first: Finding) -> str:
        if first.quantity == "neighbours":
            return (
                ". Compute each sample's loss without its neighbours, or state in model.group_samples which belong "
                "together and take one such group a microbatch"
            )
        if first.quantity == "rate":
            return ""
        if first.quantity == "agreement":
            return f". Gradients and the replicas' own updates were right; the agreement is not {self.rule}"
        if self.unkeyed:
            return f". This need not be a mistake: {self.unkeyed}"
        if self.exact and self._as_float32_rounds(first):
            return f". {IN_FLOAT32}"
        if first.difference > FAR * first.tolerance:
            return self.narrowing
        return "" if self.exact else f". {IN_FLOAT64}"

    def _told(self) -> Iterator[tuple[Finding, int]]:
        """The worst of each quantity in each step, of how many. Together where they hold: a strategy's many steps, and
        the learning rates of all steps of the run.
        """
        right = all(finding.holds for finding in self.findings if finding.quantity == "rate")
        kinds: dict[tuple[int | None, Quantity], list[Finding]] = {}
        for finding in self.findings:
            together = (self.rule and self.holds) or (finding.quantity == "rate" and right)
            kinds.setdefault((None if together else finding.step, finding.quantity), []).append(finding)
        for found in kinds.values():
            yield max(found, key=lambda finding: finding.difference), len(found)

    def _worst(self) -> Iterator[Finding]:
        kinds = dict.fromkeys((finding.step, finding.quantity) for finding in self.findings)
        for step, quantity in kinds:
            same = (f for f in self.findings if f.step == step and f.quantity == quantity)
            yield max(same, key=lambda finding: finding.difference)


def _by_how_much(finding: Finding) -> str:
    if math.isinf(finding.difference):
        return "is on one side only, or is no number"
    return f"is off by {finding.difference:.1e} of its scale (tolerance {finding.tolerance:.0e})"


def _row(finding: Finding) -> dict[str, Any]:
    """Its fields; a difference without a number is null, as JSON has it."""
    return asdict(finding) | ({"difference": None} if math.isinf(finding.difference) else {})
