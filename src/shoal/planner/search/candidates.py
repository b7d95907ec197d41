"""Every legal plan of a workload on a cluster: layouts x microbatch x schedule x ZeRO x recomputation.

Legal means that every rank gets whole heads, whole microbatches and at least one layer:

- tensor divides heads, feed-forward width and (or is a multiple of) key-value heads, within two nodes
- pipeline: equal stages, but for the last, which also holds the head; microbatches divide by p where stages interleave
- context: at least `FEWEST_TOKENS` of a sample on each rank, in an even number of pieces
- replicate x shard divides the global batch, and the microbatch what is left of it
- ZeRO shards over `shard`: all data-parallel ranks, or those of one node with replicas across (hybrid, ZeRO-3 only)
- sequence parallelism goes with tensor parallelism: same bytes on the wire, less memory; GPipe is left out: 1F1B takes
  its time and less memory
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import gcd
from typing import Protocol

from shoal.cost.plan import Plan, Zero
from shoal.cost.transformer import Recompute
from shoal.planner.predict.workload import Abilities
from shoal.schedules.build import fixed_stages_of
from shoal.schedules.table import Schedule
from shoal.topology.cluster import Cluster
from shoal.topology.layout import Layout

FEWEST_TOKENS = 256
MOST_MICROBATCH = 64


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What a search may use; a size fixes an axis. The default is everything.

    `microbatches` and `virtual_stages` bind pipelines alone. Not every stack can take the loss of a part of the tokens
    at a time, so that is asked for.
    """

    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    shard: int | None = None
    replicate: int | None = None
    expert: int | None = None
    microbatch: int | None = None
    microbatches: int | None = None
    virtual_stages: int | None = None
    zero: tuple[Zero, ...] = (0, 1, 2, 3)
    recompute: tuple[Recompute, ...] = ("none", "selective", "operators", "full")
    loss_chunks: tuple[int, ...] = (1,)
    schedules: tuple[Schedule, ...] = (
        "1F1B",
        "ZB-H1",
        "ZB-H2",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    )
    sequence_parallel: bool = True
    axes: tuple[str, ...] = field(default=("replicate", "shard", "pipeline", "context", "tensor", "expert"))

    def within(self, abilities: Abilities) -> Allowed:
        """What of it a model can do."""
        return replace(
            self,
            axes=tuple(axis for axis in self.axes if axis in abilities.axes),
            recompute=tuple(kind for kind in self.recompute if kind in abilities.recompute),
            sequence_parallel=self.sequence_parallel and abilities.sequence_parallel,
        )


class Splits(Protocol):
    """What of a model limits its layouts."""

    @property
    def layers(self) -> int: ...

    @property
    def experts(self) -> int: ...

    def tensor_fits(self, ranks: int) -> bool: ...


class PlannedJob(Protocol):
    """What of a workload limits its plans."""

    @property
    def model(self) -> Splits: ...

    @property
    def global_samples(self) -> int: ...

    @property
    def sequence(self) -> int: ...


