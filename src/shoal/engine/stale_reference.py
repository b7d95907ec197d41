"""The sequential program that PipeDream computes, in one process: microbatch after microbatch, each with the weights
that its stages had in the pipeline.

Every version of every weight is kept until the step ends. The gradients are those of the plain reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from shoal.data.sample import Batch
from shoal.engine.reference import Reference, ReferenceGradient, norm_of


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
