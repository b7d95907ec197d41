"""One rank of `shoal verify`: the same steps under the layout and in one process, compared number by number.

Every step starts from the reference's weights. First the layout computes its gradients; then rank 0, which alone holds
the reference, computes them plainly and compares. The reference's optimizer then takes the gradient that the layout
found: so what the optimizer and the agreement on parameters do is judged by itself, and not by how Adam amplifies the
last bit of a gradient.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.comm.named import gather_named
from shoal.data.cursor import Cursor
from shoal.data.feed import Feed
from shoal.data.sample import Batch
from shoal.engine.compute import Compute
from shoal.engine.config import Float32, Float64
from shoal.engine.proof import (
    EXACT,
    SINGLE,
    Finding,
    Part,
    Tolerances,
    assembled,
    compare_gradients,
    compare_number,
    compare_weights,
)
from shoal.engine.randomness import Randomness
from shoal.engine.reference import Reference, ReferenceGradient
from shoal.engine.step import StepResult, TrainStep
from shoal.launch.environment import Place
from shoal.models.mixture_routes import RecordRoutes, ReplayRoutes, RouteDifference, Routes, set_routes
from shoal.models.roles import roles_of
from shoal.optim.build import build_optimizer
from shoal.optim.schedule import peak_rate
from shoal.recipes.assembly import new_feed, new_state, new_step, new_sync
from shoal.recipes.objects import Given, loss_of, model_of
from shoal.recipes.run_file import RunFile
from shoal.recipes.setting import Setting, set_up
from shoal.recipes.shared_routes import share_routes
from shoal.recipes.verdict import Verdict
from shoal.sync.strategy import Sync
from shoal.topology.box import Box


def verify_rank(
    run_file: RunFile, place: Place, given: Given, *, steps: int, exact: bool, store: Store | None = None
) -> Verdict | None:
    """The verdict at rank 0, None at the others. Stops at the first step that differs. `store`: as for `set_up`."""
    run_file = msgspec.structs.replace(run_file, precision=Float64() if exact else Float32())
    setting = set_up(run_file, place, given, store=store)
    sync = new_sync(setting)
    state = new_state(setting, sync)
    step = new_step(setting, state, sync)
    reference = _reference(setting, given) if place.rank == 0 else None
    peak, _ = peak_rate(run_file.optimizer, global_samples=run_file.batch.global_samples)
    tolerances, replayed = EXACT if exact else SINGLE, 0
    findings: list[Finding] = []
    with closing(new_feed(setting, Cursor())) as feed, closing(_whole_feed(setting)) as whole:
        for number in range(1, steps + 1):
            wanted, routes = _expect(reference, whole, number)
            setting.announce(f"verify/{number}/expected", str)  # a long wait, which no collective would allow
            _give_weights(setting, sync, reference)
            tap = ReplayRoutes(share_routes(setting, routes, key=f"verify/{number}/routes"), tolerances.loss)
            took = _take(setting, step, sync, number, feed.next().microbatches, peak, tap)
            replayed += took.replayed
            if reference is not None and wanted is not None:
                findings += _judge(reference, wanted, took, number, peak, tolerances)
            holds = all(finding.holds for finding in findings)
            if setting.announce(f"verify/{number}/holds", lambda holds=holds: str(holds)) == "False":
                break
    axes = _axes(setting)
    if reference is None:
        return None
    notes = (f"{replayed} routes of near-ties were taken from the reference",) if replayed else ()
    return Verdict(setting.mesh.layout.describe(), exact, findings, axes, notes)


@dataclass(frozen=True)
class _Took:
    """What a step of the layout came to; the parts are those of all ranks, at rank 0 only."""

    result: StepResult
    norm: float
    gradients: list[Part]
    weights: list[Part]
    routes: list[RouteDifference]
    replayed: int


def _expect(reference: Reference | None, whole: Feed, number: int) -> tuple[ReferenceGradient | None, Routes | None]:
    """The reference's gradient of step `number`, and its routes; None where it is not."""
    if reference is None:
        return None, None
    routes = Routes()
    set_routes(reference.compute.model, RecordRoutes(routes))
    return reference.gradient(number, whole.next().microbatches), routes


def _take(
    setting: Setting, step: TrainStep, sync: Sync, number: int, batches: list[Batch], lr: float, tap: ReplayRoutes
) -> _Took:
    """A step under the layout on the reference's routes, with what every rank holds of gradients and new weights."""
    set_routes(setting.model, tap)
    seen: list[tuple[float, list[Part]]] = []

    def look(norm: float) -> None:
        seen.append((norm, _collect(setting, list(_owned_gradients(sync)))))

    result = step(number, batches, lr=lr, look=look)
    with sync.whole():
        weights = _collect(setting, [(t.holding.name, t.holding.box, t.parameter) for t in setting.trained])
    differences, replayed = _gather_routes(setting, tap)
    return _Took(result, *seen[0], weights, differences, replayed)