def candidates(workload: PlannedJob, cluster: Cluster, allowed: Allowed) -> Iterator[Plan]:
    """All legal plans that use every device of the cluster; neighbours share their layers' costs."""
    for layout in layouts(workload, cluster, allowed):
        ranks = layout.replicate * layout.shard
        for microbatch in _divisors(workload.global_samples // ranks):
            if microbatch > MOST_MICROBATCH or allowed.microbatch not in (None, microbatch):
                continue
            yield from _filled(workload, layout, microbatch, allowed)


def layouts(workload: PlannedJob, cluster: Cluster, allowed: Allowed) -> Iterator[Layout]:
    """The legal layouts, each once."""
    world, model = cluster.devices, workload.model
    for tensor in _sizes("tensor", world, allowed):
        if tensor > 2 * cluster.machine.devices or not model.tensor_fits(tensor):
            continue
        for context in _sizes("context", world // tensor, allowed):
            if context > 1 and workload.sequence % (2 * context):
                continue
            if context > 1 and workload.sequence // context < FEWEST_TOKENS:
                continue
            for pipeline in _sizes("pipeline", world // (tensor * context), allowed):
                if _even(model.layers, pipeline):
                    inside = tensor * context * pipeline
                    yield from _data(workload, cluster, allowed, tensor, context, pipeline, world // inside)


def _data(
    workload: PlannedJob, cluster: Cluster, allowed: Allowed, tensor: int, context: int, pipeline: int, ranks: int
) -> Iterator[Layout]:
    """How `ranks` data-parallel ranks are split into replicas and shards, and how experts lie on them."""
    if workload.global_samples % ranks:
        return
    near = gcd(ranks, max(1, cluster.machine.devices // (tensor * context)))
    asked = {size for size in (allowed.shard, ranks // (allowed.replicate or ranks)) if size and ranks % size == 0}
    for shard in sorted({1, near, ranks} | asked):
        if (allowed.shard not in (None, shard)) or (allowed.replicate not in (None, ranks // shard)):
            continue
        if ("shard" not in allowed.axes and shard > 1) or ("replicate" not in allowed.axes and shard < ranks):
            continue
        for expert in _experts(workload.model, shard * context * tensor, allowed):
            yield Layout(
                replicate=ranks // shard, shard=shard, pipeline=pipeline, context=context, tensor=tensor, expert=expert
            )


def _filled(workload: PlannedJob, layout: Layout, microbatch: int, allowed: Allowed) -> Iterator[Plan]:
    microbatches = workload.global_samples // (layout.replicate * layout.shard * microbatch)
    if layout.pipeline > 1 and allowed.microbatches not in (None, microbatches):
        return
    for schedule, virtual in _schedules(workload.model.layers, layout.pipeline, microbatches, allowed):
        for zero in allowed.zero:
            if not _zero_fits(layout, zero):
                continue
            for recompute, chunks in product(allowed.recompute, allowed.loss_chunks):
                yield Plan(
                    layout=layout,
                    microbatch=microbatch,
                    microbatches=microbatches,
                    schedule=schedule,
                    virtual_stages=virtual,
                    zero=zero,
                    recompute=recompute,
                    loss_chunks=chunks,
                    sequence_parallel=allowed.sequence_parallel and layout.tensor > 1,
                )


def _zero_fits(layout: Layout, zero: Zero) -> bool:
    """ZeRO needs ranks to shard over; without it, `shard` ranks would only be replicas under another name."""
    if zero == 0:
        return layout.shard == 1
    if layout.shard * layout.context == 1:
        return False
    return layout.replicate == 1 or zero == 3


def _schedules(layers: int, pipeline: int, microbatches: int, allowed: Allowed) -> Iterator[tuple[Schedule, int]]:
    if pipeline == 1:
        yield "1F1B", 1
        return
    for schedule, virtual in _staged(layers, pipeline, microbatches, allowed):
        if allowed.virtual_stages in (None, virtual):
            yield schedule, virtual


def _staged(layers: int, pipeline: int, microbatches: int, allowed: Allowed) -> Iterator[tuple[Schedule, int]]:
    for schedule in allowed.schedules:
        fixed = fixed_stages_of(schedule)
        if fixed == 1:
            yield schedule, 1
        elif fixed == 2:
            if _even(layers, 2 * pipeline) and microbatches >= 2 * pipeline:
                yield schedule, 2
        elif microbatches % pipeline == 0:
            for virtual in range(2, layers // pipeline + 1):
                if _even(layers, virtual * pipeline):
                    yield schedule, virtual


def _sizes(axis: str, ranks: int, allowed: Allowed) -> list[int]:
    wanted = getattr(allowed, axis)
    if axis not in allowed.axes:
        return [1] if wanted in (None, 1) else []
    return [size for size in _divisors(ranks) if wanted in (None, size)]


def _even(layers: int, stages: int) -> bool:
    """All stages but the last hold the same layers; the last may hold fewer, or the head alone."""
    return stages <= layers + 1 and -(-layers // stages) * (stages - 1) <= layers


def _experts(model: Splits, ranks: int, allowed: Allowed) -> list[int]:
    if not model.experts:
        return [1] if allowed.expert in (None, 1) else []
    return [size for size in _divisors(gcd(model.experts, ranks)) if allowed.expert in (None, size)]


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
