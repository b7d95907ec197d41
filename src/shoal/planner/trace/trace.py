"""A user's own model, forward and backward, on tensors without storage: what it computes, moves, keeps and says.

    fake parameters, fake inputs  ->  forward  ->  backward onto gradients that are already there

One microbatch, as a rank computes it. PyTorch's fake tensors (`FakeTensorMode`) have shapes, dtypes and lives, and no
numbers, so that a model of billions of parameters is traced on a laptop. What looks at numbers cannot be traced.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._pytree import tree_leaves

from shoal.codec.costs import Matrices
from shoal.errors import ShoalError, UserCodeError
from shoal.models.roles import roles_of
from shoal.planner.trace.alike import standing_in
from shoal.planner.trace.operator import BACKWARD_ATTENTION, Message, Operator, ParameterTrace, TracedGroup
from shoal.planner.trace.recorder import Alive, Filled, Recorder, Units
from shoal.planner.trace.rehearsal import Unlike

Result = TypeVar("Result")

# Why a model cannot be traced, in one sentence that names the user's own line.


LOOKS_AT_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)


def explained(work: Callable[[], Result], what: str) -> Result:
    """What `work` gives. Raises `UserCodeError` for what goes wrong in it; `what` is its subject ("the model")."""
    try:
        with _pytorch_silent():
            return work()
    except (ShoalError, Unlike):
        raise
    except LOOKS_AT_NUMBERS as error:
        raise UserCodeError(
            f"{what} cannot be traced: {_place(error)} looks at the numbers in a tensor ({error.func}), and a trace "
            "has shapes alone; compute it with torch.where or with masks, or choose the layout by hand"
        ) from None
    except UnsupportedFakeTensorException as error:
        raise UserCodeError(
            f"{what} cannot be traced: {_place(error)} needs what tensors without storage have not ({error.reason}); "
            "choose the layout by hand"
        ) from None
    except Exception as error:
        raise UserCodeError(
            f"{what} cannot be traced: {_place(error)} raised {type(error).__name__}: {_first_line(error)}; run it "
            "once on one batch of the data, or choose the layout by hand"
        ) from None


@contextmanager
def _pytorch_silent() -> Iterator[None]:
    """PyTorch logs a traceback for each operator that fake tensors are refused; what goes wrong is raised as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _place(error: Exception) -> str:
    """The innermost line that is neither this package's nor PyTorch's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _theirs(frame.filename)] or frames
    return f"{os.path.relpath(own[-1].filename)}, line {own[-1].lineno} ({own[-1].line})"


def _theirs(filename: str) -> bool:
    packages = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    return os.path.abspath(filename).startswith(packages) or filename.startswith("<")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "").strip()


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One microbatch on one rank.

    `kept_bytes`: what lives from the forward to the backward, by unit (None: outside of them); `on_the_way_bytes`: the
    most that the backward of a unit makes beside it; `peak_bytes`: the most that lived at once. Parameters, gradients
    and inputs are in none of these. `filled` are the gradients in the order in which the backward adds to them, and
    `since_bytes` the most that lived behind the last one.
    """

    units: Units
    operators: tuple[Operator, ...]
    messages: tuple[Message, ...]
    parameters: Mapping[str, ParameterTrace]
    kept_bytes: Mapping[int | None, int]
    on_the_way_bytes: Mapping[int | None, int]
    peak_bytes: int
    filled: tuple[Filled, ...]
    since_bytes: int
    boundary_bytes: Mapping[int, int]

    @property
    def held_bytes(self) -> int:
        """All that lives from the forward to the backward."""
        return sum(self.kept_bytes.values())

    @property
    def first_peak_bytes(self) -> int:
        """The peak with the gradients, where this backward makes them in the place of adding to them."""
        names, made, peak = set[str](), 0, 0
        for one in self.filled:
            peak = max(peak, one.before_bytes + made)
            made += 0 if one.name in names else one.bytes
            names.add(one.name)
        return max(peak, self.since_bytes + made)

    def lent_peak_bytes(self, buckets: Sequence[Collection[str]], *, in_flight: int) -> int:
        """The peak with lent buffers, one for each of `buckets`, which have names of parameters and leave in this
        order. A buffer is there from the first gradient that is copied into it until it was sent, behind the last term
        of all its gradients, and `in_flight` others were, too.
        """
        home = {name: number for number, bucket in enumerate(buckets) for name in bucket}
        missing = [0] * len(buckets)
        sizes, lent, sent, peak = [0] * len(buckets), set[int](), 0, 0
        for one in {one.name: one for one in self.filled}.values():
            sizes[home[one.name]] += one.bytes
        for one in self.filled:
            missing[home[one.name]] += 1
        for one in self.filled:
            peak = max(peak, one.before_bytes + sum(sizes[number] for number in lent))
            lent.add(home[one.name])
            peak = max(peak, one.with_term_bytes + sum(sizes[number] for number in lent))
            missing[home[one.name]] -= 1
            while sent < len(buckets) and missing[sent] == 0:
                sent += 1
                lent.discard(sent - 1 - in_flight)
        return max(peak, self.since_bytes + sum(sizes[number] for number in lent))

    @property
    def flops(self) -> float:
        """Arithmetic of forward and backward, nothing that is computed again, be it inside of fused attention."""
        share = {"forward": 1.0, "backward": 2 / BACKWARD_ATTENTION, "recompute": 0.0}
        products = sum(p.matmul.flops for one in self.operators if one.phase != "recompute" for p in one.products)
        return products + sum(share[one.phase] * one.attention_flops for one in self.operators)

    def matrices(self, units: frozenset[int | None]) -> Iterator[Matrices]:
        """The trained parameters of `units` with two dimensions or more, as matrices of the first and all others."""
        for one in self.parameters.values():
            if one.trained and len(one.shape) > 1 and not units.isdisjoint(one.units):
                yield Matrices(one.shape[0], prod(one.shape[1:]))

    def numbers(self, units: frozenset[int | None], *, trained: bool = False) -> int:
        """Parameters of `units`, on this rank."""
        return sum(
            one.numel
            for one in self.parameters.values()
            if not units.isdisjoint(one.units) and (one.trained or not trained)
        )


