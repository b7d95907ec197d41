"""What a budget of memory may choose from: mixtures of keys that free memory, and what they change.

A mixture takes one value for each of some keys. What it may change decides when it is tried:

    nothing     recomputation, and where state and activations live: losses keep every bit; without
                `optimizer.clip_norm`, whose norm is a sum over pieces, also ZeRO stages, and parameters on the host
    rounding    the same sums in another order: smaller microbatches, the loss in chunks, and these
    moments     the optimizer's moments in 8 bits

A key that the run file sets to anything but its default stays. `shoal.planning.mixture_prices` says what a mixture
costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import msgspec

from shoal.codec.config import NoCodec
from shoal.memory.config import BudgetChange, OffloadConfig
from shoal.optim.config import in_8_bits
from shoal.optim.declared import Elementwise
from shoal.runfile.layout_rules import most_samples
from shoal.runfile.rules import refusal
from shoal.runfile.run_file import RunFile, statistics_group
from shoal.sync.config import AllReduceConfig

CHANGES: tuple[BudgetChange, ...] = ("nothing", "rounding", "moments")
"""From the least to the most."""
WORTH = 1.5
"""What keeps every bit is preferred while its step takes at most so many times that of what rounds."""
PART_SHARE, LEAST_PART, MOST_PART = 32, 64 << 10, 32 << 20
"""A part of the state is such a share of the budget, within bounds: three of them are on the device."""
BOUNDLESS = "1024 GiB"
CHUNKS = 8
"""Of the loss: logits are then less than the activations of a block."""
ELEMENT_WISE = ("adamw", "sgd")
"""Optimizers whose update of a number needs nothing of another, beside those that say so (`Elementwise`)."""
MOST_HALVINGS = 5
"""Of a microbatch; each size of it is traced."""


@dataclass(frozen=True)
class Means:
    """Keys that free memory. Of one `kind`, those of more `strength` leave less on the device."""

    kind: str
    strength: float
    change: BudgetChange
    values: Mapping[str, Any] = field(hash=False)

    @property
    def said(self) -> str:
        """As one writes it."""
        return " and ".join(f"{key} = {_written(value)}" for key, value in self.values.items())


RECOMPUTE = {
    how: Means("recompute", strength, "nothing", {"memory.recompute": how})
    for strength, how in enumerate(("selective", "operators", "full"), 1)
}


@dataclass(frozen=True)
class Mixture:
    """At most one of each kind of means. `values` are all keys that differ from the run file's own."""

    means: tuple[Means, ...]

    def recomputing(self, how: Means | None) -> Mixture:
        """The same with another way of recomputation; None: without any."""
        others = self.without("recompute")
        return others if how is None else Mixture((*others.means, how))

    def without(self, kind: str) -> Mixture:
        """The same with no means of that kind."""
        return Mixture(tuple(one for one in self.means if one.kind != kind))

    @property
    def change(self) -> BudgetChange:
        """The most that any of them changes."""
        return CHANGES[max((CHANGES.index(one.change) for one in self.means), default=0)]

    @property
    def said(self) -> str:
        """As one writes it."""
        return " and ".join(one.said for one in self.means) or "the run as it is"

    @property
    def values(self) -> dict[str, Any]:
        """Of all its keys."""
        return {key: value for one in self.means for key, value in one.values.items()}

    @cached_property
    def strengths(self) -> dict[str, float]:
        """By kind."""
        return {one.kind: one.strength for one in self.means}

    def frees_as_much_as(self, other: Mixture) -> bool:
        """Whether it leaves no more on the device, whatever the model."""
        return all(self.strengths.get(kind, 0) >= strength for kind, strength in other.strengths.items())

    def apart_from(self, other: Mixture) -> int:
        """Kinds in which the two differ."""
        kinds = self.strengths.keys() | other.strengths.keys()
        return sum(self.strengths.get(kind, 0) != other.strengths.get(kind, 0) for kind in kinds)


AS_IT_IS = Mixture(())


def choices(run_file: RunFile) -> list[list[Means]]:
    """The means of each kind that this run can use, one by one; what the run file says itself has none."""
    kinds = (_state, _recompute, _activations, _parameters, _stages, _chunks, _microbatches, _moments)
    return [own for kind in kinds if (own := [means for means in kind(run_file) if _serves(run_file, means)])]


def mixtures(run_file: RunFile, change: BudgetChange) -> Iterator[Mixture]:
    """Those that change so much, and no more, with which this run can be; the run as it is comes first."""
    for chosen in product(*([None, *own] for own in choices(run_file))):
        mixture = Mixture(tuple(means for means in chosen if means is not None))
        if mixture.change == change and possible(run_file, mixture):
            yield mixture


def by_microbatch(run_file: RunFile, change: BudgetChange) -> list[list[Mixture]]:
    """`mixtures`, in lists of those that differ in the size of microbatches alone, from the largest to the smallest."""
    found: dict[Mixture, list[Mixture]] = {}
    for one in mixtures(run_file, change):
        found.setdefault(one.without("microbatch"), []).append(one)
    return list(found.values())


def allowed_by(run_file: RunFile) -> tuple[BudgetChange, ...]:
    """What mixtures may change, from the least to the most."""
    return CHANGES[: CHANGES.index(run_file.memory.budget_may_change) + 1]


def possible(run_file: RunFile, mixture: Mixture) -> bool:
    """Whether the rules between tables allow it."""
    return _refused(run_file, mixture.values) is None


