"""The ranks of a federated client that is a whole replica: one copy of the model, trained by all of them.

Rank 0 has what the client of one process has, models and updates as vectors [numel]. What trains is an ordinary run,
split as `[layout]` says:

    rank 0                              every rank
    an assignment                ->     which samples, which rate (through the store)
    model, anchor, shift         ->     its parts of them, one parameter after the other
                                        local steps: y <- y - lr (gradient + pull (y - anchor) + shift)
    what changed                 <-     its parts of it, each number from the first rank that has it

No rank but the first ever has more of a vector than its parts and one parameter. There is an update once every rank has
handed in its parts: if one is lost, the collective of the others fails, and nothing of the round is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from shoal.assembly.run import Run
from shoal.comm.board import Board
from shoal.data.batches import read_batch
from shoal.data.cursor import Interval
from shoal.data.feed import StepShare
from shoal.data.sample import Batch, padding_like
from shoal.data.sampling import SampleSubset
from shoal.engine.forward_backward import evaluate
from shoal.engine.step import TrainStep
from shoal.engine.transforms import AgreedGradient, Transform, clip_by_global_norm
from shoal.engine.updates import AtOnce
from shoal.federated.local_training import Trained
from shoal.federated.vector import VectorLayout
from shoal.gradients.gradients import global_norm, norm_of_owned
from shoal.runfile.run_file import statistics_group
from shoal.state import Owned, is_counted

LISTEN_S = 5.0
"""How long a rank listens for an assignment before it looks again: rounds may lie hours apart."""


class Assignment(msgspec.Struct, frozen=True):
    """What ranks do next. `sizes`: samples of each local step, one behind the other in `ids` (int64); without a rate
    the model is measured on them."""

    ids: bytes
    sizes: tuple[int, ...]
    lr: float | None = None
    first: int = 1
    pull: float = 0.0
    anchored: bool = False
    shifted: bool = False

    @property
    def steps(self) -> list[np.ndarray]:
        """The sample ids of each step."""
        return np.split(np.frombuffer(self.ids, dtype=np.int64), np.cumsum(self.sizes)[:-1])


@dataclass(frozen=True)
class Vectors:
    """What rank 0 brings to an assignment, each [numel]; other ranks bring nothing."""

    model: Tensor | None = None
    anchor: Tensor | None = None
    shift: Tensor | None = None


class ReplicaRanks:
    """Rank 0 calls `train` and `measured`, and at last `dismiss`; the others `follow`. See `Replica`."""

    def __init__(self, run: Run) -> None:
        self._run, self._parts, self._number = run, VectorParts(run), 0
        self._board = Board(run.process.store, timeout_s=run.run_file.wire.timeout_s).under("federated")

    def train(
        self,
        model: Tensor,
        steps: Sequence[np.ndarray],
        *,
        lr: float,
        first: int,
        pull: float = 0.0,
        shift: Tensor | None = None,
        anchor: Tensor | None = None,
    ) -> Trained:
        """See `Replica`. After a step that is not finite the whole change is not, as in one process."""
        ids, sizes = np.concatenate(steps).astype(np.int64).tobytes(), tuple(map(len, steps))
        anchored, shifted = anchor is not None, shift is not None
        assignment = Assignment(ids, sizes, lr, first, pull, anchored=anchored, shifted=shifted)
        self._tell(msgspec.msgpack.encode(assignment))
        trained = self._train(assignment, lr, Vectors(model, anchor, shift))
        assert trained is not None
        return trained

    def measured(self, model: Tensor, ids: np.ndarray) -> dict[str, float]:
        """See `Replica`."""
        assignment = Assignment(ids.astype(np.int64).tobytes(), (len(ids),))
        self._tell(msgspec.msgpack.encode(assignment))
        return self._measure(assignment, Vectors(model))

    def dismiss(self) -> None:
        """The run is over for the other ranks."""
        self._tell(b"")

    def follow(self) -> None:
        """Does what rank 0 assigns, until it dismisses this rank. Raises `CollectiveError` where a rank is lost."""
        while said := self._heard():
            assignment = msgspec.msgpack.decode(said, type=Assignment)
            if assignment.lr is None:
                self._measure(assignment, Vectors())
            else:
                self._train(assignment, assignment.lr, Vectors())

    def _tell(self, said: bytes) -> None:
        self._board.forget([str(self._number)])  # all ranks have done it
        self._number += 1
        self._board.publish(str(self._number), said)

    def _heard(self) -> bytes:
        self._number += 1
        while not (found := self._board.collect_some([str(self._number)], LISTEN_S)):
            pass
        return found[str(self._number)]

    def _measure(self, assignment: Assignment, vectors: Vectors) -> dict[str, float]:
        run = self._run
        self._begin(self._parts.spread(vectors.model))
        batches = run.one_pass(SampleSubset(run.workload.data.train, assignment.steps[0]))
        return evaluate(run.generation.forward_backward, batches, group=run.mesh.world, device=run.device)

    def _train(self, assignment: Assignment, lr: float, vectors: Vectors) -> Trained | None:
        """Rank 0's result; None on the others."""
        spread, steps = self._parts.spread, assignment.steps
        start = spread(vectors.model)
        anchor = spread(vectors.anchor) if assignment.anchored else start
        shift = spread(vectors.shift) if assignment.shifted else None
        self._begin(start)
        step = self._step(Correction(self._run, assignment.pull, anchor, shift))
        losses, finite = 0.0, True
        for number, ids in enumerate(steps, assignment.first):
            taken = step(number, self._share(ids, number), lr=lr, samples=len(ids))
            losses, finite = losses + taken.loss, finite and taken.committed
        delta = self._parts.collect([own.detach() - x for own, x in zip(self._parts.owned, start, strict=True)])
        if delta is None:
            return None
        if not finite:
            delta.fill_(torch.nan)
        return Trained(delta[None], torch.tensor([losses / len(steps)], dtype=torch.float64), [len(steps)])

    @torch.no_grad()
    def _begin(self, parts: Sequence[Tensor]) -> None:
        """The model is that of these parts, and no step has been taken."""
        if self._run.device.type != "cpu":
            torch.accelerator.set_device_index(self._run.device)  # the device is that of a thread
        for own, part in zip(self._parts.owned, parts, strict=True):
            own.copy_(part)
        self._run.generation.gradients.gather()
        for state in self._run.state.optimizer.optimizer.state.values():
            for velocity in state.values():
                velocity.zero_()

    def _step(self, correction: Correction) -> TrainStep:
        run = self._run
        if not correction.changes:
            return run.step
        clip = run.run_file.optimizer.clip_norm
        transforms: list[Transform] = [correction, *([] if clip is None else [clip_by_global_norm(clip)])]
        return run.step.by(AtOnce(run.generation.gradients, run.state.optimizer.optimizer, transforms=transforms))

    def _share(self, ids: np.ndarray, number: int) -> list[Batch]:
        """This rank's microbatches of the samples `ids` of a step."""
        run_file, (share, shares) = self._run.run_file, self._run.mesh.batch_share
        whole, samples = Interval(0, len(ids)), run_file.batch.global_samples
        micro, group = self._run.generation.microbatching.samples, statistics_group(run_file.model)
        own = StepShare(samples, share, shares, micro_samples=micro, group=group, epoch=samples)
        found = [self._read(ids, part, number * samples) for part in own.microbatches(whole)]
        if (part := own.stand_in(whole)) is not None:
            found.append(padding_like(self._read(ids, part, number * samples), len(part)))
        return found

    def _read(self, ids: np.ndarray, part: Interval, position: int) -> Batch:
        source, denominator = self._run.workload.data.train, self._run.run_file.batch.denominator
        return read_batch(
            source, ids[part.start : part.stop], position + part.positions(), denominator=denominator
        ).batch