def _judge(
    reference: Reference, wanted: ReferenceGradient, took: _Took, number: int, lr: float, tolerances: Tolerances
) -> Iterator[Finding]:
    """Loss, norm, every gradient, routes, and every weight after the step."""
    for difference in took.routes:
        where = f"{difference.layer}, token {difference.place} of sample {difference.sample}"
        yield Finding(number, "route", where, -1, difference.gap, tolerances.loss)
    yield compare_number(number, "loss", took.result.loss, wanted.loss, tolerance=tolerances.loss)
    yield compare_number(number, "norm", took.norm, wanted.norm, tolerance=tolerances.norm)
    yield from compare_gradients(number, took.gradients, wanted.gradients, tolerance=tolerances.gradient)
    reference.update(assembled(took.gradients, wanted.gradients), lr=lr)
    after = {name: parameter.detach() for name, parameter in reference.weights.items()}
    yield from compare_weights(number, took.weights, after, tolerance=tolerances.weight)


def _reference(setting: Setting, given: Given) -> Reference:
    run_file, device, precision = setting.run_file, setting.device, setting.precision
    model = model_of(run_file, given, device=device, dtype=precision.parameters)
    roles = roles_of(model)
    trained = [(name, p, roles[name].decay) for name, p in model.named_parameters() if p.requires_grad]
    randomness = Randomness(model, seed=run_file.run.seed, replica=0)
    compute = Compute(model, loss_of(run_file, given), precision, device, randomness)
    return Reference(compute, build_optimizer(run_file.optimizer, trained, lr=1.0), run_file.optimizer.clip_norm)


def _whole_feed(setting: Setting) -> Feed:
    """The global batches, undivided."""
    return new_feed(setting, Cursor(), share=(0, 1))


@torch.no_grad()
def _give_weights(setting: Setting, sync: Sync, reference: Reference | None) -> None:
    """Every rank's parameters become its boxes of the reference's."""
    world, weights = setting.mesh.world, reference.weights if reference is not None else {}
    with sync.whole():
        own = {trained.holding.name: trained for trained in setting.trained}
        for name, shape in setting.trained_shapes.items():
            dtype, device = setting.precision.parameters, setting.device
            whole = weights[name].detach().clone() if weights else torch.empty(shape, dtype=dtype, device=device)
            world.broadcast(whole, root=0).wait()
            if name in own:
                own[name].parameter.copy_(whole[own[name].holding.box.slices])


def _owned_gradients(sync: Sync) -> Iterator[tuple[str, Box, Tensor]]:
    for owned in sync.owned:
        gradient = owned.parameter.grad
        flat = torch.zeros_like(owned.parameter).flatten() if gradient is None else gradient.flatten()
        for region in owned.regions:
            part = flat[region.start : region.start + region.box.numel]
            yield owned.name, region.box, part.view(region.box.shape)


def _collect(setting: Setting, parts: list[tuple[str, Box, Tensor]]) -> list[Part]:
    items = [(json.dumps([name, box.offset, box.shape]), values) for name, box, values in parts]
    found = []
    for rank, named in enumerate(gather_named(items, setting.mesh.world, device=setting.device)):
        for key, values in named:
            name, offset, shape = json.loads(key)
            found.append(Part(name, rank, Box(tuple(offset), tuple(shape)), values))
    return found


def _gather_routes(setting: Setting, tap: ReplayRoutes) -> tuple[list[RouteDifference], int]:
    """What all ranks would have routed otherwise, at rank 0."""
    own = [(json.dumps([[*difference] for difference in tap.differences]), torch.tensor(tap.replayed))]
    differences: list[RouteDifference] = []
    replayed = 0
    for ((said, count),) in gather_named(own, setting.mesh.world, device=setting.device):
        differences += [RouteDifference(*found) for found in json.loads(said)]
        replayed += int(count)
    return differences, replayed


def _axes(setting: Setting) -> dict[str, str]:
    """For people, at rank 0: along which axes each parameter is summed, and split."""
    layout, said = setting.mesh.layout, []
    for trained in setting.trained:
        placement = trained.holding.placement
        summed = [axis for axis in placement.partial if layout.size(axis) > 1]
        split = [axis for axis in placement.sharded if layout.size(axis) > 1]
        clause = _clause("summed over", summed) + _clause("split over", split)
        said.append((json.dumps([trained.holding.name, clause]), torch.zeros(0)))
    return dict(
        json.loads(key) for named in gather_named(said, setting.mesh.world, device=setting.device) for key, _ in named
    )


def _clause(what: str, axes: list[Any]) -> str:
    return f", {what} {' x '.join(axes)}" if axes else ""
