"""Table `[sync]`: how replicas agree. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar

from shoal.config.table import Table, says


class AllReduceConfig(Table, frozen=True, tag_field="kind", tag="allreduce"):
    """The replicas' gradients are summed by all-reduce in every step, while the backward still runs."""

    implemented_by: ClassVar[str] = "shoal.sync.allreduce:AllReduceSync"


class LocalConfig(Table, frozen=True, tag_field="kind", tag="local"):
    """Each replica takes steps of its own; every `period` steps they agree on what they changed, by an outer optimizer.

    The defaults are DiLoCo's (arXiv:2311.08105). outer_lr = 1 and outer_momentum = 0 average the parameters: local SGD
    (arXiv:1805.09767).
    """

    implemented_by: ClassVar[str] = "shoal.sync.local:LocalSync"

    period: Annotated[int, says("Steps of each replica between two agreements.", ge=1)] = 50
    outer_lr: Annotated[float, says("Learning rate of the outer optimizer.", gt=0, le=10)] = 0.7
    outer_momentum: Annotated[float, says("Momentum of the outer optimizer.", ge=0, lt=1)] = 0.9
    nesterov: Annotated[bool, says("Nesterov's form of the outer momentum.")] = True
    warmup_steps: Annotated[
        int,
        says("First steps after each of which parameters are averaged (post-local SGD, arXiv:1808.07217).", ge=0),
    ] = 0


SyncConfig = AllReduceConfig | LocalConfig
