"""The same steps in one process, written down plainly: what every layout is compared with.

No buckets, no parts, no overlap: the whole model, autograd and PyTorch's optimizer. `Reference` takes all samples in
one forward, whatever microbatches the layout makes of them: a loss that couples samples is then another one, which
`neighbour_effect` names. It shares model, loss and data with the layout, and none of the code that splits them.

`StaleReference` is the sequential program that PipeDream computes: microbatch after microbatch, each with the weights
that its stages had in the pipeline. It keeps every version of every weight until the step ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shoal.comm.collective import Alone
from shoal.data.sample import Batch, leaves, map_tree
from shoal.engine.batch_statistics import StatisticsSync
from shoal.engine.closures import PlainClosure
from shoal.engine.compute import Compute
from shoal.engine.loss import weighted_losses, weighted_sum
from shoal.optim.build import set_rate
from shoal.optim.layer_statistics import SeesLayers
from shoal.optim.newton import SearchingOptimizer
from shoal.sparsity.training import SparseTraining

Arrange = Callable[[Sequence[Batch]], Sequence[Batch]]
"""From the batches of a step that the reference is given to those that it computes, one after the other."""


@dataclass(frozen=True)
class ReferenceGradient:
    """The gradient of the mean loss over a global batch, by the names of the unsplit model."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]