def ladder(run_file: RunFile) -> Iterator[Mixture]:
    """A few of them, each with one means more or stronger than the one before it: where none has a price."""
    chosen: dict[str, Means] = {}
    yield AS_IT_IS
    every = [means for own in choices(run_file) for means in own]
    for means in sorted(every, key=lambda means: CHANGES.index(means.change)):
        mixture = Mixture(tuple({**chosen, means.kind: means}.values()))
        if possible(run_file, mixture):
            chosen[means.kind] = means
            yield mixture


def with_values(run_file: RunFile, values: Mapping[str, Any]) -> RunFile:
    """The run file with values in the places of keys, such as `{"memory.zero": 1}`."""
    for key, value in values.items():
        run_file = _with_value(run_file, key.split("."), value)
    return run_file


def part_of(run_file: RunFile) -> dict[str, str]:
    """The size of a part of the state under the run file's budget, as values; none where the run file gives one."""
    if run_file.memory.offload.part != OffloadConfig().part:
        return {}
    part = min(MOST_PART, max(LEAST_PART, (run_file.memory.budget_bytes or MOST_PART) // PART_SHARE))
    return {"memory.offload.part": f"{part >> 10} KiB"}


def _with_value(table: Any, path: Sequence[str], value: Any) -> Any:
    head, *rest = path
    if path == ["optimizer", "kind"]:
        return msgspec.structs.replace(table, optimizer=in_8_bits(table.optimizer) or table.optimizer)
    inner = _with_value(getattr(table, head), rest, value) if rest else value
    return msgspec.structs.replace(table, **{head: inner})


def _written(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _serves(run_file: RunFile, means: Means) -> bool:
    """Whether the run can be with it; parameters on the host need the optimizer's state there."""
    needs = {"memory.offload.optimizer": "host"} if means.kind == "parameters" else {}
    return _refused(run_file, {**needs, **means.values}) is None


def _refused(run_file: RunFile, values: Mapping[str, Any]) -> str | None:
    """Why not, by the rules between tables; on CPUs a device is simulated."""
    device = {} if run_file.run.device == "cuda" else {"memory.simulate_device": BOUNDLESS}
    return refusal(with_values(run_file, {**values, **device, "memory.budget": None}))


def _recompute(run_file: RunFile) -> Iterator[Means]:
    if run_file.memory.recompute == "none":
        yield from RECOMPUTE.values()


def keeping(size_bytes: float, strength: float) -> Means:
    """Recomputation of what blocks save beyond so many bytes; how strong that is depends on the model."""
    values = {"memory.recompute": "budget", "memory.recompute_budget": f"{int(size_bytes) >> 10} KiB"}
    return Means("recompute", strength, "nothing", values)


def _state(run_file: RunFile) -> Iterator[Means]:
    if run_file.memory.offload.optimizer == "device":
        yield Means("state", 1, "nothing", {"memory.offload.optimizer": "host"})


def _activations(run_file: RunFile) -> Iterator[Means]:
    if run_file.memory.offload.activations == "device":
        yield Means("activations", 1, "nothing", {"memory.offload.activations": "host"})


def _parameters(run_file: RunFile) -> Iterator[Means]:
    """On CPUs, so far."""
    if run_file.memory.offload.parameters == "device" and run_file.run.device != "cuda":
        yield Means("parameters", 1, _of_pieces(run_file), {"memory.offload.parameters": "host"})


def _of_pieces(run_file: RunFile) -> BudgetChange:
    """What changes where an optimizer has pieces: nothing if numbers are updated alone, and no norm is taken."""
    optimizer = run_file.optimizer
    alone = isinstance(optimizer, Elementwise) or optimizer.variant in ELEMENT_WISE
    return "nothing" if alone and optimizer.clip_norm is None else "rounding"


def _stages(run_file: RunFile) -> Iterator[Means]:
    """Of ZeRO, over the replicas: where they are copies that take each step together, and send plain numbers. Sums over
    ranks have one order, whatever is summed together, in shared memory and of two.
    """
    layout, sync = run_file.layout, run_file.sync
    ranks = layout.layout(run_file.run.processes or 1).replicate
    plain = isinstance(sync, AllReduceConfig) and not sync.in_canonical_order and run_file.codec == NoCodec()
    if ranks == 1 or layout.shard > 1 or layout.replicate is not None or run_file.memory.zero or not plain:
        return
    in_order = ranks == 2 or (run_file.wire.transport in ("auto", "shm") and run_file.run.device != "cuda")
    change = _of_pieces(run_file) if in_order else "rounding"
    for stage in (1, 2, 3):
        yield Means("stage", stage, change, {"layout.shard": ranks, "memory.zero": stage})


def _microbatches(run_file: RunFile) -> Iterator[Means]:
    """A rank's share of a step in 2, 4, 8, ... parts, and the smallest: in whole groups of samples that belong
    together.
    """
    layout = run_file.layout.layout(run_file.run.processes or 1)
    if run_file.batch.micro_samples is not None or layout.pipeline > 1 or run_file.elastic is not None:
        return
    group = statistics_group(run_file.model)
    groups = most_samples(run_file, shares=layout.replicate * layout.shard) // group
    sizes = sorted({1, *(-(-groups // 2**halved) for halved in range(1, MOST_HALVINGS + 1))} - {groups}, reverse=True)
    for strength, size in enumerate(sizes, 1):
        yield Means("microbatch", strength, "rounding", {"batch.micro_samples": group * size})


def _chunks(run_file: RunFile) -> Iterator[Means]:
    if run_file.memory.loss_chunks == 1:
        yield Means("chunks", 1, "rounding", {"memory.loss_chunks": CHUNKS})


def _moments(run_file: RunFile) -> Iterator[Means]:
    if (optimizer := in_8_bits(run_file.optimizer)) is not None:
        yield Means("moments", 1, "moments", {"optimizer.kind": optimizer.variant})
