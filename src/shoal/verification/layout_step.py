"""A step under the layout: what all ranks came to, gathered at rank 0 and compared with the reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shoal.assembly.run import Run
from shoal.data.sample import Batch
from shoal.engine.proof import (
    Finding,
    HeldBox,
    Tolerances,
    assembled,
    compare_gradients,
    compare_number,
    compare_weights,
)
from shoal.engine.reference import Reference, ReferenceGradient
from shoal.engine.step_result import StepResult
from shoal.models.mixture_routes import RecordRoutes, ReplayRoutes, RouteDifference, Routes, set_routes
from shoal.state.ownership import owned_gradients
from shoal.verification import coded
from shoal.verification.moments import compare_moments, held_moments
from shoal.verification.reference import (
    buffers_of,
    collected,
    compare_buffers,
    gather_routes,
    held_weights,
)


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
        seen.append((norm, collected(run, own), coded.kept_back(run)))

    result = run.step(number, batches, lr=run.rate(number), on_gradients=record)
    with gradients.full_parameters():
        weights = collected(run, list(held_weights(run.trained)))
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
    norm = coded.norm_of(whole) if found.kept else wanted.norm  # of what was decoded, which is what is clipped
    yield compare_number(number, "norm", found.norm, norm, tolerance=tolerances.norm)
    gradients = coded.completed(found.gradients, found.kept, wanted.gradients)
    yield from compare_gradients(number, gradients, wanted.gradients, tolerances=tolerances, rounding=rounding)
    reference.update(whole, lr=lr, norm=found.norm)
    after = {name: parameter.detach() for name, parameter in reference.weights.items()}
    yield from compare_weights(number, found.weights, after, tolerance=tolerances.weight)
    yield from compare_moments(reference, number, found.moments)
    yield from compare_buffers(reference, number, found.buffers, tolerances.gradient)
