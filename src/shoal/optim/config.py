"""The tables `[optimizer]`, one for each kind, and what each optimizer keeps. Imports no torch.

An optimizer declares its state here, once: checkpoints make slots from the declaration, ZeRO divides parameters as it
asks, and the planner counts its bytes.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from shoal.config.table import PositiveFloat, says
from shoal.optim.adaptive_config import Adafactor, Lion, NAdam, RAdam, RMSprop
from shoal.optim.declared import BLOCK, Common, Granularity, Slot, counter
from shoal.optim.layerwise_config import LAMB, LARS
from shoal.optim.muon_config import Dion, Muon
from shoal.optim.preconditioned_config import KFAC, SOAP, Shampoo
from shoal.optim.schedule_free_config import ScheduleFreeAdamW, ScheduleFreeSGD


class AdamW(Common, frozen=True, tag_field="kind", tag="adamw"):
    """AdamW (arXiv:1711.05101), PyTorch's fused kernel."""

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
    undivided: ClassVar[int] = BLOCK
    least_numbers: ClassVar[int] = 4096

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Both moments, and the number of steps."""
        each = 1 + 4 / BLOCK
        return (Slot("exp_avg", number_bytes=each), Slot("exp_avg_sq", number_bytes=each), counter("step"))


def in_8_bits(optimizer: Common) -> AdamW8bit | None:
    """The same optimizer with moments in 8 bits; None where there is none, or it is that."""
    return AdamW8bit(**msgspec.structs.asdict(optimizer)) if type(optimizer) is AdamW else None


class SGD(Common, frozen=True, tag_field="kind", tag="sgd"):
    """Stochastic gradient descent, PyTorch's fused kernel."""

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


OptimizerConfig = (
    AdamW
    | AdamW8bit
    | SGD
    | Adagrad
    | RMSprop
    | NAdam
    | RAdam
    | Lion
    | LARS
    | LAMB
    | Adafactor
    | Muon
    | Dion
    | SOAP
    | Shampoo
    | KFAC
    | ScheduleFreeAdamW
    | ScheduleFreeSGD
    | OneBitAdam
    | ZeroOneAdam
    | OneBitLAMB
)
