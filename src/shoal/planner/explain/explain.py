"""Why this plan and not another, and what would help it most.

`why_not` takes the best plan under a condition ("tensor=8") and says what it would cost, and which constraint binds
where there is none. `helps` changes one thing at a time and ranks the changes: within the plan (recomputation, ZeRO,
microbatch) and outside of it (links or memory twice as fast).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import msgspec

from shoal import units
from shoal.codec.config import BlockwiseConfig, CastConfig, CodecConfig, NoCodec, PowerSGDConfig
from shoal.codec.stated import is_stated, label
from shoal.cost.plan import Plan
from shoal.errors import LayoutError, UsageError
from shoal.planner.explain.text import Change, signed, table
from shoal.planner.predict.coding import measured_time
from shoal.planner.predict.predictor import Prediction, Predictor
from shoal.planner.predict.stack import UNCODED
from shoal.planner.predict.workload import ITEMS
from shoal.planner.search.candidates import Allowed, candidates
from shoal.planner.search.search import fitting_memory, search
from shoal.topology.cluster import Cluster, Link

CONDITIONS = (
    "tensor",
    "pipeline",
    "context",
    "shard",
    "replicate",
    "expert",
    "microbatch",
    "zero",
    "loss_chunks",
    "recompute",
    "schedule",
)


def condition(text: str, allowed: Allowed) -> Allowed:
    """`allowed` narrowed by "tensor=8" or "zero=3,recompute=full". Raises `UsageError` for an unknown name."""
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in CONDITIONS or not value:
            raise UsageError(
                f"'{part}' is no condition on a plan: write NAME=VALUE with one of {', '.join(CONDITIONS)}"
            )
        allowed = replace(allowed, **_narrowed(name, value))
    return allowed


def why_not(predictor: Predictor, text: str, best: Prediction, *, allowed: Allowed) -> str:
    """What the condition would cost, item by item against `best`; or which constraint binds.

    The rest of the best plan is kept where a plan with the condition can keep it and fits; else it is searched for.
    """
    asked = {part.partition("=")[0].strip() for part in text.split(",")}
    narrowed = condition(text, allowed).within(predictor.abilities)
    if "schedule" in asked and "pipeline" not in asked and best.plan.layout.pipeline == 1:
        return f"{text}: the best plan has no pipeline, and so no schedule; ask for pipeline=2,{text}"
    if next(candidates(predictor.workload, predictor.cluster, narrowed), None) is None:
        return f"{text}: no legal plan has it. {_broken_rule(predictor, narrowed)}"
    kept = condition(text, _like(best.plan, allowed, text)).within(predictor.abilities)
    other, rest = _best(predictor, kept), "the best plan with it, all else kept, is"
    if other is None:
        try:
            other, rest = search(predictor, narrowed, keep=1).best[0], "nothing else can be kept; the best such plan is"
        except LayoutError as error:
            return f"{text}: {error}"
    slower = other.step_s / best.step_s - 1
    lines = [f"{text}: {rest} {other.plan.describe()}"]
    lines.append(
        f"  {units.seconds(other.step_s)} a step, {signed(100 * slower)} % against {units.seconds(best.step_s)}"
    )
    lines.append(f"  {units.memory_size(other.memory_bytes)} against {units.memory_size(best.memory_bytes)}")
    lines += [
        f"  {name}: {'+' if value >= 0 else ''}{units.seconds(value)} ({ITEMS[name]})"
        for name, value in _differences(other, best)
    ]
    return "\n".join(lines)


def _like(plan: Plan, allowed: Allowed, text: str) -> Allowed:
    """`allowed` narrowed to what `plan` is, but for the conditions' own names and what follows from them."""
    asked = {part.partition("=")[0].strip() for part in text.split(",")}
    values: dict[str, Any] = {name: getattr(plan.layout, name) for name in plan.layout.to_dict()}
    values |= {"microbatch": plan.microbatch, "zero": (plan.zero,), "recompute": (plan.recompute,)}
    values |= {"schedule": (plan.schedule,), "loss_chunks": (plan.loss_chunks,)}
    if asked & set(plan.layout.to_dict()):  # ranks that one axis takes are missing elsewhere
        values = {name: value for name, value in values.items() if name not in ("replicate", "shard", "zero")}
    kept = {name: value for name, value in values.items() if name not in asked}
    if "schedule" in kept:
        kept["schedules"] = kept.pop("schedule")
    return replace(allowed, **kept)


