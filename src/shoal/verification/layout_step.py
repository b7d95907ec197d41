"""A step under the layout: what all ranks came to, gathered at rank 0 and compared with the reference's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from shoal.assembly.run import Run
from shoal.comm.exchanges.coded import Coded
from shoal.data.cursor import Cursor
from shoal.data.feed import Feed
from shoal.data.sample import Batch
from shoal.engine.reference import Reference, ReferenceGradient, StaleReference
from shoal.engine.state import OPTIMIZER
from shoal.engine.tally import StepResult
from shoal.engine.tolerances import (
    Finding,
    HeldBox,
    Tolerances,
    assembled,
    compare_gradients,
    compare_number,
    compare_weights,
)
from shoal.models.mixture import RecordRoutes, ReplayRoutes, RouteDifference, Routes, set_routes
from shoal.optim.config import AdamW, AdamW8bit
from shoal.optim.schedule import peak_rate
from shoal.optim.slots import named_slots
from shoal.parallel.pipeline.pipedream import staleness
from shoal.runfile.run_file import RunFile
from shoal.state import owned_gradients, parts_of
from shoal.topology.holding import Box
from shoal.verification.reference import (
    axes_of,
    buffers_of,
    collected,
    compare_buffers,
    gather_routes,
    give_weights,
    held_weights,
    neighbour_findings,
    reference_of,
)
from shoal.verification.verdict import Verdict

# The proof of a layout whose gradients are coded: what was sent, and what was kept back, make the gradient.
#
#     sum over ranks of decode(encode(g_r + e_r)) + sum of e_r (new) - sum of e_r (old) = sum of g_r
#
# holds for every codec with error feedback, however much it leaves out. So a gradient of the layout is compared with
# the reference's after what the ranks have kept back in this step is added to it. The optimizers of both take the
# gradient that was decoded.


LOSSY_NOTE = 'codec.kind = "{}" is lossy: gradients were compared after adding what its error feedback had kept back'


def kept_back(run: Run) -> list[HeldBox]:
    """What each rank has kept back of its gradients in the step under way, less what it had kept before: the parts of
    all ranks at rank 0. All ranks call it, between the exchange of gradients and the update.
    """
    own: list[tuple[str, Box, Tensor]] = []
    owned = {one.name: one for one in run.generation.gradients.owned}
    for exchange in () if run.generation.coded is None else run.generation.coded.made:
        change = exchange.kept_back() if isinstance(exchange, Coded) else None  # pushes are no sums
        if change is None:
            continue
        for segment in exchange.segments:
            flat = change[segment.slice]
            for region in owned[segment.name].regions_of(segment.skipped, segment.numel):
                part = flat[region.start : region.start + region.box.numel]
                own.append((segment.name, region.box, part.view(region.box.shape)))
    return collected(run, own)


def completed(gradients: Sequence[HeldBox], kept: Sequence[HeldBox], like: Mapping[str, Tensor]) -> list[HeldBox]:
    """The gradients with what all ranks together have kept back of them; `like` has the whole tensors' shapes."""
    if not kept:
        return list(gradients)
    totals = {name: torch.zeros(like[name].shape, dtype=torch.float64) for name in {part.name for part in kept}}
    for part in kept:
        totals[part.name][part.box.slices] += part.values.double().cpu()
    return [
        part._replace(values=part.values.double().cpu() + totals[part.name][part.box.slices])
        if part.name in totals
        else part
        for part in gradients
    ]


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    """The two-norm of all whole tensors together."""
    return math.sqrt(math.fsum(float(gradient.double().norm()) ** 2 for gradient in gradients.values()))


# The proof of an optimizer whose moments have 8 bits: every step begins with the moments that the layout has.
#
# Blocks begin where a rank's part of a parameter does. A layout that cuts a parameter within a block rounds its moments
# otherwise than one process, and so does a gradient that differs by a last bit now and then; both by a hundredth of
# them. The update itself is made before its moments are rounded. So the one process takes the layout's moments before
# each step and makes the same update of them, without any tolerance for 8 bits; and the layout's new moments are
# compared with its own within `TOLERANCE`, by which both may be off together.


TOLERANCE = 2**-3
"""Two roundings, each by less than 6 % of a tensor's norm: at worst all numbers of a block but its largest, which is
exact, lie at the lower end of the highest decade of 64 values."""
MOMENTS_NOTE = (
    'optimizer.kind = "{}": each step of the one process begins with the moments that the layout has in 8 bits, and so '
    "weights are compared as ever; what the moments become is compared within the rounding of 8 bits"
)
LEFT_OUT = (
    'optimizer.kind = "{}" was taken as "adamw": what 8 bits round depends on the last digits of a gradient, which no '
    "tolerance tells from a mistake after several updates"
)


def rounds_moments(run_file: RunFile) -> bool:
    """Whether the run file's optimizer rounds what it keeps."""
    return isinstance(run_file.optimizer, AdamW8bit)


