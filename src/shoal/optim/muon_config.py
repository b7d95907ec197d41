"""The tables of Muon and Dion. Imports no torch."""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import prod
from typing import Annotated, Any, ClassVar, Literal

from shoal.config.table import PositiveFloat, says
from shoal.optim.declared import Common, Described, Dims, Granularity, Slot, counter

HIDDEN = ("column", "row", "packed", "replicated", "expert")
"""Roles of parameters whose matrices map activations to activations."""


class HiddenMatrices(Common, frozen=True):
    """Keys of optimizers of hidden matrices that leave the rest to AdamW."""

    works_on: ClassVar[Granularity] = "matrices"
    asks_for_whole: ClassVar[bool] = True

    adamw: Annotated[
        tuple[str, ...], says("Patterns of parameter names that AdamW steps, beside embeddings and heads it knows.")
    ] = ("*embed*", "*head*")
    adamw_lr: Annotated[PositiveFloat | None, says("Peak learning rate of the others; without it, `lr`.")] = None
    beta1: Annotated[float, says("Decay of AdamW's first moment.", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, says("Decay of AdamW's second moment.", ge=0, lt=1)] = 0.95
    eps: Annotated[float, says("Added to the root of AdamW's second moment.", gt=0)] = 1e-8
    clip_norm: Annotated[
        PositiveFloat | None, says("Largest global gradient norm; larger gradients are scaled down.")
    ] = 1.0

    def takes(self, parameter: Described) -> bool:
        """Whether it is one of the matrices, if no pattern of `adamw` fits it."""
        return parameter.decays and parameter.kind in HIDDEN and len(parameter.shape) > 1

    def options(self, parameter: Described) -> dict[str, Any]:
        """`whole`: it is one of the matrices; `rate`: what the others' rate is of theirs."""
        whole = self.takes(parameter) and not any(fnmatchcase(parameter.name, pattern) for pattern in self.adamw)
        own = getattr(self, "lr")  # noqa: B009
        rate = 1.0 if whole or self.adamw_lr is None or own == 0 else self.adamw_lr / own
        return {"whole": whole, **({} if rate == 1 else {"rate": rate})}


class Muon(HiddenMatrices, frozen=True, tag_field="kind", tag="muon"):
    """Muon (Jordan et al., 2024): momentum whose singular values are made equal, for hidden matrices; AdamW for
    embeddings, heads, biases and norms.
    """

    implemented_by: ClassVar[str] = "shoal.optim.muon:build"
    lr: Annotated[float, says("Peak learning rate of matrices.", ge=0, le=1e3)] = 3e-4
    momentum: Annotated[float, says("Momentum of matrices.", ge=0, lt=1)] = 0.95
    nesterov: Annotated[bool, says("Nesterov's form of the momentum.")] = True
    iterations: Annotated[int, says("Newton-Schulz iterations in an update.", ge=1, le=50)] = 5
    polish: Annotated[
        int, says("Iterations after them that bring singular values from 0.68 to 1.14 nearer to 1.", ge=0, le=50)
    ] = 0
    precision: Annotated[
        Literal["parameter", "bfloat16"],
        says("What iterations are computed in; with bfloat16 two layouts agree to 3 digits of an update alone."),
    ] = "parameter"
    adjust: Annotated[
        Literal["match_rms_adamw", "original"],
        says(
            "What the rate of a matrix is multiplied by: 0.2 sqrt(max(rows, columns)), so that AdamW's rate and decay "
            "fit (arXiv:2502.16982), or sqrt(max(1, rows / columns))."
        ),
    ] = "match_rms_adamw"
    weight_decay: Annotated[float, says("Weight decay, on parameters of two dimensions or more only.", ge=0, le=1)] = (
        0.1
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The momentum of matrices; both moments of the others, and their number of steps."""
        return (
            Slot("momentum_buffer", of="hidden"),
            Slot("exp_avg", of="rest"),
            Slot("exp_avg_sq", of="rest"),
            counter("step"),
        )

    def options(self, parameter: Described) -> dict[str, Any]:
        """Also `stacked`: each of the matrices that its first dimension counts is orthogonalised."""
        options = super().options(parameter)
        return {**options, "stacked": options["whole"] and parameter.kind == "expert"}


def dion_rank(shape: Dims, fraction: float) -> int:
    """The columns of Dion's factors for a matrix of this shape."""
    return max(1, round(fraction * min(shape[0], prod(shape[1:]))))


class Dion(HiddenMatrices, frozen=True, tag_field="kind", tag="dion"):
    """Dion (arXiv:2504.05295): orthonormal updates of low rank, for hidden matrices; AdamW for everything else."""

    implemented_by: ClassVar[str] = "shoal.optim.dion:build"

    lr: Annotated[float, says("Peak learning rate of matrices.", ge=0, le=1e3)] = 0.01
    momentum: Annotated[float, says("The share of an update that the momentum forgets is 1 less this.", ge=0, lt=1)] = (
        0.95
    )
    rank_fraction: Annotated[float, says("The rank of updates, as a share of the shorter side.", gt=0, le=1)] = 0.25
    weight_decay: Annotated[float, says("Weight decay, on parameters of two dimensions or more only.", ge=0, le=1)] = (
        0.01
    )

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The momentum and the right factor of matrices, on the owner; both moments of the others."""

        def factor(shape: Dims) -> Dims:
            return (prod(shape[1:]), dion_rank(shape, self.rank_fraction)) if len(shape) > 1 else (0, 0)

        return (
            Slot("dion_momentum", of="hidden", planned=1.0, whole=True),
            Slot("right_factor", factor, of="hidden", planned=self.rank_fraction, whole=True),
            Slot("exp_avg", of="rest"),
            Slot("exp_avg_sq", of="rest"),
            counter("step"),
        )
