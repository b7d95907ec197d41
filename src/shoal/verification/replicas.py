"""A step of replicas that differ, and what one process plays beside it.

`Copies`: the model and the optimizer of every replica, in one process.

A step of the replicas, taken apart: what every rank has before it, after its own update, and after the agreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.assembly.run import Run
from shoal.comm.collective import gather_named
from shoal.data.sample import Batch
from shoal.engine.reference import Reference, ReferenceGradient, norm_of
from shoal.engine.tolerances import HeldBox, assembled
from shoal.engine.updates import Work
from shoal.models.config import ForeignModel
from shoal.models.mixture import RecordRoutes, ReplayRoutes, RouteDifference, Routes, set_routes
from shoal.state import owned_gradients
from shoal.topology.holding import Box
from shoal.verification.plain_rules import Vectors
from shoal.verification.reference import buffers_of, collected, gather_routes, held_weights, reference_of

Tensors = dict[str, Tensor]


class Copies:
    """`of[k]` is replica k's copy. All begin at the same weights, buffers and optimizer state.

    Gradients come to the optimizers clipped already, each by its own norm, though an update may take their mean.
    """

    def __init__(self, run: Run, replicas: int) -> None:
        self.of: list[Reference] = [reference_of(run) for _ in range(replicas)]
        self.unkeyed: frozenset[str] = frozenset()
        self._run, self._clip_norm = run, run.run_file.optimizer.clip_norm
        for copy in self.of:
            copy.clip_norm = None
            copy.compute.model.load_state_dict(self.of[0].compute.model.state_dict())
        self._own = [_cloned(copy) for copy in self.of]

    @property
    def vectors(self) -> Vectors:
        """All trained numbers of each."""
        return [torch.cat([w.detach().double().flatten() for w in copy.weights.values()]).cpu() for copy in self.of]

    def named(self, vector: Tensor) -> Tensors:
        """The tensors that lie in one of `vectors`, by name."""
        weights = self.of[0].weights
        parts = vector.split([weight.numel() for weight in weights.values()])
        return {name: part.view(weights[name].shape) for name, part in zip(weights, parts, strict=True)}

    def gradients(
        self, step: int, batches: Sequence[Sequence[Batch]], at: Sequence[Sequence[HeldBox]]
    ) -> tuple[list[ReferenceGradient], Routes]:
        """Of each replica's batches, at the weights `at` that it has; the copies stay there until `update`. And which
        experts all tokens went to.
        """
        found, routes = [], Routes()
        for copy, own, parts in zip(self.of, batches, at, strict=True):
            _load(copy, assembled(parts, copy.weights))
            set_routes(copy.compute.model, RecordRoutes(routes))
            found.append(copy.gradient(step, own))
            if isinstance(self._run.run_file.model, ForeignModel):
                self.unkeyed |= copy.compute.randomness.unkeyed(self._run.device)
        return found, routes

    def update(self, gradients: Sequence[Tensors], weights: Sequence[float], *, lr: float, together: bool) -> None:
        """Every copy's optimizer takes its gradient, or if `together` the mean of all by `weights`."""
        clipped = [self._clipped(gradient) for gradient in gradients]
        if together:
            zero, total = {name: 0 * values for name, values in clipped[0].items()}, sum(weights)
            weighed = list(zip(weights, clipped, strict=True))
            mean = {name: sum((w * own[name] for w, own in weighed), zero[name]) / total for name in zero}
            clipped = [mean] * len(clipped)
        for copy, own, gradient in zip(self.of, self._own, clipped, strict=True):
            _load(copy, own)
            copy.update(gradient, lr=lr)

    def go_on(self, own: Vectors, *, together: bool) -> None:
        """From these vectors. `together`: all have met, and saved buffers, such as running statistics, are averaged."""
        for copy, vector in zip(self.of, own, strict=True):
            _load(copy, self.named(vector))
        self._own = [_cloned(copy) for copy in self.of]
        if together:
            self._average_buffers()

    @torch.no_grad()
    def _average_buffers(self) -> None:
        states = [copy.compute.model.state_dict() for copy in self.of]
        for name, buffer in self.of[0].compute.model.named_buffers():
            if name in states[0] and buffer.is_floating_point():
                mean = sum((state[name].double() for state in states), 0.0 * buffer.double()) / len(states)
                for state in states:
                    state[name].copy_(mean)

    def _clipped(self, gradient: Tensors) -> Tensors:
        norm = norm_of(gradient)
        if self._clip_norm is None or norm <= self._clip_norm:
            return gradient
        return {name: values * (self._clip_norm / norm) for name, values in gradient.items()}


def _cloned(copy: Reference) -> Tensors:
    return {name: weight.detach().clone() for name, weight in copy.weights.items()}


@torch.no_grad()
def _load(copy: Reference, values: Tensors) -> None:
    for name, weight in copy.weights.items():
        weight.copy_(values[name])


Located = tuple[str, Box, Tensor]
"""A rank's part of a tensor of the unsplit model: name, where, values."""


@dataclass(frozen=True)
class TakenStep:
    """What a step came to. `numbers` are each rank's loss and norm, `made` the weights before the agreement; the parts
    are those of all ranks, at rank 0 only.
    """

    numbers: list[tuple[float, float]]
    gradients: list[HeldBox]
    made: list[HeldBox]
    weights: list[HeldBox]
    buffers: list[HeldBox]
    routes: list[RouteDifference]
    replayed: int


class ReplicasStep:
    """Step `number` on this rank. It begins with `before`, the weights that all ranks have, at rank 0 only."""

    def __init__(self, run: Run, number: int, batches: Sequence[Batch]) -> None:
        self._run, self._number, self._batches = run, number, batches
        self._norms: list[float] = []
        self._gradients: list[Located] = []
        self._work: Work | None = None
        own: list[Located] = []
        if not run.step.agreement.skips_step:
            self._work = run.step.begin(number, batches, lr=run.rate(number), on_gradients=self._record)
            own = self._weights()
        self.before = collected(run, own)

    def take(self, tap: ReplayRoutes) -> TakenStep:
        """The rest of it, on the reference's routes."""
        run, made = self._run, list[Located]()
        set_routes(run.model, tap)
        if self._work is None:
            result = run.step(self._number, self._batches, lr=run.rate(self._number))
        else:
            run.generation.forward_backward.compute.randomness.step(self._number)  # the reference has drawn since
            outcome = run.step.policy(run.step.context, self._work)
            made = self._weights()
            result = run.step.end(self._work, outcome)
        numbers = torch.tensor([result.loss, *(self._norms or [0.0])], dtype=torch.float64)
        told = gather_named([("", numbers)], run.mesh.world, device=run.device)
        differences, replayed = gather_routes(run, tap)
        return TakenStep(
            [(float(values[0]), float(values[1])) for ((_, values),) in told],
            collected(run, self._gradients),
            collected(run, made),
            collected(run, self._weights()),
            collected(run, buffers_of(run)),
            differences,
            replayed,
        )

    def _record(self, norm: float) -> None:
        self._norms.append(norm)
        found = owned_gradients(self._run.generation.gradients.owned)
        self._gradients += [(name, box, gradient.clone()) for name, box, gradient in found]

    def _weights(self) -> list[Located]:
        """This rank's trained parameters as they are now."""
        with self._run.generation.gradients.full_parameters():
            return [(name, box, part.clone()) for name, box, part in held_weights(self._run)]
