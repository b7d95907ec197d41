"""A table run on live ranks with stages that only sleep: the bubble measured, beside the one that its timeline says.

Sleeping takes no core, so a machine with fewer cores than ranks shows the schedule and not their fight for cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.parallel.pipeline.execute import Computation, PipelineRun, run_pipeline
from shoal.schedules.table import ScheduleTable
from shoal.schedules.timeline import Timeline, timeline


class _Sleeping(torch.autograd.Function):
    """The identity, whose backward takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


def rehearse(
    table: ScheduleTable, group: Collective, *, forward_s: float, backward_input_s: float, backward_weight_s: float
) -> PipelineRun:
    """Runs `table` with stages of these durations and one number of activation; all ranks start together."""
    stages = table.stages_of(group.rank)
    own = {stage: torch.zeros(1, requires_grad=True) for stage in stages}
    inputs = [torch.zeros(1, requires_grad=True) for _ in range(table.microbatches)]

    def stage(index: int, x: Tensor | None, context: Tensor) -> Tensor:
        time.sleep(forward_s)
        x = context if x is None else x
        return _slept(x, backward_input_s) + _slept(own[index], backward_weight_s)

    group.barrier().wait()
    computation = Computation(stage, lambda output, _: output[0], lambda index: [own[index]])
    return run_pipeline(table, group, computation, inputs, device=torch.device("cpu"))


def planned(table: ScheduleTable, *, forward_s: float, backward_input_s: float, backward_weight_s: float) -> Timeline:
    """What `rehearse` should show."""
    return timeline(table, forward_s=forward_s, backward_input_s=backward_input_s, backward_weight_s=backward_weight_s)


_slept: Callable[[Tensor, float], Tensor] = _Sleeping.apply  # pyright: ignore[reportAssignmentType]
