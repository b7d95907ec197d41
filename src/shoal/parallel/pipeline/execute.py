"""Runs a schedule's table on live ranks: the loop that every schedule shares.

Each rank goes through its row in order. What an action takes is received, or handed over where the stage before is on
the same rank; what it gives is sent without waiting. Gradients add up in the parameters, over microbatches, in the
order of the row. They are complete when the row is, or for one stage after the action that `schedules.order.completing`
names: parameters' hooks do not tell, for a split backward writes past them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.errors import LayoutError
from shoal.parallel.pipeline.packing import AS_IT_IS, Packing
from shoal.parallel.pipeline.passes import Pass, Weights
from shoal.parallel.pipeline.stopwatch import Stopwatch, stopwatch
from shoal.parallel.pipeline.transfers import Wire
from shoal.schedules.table import Action, ScheduleTable

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
    busy_s: float
    idle_s: float

    @property
    def loss(self) -> Tensor | None:
        """Sum of `losses`; None on ranks without the last stage."""
        return torch.stack(self.losses).sum() if self.losses else None

    @property
    def idle_share(self) -> float:
        return self.idle_s / (self.busy_s + self.idle_s)


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
    back: Collective | None = None,
    hooks: Hooks = Hooks(),
    likenesses: Sequence[int] | None = None,
    packing: Packing = AS_IT_IS,
) -> PipelineRun:
    """Takes `len(contexts)` microbatches through all stages, and back where the table has a backward.

    `group` are the ranks of the pipeline, stage order; `back` is a second group of them, needed with NCCL (see `Wire`).
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
            table, group, back=back or group, device=device, likenesses=likenesses or [0] * table.microbatches,
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
    busy_s, all_s = run.clock.read()
    return PipelineRun(tuple(run.losses[j] for j in sorted(run.losses)), busy_s, all_s - busy_s)


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
