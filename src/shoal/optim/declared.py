"""What every optimizer's table declares: the state it keeps (`Slot`), what it needs to see together, groups, and the
averages, look-ahead and transforms of gradients beside it. Imports no torch.

Checkpoints make slots from the declaration, ZeRO divides parameters as it asks, and the planner counts its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec

from shoal.config.check import Positive, PositiveFloat, Table, says

if TYPE_CHECKING:
    from torch import Tensor

# The tables `[optimizer.average]` and `[optimizer.lookahead]`.


class EMA(Table, frozen=True, tag_field="kind", tag="ema"):
    """An exponential average of the weights, beside them: evaluations and exports are of it."""

    decay: Annotated[float, says("The share of the average that an update leaves.", ge=0, lt=1)] = 0.999


class SWA(Table, frozen=True, tag_field="kind", tag="swa"):
    """The mean of weights at intervals (arXiv:1803.05407), beside them: evaluations and exports are of it."""

    start: Annotated[Positive, says("The first update whose weights count; until then the mean is the weights.")]
    every: Annotated[Positive, says("Updates between two that count.")] = 1


AverageConfig = EMA | SWA


class Lookahead(Table, frozen=True):
    """Lookahead (arXiv:1907.08610): now and then weights go back towards where they were."""

    every: Annotated[Positive, says("Updates until they do.")] = 5
    share: Annotated[float, says("The share of the way that is kept.", gt=0, le=1)] = 0.5


# The tables `[[optimizer.transforms]]`: what happens to the numbers of a gradient before the optimizer sees it, one
# after the other.


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


Dims = tuple[int, ...]
Granularity = Literal["elements", "matrices"]
"""What an optimizer needs of a parameter on one rank: any elements of it, or the whole of it."""


def _like_parameter(shape: Dims) -> Dims:
    return shape


def _one_number(shape: Dims) -> Dims:
    return ()


@dataclass(frozen=True)
class Slot:
    """One tensor of an optimizer's state for each parameter: its name in PyTorch's state, and its shape from the
    parameter's.

    A slot of the parameter's shape is divided with it. `number_bytes` is what a number of it takes between two steps;
    None: what a number of the parameter does. `of`: only hidden matrices have it, or only the rest of the model.
    `planned` are its numbers for one of the parameter, as a plan counts them; None: 1 if it is as large, else 0.
    `whole`: it is kept on one rank, the parameter's owner, and follows from the shape of the whole parameter.
    `with_parts`: every rank that steps a part keeps it, also where a parameter has an owner. `python_number`: its
    optimizer keeps it as a number of Python, a checkpoint as a tensor (`shoal.optim.adopt.keep_numbers`).
    """

    name: str
    shape: Callable[[Dims], Dims] = _like_parameter
    number_bytes: float | None = None
    of: Literal["all", "hidden", "rest"] = "all"
    planned: float | None = None
    whole: bool = False
    with_parts: bool = False
    python_number: bool = False

    @property
    def like_parameter(self) -> bool:
        """Whether it is as large as the parameter, and divided with it."""
        return self.shape is _like_parameter and not self.whole

    def planned_numbers(self, hidden: float) -> float:
        """Numbers of it for one of the model, of which the share `hidden` lies in hidden matrices."""
        share = {"all": 1.0, "hidden": hidden, "rest": 1.0 - hidden}[self.of]
        return share * (float(self.like_parameter) if self.planned is None else self.planned)


def counter(name: str, *, with_parts: bool = False) -> Slot:
    """A slot of one number, such as the number of steps."""
    return Slot(name, _one_number, with_parts=with_parts)


class Described(NamedTuple):
    """A parameter as the unsplit model has it; `kind` is its role there, such as "embedding" or "norm"."""

    name: str
    shape: Dims
    kind: str
    decays: bool


class Group(Table, frozen=True):
    """What is different for some parameters."""

    rate: Annotated[float, says("What the learning rate is multiplied by.", ge=0, le=1e3)] = 1.0
    weight_decay: Annotated[
        float | None, says("Weight decay in the place of the optimizer's, whatever their shape.")
    ] = None
    kind: Annotated[
        Literal["adamw", "sgd", "lion"] | None,
        says(
            "Another optimizer for them, with its defaults but for `lr`, `momentum` and `weight_decay` here; default: "
            "the run's own."
        ),
    ] = None
    lr: Annotated[PositiveFloat | None, says("With `kind`: their peak rate; without it, that kind's default.")] = None
    momentum: Annotated[
        Annotated[float, msgspec.Meta(ge=0, lt=1)] | None, says('With `kind = "sgd"`: the momentum; default: 0.')
    ] = None

    def __post_init__(self) -> None:
        if self.lr is not None and self.kind is None:
            raise ValueError(f"lr = {self.lr:g} without kind; say kind, or rate, what the run's lr is multiplied by")
        if self.momentum is not None and self.kind != "sgd":
            raise ValueError(f'momentum = {self.momentum:g} without kind = "sgd"; leave it out')

    @property
    def table(self) -> Common | None:
        """That of its own optimizer; None: the run's steps them."""
        if self.kind is None:
            return None
        given: dict[str, Any] = {"lr": self.lr, "momentum": self.momentum}
        return Common.kinds()[self.kind](**{key: value for key, value in given.items() if value is not None})


