"""A step of the replicas, taken apart: what every rank has before it, after its own update, and after the agreement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.assembly.run import Run
from shoal.comm.gather import gather_named
from shoal.data.sample import Batch
from shoal.engine.proof import HeldBox
from shoal.engine.updates import Work
from shoal.models.mixture_routes import ReplayRoutes, RouteDifference, set_routes
from shoal.topology.box import Box
from shoal.verification.reference import buffers_of, collected, gather_routes, held_weights, owned_gradients

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
        found = owned_gradients(self._run.generation.gradients)
        self._gradients += [(name, box, gradient.clone()) for name, box, gradient in found]

    def _weights(self) -> list[Located]:
        """This rank's trained parameters as they are now."""
        with self._run.generation.gradients.full_parameters():
            return [(name, box, part.clone()) for name, box, part in held_weights(self._run.trained)]
