"""The state that a rank would carry over if its generation ended now: that after the newest step that counts.

Where all replicas take every step together, that is the newest step whose optimizer is done, in the memory of the run
itself: a step that fails before its update has changed nothing but buffers, which are taken back; one that fails within
it has left no state. Where replicas take steps of their own, only what they have agreed on counts: the state at the
last agreement, of which the rank keeps a copy.

A parameter server has a part that nobody else has. Where servers do nothing else, the loss of a worker leaves all of
these parts (`served_state`): those of the last agreement, of which a server keeps a copy, where all updates are of one
step, and else as they are. Where workers serve, all go on from the newest checkpoint, and so they do without a server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal.assembly.run import Run
from shoal.elastic.served_state import beside_served, own_parts, served_parts, with_parts
from shoal.elastic.state_copy import HeldState, held_state, load_state
from shoal.engine.loop import Job, steps
from shoal.models.step_batch_norm import StepStatistics


class CommittedState:
    """Which run has the state, and whether a step is changing it. `held` is the state of the generation before, until
    a run has taken it over.
    """

    def __init__(self, held: HeldState | None) -> None:
        self.held: HeldState | None = held
        self._run: Run | None = None
        self._in_step = self._changing = False
        self._step = 0

    def take_over(self, run: Run, held: HeldState | None) -> None:
        """`run` has the state from now on; `held`, where there is one, is loaded into it first."""
        if held is not None:
            load_state(run.state, held)
        self._run, self.held = run, None
        self.commit()
        run.state.optimizer.optimizer.register_step_pre_hook(self._change)

    def train(self, job: Job, *, before_step: Callable[[], None]) -> None:
        """Takes the steps of the generation, each after `before_step`. Raises what this and `engine.loop.steps` do."""
        for pending in steps(job):
            before_step()
            self._in_step, self._changing = True, False
            pending.result = pending.taken_by(job.step)
            self._in_step = False

    def commit(self) -> None:
        """The steps up to now count."""
        assert self._run is not None
        run, agreement = self._run, self._run.generation.agreement
        self._step = run.state.progress.step
        if agreement.carried == "agreed":
            self.held = with_parts(beside_served(run), served_parts(run)).copied()
        elif agreement.carried == "newest":
            self.held = beside_served(run).copied()
        elif not run.generation.sync.keeps_replicas_equal and agreement.served is None:
            self.held = held_state(run.state).copied()

    def carried_over(self) -> HeldState | None:
        """The newest state that counts; None where there is none, or a step has begun to change it."""
        run = self._run
        if run is not None and self.held is not None and run.generation.agreement.carried == "newest":
            return self._served(run, self.held)
        if run is None or not run.generation.sync.keeps_replicas_equal:
            return self.held
        if run.state.progress.step != self._step or (self._in_step and self._changing):
            return None
        if self._in_step:
            _take_back_buffers(run)
        return held_state(run.state)

    def _served(self, run: Run, beside: HeldState) -> HeldState:
        """The parts as they are, between two updates, and what this rank has not pushed; `beside`: what all ranks have
        alike.
        """
        agreement = run.generation.agreement
        agreed = agreement.equal and run.state.progress.step == self._step
        ahead = agreement.stand_still()
        newest = {**served_parts(run), **own_parts(held_state(run.state))}
        return replace(with_parts(beside, newest), ahead=0 if agreed else ahead)

    def _change(self, *_: Any) -> None:
        self._changing = True


def _take_back_buffers(run: Run) -> None:
    """What the forward of an unfinished step has changed beside the parameters."""
    run.step.compute.buffers.finish(committed=False)
    for module in run.model.modules():
        if isinstance(module, StepStatistics):
            module.discard_sums()