class Common(Table, frozen=True):
    """Keys that every optimizer has. Each kind has also `lr`, its peak learning rate, with a default of its own."""

    if TYPE_CHECKING:
        lr: float = 0.0

    works_on: ClassVar[Granularity] = "elements"
    asks_for_whole: ClassVar[bool] = False
    """Whether it asks something of whole parameters (`shoal.optim.parts`), whatever it works on."""
    undivided: ClassVar[int] = 1
    """So many numbers of a parameter, one after the other, are not divided between ranks."""
    least_numbers: ClassVar[int] = 0
    """Parameters with fewer numbers form groups of their own, which say `small`."""
    sends_momentum: ClassVar[bool] = False
    """Whether ranks sum momenta, coded, instead of gradients (`OneBit`)."""

    steps_alone: ClassVar[bool] = False
    """Whether it steps all parameters itself, so that no group has an optimizer of its own."""
    updates_apart: ClassVar[bool] = False
    """Whether the update of some parameters needs nothing but their own state, which may then lie elsewhere."""

    width_rule: ClassVar[Literal["adam", "sgd"] | None] = None
    """Whose rule says how its rates follow the width of a model (`shoal.optim.mup`); None: it is not known."""

    def own_width_factor(self, parameter: Described, grows: str, times: float) -> float | None:
        """What the rate of `parameter` is multiplied by where it `grows` by `times` and its updates follow another rule
        than `width_rule`; None: they do not.
        """
        return None

    keeps_average: ClassVar[bool] = False
    """Whether one of its slots is an average, under which the run is evaluated (`shoal.optim.average`)."""

    @classmethod
    def kinds(cls) -> dict[str, type[Common]]:
        """Every table with a kind, by it, in alphabetical order: all that are defined."""
        found: dict[str, type[Common]] = {}
        for table in cls.__subclasses__():
            own = {str(tag): table} if (tag := table.__struct_config__.tag) is not None else {}
            found |= own | table.kinds()
        return dict(sorted(found.items()))

    @property
    def needs(self) -> Granularity:
        """`works_on`, or what the class says that a table names."""
        return self.works_on

    @property
    def identity(self) -> str:
        """What may not change from a checkpoint to the run that goes on from it."""
        return self.variant

    @property
    def backwards(self) -> float:
        """Forwards and backwards of a step, at most, for each that other optimizers take."""
        return 1.0

    def matrix_flops(self, rows: int, columns: int) -> float:
        """Floating-point operations of an update of a hidden matrix, beyond a few for each of its numbers."""
        return 0.0

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Its state for each parameter, without what `average` and `lookahead` add."""
        return ()

    @property
    def all_slots(self) -> tuple[Slot, ...]:
        """Its state for each parameter."""
        counted = (counter("averaged", with_parts=True),) if isinstance(self.average, SWA) else ()
        average = () if self.average is None else (Slot("average"), *counted)
        slow = () if self.lookahead is None else (Slot("slow_weight"), counter("looked", with_parts=True))
        found: dict[str, Slot] = {}
        for slot in (*self.slots, *(slot for table in self.others for slot in table.slots)):
            known = found.setdefault(slot.name, slot)
            if known.of != slot.of:  # a group may take any parameter
                found[slot.name] = replace(known, of="all")
        return (*found.values(), *average, *slow)

    @property
    def others(self) -> tuple[Common, ...]:
        """The tables of groups with optimizers of their own."""
        return tuple(table for group in self.groups.values() if (table := group.table) is not None)

    @property
    def takes_sparse(self) -> bool:
        """Whether an update of some rows of an embedding table leaves the others as they are."""
        return False

    def options(self, parameter: Described) -> dict[str, Any]:
        """What the group of `parameter` says beside `weight_decay` and `rate`."""
        return {}

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
    lr_scaling: Annotated[
        Literal["linear", "square_root"],
        says("By what `lr_for_samples` multiplies `lr`: the ratio of the batches, or its square root."),
    ] = "linear"
    groups: Annotated[
        dict[str, Group], says("Tables by patterns of parameter names (`blocks.*.bias`); the first that fits decides.")
    ] = msgspec.field(default_factory=dict)

    layer_decay: Annotated[
        float,
        says(
            "What the rate of each layer is of the next one's (arXiv:2106.08254): with it, layers near the input keep "
            "what they have learned while a model is trained further. 1: all have the same."
        ),
        msgspec.Meta(gt=0, le=1),
    ] = 1.0

    transforms: Annotated[
        tuple[TransformConfig, ...],
        says("What happens to the numbers of the gradient, in this order, after `clip_norm`; `kind` says which."),
    ] = ()

    average: Annotated[
        AverageConfig | None, says("An average of the weights that is kept beside them, evaluated and exported.")
    ] = None
    lookahead: Annotated[Lookahead | None, says("Weights go back, now and then, towards where they were.")] = None

    def group_of(self, name: str) -> Group:
        """What `groups` says of the parameter `name`."""
        return next((group for pattern, group in self.groups.items() if fnmatchcase(name, pattern)), Group())


class Elementwise(Common, frozen=True):
    """An optimizer that treats every number alone, written down as its equation: a subclass is all there is of it.

    Its state begins at zero. A slot `step` counts updates.
    """

    implemented_by: ClassVar[str] = "shoal.optim.adaptive:elementwise"
    updates_apart: ClassVar[bool] = True

    @staticmethod
    def update(x: Tensor, g: Tensor, state: dict[str, Tensor], options: dict[str, Any], t: Tensor) -> None:
        """Changes `x`, a parameter or a piece of one, and its `state`, in place, by the gradient `g`.

        `options` holds the keys of the table, `lr` as the schedule has it, and `weight_decay`. `t` is the number of
        this update, from 1, one number in float64 on the device; of tables without a slot `step` it is 0. It may call
        what tensors have, and nothing that differs between a piece and the whole, such as a norm.
        """
        raise NotImplementedError
