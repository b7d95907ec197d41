"""The tables of schedule-free optimizers. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar

from shoal.config.table import says
from shoal.optim.declared import Common, Slot, counter


class _ScheduleFree(Common, frozen=True):
    """What both have in common."""

    keeps_average: ClassVar[bool] = True


class ScheduleFreeAdamW(_ScheduleFree, frozen=True, tag_field="kind", tag="schedule_free_adamw"):
    """Schedule-free AdamW (arXiv:2405.15682): an average in the place of a decay of the rate."""

    implemented_by: ClassVar[str] = "shoal.optim.schedule_free:adamw"

    lr: Annotated[float, says("Learning rate; often 1 to 10 times AdamW's.", ge=0, le=1e3)] = 2.5e-3
    beta1: Annotated[float, says("The share of the average in the weights.", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, says("Decay of the second moment.", ge=0, lt=1)] = 0.999
    eps: Annotated[float, says("Added to the root of the second moment.", gt=0)] = 1e-8

    @property
    def slots(self) -> tuple[Slot, ...]:
        """z, the average, the second moment, the number of steps, and the sum of squared rates."""
        return (Slot("z"), Slot("average"), Slot("exp_avg_sq"), counter("step"), counter("squared_rates"))


class ScheduleFreeSGD(_ScheduleFree, frozen=True, tag_field="kind", tag="schedule_free_sgd"):
    """Schedule-free SGD (arXiv:2405.15682): an average in the place of a decay of the rate."""

    implemented_by: ClassVar[str] = "shoal.optim.schedule_free:sgd"

    lr: Annotated[float, says("Learning rate; often 10 times that of SGD with momentum.", ge=0, le=1e3)] = 1.0
    beta: Annotated[float, says("The share of the average in the weights.", ge=0, lt=1)] = 0.9

    @property
    def slots(self) -> tuple[Slot, ...]:
        """z, the average, the number of steps, and the sum of squared rates."""
        return (Slot("z"), Slot("average"), counter("step"), counter("squared_rates"))