def without_rounding(run_file: RunFile) -> RunFile:
    """The same run with moments as they are."""
    return msgspec.structs.replace(run_file, optimizer=AdamW(**msgspec.structs.asdict(run_file.optimizer)))


def held_moments(run: Run) -> list[HeldBox]:
    """The moments of all ranks at rank 0, if the optimizer rounds them. All ranks call it, between two steps."""
    if not rounds_moments(run.run_file) or run.workload.optimizers:
        return []
    like = tuple(f"{OPTIMIZER}{slot.name}/" for slot in run.run_file.optimizer.slots if slot.like_parameter)
    own = [
        (name.removeprefix(OPTIMIZER), target.box, target.tensor)
        for name, parts in parts_of(run.state.optimizer.tensors()).items()
        if name.startswith(like)
        for target in parts
    ]
    return collected(run, own)


def give_moments(reference: Reference, moments: Sequence[HeldBox]) -> None:
    """The reference's optimizer goes on with these. Nothing before the first step."""
    own = _moments_of(reference)
    whole = assembled(moments, own) if moments else {}
    for name, parameter in reference.weights.items():
        state = reference.optimizer.state.get(parameter, {})
        state.update({slot: whole[key] for slot in state if (key := f"{slot}/{name}") in whole})


def compare_moments(reference: Reference, number: int, moments: Sequence[HeldBox]) -> Iterator[Finding]:
    """Every rank's moments after the step beside the reference's."""
    if moments:
        yield from compare_weights(number, moments, _moments_of(reference), tolerance=TOLERANCE, quantity="moment")


def _moments_of(reference: Reference) -> dict[str, Tensor]:
    slots = named_slots(reference.optimizer, reference.weights.items())  # pyright: ignore[reportArgumentType]
    return {name: tensor for name, tensor in slots.items() if tensor.dim()}


@dataclass(frozen=True)
class LayoutStep:
    """What a step of the layout came to; the parts are those of all ranks, at rank 0 only."""

    result: StepResult
    norm: float
    gradients: list[HeldBox]
    kept: list[HeldBox]
    weights: list[HeldBox]
    buffers: list[HeldBox]
    moments: list[HeldBox]
    routes: list[RouteDifference]
    replayed: int


def expect_step(
    reference: Reference | None, batches: list[Batch], number: int
) -> tuple[ReferenceGradient | None, Routes | None]:
    """The reference's gradient of step `number`, and its routes; None where it is not."""
    if reference is None:
        return None, None
    routes = Routes()
    set_routes(reference.compute.model, RecordRoutes(routes))
    return reference.gradient(number, batches), routes


def take_step(run: Run, number: int, batches: list[Batch], tap: ReplayRoutes) -> LayoutStep:
    """A step under the layout on the reference's routes, with what every rank holds of gradients and new weights."""
    set_routes(run.model, tap)
    gradients = run.generation.gradients
    seen: list[tuple[float, list[HeldBox], list[HeldBox]]] = []

    def record(norm: float) -> None:
        scale = run.step.scale
        own = [(name, box, values / scale) for name, box, values in owned_gradients(gradients.owned)]
        seen.append((norm, collected(run, own), kept_back(run)))

    result = run.step(number, batches, lr=run.rate(number), on_gradients=record)
    with gradients.full_parameters():
        weights = collected(run, list(held_weights(run)))
    differences, replayed = gather_routes(run, tap)
    buffers, moments = collected(run, buffers_of(run)), held_moments(run)
    return LayoutStep(result, *seen[0], weights, buffers, moments, differences, replayed)


def compare_step(
    reference: Reference,
    wanted: ReferenceGradient,
    found: LayoutStep,
    number: int,
    lr: float,
    tolerances: Tolerances,
    rounding: Callable[[], Mapping[str, float]],
) -> Iterator[Finding]:
    """Loss, norm, every gradient, routes, and every weight and buffer after the step."""
    for difference in found.routes:
        where = f"{difference.layer}, token {difference.place} of sample {difference.sample}"
        yield Finding(number, "route", where, -1, difference.gap, tolerances.loss)
    yield compare_number(number, "loss", found.result.loss, wanted.loss, tolerance=tolerances.loss)
    whole = assembled(found.gradients, wanted.gradients)
    norm = norm_of(whole) if found.kept else wanted.norm  # of what was decoded, which is what is clipped
    yield compare_number(number, "norm", found.norm, norm, tolerance=tolerances.norm)
    gradients = completed(found.gradients, found.kept, wanted.gradients)
    yield from compare_gradients(number, gradients, wanted.gradients, tolerances=tolerances, rounding=rounding)
    reference.update(whole, lr=lr, norm=found.norm, loss=found.result.loss)
    after = {name: parameter.detach() for name, parameter in reference.weights.items()}
    yield from compare_weights(number, found.weights, after, tolerance=tolerances.weight)
    yield from compare_moments(reference, number, found.moments)
    yield from compare_buffers(reference, number, found.buffers, tolerances.gradient)


