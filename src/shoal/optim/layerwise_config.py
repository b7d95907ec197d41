"""The tables of optimizers whose rate follows the norm of each layer: LARS and LAMB. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from shoal.config.table import PositiveFloat, says
from shoal.optim.declared import Common, Described, Slot, counter


class _Layerwise(Common, frozen=True):
    """Keys of both."""

    asks_for_whole: ClassVar[bool] = True

    trust: Annotated[
        Literal["decayed", "all"],
        says('Which parameters have a rate of their own: those that decay, and so no bias and no norm; or "all".'),
    ] = "decayed"
    max_trust: Annotated[PositiveFloat | None, says("Largest factor of a parameter's rate; without it, none.")] = None

    def options(self, parameter: Described) -> dict[str, Any]:
        """`trust`: whether the rate follows the norms."""
        return {"trust": parameter.decays or self.trust == "all"}


class LARS(_Layerwise, frozen=True, tag_field="kind", tag="lars"):
    """LARS (arXiv:1708.03888): SGD with momentum whose rate, for each parameter, follows the ratio of two norms."""

    implemented_by: ClassVar[str] = "shoal.optim.layerwise:lars"

    lr: Annotated[float, says("Peak learning rate.", ge=0, le=1e3)] = 1.0
    momentum: Annotated[float, says("Momentum.", ge=0, lt=1)] = 0.9
    nesterov: Annotated[bool, says("Nesterov's form of the momentum.")] = False
    coefficient: Annotated[float, says("What the ratio of the norms is multiplied by.", gt=0, le=1)] = 1e-3
    eps: Annotated[float, says("Added to the norm of the gradient.", ge=0)] = 1e-8
    weight_decay: Annotated[float, says("Weight decay, on parameters of two dimensions or more only.", ge=0, le=1)] = (
        1e-4
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The velocity."""
        return (Slot("momentum_buffer"),)


class LAMB(_Layerwise, frozen=True, tag_field="kind", tag="lamb"):
    """LAMB (arXiv:1904.00962): AdamW whose steps are as long as each parameter's norm asks for."""

    implemented_by: ClassVar[str] = "shoal.optim.layerwise:lamb"

    lr: Annotated[float, says("Peak learning rate.", ge=0, le=1e3)] = 4e-3
    beta1: Annotated[float, says("Decay of the first moment.", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, says("Decay of the second moment.", ge=0, lt=1)] = 0.999
    eps: Annotated[float, says("Added to the root of the second moment.", gt=0)] = 1e-6
    bias_correction: Annotated[bool, says("Correct moments for their start from zero.")] = True
    decay_in_norm: Annotated[
        bool, says("Whether the decay counts in the norm of the step, as in the paper; else it is apart, as in AdamW.")
    ] = True
    weight_decay: Annotated[float, says("Weight decay, on parameters of two dimensions or more only.", ge=0, le=1)] = (
        0.01
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Both moments, and the number of steps."""
        return (Slot("exp_avg"), Slot("exp_avg_sq"), counter("step"))
