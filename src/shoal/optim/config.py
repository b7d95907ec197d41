"""The tables `[optimizer]`, one for each kind, and what each optimizer keeps. Imports no torch.

An optimizer declares its state here, once: checkpoints make slots from the declaration, ZeRO divides parameters as it
asks, and the planner counts its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

import msgspec

from shoal.codec.config import MOMENT_BLOCK
from shoal.config.check import Positive, PositiveFloat, Table, imported, says
from shoal.optim import kinds, matrix_kinds  # noqa: F401  # optimizers' tables
from shoal.optim.declared import Common, Described, Granularity, Slot, counter


class AdamW(Common, frozen=True, tag_field="kind", tag="adamw"):
    """AdamW (arXiv:1711.05101), PyTorch's fused kernel."""

    width_rule: ClassVar[Literal["adam", "sgd"] | None] = "adam"

    implemented_by: ClassVar[str] = "shoal.optim.build:adamw"
    updates_apart: ClassVar[bool] = True

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

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Both moments, and the number of steps."""
        return (Slot("exp_avg"), Slot("exp_avg_sq"), counter("step"))


class AdamW8bit(AdamW, frozen=True, tag_field="kind", tag="adamw_8bit"):
    """AdamW with moments in 8 bits (arXiv:2110.02861): 2 bytes a parameter instead of 8, from 4,096 numbers on."""

    implemented_by: ClassVar[str] = "shoal.optim.adamw_8bit:build"
    updates_apart: ClassVar[bool] = True
    undivided: ClassVar[int] = MOMENT_BLOCK
    least_numbers: ClassVar[int] = 4096

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Both moments, and the number of steps."""
        each = 1 + 4 / MOMENT_BLOCK
        return (Slot("exp_avg", number_bytes=each), Slot("exp_avg_sq", number_bytes=each), counter("step"))


def in_8_bits(optimizer: Common) -> AdamW8bit | None:
    """The same optimizer with moments in 8 bits; None where there is none, or it is that."""
    return AdamW8bit(**msgspec.structs.asdict(optimizer)) if type(optimizer) is AdamW else None


