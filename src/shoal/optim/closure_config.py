"""The tables of optimizers that look for a step: Newton-CG and L-BFGS. Imports no torch.

They evaluate loss and gradient of the same samples several times in one step, at other weights.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from shoal.config.check import Positive, PositiveFloat, says
from shoal.optim.declared import Common, Slot, counter


class Searching(Common, frozen=True):
    """Keys of both."""

    asks_for_whole: ClassVar[bool] = True
    steps_alone: ClassVar[bool] = True

    lr: Annotated[
        float, says("The length of a step that is tried first, as a share of the direction; 1 is Newton's.", gt=0, le=1)
    ] = 1.0
    decrease: Annotated[
        float, says("Wolfe's first constant: the share of the expected decrease that a step must reach.", gt=0, lt=0.5)
    ] = 1e-4
    curvature: Annotated[
        float, says("Wolfe's second constant: the share of the slope that may be left after a step.", gt=0, lt=1)
    ] = 0.9
    evaluations: Annotated[Positive, says("Most evaluations of the loss in one line search.")] = 25

    @property
    def backwards(self) -> float:
        """At the start of a step, and of one length, which a search mostly takes."""
        return 2.0

    def __post_init__(self) -> None:
        if self.decrease >= self.curvature:
            raise ValueError(
                f"decrease = {self.decrease:g} must be below curvature = {self.curvature:g}, or no step may exist"
            )
        for key, value in self._against_the_loss():
            raise ValueError(
                f"{key} = {value} with a line search: the gradient must be that of the loss that is compared; leave "
                f"{key} out"
            )

    def _against_the_loss(self) -> list[tuple[str, Any]]:
        """Keys that make another gradient, or another direction, of the loss's."""
        rates = [f"{pattern!r}: rate = {group.rate:g}" for pattern, group in self.groups.items() if group.rate != 1]
        rates += [f"{pattern!r}: kind = {group.kind}" for pattern, group in self.groups.items() if group.kind]
        kinds = [transform.variant for transform in self.transforms]
        layers = self.layer_decay if self.layer_decay != 1 else None
        found = [("clip_norm", self.clip_norm), ("transforms", kinds), ("groups", rates), ("layer_decay", layers)]
        return [(key, value) for key, value in found if value]


class NewtonCG(Searching, frozen=True, tag_field="kind", tag="newton_cg"):
    """Newton's method with truncated conjugate gradients and a line search, for full or large batches."""

    implemented_by: ClassVar[str] = "shoal.optim.newton:newton_cg"

    hessian: Annotated[
        Literal["differences", "exact"],
        says(
            "How the Hessian is multiplied by a vector: as the difference of two gradients, in every layout; or "
            "exactly, by a backward through the backward, which replicas and ZeRO-1 and -2 can."
        ),
    ] = "differences"
    cg_iterations: Annotated[
        Positive, says("Most Hessian-vector products in one step, each as dear as two gradients.")
    ] = 50
    cg_tolerance: Annotated[
        PositiveFloat, says("What may be left of the linear system, relative: the smaller of this and sqrt(|g|).")
    ] = 0.01
    damping: Annotated[float, says("Added to every eigenvalue of the Hessian.", ge=0)] = 0.0

    @property
    def backwards(self) -> float:
        """Two for each product, or what costs as much, and those of the line search."""
        return 2.0 * self.cg_iterations + super().backwards


class LBFGS(Searching, frozen=True, tag_field="kind", tag="lbfgs"):
    """L-BFGS with a line search, for full or large batches: an inverse Hessian from the last steps."""

    implemented_by: ClassVar[str] = "shoal.optim.newton:lbfgs"

    history: Annotated[int, says("Pairs of steps and changes of the gradient that are kept.", ge=1, le=100)] = 10

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The pairs, a ring, and how many there have been since the last that was no use."""
        return (*(Slot(f"{of}_{n}") for of in ("moved", "changed") for n in range(self.history)), counter("pairs"))