def traced(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    units: Units,
    mode: FakeTensorMode,
    group: TracedGroup,
    apart: Sequence[Tensor] = (),
    each: bool = False,
) -> Trace:
    """The trace of `loss()`, a scalar, and of its backward. `model`, and what the loss uses, is fake and of `mode`.

    `group` stands for the tensor ranks that `model` was split over; `apart` are the inputs; `each`: blocks that are
    like others are traced, too. Raises `UserCodeError` where the model looks at numbers, or raises, and `Unlike` where
    `each` is needed, for another model like this one.
    """
    alive, boundaries = Alive(), {}
    recorder = Recorder(model, units, alive)
    group.told = recorder.told
    with mode:
        alive.leave_out([*model.parameters(), *model.buffers(), *_gradients(model), *apart])
        blocks, outputs = nullcontext() if each else standing_in(model, recorder), _outputs(model, units, boundaries)
        with _uncollected(), _one_document(), blocks, recorder, recorder.watching(model), outputs:
            value = explained(loss, "the model")
            recorder.turn()
            kept = alive.keep()
            explained(lambda: torch.autograd.backward(value), "the model's backward")
    return Trace(
        units=units,
        operators=recorder.finished(),
        messages=tuple(recorder.messages),
        parameters=_parameters(model, units),
        kept_bytes=kept,
        on_the_way_bytes=dict(alive.peak_by_unit),
        peak_bytes=alive.peak_bytes,
        filled=tuple(alive.filled),
        since_bytes=alive.since_bytes,
        boundary_bytes=boundaries,
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Python's collector would look through all that the process has whenever a trace has made some hundred objects, a
    third of its time, and would decide when a storage that lies in a cycle ends."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def _one_document() -> Iterator[None]:
    """A sequence has one. transformers asks positions whether there are several, and where it cannot look at them makes
    a mask as if there were, which no run has; documents of a run bring a mask of their own.
    """
    masking = sys.modules.get("transformers.masking_utils")
    looks = getattr(masking, "find_packed_sequence_indices", None)
    if masking is None or looks is None:
        yield
        return
    setattr(masking, "find_packed_sequence_indices", lambda position_ids: None)  # noqa: B010
    try:
        yield
    finally:
        setattr(masking, "find_packed_sequence_indices", looks)  # noqa: B010


def _gradients(model: nn.Module) -> list[Tensor]:
    """Gives every trained parameter the gradient of earlier microbatches, onto which this one's is added."""
    gradients = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
            gradients.append(parameter.grad)
    return gradients


@contextmanager
def _outputs(model: nn.Module, units: Units, sizes: dict[int, int]) -> Iterator[None]:
    """Fills in the bytes that come out of each unit: what would travel to the next stage."""

    def watch(unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            sizes[unit] = sum(x.numel() * x.element_size() for x in tree_leaves(outputs) if isinstance(x, Tensor))

        return hook

    handles = [model.get_submodule(path).register_forward_hook(watch(unit)) for path, unit in units.of_module.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _parameters(model: nn.Module, units: Units) -> dict[str, ParameterTrace]:
    roles, holders = roles_of(model), {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), {})[units.holding(name)] = None
    return {
        name: ParameterTrace(p.numel(), tuple(holders[id(p)]), roles[name].kind, p.requires_grad, tuple(p.shape))
        for name, p in model.named_parameters()
    }
