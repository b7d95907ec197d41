"""What every proof of a layout needs: the reference on rank 0, its weights on all ranks, all ranks' parts on rank 0.

A mixture of experts also needs the reference's routes, which say where each token went. Two orders of summation may
rank two nearly equal scores differently, and a token that goes elsewhere changes everything after it. So the layout
takes the reference's routes, and only those that it would have chosen otherwise by more than a near-tie count against
it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shoal.assembly.objects import loss_of, model_of
from shoal.assembly.run import Run
from shoal.assembly.sparse import Placed, build_sparse
from shoal.assembly.splitting import draws_of
from shoal.comm.collective import Alone, gather_named
from shoal.data.sample import Batch, map_tree
from shoal.engine.compute import Compute
from shoal.engine.randomness import Randomness
from shoal.engine.reference import Arrange, Reference, joined
from shoal.engine.tolerances import Finding, HeldBox, compare_rates, compare_weights
from shoal.models.mixture import UNKNOWN, ReplayRoutes, RouteDifference, Routes, set_routes
from shoal.models.roles import roles_of
from shoal.optim.build import build_optimizer
from shoal.optim.config import Schedule
from shoal.optim.layer_statistics import SeesLayers, layers_in
from shoal.optim.parts import Parts
from shoal.optim.transforms import Chain
from shoal.runfile.run_file import RunFile, declared_group, synchronises_norms
from shoal.sparsity.masks import Masks
from shoal.sparsity.training import SparseTraining
from shoal.state import Owned, Trained, boxes_in, owned_whole
from shoal.topology.holding import Box, held, whole
from shoal.topology.layout import Layout


def reference_of(run: Run) -> Reference:
    """The whole model in this process, drawn as the layout's was."""
    run_file, device, precision, objects = run.run_file, run.device, run.workload.precision, run.workload.objects
    model = model_of(run_file, objects, device=device, dtype=precision.parameters)
    roles = roles_of(model)
    trained = [(name, p, roles[name].decay) for name, p in model.named_parameters() if p.requires_grad]
    draws = draws_of(run_file, model)
    randomness = Randomness(model, seed=run_file.run.seed, replica=0, draws=draws)
    randomness.seeds_host = run.generation.forward_backward.compute.randomness.seeds_host
    loss, distillation = loss_of(run_file.loss, objects, precision), run.workload.distillation
    compute = Compute(model, loss, precision, device, randomness, distillation=distillation)
    sparse = [name for name, role in roles.items() if role.kind == "table"]
    kinds = {name: role.kind for name, role in roles.items()}
    widened = {name: role.widened for name, role in roles.items()}
    optimizer = build_optimizer(run_file.optimizer, trained, lr=1.0, sparse=sparse, kinds=kinds, widened=widened)
    alone = [(held(Layout(), 0, name, tuple(p.shape)), p) for name, p, _ in trained]
    parts = Parts([owned_whole(Trained(holding, p)) for holding, p in alone], Alone(), Alone())
    if isinstance(optimizer, SeesLayers):
        optimizer.watch(layers_in(model, {id(p): name for name, p, _ in trained}), Alone(), seed=run_file.run.seed)
        optimizer.connect(parts)
        compute.announces.append(optimizer.microbatch)
        compute.looks.append(optimizer.look)
    chain = Chain(run_file.optimizer.transforms, parts, run_file.run.seed)
    sparse = None if run_file.sparsity is None else _masks(run, optimizer, parts.owned)
    clip_norm = run_file.optimizer.clip_norm
    kind = Reference if run_file.memory.offload.delay_update_after is None else LateReference
    return kind(compute, optimizer, clip_norm, _arrangement(run), transform=chain, sparse=sparse)