def _best(predictor: Predictor, allowed: Allowed) -> Prediction | None:
    """None where no plan is legal, or none fits."""
    plans = (plan for plan in candidates(predictor.workload, predictor.cluster, allowed))
    fitting = (plan for plan in plans if fitting_memory(predictor, plan) is not None)
    found = min(fitting, key=lambda plan: predictor.bill(plan).total, default=None)
    return None if found is None else predictor.predict(found)


def helps(predictor: Predictor, best: Prediction) -> list[Change]:
    """Changes of the plan and of the machine, fastest first. A measured machine is what it is."""
    changes = [_change(what, predictor, plan) for what, plan in _other_plans(best.plan, predictor) if plan != best.plan]
    for what, cluster in _other_clusters(predictor.cluster) if predictor.measured is None else ():
        changes.append(_change(what, predictor.on(cluster), best.plan))
    return sorted(changes, key=lambda change: change.step_s)


def _change(what: str, predictor: Predictor, plan: Plan) -> Change:
    one = predictor.predict(plan)
    return Change(what=what, step_s=one.step_s, memory_bytes=one.memory_bytes, fits=one.fits)


def _other_plans(plan: Plan, predictor: Predictor) -> Iterator[tuple[str, Plan]]:
    for kind in Allowed().within(predictor.abilities).recompute:
        if not (kind == "selective" and predictor.stack.flash_attention):
            yield f"memory.recompute = {kind}", replace(plan, recompute=kind)
    if plan.layout.shard > 1:
        for stage in (1, 2, 3):
            yield f"memory.zero = {stage}", replace(plan, zero=stage)
    if plan.microbatches % 2 == 0:
        twice = replace(plan, microbatch=2 * plan.microbatch, microbatches=plan.microbatches // 2)
        yield "microbatches twice as large", twice
    if plan.microbatch % 2 == 0:
        half = replace(plan, microbatch=plan.microbatch // 2, microbatches=2 * plan.microbatches)
        yield "microbatches half as large", half


def _other_clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    machine = cluster.machine
    faster = {"scale_up": "links in a node twice as fast", "scale_out": "links between nodes twice as fast"}
    for name, what in faster.items():
        link: Link = getattr(machine, name)
        parts: dict[str, Any] = {name: msgspec.structs.replace(link, gb_s=2 * link.gb_s)}
        yield what, msgspec.structs.replace(cluster, machine=msgspec.structs.replace(machine, **parts))
    device = msgspec.structs.replace(machine.device, memory_gb_s=2 * machine.device.memory_gb_s)
    yield (
        "memory twice as fast",
        msgspec.structs.replace(cluster, machine=msgspec.structs.replace(machine, device=device)),
    )


def _differences(other: Prediction, best: Prediction) -> list[tuple[str, float]]:
    """Items that differ by at least a hundredth of the step, largest first."""
    both = {name: other.bill.seconds.get(name, 0.0) - best.bill.seconds.get(name, 0.0) for name in ITEMS}
    seen = [(name, value) for name, value in both.items() if abs(value) >= 0.01 * best.step_s]
    return sorted(seen, key=lambda pair: -abs(pair[1]))


def _narrowed(name: str, value: str) -> dict[str, Any]:
    if name == "recompute":
        return {"recompute": (value,)}
    if name == "schedule":
        return {"schedules": (value,)}
    if not value.isdigit():
        raise UsageError(f"{name}={value}: the value is a whole number, such as {name}=2")
    return {name: (int(value),)} if name in ("zero", "loss_chunks") else {name: int(value)}


def _broken_rule(predictor: Predictor, allowed: Allowed) -> str:
    """The axes that were asked for, and what each must divide."""
    model, world = predictor.workload.model, predictor.cluster.devices
    rules = {
        "tensor": predictor.tensor_rule(allowed.tensor or 1),
        "pipeline": f"pipeline must divide {world} devices and leave each rank some of {model.layers} layers",
        "context": f"context must divide {world} devices and a sample of {predictor.workload.sequence} tokens evenly",
        "shard": f"replicate x shard must divide {world} devices and {predictor.workload.global_samples} samples",
        "expert": f"expert must divide {model.experts} experts and the ranks of shard x context x tensor",
        "microbatch": f"the microbatch must divide a rank's part of {predictor.workload.global_samples} samples",
    }
    asked = [field.name for field in fields(allowed) if getattr(allowed, field.name) is not None]
    return "; ".join(rules[name] for name in asked if name in rules) or "the other axes leave no room for it"


# Which codec of gradients would pay on a plan, with its price in time, bytes and memory, and what it does to accuracy.
#
# A codec changes what is computed, so nobody but the user chooses one: this is a table and a sentence.


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
