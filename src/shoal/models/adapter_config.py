"""Table `[adapter]`. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar

from shoal.config.table import Positive, PositiveFloat, Table, says


class Adapter(Table, frozen=True, kw_only=True):
    """The keys of every kind: the model is frozen, and what is added to it is trained."""

    implemented_by: ClassVar[str] = ""

    layers: Annotated[
        tuple[str, ...],
        says(
            "Patterns of names of linear layers (`blocks.*.query`) that get one; default: all but the output head.",
            min_length=1,
        ),
    ] = ("*",)
    train: Annotated[
        tuple[str, ...], says("Patterns of parameters (`head.*`, `*norm*`) that are trained as well, whole.")
    ] = ()


class LoRA(Adapter, frozen=True, tag_field="kind", tag="lora"):
    """Low-rank updates of linear layers: W + (alpha / rank) B A (arXiv:2106.09685). Merged into exported weights."""

    implemented_by: ClassVar[str] = "shoal.models.adapters:LoRALinear"

    rank: Annotated[int, says("Rank of each update.", ge=1, le=1 << 14)] = 8
    alpha: Annotated[PositiveFloat | None, says("The update is scaled by alpha / rank; default: 2 x rank.")] = None

    @property
    def scale(self) -> float:
        """What the product of both factors is multiplied by."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


class DoRA(LoRA, frozen=True, tag_field="kind", tag="dora"):
    """LoRA, and a magnitude for each row of the weight (arXiv:2402.09353). Merged into exported weights."""

    implemented_by: ClassVar[str] = "shoal.models.adapters:DoRALinear"


class Bottleneck(Adapter, frozen=True, tag_field="kind", tag="bottleneck"):
    """Small layers behind linear ones: y + up(relu(down(y))) (arXiv:1902.00751). They stay in exported weights."""

    implemented_by: ClassVar[str] = "shoal.models.adapters:BottleneckLinear"

    width: Annotated[Positive, says("Features between `down` and `up`.")] = 16


class BitFit(Adapter, frozen=True, tag_field="kind", tag="bitfit"):
    """Trains biases alone (arXiv:2106.10199)."""


AdapterConfig = LoRA | DoRA | Bottleneck | BitFit
