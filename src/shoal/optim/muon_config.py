"""The table of Muon. Imports no torch."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal

from shoal.config.table import PositiveFloat, says
from shoal.optim.declared import Common, Described, Granularity, Slot, counter

HIDDEN = ("column", "row", "packed", "replicated", "expert")
"""Roles of parameters whose matrices map activations to activations."""


class Muon(Common, frozen=True, tag_field="kind", tag="muon"):
    """Muon (Jordan et al., 2024): momentum whose singular values are made equal, for hidden matrices; AdamW for
    embeddings, heads, biases and norms.
    """

    implemented_by: ClassVar[str] = "shoal.optim.muon:build"
    works_on: ClassVar[Granularity] = "matrices"
    asks_for_whole: ClassVar[bool] = True

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
    adamw: Annotated[
        tuple[str, ...], says("Patterns of parameter names that AdamW steps, beside embeddings and heads it knows.")
    ] = ("*embed*", "*head*")
    adamw_lr: Annotated[PositiveFloat | None, says("Peak learning rate of the others; without it, `lr`.")] = None
    beta1: Annotated[float, says("Decay of AdamW's first moment.", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, says("Decay of AdamW's second moment.", ge=0, lt=1)] = 0.95
    eps: Annotated[float, says("Added to the root of AdamW's second moment.", gt=0)] = 1e-8
    weight_decay: Annotated[float, says("Weight decay, on parameters of two dimensions or more only.", ge=0, le=1)] = (
        0.1
    )
    clip_norm: Annotated[
        PositiveFloat | None, says("Largest global gradient norm; larger gradients are scaled down.")
    ] = 1.0

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
        """`whole`: it is orthogonalised; `stacked`: each of the matrices that its first dimension counts."""
        hidden = parameter.decays and parameter.kind in HIDDEN and len(parameter.shape) > 1
        whole = hidden and not any(fnmatchcase(parameter.name, pattern) for pattern in self.adamw)
        rate = 1.0 if whole or self.adamw_lr is None or self.lr == 0 else self.adamw_lr / self.lr
        return {
            "whole": whole,
            "stacked": whole and parameter.kind == "expert",
            **({} if rate == 1 else {"rate": rate}),
        }
