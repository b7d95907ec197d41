"""The tables `[[optimizer.transforms]]`: what happens to the numbers of a gradient before the optimizer sees it, one
after the other. Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from shoal.config.table import Table, says


class ClipValue(Table, frozen=True, tag_field="kind", tag="clip_value"):
    """No number is larger than `limit`."""

    implemented_by: ClassVar[str] = "shoal.optim.transforms:clip_value"

    limit: Annotated[float, says("The largest size of a number.", gt=0)]


class ClipLayer(Table, frozen=True, tag_field="kind", tag="clip_layer"):
    """The gradient of no parameter has a larger 2-norm than `limit`."""

    implemented_by: ClassVar[str] = "shoal.optim.transforms:clip_layer"

    limit: Annotated[float, says("The largest norm.", gt=0)]


class ClipAdaptively(Table, frozen=True, tag_field="kind", tag="clip_adaptively"):
    """Adaptive clipping (arXiv:2102.06171): the gradient of a row is not larger than `limit` times the row itself."""

    implemented_by: ClassVar[str] = "shoal.optim.transforms:clip_adaptively"

    limit: Annotated[float, says("The largest ratio of the norms of gradient and row.", gt=0)] = 0.01
    least: Annotated[float, says("The least norm that a row is taken for.", gt=0)] = 1e-3


class Centralise(Table, frozen=True, tag_field="kind", tag="centralise"):
    """Centralisation (arXiv:2004.01461): from each row of a matrix's gradient its mean is taken."""

    implemented_by: ClassVar[str] = "shoal.optim.transforms:centralise"


class AddNoise(Table, frozen=True, tag_field="kind", tag="add_noise"):
    """Gaussian noise (arXiv:1511.06807): the same numbers in every layout, of the seed, the step and the place."""

    implemented_by: ClassVar[str] = "shoal.optim.transforms:add_noise"

    std: Annotated[float, says("Its standard deviation in the first step.", gt=0)]
    decay: Annotated[float, says("Step t has std / t^(decay / 2).", ge=0)] = 0.55


TransformConfig = ClipValue | ClipLayer | ClipAdaptively | Centralise | AddNoise