@dataclass
class Reference:
    """The whole model `compute.model` and its optimizer in this process.

    One forward takes all samples that it is given and that have the same shapes; `arrange`: the batches that forwards
    take instead, where samples of one belong together. `scale`: the loss is multiplied by it in the backward, for
    float16. `transform` changes every `.grad` in a step, after clipping; `sparse` masks gradients and weights.
    """

    compute: Compute
    optimizer: torch.optim.Optimizer
    clip_norm: float | None
    arrange: Arrange | None = None
    scale: float = 1.0
    transform: Callable[[int], None] | None = None
    sparse: SparseTraining | None = None
    _step: int = field(default=0, init=False)
    _batches: Sequence[Batch] = field(default=(), init=False)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The trained parameters by name, tied ones once."""
        return {name: p for name, p in self.compute.model.named_parameters() if p.requires_grad}

    def __post_init__(self) -> None:
        self._statistics = StatisticsSync(self.compute.model, Alone())

    def gradient(self, step: int, batches: Sequence[Batch]) -> ReferenceGradient:
        """Of step `step` over `batches`, which are the global batch."""
        self._step, self._batches = step, batches
        if self.sparse is not None:
            self.sparse.begin(step)
        self.compute.train()
        self.compute.randomness.step(step)
        self.compute.buffers.start()
        denominator = sum(batch.weight for batch in batches)
        seeing = self.optimizer if isinstance(self.optimizer, SeesLayers) else None
        if seeing is not None:
            seeing.begin(step)
        loss = self._backward(batches)
        if seeing is not None:
            seeing.agree(scale=self.scale / denominator, terms=denominator)
        if self.sparse is not None:
            self.sparse.explore(step, lambda: self._backward(batches))
            self.sparse.agreed(step, scale=self.scale)
        zero = {name: torch.zeros_like(parameter) for name, parameter in self.weights.items()}
        found = {name: p.grad.to_dense() / self.scale for name, p in self.weights.items() if p.grad is not None}
        return ReferenceGradient(loss, norm_of(found), zero | found)

    def _backward(self, batches: Sequence[Batch]) -> float:
        """The mean loss over `batches`; its gradient, times the scale, is in every `.grad`."""
        for parameter in self.compute.model.parameters():
            parameter.grad = None
        denominator, total = sum(batch.weight for batch in batches), 0.0
        for loss_sum in self._loss_sums(batches, denominator):
            with self.compute.randomness.drawing():
                (loss_sum / denominator * self.scale).backward()
            total += float(loss_sum.detach().double())
        return total / denominator

    def _loss_sums(self, batches: Sequence[Batch], denominator: float) -> Iterator[Tensor]:
        for raw in self._arranged(batches):
            microbatch = self.compute.prepared(raw)
            self.compute.announce(microbatch, lambda: 1.0 / denominator)
            outputs, losses = self.compute.losses(microbatch.batch)
            self.compute.look(outputs, microbatch.batch)
            yield weighted_sum(losses, microbatch.batch.weights)

    def rounding(self, batches: Sequence[Batch], gradient: ReferenceGradient) -> dict[str, float]:
        """What the order of summation changes: the 2-norm of each gradient's difference when samples come in reverse.

        Called after `gradient` of the same batches, which it leaves as it is. Nothing is said of a mixture, whose
        tokens may go elsewhere.
        """
        if self.compute.mixes:
            return {}
        kept = [(buffer, buffer.clone()) for buffer in self.compute.model.buffers()]
        denominator = sum(batch.weight for batch in batches)
        totals = {name: torch.zeros_like(parameter) for name, parameter in self.weights.items()}
        for batch in self._arranged(batches):
            microbatch = self.compute.prepared(_mapped(batch, lambda leaf: leaf.flip(0)))
            self.compute.announce(microbatch, lambda: 1.0 / denominator)
            _, losses = self.compute.losses(microbatch.batch)
            loss = weighted_sum(losses, microbatch.batch.weights) / denominator * self.scale
            with self.compute.randomness.drawing():
                found = torch.autograd.grad(loss, list(self.weights.values()), allow_unused=True)
            for name, value in zip(self.weights, found, strict=True):
                totals[name] += 0 if value is None else value / self.scale
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
        return {name: float((total - gradient.gradients[name]).double().norm()) for name, total in totals.items()}

    @torch.no_grad()
    def neighbour_effect(self, batches: Sequence[Batch], *, samples: int, tolerance: float) -> NeighbourEffect | None:
        """The first sample whose loss is another one among `samples` of its neighbours than in its whole batch.

        `samples` is the size of the layout's microbatches; pieces are also cut to their longest sequence, as they are
        when a microbatch is read. None where no loss differs by more than `tolerance`, relative to the largest.
        """
        before = 0
        for whole in self._arranged(batches):
            wanted = self._losses(whole)
            found = torch.cat([self._losses(piece) for piece in _pieces(whole, samples)])
            gaps = (found - wanted).abs() / wanted.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
            for index in (~(gaps <= tolerance)).nonzero().flatten().tolist()[:1]:
                return NeighbourEffect(before + index, len(whole), samples, float(gaps[index]))
            before += len(whole)
        return None

    def _arranged(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        return joined(batches) if self.arrange is None else self.arrange(batches)

    def _losses(self, batch: Batch) -> Tensor:
        """The loss of each sample, weighted and summed over its positions, float64 `[samples]`."""
        microbatch = self.compute.prepared(batch)
        self.compute.announce(microbatch, lambda: 1.0)
        _, losses = self.compute.losses(microbatch.batch)
        return weighted_losses(losses, microbatch.batch.weights).double().reshape(len(batch), -1).sum(1).cpu()

    def _closure(self, *, first: float) -> PlainClosure:
        batches, denominator = self._batches, sum(batch.weight for batch in self._batches)

        def parts() -> Iterator[Tensor]:
            return (part / denominator for part in self._loss_sums(batches, denominator))

        return PlainClosure(lambda: self._backward(batches), parts, list(self.weights.values()), first=first)

    def update(
        self, gradients: dict[str, Tensor], *, lr: float, norm: float | None = None, loss: float = math.nan
    ) -> None:
        """One optimizer step with these gradients, clipped by their norm. `norm` is that which a layout found and was
        judged by: clipped by it they are the layout's in every bit, which an optimizer may amplify. `loss` is the
        layout's, too, for an optimizer that compares others with it.
        """
        norm = norm_of(gradients) if norm is None else norm
        factor = 1.0 if self.clip_norm is None or norm <= self.clip_norm else self.clip_norm / norm
        for name, parameter in self.weights.items():
            parameter.grad = gradients[name].to(parameter) * factor
        if self.transform is not None:
            self.transform(self._step)
        set_rate(self.optimizer, lr)
        if isinstance(self.optimizer, SearchingOptimizer):
            self.optimizer.step(self._closure(first=loss))
        else:
            self.optimizer.step()
        if self.sparse is not None:
            self.sparse.updated(self._step)
        self._statistics.finish(committed=True)
        self.compute.buffers.finish(committed=True)


@dataclass(frozen=True)
class NeighbourEffect:
    """Sample `sample` of a step, from 0: its loss among `of` samples and among `among` differs by `difference`."""

    sample: int
    of: int
    among: int
    difference: float


def joined(batches: Iterable[Batch]) -> list[Batch]:
    """The batches as few as can be: neighbours whose samples have the same shapes become one."""
    found: list[Batch] = []
    for batch in batches:
        if found and _shapes(found[-1]) == _shapes(batch):
            others = iter(_tensors(batch))
            found[-1] = _mapped(found[-1], lambda leaf, others=others: torch.cat([leaf, next(others)]))
        else:
            found.append(batch)
    return found


def _tensors(batch: Batch) -> list[Tensor]:
    return leaves(batch.inputs, batch.targets, batch.weights, batch.positions)


def _shapes(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape[1:]) for leaf in _tensors(batch)]


def _mapped(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """`change` of every tensor of `batch`, in the order of `_tensors`."""
    inputs, targets = map_tree(change, batch.inputs), map_tree(change, batch.targets)
    return Batch(inputs, targets, weights=change(batch.weights), positions=change(batch.positions))


def _pieces(batch: Batch, samples: int) -> Iterator[Batch]:
    """Pieces of `samples` samples, without the positions that are padding in all of them."""
    length = batch.weights.shape[1] if batch.weights.ndim > 1 else 0
    for first in range(0, len(batch), samples):
        counted = batch.weights[first : first + samples].flatten(1).count_nonzero(0).nonzero() if length else None
        kept = length if counted is None or not len(counted) else int(counted[-1]) + 1

        def cut(leaf: Tensor, first: int = first, kept: int = kept) -> Tensor:
            own = leaf[first : first + samples]
            return own[:, :kept] if length and own.ndim > 1 and own.shape[1] == length else own

        yield _mapped(batch, cut)


def norm_of(gradients: dict[str, Tensor]) -> float:
    """The 2-norm over all tensors together."""
    return sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5


@dataclass
class StaleReference:
    """`stage_of` has the stage of every trained parameter; `versions[stage, microbatch]` the updates that a forward has
    seen. Made anew for each step, in which `gradient` and `update` take turns."""

    whole: Reference
    stage_of: Mapping[str, int]
    versions: Mapping[tuple[int, int], int]
    _history: dict[str, list[Tensor]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._history = {name: [p.detach().clone()] for name, p in self.whole.weights.items()}

    def gradient(self, step: int, microbatch: int, batches: Sequence[Batch]) -> ReferenceGradient:
        """Of the mean loss over `batches`, which are a microbatch of all replicas, at its stale weights."""
        for name, parameter in self.whole.weights.items():
            parameter.data = self._history[name][self.versions[self.stage_of[name], microbatch]]
        return self.whole.gradient(step, batches)

    def update(self, gradients: dict[str, Tensor] | None, *, lr: float) -> None:
        """An optimizer step of the latest weights with these gradients, each stage clipped by its own norm; None: a
        microbatch that weighs nothing, whose update changes nothing."""
        for name, parameter in self.whole.weights.items():
            parameter.data = self._history[name][-1].clone()
        if gradients is not None:
            replace(self.whole, clip_norm=None).update(self._clipped(gradients), lr=lr)
        for name, parameter in self.whole.weights.items():
            self._history[name].append(parameter.data)

    def _clipped(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        limit, clipped = self.whole.clip_norm, dict(gradients)
        if limit is None:
            return clipped
        for stage in set(self.stage_of.values()):
            own = {name: gradient for name, gradient in gradients.items() if self.stage_of[name] == stage}
            norm = norm_of(own)
            if norm > limit:
                clipped |= {name: gradient * (limit / norm) for name, gradient in own.items()}
        return clipped