class SGD(Common, frozen=True, tag_field="kind", tag="sgd"):
    """Stochastic gradient descent, PyTorch's fused kernel."""

    width_rule: ClassVar[Literal["adam", "sgd"] | None] = "sgd"

    implemented_by: ClassVar[str] = "shoal.optim.build:sgd"
    updates_apart: ClassVar[bool] = True

    lr: Annotated[float, says("Peak learning rate.", ge=0, le=1e3)] = 0.1
    momentum: Annotated[float, says("Momentum.", ge=0, lt=1)] = 0.0
    nesterov: Annotated[bool, says("Nesterov's form of the momentum.")] = False

    def __post_init__(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov = true with momentum = 0; Nesterov's form needs a momentum above 0, such as 0.9")

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The velocity, if there is momentum."""
        return (Slot("momentum_buffer"),) if self.momentum else ()

    @property
    def takes_sparse(self) -> bool:
        """Without momentum."""
        return not self.momentum


class Adagrad(Common, frozen=True, tag_field="kind", tag="adagrad"):
    """Adagrad (JMLR 12, 2011), whose step shrinks with the sum of squared gradients: for embedding tables."""

    implemented_by: ClassVar[str] = "shoal.optim.build:adagrad"
    steps_alone: ClassVar[bool] = True

    lr: Annotated[float, says("Peak learning rate.", ge=0, le=1e3)] = 0.01
    eps: Annotated[float, says("Added to the root of the sum.", gt=0)] = 1e-10

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The sum of squares, and the number of steps."""
        return (Slot("sum"), counter("step"))

    @property
    def takes_sparse(self) -> bool:
        """Rows that a step has not touched have gradient 0, and stay."""
        return True


class OneBit(Common, frozen=True):
    """What the optimizers have in common that send their momentum in one bit a number."""

    sends_momentum: ClassVar[bool] = True
    steps_alone: ClassVar[bool] = True

    lr: Annotated[float, says("Peak learning rate.", ge=0, le=1e3)] = 3e-4
    beta1: Annotated[float, says("Decay of the momentum.", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, says("Decay of the variance.", ge=0, lt=1)] = 0.95
    eps: Annotated[float, says("Added to the root of the variance.", gt=0)] = 1e-8
    weight_decay: Annotated[float, says("Weight decay, on parameters of two dimensions or more only.", ge=0, le=1)] = (
        0.1
    )
    block: Annotated[int, says("Numbers of a momentum that share a scale on the wire.", ge=8, le=1 << 20)] = 1024

    def exact(self, update: int) -> bool:
        """Whether `update`, counted from 1, takes the gradient as it is, and moves the variance."""
        raise NotImplementedError


class OneBitAdam(OneBit, frozen=True, tag_field="kind", tag="one_bit_adam"):
    """1-bit Adam (arXiv:2102.02888): AdamW, then a variance that stands still and a momentum sent by its signs."""

    implemented_by: ClassVar[str] = "shoal.optim.one_bit:MomentumAdam"

    exact_steps: Annotated[
        int, says("First updates, of AdamW with gradients as they are; 15 to 20 % of all, in the paper.", ge=1)
    ] = 100

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Both moments, the number of updates, and that of the variance."""
        return (Slot("exp_avg"), Slot("exp_avg_sq"), counter("step"), counter("variance_step"))

    def exact(self, update: int) -> bool:
        return update <= self.exact_steps


class OneBitLAMB(OneBit, frozen=True, tag_field="kind", tag="one_bit_lamb"):
    """1-bit LAMB (arXiv:2104.06069): LAMB, then a momentum sent by its signs; its step lengths follow the variance."""

    implemented_by: ClassVar[str] = "shoal.optim.one_bit:MomentumLAMB"
    works_on: ClassVar[Granularity] = "matrices"

    lr: Annotated[float, says("Peak learning rate.", ge=0, le=1e3)] = 4e-3
    exact_steps: Annotated[
        int, says("First updates, of LAMB with gradients as they are; 15 to 20 % of all, in the paper.", ge=1)
    ] = 100

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Both moments, the variance that goes on, the number of updates, and what scales a tensor's step."""
        moments = (Slot("exp_avg"), Slot("exp_avg_sq"), Slot("exp_avg_sq_fresh"))
        return (*moments, counter("step"), counter("coefficient"), counter("factor"))

    def exact(self, update: int) -> bool:
        return update <= self.exact_steps


class ZeroOneAdam(OneBit, frozen=True, tag_field="kind", tag="zero_one_adam"):
    """0/1 Adam (arXiv:2202.06009) without its local steps: the variance moves at intervals of 1, 2, 4, ... updates."""

    implemented_by: ClassVar[str] = "shoal.optim.one_bit:MomentumAdam"

    variance_updates: Annotated[
        int, says("Updates of the variance at each interval, after which the interval doubles.", ge=1)
    ] = 16

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Both moments, the number of updates, and that of the variance."""
        return (Slot("exp_avg"), Slot("exp_avg_sq"), counter("step"), counter("variance_step"))

    def exact(self, update: int) -> bool:
        """At interval 2^i there are `variance_updates` of them, over variance_updates 2^i updates."""
        interval, first = 1, 0
        while update > first + self.variance_updates * interval:
            first += self.variance_updates * interval
            interval *= 2
        return (update - first - 1) % interval == interval - 1


class PythonOptimizer(Common, frozen=True, kw_only=True, tag_field="kind", tag="python"):
    """The user's own optimizer, PyTorch's, or a package's: a class of `torch.optim.Optimizer`.

    What it keeps, and what its update needs to see together, the class says (`slots`, `works_on`), or it is tried.
    """

    implemented_by: ClassVar[str] = "shoal.optim.build:named"
    asked_by: ClassVar[str] = "shoal.optim.build:asked"
    asks_for_whole: ClassVar[bool] = True
    steps_alone: ClassVar[bool] = True

    build: Annotated[
        str,
        says(
            '"package.module:Class"; called with groups of parameters, `lr` and `arguments`, it returns a '
            "`torch.optim.Optimizer`.",
            pattern=r"^[^:\s]+:[^:\s]+$",
        ),
    ]
    lr: Annotated[float, says("Peak learning rate.", ge=0, le=1e3)] = 1e-3
    arguments: Annotated[
        dict[str, Any], says("Keywords for the class, other than `lr` and `weight_decay`, which are keys here.")
    ] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if given := next((key for key in ("lr", "weight_decay", "params") if key in self.arguments), None):
            instead = "Shoal gives it: leave it out" if given == "params" else f"set optimizer.{given} instead"
            raise ValueError(f"optimizer.arguments has {given}, which would have no effect: {instead}")

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What the class says, or keeps after a step."""
        return self._asked().slots

    @property
    def needs(self) -> Granularity:
        """What the class says, or whole parameters."""
        return self._asked().works_on

    @property
    def identity(self) -> str:
        """Another class has other state."""
        return f"{self.variant}, {self.build}"

    def options(self, parameter: Described) -> dict[str, Any]:
        """What the class says of it, if it has a function `group_options` (`shoal.optim.owners.WholeOptimizer`)."""
        found = self._asked().options
        return {} if found is None else found(parameter)

    def _asked(self) -> Any:
        """Imports torch and the class."""
        return imported(self.asked_by)(self)


if TYPE_CHECKING:
    OptimizerConfig = Common
else:
    OptimizerConfig = Union[tuple(Common.kinds().values())]  # noqa: UP007
"""Every optimizer's table: those above, and those of the files that are imported for it."""


def kinds_whose(tables: Callable[[type[Common]], bool]) -> str:
    """The kinds of optimizers whose tables are so, in words: `"a", "b" or "c"`."""
    *others, last = [f'"{kind}"' for kind, table in Common.kinds().items() if tables(table)]
    return f"{', '.join(others)} or {last}"


def groups_refusal(optimizer: Common) -> str | None:
    """One sentence if `optimizer` does not step beside those of its groups, or gives them no rate."""
    pattern = next((pattern for pattern, group in optimizer.groups.items() if group.kind is not None), None)
    if pattern is None:
        return None
    said = f'optimizer.groups."{pattern}" with a kind of its own'
    if optimizer.steps_alone:
        return (
            f'{said}, and optimizer.kind = "{optimizer.variant}", which steps all parameters itself: choose '
            f"{kinds_whose(lambda table: not table.steps_alone)}, or leave kind out of the groups"
        )
    if optimizer.lr == 0:
        return (
            f"{said}, and optimizer.lr = 0: a schedule scales both rates alike, and cannot from 0; set it above 0, and "
            "freeze what is not to train ([freeze])"
        )
    return None


# The table `[schedule]`: the learning rate over the run.


Shape = Literal["cosine", "linear", "constant", "stable", "one_cycle", "polynomial", "step", "inverse_sqrt", "chained"]
_OWN_KEYS = {
    "decay_fraction": "stable",
    "power": "polynomial",
    "milestones": "step",
    "factor": "step",
    "initial_fraction": "one_cycle",
    "phases": "chained",
}


class Phase(Table, frozen=True):
    """A part of a chained schedule: from the rate at which the one before ends to `final_fraction` of the peak."""

    kind: Annotated[Literal["constant", "linear", "cosine"], says("The shape from its first rate to its last.")]
    final_fraction: Annotated[
        float | None, says("The rate at its end, as a fraction of the peak; without it, the rate at its start.")
    ] = None
    steps: Annotated[Positive | None, says("Its steps; without it, all that are left. The last has none.")] = None

    def __post_init__(self) -> None:
        if (self.final_fraction is None) != (self.kind == "constant"):
            raise ValueError(
                f'a phase of kind = "{self.kind}" {"with" if self.kind == "constant" else "without"} final_fraction; '
                "a constant one has none, the others need it"
            )
        if self.final_fraction is not None and not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction = {self.final_fraction:g} of a phase must be from 0 to 1")


class Schedule(Table, frozen=True):
    """The learning rate over the run: a linear warm-up, then a decay to `final_fraction` of the peak."""

    kind: Annotated[Shape, says("The shape after the warm-up.")] = "cosine"
    warmup_steps: Annotated[int, says("Steps in which the rate rises from near 0 to its peak.", ge=0)] = 0
    final_fraction: Annotated[float, says("The rate at the last step, as a fraction of the peak.", ge=0, le=1)] = 0.1
    decay_fraction: Annotated[
        float,
        says(
            '"stable": the share of the steps after the warm-up in which the rate falls, linearly.',
            gt=0,
            le=1,
        ),
    ] = 0.2
    power: Annotated[PositiveFloat, says('"polynomial": the power of the share of steps that are left.')] = 2.0
    milestones: Annotated[
        tuple[Positive, ...], says('"step": after each of these steps the rate is multiplied by `factor`.')
    ] = ()
    factor: Annotated[float, says('"step": what the rate is multiplied by.', gt=0, le=1)] = 0.1
    initial_fraction: Annotated[
        float, says('"one_cycle": the rate before the first step, as a fraction of the peak.', ge=0, le=1)
    ] = 0.04
    phases: Annotated[tuple[Phase, ...], says('"chained": what follows the warm-up, one after the other.')] = ()

    def __post_init__(self) -> None:
        defaults = _defaults()
        for key, kind in _OWN_KEYS.items():
            if self.kind != kind and getattr(self, key) != defaults[key]:
                raise ValueError(f'{key} with kind = "{self.kind}"; it belongs to kind = "{kind}": leave it out')
        if self.kind == "step" and (not self.milestones or list(self.milestones) != sorted(set(self.milestones))):
            raise ValueError(
                f'kind = "step" with milestones = {list(self.milestones)}; give the steps after which the rate falls, '
                "ascending, such as [1000, 2000]"
            )
        if self.kind == "chained" and not self.phases:
            raise ValueError('kind = "chained" without phases; give [[schedule.phases]] with kind and steps')
        open_ended = [number for number, phase in enumerate(self.phases, start=1) if phase.steps is None]
        if self.phases and open_ended != [len(self.phases)]:
            raise ValueError(
                "every phase of a chained schedule but the last has steps, and the last has none: it takes what is left"
            )


def _defaults() -> dict[str, Any]:
    names, values = Schedule.__struct_fields__, Schedule.__struct_defaults__
    return dict(zip(names[-len(values) :], values, strict=True))
