"""Tables `[optimizer]` and `[schedule]`, and what each optimizer keeps. Imports no torch.

An optimizer declares its state here, once: checkpoints make slots from the declaration, ZeRO divides parameters as it
asks, and the planner counts its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgspec

from shoal.config.table import Positive, PositiveFloat, Table, says

Dims = tuple[int, ...]
Granularity = Literal["elements", "matrices"]
"""What an optimizer needs of a parameter on one rank: any elements of it, or the whole of it."""

BLOCK = 256
"""Numbers of a moment in 8 bits that share a scale (`shoal.optim.dynamic`)."""


def _like_parameter(shape: Dims) -> Dims:
    return shape


def _one_number(shape: Dims) -> Dims:
    return ()


@dataclass(frozen=True)
class Slot:
    """One tensor of an optimizer's state for each parameter: its name in PyTorch's state, and its shape from the
    parameter's.

    A slot of the parameter's shape is divided with it. `number_bytes` is what a number of it takes between two steps;
    None: what a number of the parameter does.
    """

    name: str
    shape: Callable[[Dims], Dims] = _like_parameter
    number_bytes: float | None = None

    @property
    def like_parameter(self) -> bool:
        """Whether it is as large as the parameter, and divided with it."""
        return self.shape is _like_parameter


def counter(name: str) -> Slot:
    """A slot of one number, such as the number of steps."""
    return Slot(name, _one_number)


class _Common(Table, frozen=True):
    """Keys that every optimizer has."""

    works_on: ClassVar[Granularity] = "elements"
    undivided: ClassVar[int] = 1
    """So many numbers of a parameter, one after the other, are not divided between ranks."""
    least_numbers: ClassVar[int] = 0
    """Parameters with fewer numbers form groups of their own, which say `small`."""
    sends_momentum: ClassVar[bool] = False
    """Whether ranks sum momenta, coded, instead of gradients (`OneBit`)."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Its state for each parameter."""
        return ()

    @property
    def takes_sparse(self) -> bool:
        """Whether an update of some rows of an embedding table leaves the others as they are."""
        return False

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

    implemented_by: ClassVar[str] = "shoal.optim.build:adamw"

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
    undivided: ClassVar[int] = BLOCK
    least_numbers: ClassVar[int] = 4096

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Both moments, and the number of steps."""
        each = 1 + 4 / BLOCK
        return (Slot("exp_avg", number_bytes=each), Slot("exp_avg_sq", number_bytes=each), counter("step"))


def in_8_bits(optimizer: _Common) -> AdamW8bit | None:
    """The same optimizer with moments in 8 bits; None where there is none, or it is that."""
    return AdamW8bit(**msgspec.structs.asdict(optimizer)) if type(optimizer) is AdamW else None


class SGD(_Common, frozen=True, tag_field="kind", tag="sgd"):
    """Stochastic gradient descent, PyTorch's fused kernel."""

    implemented_by: ClassVar[str] = "shoal.optim.build:sgd"

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


class Adagrad(_Common, frozen=True, tag_field="kind", tag="adagrad"):
    """Adagrad (JMLR 12, 2011), whose step shrinks with the sum of squared gradients: for embedding tables."""

    implemented_by: ClassVar[str] = "shoal.optim.build:adagrad"

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


class OneBit(_Common, frozen=True):
    """What the optimizers have in common that send their momentum in one bit a number."""

    sends_momentum: ClassVar[bool] = True

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

    implemented_by: ClassVar[str] = "shoal.optim.one_bit_lamb:MomentumLAMB"
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


class Schedule(Table, frozen=True):
    """The learning rate over the run: a linear warm-up, then a decay to `final_fraction` of the peak."""

    kind: Annotated[Literal["cosine", "linear", "constant"], says("The shape after the warm-up.")] = "cosine"
    warmup_steps: Annotated[int, says("Steps in which the rate rises from near 0 to its peak.", ge=0)] = 0
    final_fraction: Annotated[float, says("The rate at the last step, as a fraction of the peak.", ge=0, le=1)] = 0.1


OptimizerConfig = AdamW | AdamW8bit | SGD | Adagrad | OneBitAdam | ZeroOneAdam | OneBitLAMB