# One rank of `shoal verify` for a pipeline that updates after each microbatch (PipeDream).
#
# What it is compared with is no plain training, but the sequential program with the same stale weights: every
# microbatch's gradient, and the weights when the pipeline has drained. As in every proof, the reference's optimizer
# takes the gradients that the layout found.


NOTE = "PipeDream: the one process takes the microbatches in turn, each at weights as old as its stages' were"


def verify_pipedream(run: Run, *, steps: int, tolerances: Tolerances, exact: bool) -> Verdict | None:
    """The verdict at rank 0, None at the others. Stops at the first step that differs."""
    reference = reference_of(run) if run.process.place.rank == 0 else None
    peak, _ = peak_rate(run.run_file.optimizer, global_samples=run.run_file.batch.global_samples)
    findings: list[Finding] = []
    with ExitStack() as stack:
        feed = stack.enter_context(closing(run.feed(Cursor())))
        shares = run.mesh.batch_share[1] if reference is not None else 0
        others = [stack.enter_context(closing(run.feed(Cursor(), share=(i, shares)))) for i in range(shares)]
        for number in range(1, steps + 1):
            run.process.announce(f"verify/{number}/ready", str)  # a long wait, which no collective would allow
            give_weights(run, reference)
            found = _take_step(run, number, feed.next().microbatches, peak)
            if reference is not None:
                microbatches = _microbatches(run, others)
                findings += _compare(run, reference, microbatches, found, number, peak, tolerances)
                if not all(finding.holds for finding in findings):
                    findings += neighbour_findings(run, reference, microbatches[0], number, tolerances.loss)
            holds = all(finding.holds for finding in findings)
            if run.process.announce(f"verify/{number}/holds", lambda holds=holds: str(holds)) == "False":
                break
    axes = axes_of(run)
    return None if reference is None else Verdict(run.mesh.layout.describe(), exact, findings, axes, (NOTE,))


@dataclass(frozen=True)
class _LayoutStep:
    """A step of the layout; `gradients[microbatch]` are the parts of all ranks, at rank 0 only."""

    result: StepResult
    gradients: dict[int, list[HeldBox]]
    weights: list[HeldBox]


def _take_step(run: Run, number: int, batches: list[Batch], lr: float) -> _LayoutStep:
    seen: dict[int, list[tuple[str, Box, Tensor]]] = {}

    def record(microbatch: int) -> None:
        owned = owned_gradients(run.generation.gradients.owned)
        seen[microbatch] = [(name, box, values.clone()) for name, box, values in owned]

    result = run.step(number, batches, lr=lr, on_microbatch=record)
    gradients = {microbatch: collected(run, seen[microbatch]) for microbatch in sorted(seen)}
    weights = collected(run, list(held_weights(run)))
    return _LayoutStep(result, gradients, weights)


def _microbatches(run: Run, feeds: Sequence[Feed]) -> list[tuple[Batch, ...]]:
    """The next step's, each of all replicas together."""
    arrange = run.generation.microbatching.uniform
    assert arrange is not None, "the ranks of a pipeline have microbatches of one size"
    return list(zip(*(arrange(feed.next().microbatches) for feed in feeds), strict=True))


def _compare(
    run: Run, reference: Reference, microbatches: Sequence[tuple[Batch, ...]], found: _LayoutStep, number: int,
    lr: float, tolerances: Tolerances,
) -> Iterator[Finding]:  # fmt: skip
    """Every microbatch's gradient, then loss, norm and weights of the whole step."""
    table, stages = run.generation.parts.table, run.generation.parts.stages
    assert table is not None
    assert stages is not None
    stage_of = {name: stage for stage, names in enumerate(stages.names) for name in names}
    stale = StaleReference(reference, stage_of, staleness(table))
    loss_sum, weight, squares = 0.0, 0.0, []
    for index, batches in enumerate(microbatches):
        own_weight = sum(batch.weight for batch in batches)
        if not own_weight:
            stale.update(None, lr=lr)
            continue
        wanted = stale.gradient(number, index, batches)
        loss_sum, weight = loss_sum + wanted.loss * own_weight, weight + own_weight
        squares.append(wanted.norm**2)
        yield from compare_gradients(number, found.gradients[index], wanted.gradients, tolerances=tolerances)
        stale.update(assembled(found.gradients[index], wanted.gradients), lr=lr)
    yield compare_number(number, "loss", found.result.loss, loss_sum / weight, tolerance=tolerances.loss)
    norm = math.sqrt(sum(squares) / len(squares))
    yield compare_number(number, "norm", found.result.norm, norm, tolerance=tolerances.norm)
    after = {name: parameter.detach() for name, parameter in reference.weights.items()}
    yield from compare_weights(number, found.weights, after, tolerance=tolerances.weight)
