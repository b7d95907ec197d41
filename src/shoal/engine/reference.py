"""The same steps in one process, written down plainly: what every layout is compared with.

No buckets, no parts, no overlap: the whole model, the whole global batch, autograd and PyTorch's optimizer. It shares
the model, the loss and the data with the layout that is judged, and none of the code that splits them.

The sequential program that PipeDream computes, in one process: microbatch after microbatch, each with the weights
that its stages had in the pipeline.

Every version of every weight is kept until the step ends. The gradients are those of the plain reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shoal.comm.collective import Alone
from shoal.data.sample import Batch
from shoal.engine.batch_statistics import StatisticsSync
from shoal.engine.compute import Compute
from shoal.engine.loss import weighted_sum
from shoal.optim.build import set_rate


@dataclass(frozen=True)
class ReferenceGradient:
    """The gradient of the mean loss over a global batch, by the names of the unsplit model."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]


@dataclass
class Reference:
    """The whole model `compute.model` and its optimizer in this process."""

    compute: Compute
    optimizer: torch.optim.Optimizer
    clip_norm: float | None

    @property
    def weights(self) -> dict[str, Tensor]:
        """The trained parameters by name, tied ones once."""
        return {name: p for name, p in self.compute.model.named_parameters() if p.requires_grad}

    def gradient(self, step: int, batches: Sequence[Batch]) -> ReferenceGradient:
        """Of step `step` over `batches`, which are the global batch."""
        model, randomness = self.compute.model.train(), self.compute.randomness
        randomness.step(step)
        for parameter in model.parameters():
            parameter.grad = None
        denominator, total = sum(batch.weight for batch in batches), 0.0
        for raw in batches:
            microbatch = self.compute.prepared(raw)
            self.compute.announce(microbatch, lambda: 1.0 / denominator)
            _, losses = self.compute.losses(microbatch.batch)
            loss_sum = weighted_sum(losses, microbatch.batch.weights)
            (loss_sum / denominator).backward()
            total += float(loss_sum.detach().double())
        zero = {name: torch.zeros_like(parameter) for name, parameter in self.weights.items()}
        found = {name: p.grad.clone() for name, p in self.weights.items() if p.grad is not None}
        return ReferenceGradient(total / denominator, norm_of(found), zero | found)

    def __post_init__(self) -> None:
        self._statistics = StatisticsSync(self.compute.model, Alone())

    def update(self, gradients: dict[str, Tensor], *, lr: float) -> None:
        """One optimizer step with these gradients, clipped by their norm."""
        norm = norm_of(gradients)
        factor = 1.0 if self.clip_norm is None or norm <= self.clip_norm else self.clip_norm / norm
        for name, parameter in self.weights.items():
            parameter.grad = gradients[name].to(parameter) * factor
        set_rate(self.optimizer, lr)
        self.optimizer.step()
        self._statistics.finish(committed=True)


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
