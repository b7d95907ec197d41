"""The state that a rank would carry over if its generation ended now: that after the newest step that counts.

Where all replicas take every step together, that is the newest step whose optimizer is done, in the memory of the run
itself: a step that fails before its update has changed nothing but buffers, which are taken back; one that fails within
it has left no state. Where replicas take steps of their own, only what they have agreed on counts: the state at the
last agreement, of which the rank keeps a copy.

A parameter server has a part that nobody else has. Where servers do nothing else, the loss of a worker leaves all of
these parts: those of the last agreement, of which a server keeps a copy, where all updates are of one
step, and else as they are. Where workers serve, all go on from the newest checkpoint, and so they do without a server.

Every rank that works or serves holds what all have alike (progress, persistent buffers), a server its parts of weights
and optimizer state as well. When a rank is lost, survivors tell each other which parts are left. If these make the
whole, as they do where no server was lost, each server sends its own, and every rank keeps what it needs in its new
role; otherwise all go back to the newest checkpoint.

Workers are at different steps when one is lost. The next generation goes on where the one furthest ahead was: what
others had not sent by then is left out, as a gradient that comes too late is.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shoal.assembly.run import Run
from shoal.comm.collective import Collective
from shoal.elastic.state_copy import (
    Entry,
    HeldState,
    Index,
    filled,
    held_state,
    load_state,
    share_index,
    share_part,
    sources_of,
)
from shoal.engine.loop import Job, steps
from shoal.engine.state import MODEL, OPTIMIZER, TrainState, held_pieces
from shoal.gradients.residuals import is_own
from shoal.models.batch_norm import StepStatistics
from shoal.state import Target, parts_of
from shoal.topology.holding import Box, intersection

Parts = Mapping[str, Sequence[Target]]


def beside_served(run: Run) -> HeldState:
    """What all ranks have alike, without anything that servers hold."""
    held = held_state(run.state)
    names = {f"{MODEL}{name}" for name in run.generation.parts.split.shapes}
    rest = {n: parts for n, parts in held.tensors.items() if n not in names and not n.startswith(OPTIMIZER)}
    return replace(held, tensors=rest, ahead=0)


def served_parts(run: Run) -> Parts:
    """What this rank serves, in the memory that it has now: weights and optimizer state; nothing of a worker's."""
    found: dict[str, list[Target]] = defaultdict(list)
    for name, tensor, shape, box in held_pieces(run.generation.agreement.served or ()):
        found[f"{MODEL}{name}"].append(Target(tensor, tuple(shape), box.offset))
    slots = {name: parts for name, parts in parts_of(run.state.optimizer.tensors()).items() if parts}
    return {**found, **slots}


def own_parts(held: HeldState) -> Parts:
    """What is this rank's alone: what it has not pushed yet of its gradients."""
    return {name: parts for name, parts in held.tensors.items() if is_own(name)}


def with_parts(held: HeldState, parts: Parts) -> HeldState:
    """Both together."""
    return replace(held, tensors={**held.tensors, **parts})


def gather_served(state: TrainState, held: HeldState | None, group: Collective, device: torch.device) -> int | None:
    """Makes `state` what survivors hold together: of a rank that passes None nothing. All ranks of `group` call it. A
    rank keeps what is its alone.

    How many steps that is ahead of the progress in `state`; None, with `state` as it was, where a part is missing.
    """
    told = torch.zeros(group.size, 2, dtype=torch.int64, device=device)
    if held is not None:
        told[group.rank] = torch.tensor([1, held.ahead or 0])
    group.all_reduce(told).wait()
    sources = [rank for rank, (holds, _) in enumerate(told.tolist()) if holds]
    indices = {root: share_index(held, group, root=root, device=device) for root in sources}
    entries = [entry for index in indices.values() for entry in index.entries]
    if not _make_the_whole(entries, {name for name in state.model.tensors() if name.startswith(MODEL)}):
        return None
    state.load_json(json.loads(indices[sources[0]].facts))
    own = {} if held is None else own_parts(held)
    dtypes = {name: parts[0].tensor.dtype for name, parts in own.items()}
    targets = parts_of(state.targets({entry.name: entry.of_dtype for entry in entries} | dtypes))
    _fill(targets, held, indices, group, device)
    with torch.no_grad():
        for name, parts in own.items():
            for target in targets[name]:
                filled(target, parts)
    state.pack()
    state.gather()
    state.restore_extra()
    return int(told[:, 1].max())


def _make_the_whole(entries: Iterable[Entry], names: set[str]) -> bool:
    """Whether the parts of every tensor, and of all of `names`, are there."""
    boxes: dict[str, set[Box]] = defaultdict(set)
    numbers: dict[str, int] = {}
    for entry in entries:
        boxes[entry.name].add(entry.box)
        numbers[entry.name] = math.prod(entry.global_shape)
    return names <= boxes.keys() and all(sum(b.numel for b in own) == numbers[name] for name, own in boxes.items())


@torch.no_grad()
def _fill(
    targets: Parts, held: HeldState | None, indices: Mapping[int, Index], group: Collective, device: torch.device
) -> None:
    """Each source sends its parts in turn; what several have is sent once."""
    seen: set[tuple[str, Box]] = set()
    for root, index in indices.items():
        own = sources_of(held if root == group.rank else None)
        for entry in index.entries:
            source = next(own, None)
            if (entry.name, entry.box) in seen:
                continue
            seen.add((entry.name, entry.box))
            sent = share_part(entry, source, group, root=root, device=device)
            for target in targets.get(entry.name, ()):
                box = intersection(target.box, sent.box)
                if box is not None:
                    here = sent.tensor[box.relative_to(sent.offset).slices]
                    target.tensor[box.relative_to(target.offset).slices].copy_(here)


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
