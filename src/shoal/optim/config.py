"""Tables `[optimizer]` and `[schedule]`."""

from __future__ import annotations

from typing import Annotated, Literal

from shoal.config.table import Positive, PositiveFloat, Table, says


class _Common(Table, frozen=True):
    """Keys that every optimizer has."""

    weight_decay: Annotated[float, says("Weight decay, on parameters of two dimensions or more only.", ge=0, le=1)] = (
        0.0
    )
    clip_norm: Annotated[
        PositiveFloat | None, says("Largest global gradient norm; larger gradients are scaled down.")
    ] = None
    lr_for_samples: Annotated[
        Positive | None,
        says(
            "The global batch that `lr` was tuned for: the linear scaling rule (arXiv:1706.02677) multiplies `lr` by "
            "`batch.global_samples` / this, and the run says so. Without it, `lr` is used as it stands."
        ),
    ] = None


class AdamW(_Common, frozen=True, tag_field="kind", tag="adamw"):
    """AdamW (arXiv:1711.05101), PyTorch's fused kernel."""

    lr: Annotated[float, says("Peak learning rate.", ge=0, le=1e3)] = 3e-4
    beta1: Annotated[float, says("Decay of the first moment.", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, says("Decay of the second moment.", ge=0, lt=1)] = 0.95
    eps: Annotated[float, says("Added to the root of the second moment.", gt=0)] = 1e-8
    weight_decay: Annotated[float, says("Weight decay, on parameters of two dimensions or more only.", ge=0, le=1)] = (
        0.1
    )
    clip_norm: Annotated[
        PositiveFloat | None, says("Largest global gradient norm; larger gradients are scaled down.")
    ] = 1.0


class SGD(_Common, frozen=True, tag_field="kind", tag="sgd"):
    """Stochastic gradient descent, PyTorch's fused kernel."""

    lr: Annotated[float, says("Peak learning rate.", ge=0, le=1e3)] = 0.1
    momentum: Annotated[float, says("Momentum.", ge=0, lt=1)] = 0.0
    nesterov: Annotated[bool, says("Nesterov's form of the momentum.")] = False

    def __post_init__(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov = true with momentum = 0; Nesterov's form needs a momentum above 0, such as 0.9")


class Schedule(Table, frozen=True):
    """The learning rate over the run: a linear warm-up, then a decay to `final_fraction` of the peak."""

    kind: Annotated[Literal["cosine", "linear", "constant"], says("The shape after the warm-up.")] = "cosine"
    warmup_steps: Annotated[int, says("Steps in which the rate rises from near 0 to its peak.", ge=0)] = 0
    final_fraction: Annotated[float, says("The rate at the last step, as a fraction of the peak.", ge=0, le=1)] = 0.1


OptimizerConfig = AdamW | SGD
