"""A model of a run, ready to be traced in any size of microbatch and under any split over tensor ranks.

Traces are made when they are asked for, and kept. The model is built on the meta device, without storage; a builder
that does not work there, since it looks at numbers, is run with storage that is given back at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.cost.plan import Plan
from shoal.errors import LayoutError, ShoalError, UserCodeError
from shoal.memory.recompute import RecomputeKind, blocks_of, recompute
from shoal.models.roles import DeclaresParts, DeclaresRoles, roles_of
from shoal.parallel.pipeline.stages import balanced_cut, estimated_costs
from shoal.parallel.tensor.plan import split_tensor
from shoal.parallel.tensor.vocabulary import VocabularySplit
from shoal.planner.trace.operator import TracedGroup
from shoal.planner.trace.recorder import Units, units_of
from shoal.planner.trace.rehearsal import Unlike
from shoal.planner.trace.trace import Trace, traced
from shoal.schedules.build import fixed_stages_of
from shoal.schedules.table import looped, v_shaped

Held = frozenset[int | None]


# Which units a pipeline rank holds: the chain is cut as a run cuts it, by the numbers of its matrices.
#
# What lies outside of units (the loss, masks) is the last stage's. Loops lay stage s on rank s mod p, V-shaped
# schedules turn round at the last rank.


@dataclass(frozen=True)
class Stages:
    """The units of every pipeline rank."""

    held: tuple[Held, ...]

    @classmethod
    def of(cls, placement: Sequence[int], costs: Sequence[float]) -> Stages:
        """`placement`, the rank of each stage; `costs` of the chain's parts. Raises `LayoutError` for more stages than
        parts.
        """
        ranks = max(placement) + 1
        if ranks == 1:
            return cls((frozenset({None, *range(len(costs))}),))
        held: list[set[int | None]] = [set() for _ in range(ranks)]
        for rank, parts in zip(placement, balanced_cut(costs, len(placement)), strict=True):
            held[rank].update(parts)
        held[placement[-1]].add(None)
        return cls(tuple(frozenset(units) for units in held))


def placement_of(plan: Plan) -> tuple[int, ...]:
    """On which pipeline rank each stage is."""
    ranks = plan.layout.pipeline
    return v_shaped(ranks) if fixed_stages_of(plan.schedule) == 2 else looped(ranks, plan.virtual_stages)


# A traced model and the step that trains it: what a search of layouts asks of them.


@dataclass(frozen=True)
class Step:
    """The loss of a microbatch, a scalar, and the tensors that go into it."""

    loss: Callable[[], Tensor]
    inputs: tuple[Tensor, ...]


class Steps(Protocol):
    """What a run does with a model, its loss and its data; called where tensors have no storage."""

    def __call__(
        self,
        model: nn.Module,
        samples: int,
        *,
        vocabulary: VocabularySplit | None,
        group: TracedGroup,
        loss_chunks: int = 1,
    ) -> Step:
        """A microbatch of `samples` samples; `vocabulary` says which logits this rank of `group` has, None: all;
        `loss_chunks`, of how many parts of the tokens they are there one after the other."""
        ...


@dataclass(frozen=True)
class TracedSplit:
    """What a trace depends on."""

    samples: int
    tensor: int = 1
    sequence_parallel: bool = False
    recompute: RecomputeKind = "none"
    loss_chunks: int = 1


@dataclass(frozen=True)
class Subject:
    """One model and its steps. `of` gives the traces; `each`: of every block, those that are like others, too."""

    model: nn.Module
    steps: Steps
    mode: FakeTensorMode
    units: Units
    each: bool = False
    _traces: dict[TracedSplit, Trace | ShoalError] = field(default_factory=dict, compare=False)
    _refusals: dict[int, str | None] = field(default_factory=dict, compare=False)

    @classmethod
    def built(cls, build: Callable[[], nn.Module], steps: Steps, *, dtype: torch.dtype) -> Subject:
        """From a function that builds the whole model, whose floating parameters are then of `dtype`."""
        mode, model = FakeTensorMode(allow_non_fake_inputs=True), without_storage(build)
        with mode:
            _faked(model, dtype)
        return cls(model, steps, mode, units_of(model))

    def of(self, split: TracedSplit) -> Trace:
        """One microbatch of one rank. Raises `UserCodeError`, and `LayoutError` for what does not divide."""
        if split not in self._traces:
            self._traces[split] = self._traced_or_not(split, each=self.each)
        found = self._traces[split]
        if isinstance(found, ShoalError):
            raise found
        return found

    @property
    def has_blocks(self) -> bool:
        """Is there anything that a backward could compute again?"""
        return bool(blocks_of(self.model))

    @property
    def has_roles(self) -> bool:
        """Does the model say how it is split over tensor ranks?"""
        return isinstance(self.model, DeclaresRoles)

    @cached_property
    def costs(self) -> list[float]:
        """What each unit weighs where a chain is cut into stages."""
        if not isinstance(self.model, DeclaresParts):
            return [1.0] * len(self.units.names)
        return estimated_costs(self.model, list(self.model.parts()))

    @property
    def slices_sequences(self) -> bool:
        """Can the stream between split layers be split along the sequence? It begins at an embedding."""
        return any(role.kind == "embedding" for role in roles_of(self.model).values())

    def refusal(self, tensor: int) -> str | None:
        """Why the model cannot be split over `tensor` ranks; None where it can."""
        if tensor not in self._refusals:
            self._refusals[tensor] = self._tried(tensor)
        return self._refusals[tensor]

    @property
    def failures(self) -> dict[int, str]:
        """Why the model could not be traced once it was split, by the number of tensor ranks."""
        found = {split.tensor: error for split, error in self._traces.items() if isinstance(error, UserCodeError)}
        return {tensor: str(found[tensor]) for tensor in sorted(found)}

    def _tried(self, tensor: int) -> str | None:
        try:
            self.of(TracedSplit(1, tensor=tensor, sequence_parallel=tensor > 1 and self.slices_sequences))
        except (LayoutError, UserCodeError) as error:
            return str(error)
        return None

    def _traced_or_not(self, split: TracedSplit, *, each: bool) -> Trace | ShoalError:
        """Or why there is none, which takes as long to find out."""
        try:
            return self._traced(split, each=each)
        except Unlike:
            return self._traced_or_not(split, each=True)
        except ShoalError as why:
            return why

    def _traced(self, split: TracedSplit, *, each: bool) -> Trace:
        group = TracedGroup(split.tensor)
        with self.mode:
            model = _copied(self.model)
            plan = split_tensor(model, group, sequence_parallel=split.sequence_parallel)
            recompute(model, split.recompute)
            step = self.steps(
                model, split.samples, vocabulary=plan.vocabulary, group=group, loss_chunks=split.loss_chunks
            )
        return traced(model, step.loss, units=self.units, mode=self.mode, group=group, apart=step.inputs, each=each)


def without_storage(build: Callable[[], nn.Module]) -> nn.Module:
    """The meta device has no storage; a builder that it cannot serve is run again on the CPU."""
    try:
        with torch.device("meta"):
            return build()
    except Exception:  # whatever is wrong with the builder itself is raised again
        return build()


def _faked(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`model` with fake tensors on the CPU in the place of its own, what is floating in `dtype`; ties stay ties."""
    made: dict[int, Any] = {}

    def fake(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            wanted = dtype if tensor.is_floating_point() else tensor.dtype
            empty = torch.empty(tensor.shape, dtype=wanted, device="cpu")
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        return made[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers, module.__dict__):
            for name, tensor in list(held.items()):
                if isinstance(tensor, Tensor):
                    held[name] = fake(tensor)
    return model


def _copied(model: nn.Module) -> nn.Module:
    """A model of its own to split, with parameters of its own."""
    memo: dict[int, Tensor] = {id(p): nn.Parameter(torch.empty_like(p), p.requires_grad) for p in model.parameters()}
    for module in model.modules():
        plain = (*module._buffers.values(), *vars(module).values())
        memo |= {id(tensor): torch.empty_like(tensor) for tensor in plain if isinstance(tensor, Tensor)}
    return copy.deepcopy(model, memo)


@dataclass(frozen=True)
class TracedSizes:
    """What of a traced model limits its layouts."""

    subject: Subject

    @property
    def layers(self) -> int:
        """Blocks, or 1 where the model shows none."""
        return max(1, len(self.subject.units.blocks))

    @property
    def experts(self) -> int:
        """A user's experts are not told apart from other layers."""
        return 0

    def tensor_fits(self, ranks: int) -> bool:
        """Can the model be split over so many tensor ranks? It is tried."""
        return ranks == 1 or self.subject.refusal(ranks) is None


@dataclass(frozen=True, kw_only=True)
class TracedJob:
    """`sequence` are the positions of a sample that are weighed: tokens, or 1."""

    subject: Subject
    global_samples: int
    sequence: int

    @property
    def model(self) -> TracedSizes:
        """What limits layouts."""
        return TracedSizes(self.subject)

    @property
    def tokens(self) -> int:
        """Positions of one step."""
        return self.global_samples * self.sequence