@dataclass
class LateReference(Reference):
    """The same where a step computes with weights of which the last update is left out: `newest` have it."""

    newest: dict[str, Tensor] = field(default_factory=dict)

    def update(
        self, gradients: dict[str, Tensor], *, lr: float, norm: float | None = None, loss: float = math.nan
    ) -> None:
        """One optimizer step of the newest weights; those before it are what the next step computes with."""
        shown = self.newest or self._copied()
        self._put(shown)
        super().update(gradients, lr=lr, norm=norm, loss=loss)
        self.newest = self._copied()
        self._put(shown)

    def _copied(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.weights.items()}

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.weights.items():
            parameter.copy_(values[name])


def _masks(run: Run, optimizer: torch.optim.Optimizer, owned: Sequence[Owned]) -> SparseTraining:
    """Those of the layout's layers, decided by this process alone."""
    split, dtype = run.generation.parts.split, run.workload.precision.parameters
    return build_sparse(
        run.run_file, split, owned, optimizer, masks=Masks(), group=Alone(), placed=Placed(run.device, dtype)
    )


def _arrangement(run: Run) -> Arrange | None:
    """Which samples the reference takes in one forward, where it matters; None: all of a step."""
    if declared_group(run.run_file.model) is not None:
        return lambda groups: groups
    if synchronises_norms(run.run_file.model):
        samples, shares = run.generation.microbatching.samples, run.mesh.batch_share[1]
        assert samples is not None, "all ranks have microbatches of one size"
        return partial(_rounds, samples=samples, shares=shares)
    return None


