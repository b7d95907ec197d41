"""Runs a schedule's table on live ranks: the loop that every schedule shares.

Each rank goes through its row in order. What an action takes is received, or handed over where the stage before is on
the same rank; what it gives is sent without waiting. Gradients add up in the parameters, over microbatches, in the
order of the row. They are complete when the row is, or for one stage after the action that
`schedules.timeline.completing` names: parameters' hooks do not tell, for a split backward writes past them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.comm.messages import Messages
from shoal.errors import LayoutError
from shoal.parallel.pipeline.joints import Branches, Noted, find_branches, noting
from shoal.parallel.pipeline.packing import AS_IT_IS, Packing
from shoal.parallel.pipeline.transfers import Wire
from shoal.schedules.table import Action, ScheduleTable

# One stage's forward and backward on one microbatch, whole or split.
#
#     B   dx and dw in one go
#     I   dx only, noting what arrives where weights join the path (see `joints`)
#     W   dw only, from what was noted
#
# A stage whose input needs no gradient, such as the first, has no path: its I is the whole backward and its W nothing.


Weights = Callable[[int], Sequence[Tensor]]
"""The parameters of a stage."""


@dataclass
class Pass:
    """What is kept between a forward and its backward: the input (a leaf), and the output or the loss."""

    x: Tensor | None
    root: Tensor
    branches: list[Branches] = field(default_factory=list)
    noted: Noted = field(default_factory=dict)

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Adds to the parameters' gradients; gives that of the input, None where it needs none."""
        if self.root.requires_grad:
            torch.autograd.backward(self.root, gradient)
        self.root = self.root.detach()
        if self.x is None or not self.x.requires_grad:
            return None
        arrived, self.x.grad = self.x.grad, None
        return torch.zeros_like(self.x) if arrived is None else arrived

    def backward_input(self, gradient: Tensor | None, weights: Sequence[Tensor]) -> Tensor | None:
        """The gradient of the input. Those of `weights`, the stage's, are added by `backward_weight`."""
        if self.x is None or not self.x.requires_grad or not self.root.requires_grad:
            return self.backward(gradient)
        branches = find_branches(self.root, self.x, weights)
        if branches is None:
            return self.backward(gradient)
        self.branches = branches
        hooks = noting(branches, self.noted)
        try:
            (result,) = torch.autograd.grad(self.root, self.x, gradient, retain_graph=True, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        self.root = self.root.detach()
        return torch.zeros_like(self.x) if result is None else result

    def backward_weight(self) -> None:
        """Adds what `backward_input` left to the parameters' gradients."""
        for branch in self.branches:
            for weight, gradient in branch.gradients(self.noted):
                if weight.grad is None:
                    weight.grad = gradient.clone()  # it may be another weight's too, or the input's, or expanded
                else:
                    weight.grad.add_(gradient)
        self.branches, self.noted = [], {}


# Seconds that a rank's device computes, to be set against the seconds of the whole schedule.
#
# A GPU is given work and asked for nothing: its seconds lie between events on its stream, which are read when somebody
# asks. A host that waited for them at the end of a pass would launch the update late.


Seconds = Callable[[], tuple[float, float]]
"""(seconds of computation, seconds in all)."""


class Stopwatch(Protocol):
    """Runs from its making."""

    def computing(self) -> AbstractContextManager[None]:
        """Around a piece of computation, whose time is added up."""
        ...

    def stop(self) -> Seconds:
        """Ends it. What it gives may wait for the device."""
        ...


class HostStopwatch:
    """For devices that are done when the call returns."""

    def __init__(self) -> None:
        self._start_s, self._busy_s = time.perf_counter(), 0.0

    @contextmanager
    def computing(self) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self._busy_s += time.perf_counter() - start_s

    def stop(self) -> Seconds:
        found = self._busy_s, time.perf_counter() - self._start_s
        return lambda: found


class StreamStopwatch:
    """For devices with streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start, self._pieces = self._event(), []

    @contextmanager
    def computing(self) -> Iterator[None]:
        start = self._event()
        yield
        self._pieces.append((start, self._event()))

    def stop(self) -> Seconds:
        end = self._event()

        def read() -> tuple[float, float]:
            end.synchronize()
            return sum(_seconds(*piece) for piece in self._pieces), _seconds(self._start, end)

        return read

    def _event(self) -> Any:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def stopwatch(device: torch.device) -> Stopwatch:
    """The one that tells the truth on `device`."""
    return HostStopwatch() if device.type == "cpu" else StreamStopwatch(device)


def _seconds(start: Any, end: Any) -> float:
    return start.elapsed_time(end) / 1000


LOOKAHEAD = 2
"""Actions whose receives are posted while one computes: one hides a transfer as long as a computation, two ride out a
short computation between long ones; more would only hold buffers."""

StageForward = Callable[[int, Tensor | None, Any], Tensor]
"""(stage, activation or None for the first, context of the microbatch) -> activation for the next stage."""
Loss = Callable[[Tensor, int], Tensor]
"""(output of the last stage, microbatch) -> scalar, already divided by what the step's loss is divided by."""


@dataclass(frozen=True)
class PipelineRun:
    """One pass through a table, as one rank saw it.

    `losses` are those of the microbatches in their order, detached; none on ranks without the last stage. `idle_s` is
    the rest of the pass beside `busy_s` of computation: the bubble and what waiting for the wire adds to it.
    """

    losses: tuple[Tensor, ...]
    seconds: Seconds

    @property
    def loss(self) -> Tensor | None:
        """Sum of `losses`; None on ranks without the last stage."""
        return torch.stack(self.losses).sum() if self.losses else None

    @property
    def busy_s(self) -> float:
        return self.seconds()[0]

    @property
    def idle_s(self) -> float:
        busy_s, all_s = self.seconds()
        return all_s - busy_s

    @property
    def idle_share(self) -> float:
        busy_s, all_s = self.seconds()
        return 1 - busy_s / all_s


def _nothing(action: Action) -> AbstractContextManager[Any]:
    return nullcontext()


def _no_more(action: Action) -> None:
    """After an action, by default."""


@dataclass(frozen=True)
class Hooks:
    """What surrounds the computation of an action.

    `around` sets what a microbatch carries outside of its context, such as dropout's sample keys, for its forward and
    again for its backward, in which layers may be recomputed. `after` comes when the action's results are on their way:
    the place to start a stage's gradient reduction.
    """

    around: Callable[[Action], AbstractContextManager[Any]] = _nothing
    after: Callable[[Action], None] = _no_more


@dataclass(frozen=True)
class Computation:
    """What a rank computes: the `forward` of its stages, the `loss` behind the last one, and each stage's `weights`.

    Without `splits` an I is the whole backward and its W nothing: for stages that compute whole layers again in the
    backward, which a split one would do once for the activations and once more for each weight.
    """

    forward: StageForward
    loss: Loss
    weights: Weights
    splits: bool = True


def run_pipeline(
    table: ScheduleTable,
    group: Collective,
    computation: Computation,
    contexts: Sequence[Any],
    *,
    device: torch.device,
    messages: Messages | None = None,
    hooks: Hooks = Hooks(),
    likenesses: Sequence[int] | None = None,
    packing: Packing = AS_IT_IS,
) -> PipelineRun:
    """Takes `len(contexts)` microbatches through all stages, and back where the table has a backward.

    `group` are the ranks of the pipeline, stage order; `messages` go between them (None: over the group).
    Parameters' `.grad` get the sum over the microbatches. All ranks call it with the same table. `likenesses` has a
    number for each microbatch: the same, the first one's index, for those whose activations have one form. None: all
    have one.

    `packing`: what activations and gradients become between ranks.

    Raises:
        LayoutError: the table is for other numbers of ranks or microbatches.
        UserCodeError: a stage gave what cannot travel, or different forms for microbatches that are alike.
        CollectiveError: a rank is dead, stopped or late.
    """
    _check_sizes(table, group, contexts)
    run = _Run(
        table, computation, contexts, hooks,
        wire=Wire(
            table, messages or group, device=device, likenesses=likenesses or [0] * table.microbatches,
            packing=packing,
        ),
        clock=stopwatch(device),
    )  # fmt: skip
    row = table.rows[group.rank]
    with torch.set_grad_enabled(table.has_backward):
        for place, action in enumerate(row):
            run.wire.expect(row[place : place + 1 + LOOKAHEAD])
            run.act(action)
    run.wire.finish()
    return PipelineRun(tuple(run.losses[j] for j in sorted(run.losses)), run.clock.stop())


@dataclass
class _Run:
    """The state of a pass: what is stored between forwards and backwards, and the losses so far."""

    table: ScheduleTable
    computation: Computation
    contexts: Sequence[Any]
    hooks: Hooks
    wire: Wire
    clock: Stopwatch
    stored: dict[tuple[int, int], Pass] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)

    def act(self, action: Action) -> None:
        {"F": self._forward, "B": self._backward, "I": self._backward_input, "W": self._backward_weight}[action.kind](
            action
        )
        self.hooks.after(action)

    def _forward(self, action: Action) -> None:
        x = self.wire.take(action)
        last = action.stage == self.table.last_stage
        with self.hooks.around(action), self.clock.computing():
            output = self.computation.forward(action.stage, x, self.contexts[action.microbatch])
            root = self.computation.loss(output, action.microbatch) if last else output
        if last:
            self.losses[action.microbatch] = root.detach()
        else:
            self.wire.give_activation(action, output)
        if self.table.has_backward:
            self.stored[action[1:]] = Pass(x, root)

    def _backward(self, action: Action) -> None:
        one = self.stored.pop(action[1:])
        gradient = self._gradient(action, one)
        with self.hooks.around(action), self.clock.computing():
            result = one.backward(gradient)
        self._give(action, result)

    def _backward_input(self, action: Action) -> None:
        one = self.stored[action[1:]]
        gradient = self._gradient(action, one)
        with self.hooks.around(action), self.clock.computing():
            if self.computation.splits:
                result = one.backward_input(gradient, self.computation.weights(action.stage))
            else:
                result = one.backward(gradient)
        self._give(action, result)

    def _backward_weight(self, action: Action) -> None:
        one = self.stored.pop(action[1:])
        with self.hooks.around(action), self.clock.computing():
            one.backward_weight()

    def _gradient(self, action: Action, one: Pass) -> Tensor | None:
        return self.wire.take(action) if one.root.requires_grad else None

    def _give(self, action: Action, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.wire.give_gradient(action, gradient)


def _check_sizes(table: ScheduleTable, group: Collective, contexts: Sequence[Any]) -> None:
    if table.ranks != group.size:
        raise LayoutError(
            f"the table of {table.name} is for {table.ranks} ranks, but the pipeline has {group.size}; "
            f"build it with ranks={group.size}"
        )
    if table.microbatches != len(contexts):
        raise LayoutError(
            f"the table of {table.name} is for {table.microbatches} microbatches, but {len(contexts)} are given; "
            f"build it with microbatches={len(contexts)}"
        )
