"""Which codec of gradients would pay on a plan, with its price in time, bytes and memory, and what it does to accuracy.

A codec changes what is computed, so nobody but the user chooses one: this is a table and a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shoal import units
from shoal.codec.config import BlockwiseConfig, CastConfig, CodecConfig, NoCodec, PowerSGDConfig
from shoal.codec.costs import is_stated, label
from shoal.cost.plan import Plan
from shoal.planner.explain.text import Change, signed, table
from shoal.planner.predict.coding import measured_time
from shoal.planner.predict.predictor import Prediction, Predictor
from shoal.planner.predict.stack import UNCODED


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A codec to try. `above` is the held-out loss above that without a codec, in percent with two standard errors:
    digits, 200 steps, three seeds (docs/benchmarks/compression.md)."""

    key: str
    codec: CodecConfig
    above: str

    @property
    def caveat(self) -> str:
        """What it may do to the loss, in a sentence."""
        return (
            f"lossy: held-out loss {self.above} % above none's on digits after 200 steps; measure your own task, such "
            "as by shoal bench codec --accuracy gpt"
        )


PROPOSED = (
    Proposal(key='codec.kind = "cast"', codec=CastConfig(), above="1 +- 13"),
    Proposal(key='codec.kind = "blockwise"', codec=BlockwiseConfig(), above="-1 +- 6"),
    Proposal(key='codec.kind = "blockwise", bits = 4', codec=BlockwiseConfig(bits=4), above="-4 +- 3"),
    Proposal(key='codec.kind = "power_sgd"', codec=PowerSGDConfig(), above="10 +- 18"),
)
PAYS = 0.98
"""A codec pays where the step takes at most this part of the time."""


@dataclass(frozen=True, kw_only=True)
class CodecPrice:
    """One codec on one plan: bytes that a rank sends in a step for sums over replicas, and seconds."""

    codec: str
    sent_bytes: float
    wire_s: float
    coding_s: float
    residual_bytes: float
    step_s: float
    fits: bool
    caveat: str | None = None


@dataclass(frozen=True, kw_only=True)
class Codings:
    """The run file's own codec first, then those that were tried in its place."""

    plan: str
    prices: tuple[CodecPrice, ...]
    verdict: str
    basis: str

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "plan": self.plan,
            "prices": [asdict(one) for one in self.prices],
            "verdict": self.verdict,
            "basis": self.basis,
        }

    def text(self) -> str:
        """The table, and the verdict below it."""
        rows = [
            (
                one.codec,
                units.memory_size(one.sent_bytes),
                units.seconds(one.wire_s),
                units.seconds(one.coding_s),
                units.memory_size(one.residual_bytes),
                units.seconds(one.step_s),
            )
            for one in self.prices
        ]
        head = ("gradients between replicas", "sent", "wire", "coding", "residual", "step")
        return f"Codecs of gradients, with {self.plan}:\n{table(head, rows)}\n{self.verdict}\n{self.basis}"


Legal = Callable[[CodecConfig, Plan], bool]
"""Whether the run file could name this codec with this plan."""


def codings(predictor: Predictor, one: Prediction, legal: Legal) -> Codings | None:
    """Prices of codecs on a predicted plan; None where no replicas sum gradients."""
    own = codec_price(predictor, one)
    if not own.sent_bytes:
        return None
    found = [
        replace(codec_price(other, other.predict(one.plan)), caveat=proposal.caveat)
        for proposal, other in _others(predictor, one.plan, legal)
    ]
    return Codings(
        plan=one.plan.describe(), prices=(own, *found), verdict=_verdict(own, found), basis=_basis(predictor)
    )


def codec_changes(predictor: Predictor, best: Prediction, legal: Legal) -> list[Change]:
    """The proposals as changes of the best plan; only where none is used."""
    if not codec_price(predictor, best).sent_bytes or predictor.stack.codecs.gradients != NoCodec():
        return []
    changes = []
    for proposal, other in _others(predictor, best.plan, legal):
        one = other.predict(best.plan)
        changes.append(
            Change(
                what=proposal.key,
                step_s=one.step_s,
                memory_bytes=one.memory_bytes,
                fits=one.fits,
                caveat=proposal.caveat,
            )
        )
    return changes


def codec_price(predictor: Predictor, one: Prediction) -> CodecPrice:
    """What sums over replicas cost with the predictor's own codec."""
    total = predictor.gradient_sum(one.plan)
    return CodecPrice(
        codec=label(total.codec) if is_stated(total.codec) else "none",
        sent_bytes=total.sent_bytes,
        wire_s=total.wire_s,
        coding_s=total.coding_s,
        residual_bytes=total.residual_bytes,
        step_s=one.step_s,
        fits=one.fits,
    )


def _others(predictor: Predictor, plan: Plan, legal: Legal) -> list[tuple[Proposal, Predictor]]:
    codecs = predictor.stack.codecs
    tried = [UNCODED_AGAIN, *PROPOSED] if codecs.gradients != NoCodec() else PROPOSED
    return [
        (
            proposal,
            predictor.on(
                predictor.cluster,
                measured=predictor.measured,
                stack=replace(predictor.stack, codecs=replace(codecs, gradients=proposal.codec)),
            ),
        )
        for proposal in tried
        if proposal.codec != codecs.gradients and legal(proposal.codec, plan)
    ]


UNCODED_AGAIN = Proposal(key='codec.kind = "none"', codec=UNCODED, above="0")


def _basis(predictor: Predictor) -> str:
    """Where the seconds of coding come from."""
    measured, codecs = predictor.measured, predictor.stack.codecs
    times = codecs.times if measured is None else measured.codecs
    missing = [one.key for one in PROPOSED if measured_time(one.codec, times) is None]
    if not missing:
        return "Coding takes what shoal bench codec measured on this machine."
    of = "Coding" if len(missing) == len(PROPOSED) else f"Coding of {'; '.join(missing)}"
    return f"{of} is priced by passes over memory, a lower bound; shoal bench codec measures CPU cores."


def _verdict(own: CodecPrice, found: Sequence[CodecPrice]) -> str:
    fitting = [one for one in found if one.fits]
    if not fitting:
        return "No other codec serves this plan."
    best = min(fitting, key=lambda one: one.step_s)
    change = best.step_s / own.step_s - 1
    if best.step_s > PAYS * own.step_s:
        pays = "No codec pays" if own.codec == "none" else f"{own.codec} may stay"
        return f"{pays} here: the next best, {best.codec}, would change the step by {signed(100 * change)} %."
    caveat = f" It is {best.caveat}." if best.codec != "none" else ""
    return f"{best.codec} would take {-100 * change:.0f} % off the step.{caveat} Nothing is changed unless you name it."
