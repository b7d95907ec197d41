"""Tables `[precision]` and `[loss]`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from shoal.checkpoint.config import Goal
from shoal.config.check import Table, says


class Float32(Table, frozen=True, tag_field="kind", tag="float32"):
    """Parameters, arithmetic and gradients in float32."""


class Float64(Table, frozen=True, tag_field="kind", tag="float64"):
    """Everything in float64: for proofs, not for speed."""


class BFloat16(Table, frozen=True, tag_field="kind", tag="bfloat16"):
    """Matrix products in bfloat16 (autocast), of float32 parameters; gradients, reductions and norms in float32."""


class BFloat16Params(Table, frozen=True, tag_field="kind", tag="bfloat16_params"):
    """The model's parameters and arithmetic in bfloat16, float32 master copies of them in the optimizer.

    Replicated, and under ZeRO-1 and -2, this is Megatron's way; under ZeRO-3 shards are float32, and gathered in
    bfloat16, as by `fully_shard` with a `MixedPrecisionPolicy`. Checkpoints hold the masters.
    """

    reduce_dtype: Annotated[
        Literal["float32", "bfloat16"],
        says("In which ranks sum gradients: in bfloat16 half of the bytes, and every sum is rounded."),
    ] = "float32"


class Float16(Table, frozen=True, tag_field="kind", tag="float16"):
    """Matrix products in float16 (autocast) with loss scaling; parameters, gradients and norms in float32."""

    loss_scale: Annotated[float | Literal["dynamic"], says('A fixed scale of the loss, or "dynamic".')] = "dynamic"
    initial_scale: Annotated[float, says("Where the dynamic scale starts.", gt=0)] = 65536.0
    growth_steps: Annotated[int, says("Finite steps in a row after which the dynamic scale doubles.", ge=1)] = 2000

    def __post_init__(self) -> None:
        if not isinstance(self.loss_scale, str) and self.loss_scale <= 0:
            raise ValueError(f'loss_scale = {self.loss_scale}; a scale is above 0, such as 1024, or "dynamic"')


class Float8(Table, frozen=True, tag_field="kind", tag="float8"):
    """Linear layers of blocks in float8 (torchao), all else as under bfloat16; parameters and gradients in float32."""

    recipe: Annotated[
        Literal["tensorwise", "rowwise"],
        says("One scale for each factor of a product, or one for each row: slower, and outliers cost less."),
    ] = "tensorwise"
    emulate: Annotated[
        bool,
        says("Round to float8 and multiply in a wider type: on any device, slowly, to see what it does to the loss."),
    ] = False


PrecisionConfig = Float32 | Float64 | BFloat16 | BFloat16Params | Float16 | Float8


class CrossEntropy(Table, frozen=True, tag_field="kind", tag="cross_entropy"):
    """Cross-entropy of logits `[..., classes]` and integer targets, one value per target."""


class SquaredError(Table, frozen=True, tag_field="kind", tag="squared_error"):
    """The squared difference of outputs and targets, averaged over what is behind the weights' dimensions."""


class PythonLoss(Table, frozen=True, tag_field="kind", tag="python"):
    """The user's own loss: called with (outputs, targets), it returns one value per sample or per position."""

    build: Annotated[str, says('"package.module:function"; the function returns the loss, a callable.')]
    arguments: Annotated[dict[str, Any], says("Keywords for the function.")] = msgspec.field(default_factory=dict)


LossConfig = CrossEntropy | SquaredError | PythonLoss


class StopWhen(Goal, frozen=True):
    """When the run is over before its last step: evaluations have stopped improving."""

    patience: Annotated[int, says("Evaluations in a row without an improvement, after which the run ends.", ge=1)] = 5
    least_change: Annotated[float, says("What counts as an improvement: a change of more than this.", ge=0)] = 0.0


class HooksConfig(Table, frozen=True):
    """The user's functions that are called on every rank while a run goes on, each "package.module:function".

    They get a `HookRecord`: step, rank, values, model. What they return, names to numbers, is recorded too.
    """

    after_step: Annotated[list[str], says("Called after each step.")] = msgspec.field(default_factory=list)
    after_evaluation: Annotated[list[str], says("Called after each evaluation.")] = msgspec.field(default_factory=list)
    after_save: Annotated[list[str], says("Called when a checkpoint counts; what they return is not recorded.")] = (
        msgspec.field(default_factory=list)
    )


class DistillationConfig(Table, frozen=True, kw_only=True):
    """A trained model says what the classes of each sample are worth (arXiv:1503.02531)."""

    teacher: Annotated[str, says("The run directory or checkpoint of the teacher, which every rank holds whole.")]
    weight: Annotated[float, says("The teacher's share of the loss.", gt=0, le=1)] = 0.5
    temperature: Annotated[float, says("What logits are divided by before they are compared.", gt=0, le=1e3)] = 2.0
