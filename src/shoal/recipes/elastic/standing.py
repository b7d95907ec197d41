"""A replica's state in one generation of an elastic run, and the steps that it takes there."""

from __future__ import annotations

from typing import Any

from shoal.engine.loop import Job, steps
from shoal.models.grouped_norm import StepStatistics
from shoal.recipes.elastic.state_copy import HeldState, held_state, load_state
from shoal.recipes.run import Run


class Standing:
    """Which run has the state, and whether a step is changing it. `held` is the state of the generation before, until
    a run has taken it over.
    """

    def __init__(self, held: HeldState | None) -> None:
        self.held: HeldState | None = held
        self._run: Run | None = None
        self._in_step = self._changing = False
        self._reported = 0

    def take_over(self, run: Run, held: HeldState | None) -> None:
        """`run` has the state from now on; `held`, where there is one, is loaded into it first."""
        if held is not None:
            load_state(run.state, held)
        self._run, self.held, self._reported = run, None, run.state.progress.step
        run.state.optimizer.optimizer.register_step_pre_hook(self._change)

    def train(self, job: Job) -> None:
        """Takes the steps of the generation. Raises what `engine.loop.steps` does."""
        for pending in steps(job):
            self._in_step, self._changing = True, False
            pending.result = job.step(pending.number, pending.microbatches, lr=pending.lr, stop=pending.stop)
            self._in_step = False

    def reported(self) -> None:
        """The coordinator is told of the newest step."""
        assert self._run is not None
        self._reported = self._run.state.progress.step

    def carried_over(self) -> HeldState | None:
        """The state between two steps, for the next generation; None where there is none, or a step has begun to
        change it.
        """
        run = self._run
        if run is None:
            return self.held
        if run.state.progress.step != self._reported or (self._in_step and self._changing):
            return None
        if self._in_step:
            _take_back_buffers(run)
        return held_state(run.state)

    def _change(self, *_: Any) -> None:
        self._changing = True


def _take_back_buffers(run: Run) -> None:
    """What the forward of an unfinished step has changed beside the parameters."""
    run.step.context.forward_backward.compute.buffers.finish(committed=False)
    for module in run.model.modules():
        if isinstance(module, StepStatistics):
            module.discard_sums()