def _rounds(batches: Sequence[Batch], *, samples: int, shares: int) -> list[Batch]:
    """The microbatches of a step, each of all `shares` of it: microbatch k is the k-th `samples` samples of each."""
    (step,) = joined(batches)
    edges = [len(step) * index // shares for index in range(shares + 1)]
    offsets = range(0, max(after - before for before, after in pairwise(edges)), samples)
    return [
        _rows(step, [row for before, after in pairwise(edges) for row in range(before, after)[offset:][:samples]])
        for offset in offsets
    ]


def _rows(batch: Batch, rows: list[int]) -> Batch:
    take = lambda leaf: leaf[torch.tensor(rows, device=leaf.device)]  # noqa: E731
    inputs, targets = map_tree(take, batch.inputs), map_tree(take, batch.targets)
    return Batch(inputs, targets, weights=take(batch.weights), positions=take(batch.positions))


@torch.no_grad()
def give_weights(run: Run, reference: Reference | None) -> None:
    """Every rank's parameters become its boxes of the reference's, or its masters of them do."""
    world, weights = run.mesh.world, reference.weights if reference is not None else {}
    gradients, mixed = run.generation.gradients, run.workload.precision.mixed is not None
    with nullcontext() if mixed else gradients.full_parameters():
        own: dict[str, list[tuple[Box, Tensor]]] = {}
        for name, box, part in held_weights(run):
            own.setdefault(name, []).append((box, part))
        for name, shape in run.trained_shapes.items():
            dtype, device = run.workload.precision.parameters, run.device
            whole = weights[name].detach().clone() if weights else torch.empty(shape, dtype=dtype, device=device)
            world.broadcast(whole, root=0).wait()
            for box, part in own.get(name, ()):
                part.copy_(whole[box.slices])
    if mixed:
        gradients.gather()


def held_weights(run: Run) -> Iterator[tuple[str, Box, Tensor]]:
    """The parameters of this rank, or its masters of them: name, box of the unsplit parameter, values."""
    if run.workload.precision.mixed is not None:
        for owned in run.generation.gradients.owned:
            for box, part in owned.boxes(owned.parameter.detach()):
                yield owned.name, box, part
        return
    for own in run.trained:
        for box, part in boxes_in(own.holding, own.parameter.detach()):
            yield own.holding.name, box, part


def collected(run: Run, parts: list[tuple[str, Box, Tensor]]) -> list[HeldBox]:
    """The parts of all ranks at rank 0, nothing at the others."""
    items = [(json.dumps([name, box.offset, box.shape]), values) for name, box, values in parts]
    found = []
    for rank, named in enumerate(gather_named(items, run.mesh.world, device=run.device)):
        for key, values in named:
            name, offset, shape = json.loads(key)
            found.append(HeldBox(name, rank, Box(tuple(offset), tuple(shape)), values))
    return found


def neighbour_findings(
    run: Run, reference: Reference, batches: Sequence[Batch], number: int, tolerance: float
) -> list[Finding]:
    """Does a sample's loss depend on its neighbours? Then no layout that cuts the batch elsewhere can be the same.

    Not asked of a model whose batch norms are synchronised: theirs do.
    """
    if synchronises_norms(run.run_file.model):
        return []
    set_routes(reference.compute.model, None)
    shares = run.mesh.batch_share[1]
    samples = run.generation.microbatching.samples or -(-run.run_file.batch.global_samples // shares)
    found = reference.neighbour_effect(batches, samples=samples, tolerance=tolerance)
    if found is None:
        return []
    where = f"sample {found.sample} among {found.among} samples instead of {found.of}"
    return [Finding(number, "neighbours", where, -1, found.difference, tolerance)]


def buffers_of(run: Run) -> list[tuple[str, Box, Tensor]]:
    """This rank's buffers that are saved, and what else its forwards have changed: name, box, values."""
    split, moving = run.generation.parts.split, run.generation.forward_backward.compute.buffers.moving
    named = dict(run.model.named_buffers()) | dict(run.model.named_parameters())
    found = [(name, named[name].detach()) for name in sorted({*split.buffers, *moving} & set(named))]
    found = [(name, torch.view_as_real(t) if t.is_complex() else t) for name, t in found]
    return [(name, whole(tuple(tensor.shape)), tensor) for name, tensor in found]


def compare_buffers(reference: Reference, number: int, parts: Sequence[HeldBox], tolerance: float) -> list[Finding]:
    """Every rank's buffers beside the reference's."""
    named = dict(reference.compute.model.named_buffers()) | dict(reference.compute.model.named_parameters())
    wanted = {name: torch.view_as_real(t) if t.is_complex() else t.detach() for name, t in named.items()}
    return compare_weights(number, parts, wanted, tolerance=tolerance, quantity="buffer")


SAMPLED_RATES = 16
"""Steps of the whole run at which every rank's learning rate is compared."""


def rate_findings(run: Run) -> list[Finding]:
    """At rank 0: the learning rates that every rank would train with, beside the schedule written down plainly."""
    steps = run.run_file.run.steps
    numbers = sorted({1 + (steps - 1) * i // (SAMPLED_RATES - 1) for i in range(SAMPLED_RATES)})
    own = torch.tensor([run.rate(number) for number in numbers], dtype=torch.float64)
    ranks = gather_named([("rates", own)], run.mesh.world, device=run.device)
    return compare_rates(
        [values.tolist() for ((_, values),) in ranks], {n: _plain_rate(run.run_file, n) for n in numbers}
    )


def _plain_rate(run_file: RunFile, step: int) -> float:
    optimizer, schedule = run_file.optimizer, run_file.schedule
    ratio = 1.0 if optimizer.lr_for_samples is None else _plain_samples(run_file, step) / optimizer.lr_for_samples
    peak = optimizer.lr * (math.sqrt(ratio) if optimizer.lr_scaling == "square_root" else ratio)
    warmup, steps, final = schedule.warmup_steps, run_file.run.steps, schedule.final_fraction
    if step <= warmup and not (schedule.kind == "one_cycle" and step < warmup):
        return peak * step / warmup
    if step < warmup:
        return peak * (1 - (1 - schedule.initial_fraction) * math.cos(math.pi * step / warmup / 2) ** 2)
    left = max(0.0, (steps - step) / max(1, steps - warmup))
    cosine = math.sin(math.pi * left / 2) ** 2
    shares = {
        "constant": lambda: 1.0,
        "linear": lambda: final + (1 - final) * left,
        "cosine": lambda: final + (1 - final) * cosine,
        "one_cycle": lambda: final + (1 - final) * cosine,
        "stable": lambda: final + (1 - final) * min(1.0, left / schedule.decay_fraction),
        "polynomial": lambda: final + (1 - final) * left**schedule.power,
        "step": lambda: math.prod(schedule.factor for milestone in schedule.milestones if step > milestone),
        "inverse_sqrt": lambda: (max(1, warmup) / (max(1, warmup) + step - warmup)) ** 0.5,
        "chained": lambda: _plain_phases(schedule, steps - warmup)[step - warmup],
    }
    return peak * shares[schedule.kind]()


def _plain_samples(run_file: RunFile, step: int) -> int:
    """The samples of step `step`, counted step by step."""
    if run_file.batch.adaptive is not None:
        return run_file.batch.adaptive.first  # a proof's feed has steps of the first size
    position = size = 0
    for _ in range(step):
        sizes = [phase.samples for phase in run_file.batch.schedule if position < phase.until]
        size = sizes[0] if sizes else run_file.batch.global_samples
        position += size
    return size


def _plain_phases(schedule: Schedule, steps: int) -> list[float]:
    """The shares of the peak at step 0 and each of the steps after it, one after the other."""
    shares = [1.0]
    for phase in schedule.phases:
        length, first = max(1, steps + 1 - len(shares)) if phase.steps is None else phase.steps, shares[-1]
        last = first if phase.final_fraction is None else phase.final_fraction
        for step in range(1, length + 1):
            left = 1 - step / length
            share = math.sin(math.pi * left / 2) ** 2 if phase.kind == "cosine" else left
            shares.append(last + (first - last) * share)
    return shares


def axes_of(run: Run) -> dict[str, str]:
    """For people, at rank 0: along which axes each parameter is summed, and split."""
    layout, said = run.mesh.layout, []
    for trained in run.trained:
        placement = trained.holding.placement
        summed = [axis for axis in placement.partial if layout.size(axis) > 1]
        split = [axis for axis in placement.sharded if layout.size(axis) > 1]
        clause = _clause("summed over", summed) + _clause("split over", split)
        said.append((json.dumps([trained.holding.name, clause]), torch.zeros(0)))
    return dict(json.loads(key) for named in gather_named(said, run.mesh.world, device=run.device) for key, _ in named)


def _clause(what: str, axes: list[Any]) -> str:
    return f", {what} {' x '.join(axes)}" if axes else ""


def share_routes(run: Run, routes: Routes | None, *, key: str) -> Routes:
    """Rank 0's `routes` (None on the others), the same on all. `key` is one that was not used before."""
    said = json.loads(run.process.announce(key, lambda: json.dumps(_forms(routes or Routes()))))
    shared = Routes()
    for layer, samples, places, top_k in said:
        table = torch.full((len(samples), places, top_k), UNKNOWN)
        if routes is not None:
            for row, sample in enumerate(samples):
                own = routes.tables[layer][sample]
                table[row, : len(own)] = own
        table = table.to(run.device)
        run.mesh.world.broadcast(table, root=0).wait()
        shared.tables[layer] = dict(zip(samples, table.unbind(), strict=True))
    return shared


def gather_routes(run: Run, tap: ReplayRoutes) -> tuple[list[RouteDifference], int]:
    """What all ranks would have routed otherwise, at rank 0."""
    own = [(json.dumps([[*difference] for difference in tap.differences]), torch.tensor(tap.replayed))]
    differences: list[RouteDifference] = []
    replayed = 0
    for ((said, count),) in gather_named(own, run.mesh.world, device=run.device):
        differences += [RouteDifference(*found) for found in json.loads(said)]
        replayed += int(count)
    return differences, replayed


def _forms(routes: Routes) -> list[list[object]]:
    return [[layer, list(table), *_largest(table)] for layer, table in sorted(routes.tables.items())]


def _largest(table: dict[int, Tensor]) -> tuple[int, int]:
    return max(len(rows) for rows in table.values()), next(iter(table.values())).shape[-1]