@dataclass(frozen=True)
class Correction:
    """What a strategy adds to the gradient of each local step, before it is clipped: pull (y - anchor) + shift. Of
    `anchor` and `shift` this rank's parts, one for each tensor that its optimizer steps."""

    run: Run
    pull: float
    anchor: Sequence[Tensor]
    shift: Sequence[Tensor] | None

    @property
    def changes(self) -> bool:
        """Whether there is anything to add."""
        return self.pull != 0 or self.shift is not None

    @torch.no_grad()
    def __call__(self, gradient: AgreedGradient) -> None:
        gradient.apply()
        owned = gradient.gradients.owned
        for place, each in enumerate(owned):
            each.parameter.grad = each.gradient
            if self.pull:
                each.gradient.add_(each.parameter - self.anchor[place], alpha=self.pull)
            if self.shift is not None:
                each.gradient.add_(self.shift[place])
        counted = norm_of_owned(each for each in owned if is_counted(each))
        replica = self.run.mesh.axis("pipeline", "shard", "context", "tensor")
        gradient.norm = float(global_norm(counted, replica, device=self.run.device))


class VectorParts:
    """What this rank's optimizer steps of the vectors [numel] that rank 0 has."""

    def __init__(self, run: Run) -> None:
        shapes = run.trained_shapes
        self._layout = VectorLayout(tuple(shapes), tuple(shapes.values()))
        self._world, self._device, self._dtype = run.mesh.world, run.device, run.workload.dtype
        self._owned: Sequence[Owned] = run.generation.gradients.owned
        first = run.mesh.layout.index("replicate", run.mesh.rank) == 0
        self._counted = [first and is_counted(each) for each in self._owned]
        self._places: dict[str, list[int]] = defaultdict(list)
        for place, each in enumerate(self._owned):
            self._places[each.name].append(place)

    @property
    def owned(self) -> list[Tensor]:
        """The tensors that it steps."""
        return [each.parameter for each in self._owned]

    @torch.no_grad()
    def spread(self, vector: Tensor | None) -> list[Tensor]:
        """This rank's parts of rank 0's `vector`, one for each tensor of `owned`."""
        views = {} if vector is None else self._layout.views(vector)
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for own in self.owned]
        for name, whole in self._parameters():
            if name in views:
                whole.copy_(views[name])
            self._world.broadcast(whole).wait()
            for place in self._places[name]:
                for box, part in self._owned[place].boxes(parts[place]):
                    part.copy_(whole[box.slices])
        return parts

    @torch.no_grad()
    def collect(self, parts: Sequence[Tensor]) -> Tensor | None:
        """The vector of which every rank has `parts`, one for each tensor of `owned`, on rank 0; None elsewhere."""
        vector = torch.empty(self._layout.numel, dtype=self._dtype) if self._world.rank == 0 else None
        views = {} if vector is None else self._layout.views(vector)
        for name, whole in self._parameters():
            whole.zero_()
            for place in self._places[name]:
                for box, part in self._owned[place].boxes(parts[place]) if self._counted[place] else ():
                    whole[box.slices] = part
            self._world.reduce(whole).wait()
            if name in views:
                views[name].copy_(whole)
        return vector

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Room for each parameter, whole, one after the other."""
        for name, shape in zip(self._layout.names, self._layout.shapes, strict=True):
            if 0 not in shape:
                yield name, torch.empty(shape, dtype=self._dtype, device=self._device)
