"""Table `[sync]`: how replicas agree. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from shoal.config.table import Positive, Table, says

Natural = Annotated[int, msgspec.Meta(ge=0)]
"""A whole number from 0."""


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


class ServerConfig(Table, frozen=True, tag_field="kind", tag="server"):
    """A parameter server: workers push gradients and pull parameters; every rank serves a part of them, and its
    optimizer updates that part for all.
    """

    implemented_by: ClassVar[str] = "shoal.sync.server:ServerSync"

    admission: Annotated[
        Literal["sync", "async", "bounded", "backup"],
        says(
            "Who may go on, and whose gradient counts. sync: an update holds one gradient of every worker; async: "
            "every gradient is an update; bounded: a worker may be `bound` steps ahead of the slowest "
            "(stale-synchronous parallel); backup: an update holds the first gradients of all but `backup` workers, "
            "later ones are dropped (arXiv:1604.00981)."
        ),
    ] = "sync"
    bound: Annotated[
        Natural | None, says('Steps that a worker may be ahead of the slowest, with admission = "bounded".')
    ] = None
    backup: Annotated[
        Positive | None, says('Workers whose gradients an update does not wait for, with admission = "backup".')
    ] = None
    staleness: Annotated[
        Literal["plain", "scaled", "compensated"],
        says(
            'What a gradient is worth that was computed tau updates ago, with admission = "async": all; 1 / tau '
            "(arXiv:1511.05950); with DC-ASGD's compensation of the delay (arXiv:1609.08326)."
        ),
    ] = "plain"
    compensation: Annotated[
        float, says('The strength lambda of DC-ASGD, with staleness = "compensated".', ge=0, le=1e3)
    ] = 0.04
    staleness_cap: Annotated[
        Natural | None, says('Gradients more updates old than this are dropped, with admission = "async".')
    ] = None
    period: Annotated[
        Positive | None,
        says(
            "Steps of each worker between two agreements, where all wait until parameters are equal: evaluations, "
            "saves and stops happen there. Default: 1 for sync, 50 for the others."
        ),
    ] = None

    def __post_init__(self) -> None:
        for key, value, admission in (
            ("bound", self.bound, "bounded"),
            ("backup", self.backup, "backup"),
            ("staleness_cap", self.staleness_cap, "async"),
            ("staleness", None if self.staleness == "plain" else self.staleness, "async"),
        ):
            if value is not None and self.admission != admission:
                raise ValueError(
                    f'{key} = {value!r} with admission = "{self.admission}"; {key} is for admission = "{admission}": '
                    "leave one of them out"
                )
        for key, value, admission in (("bound", self.bound, "bounded"), ("backup", self.backup, "backup")):
            if value is None and self.admission == admission:
                raise ValueError(f'admission = "{admission}" without {key}; set {key}, such as {key} = 1')

    @property
    def steps_between(self) -> int:
        """Steps of each worker between two agreements."""
        return self.period or (1 if self.admission == "sync" else 50)


class HogwildConfig(Table, frozen=True, tag_field="kind", tag="hogwild"):
    """The processes of one host update the same parameters in shared memory, without locks (arXiv:1106.5730)."""

    implemented_by: ClassVar[str] = "shoal.sync.hogwild:HogwildSync"

    period: Annotated[
        int,
        says(
            "Steps of each process between two agreements, where all wait for each other: evaluations, saves and stops "
            "happen there.",
            ge=1,
        ),
    ] = 50


SyncConfig = AllReduceConfig | LocalConfig | ServerConfig | HogwildConfig
