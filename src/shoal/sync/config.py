"""Table `[sync]`: how replicas agree. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from shoal.config.check import Positive, Table, says
from shoal.maths.mixing import Matrix, check_mixing, equal_shares, metropolis, one_peer_exponential, ring, torus

ReplicasAre = Literal["lockstep", "own_steps", "workers"]
EventsAre = Literal["ordered", "recorded", "unordered"]
Natural = Annotated[int, msgspec.Meta(ge=0)]
"""A whole number from 0."""


class Strategy(Table, frozen=True):
    """What the rules ask of every strategy.

    own_steps: replicas, split in any way, take optimizer steps of their own. workers: replicas of one rank, which leave
    their updates to others. lockstep: all ranks take every step together.

    takes_sparse: it sends the rows of an embedding table that a step touched, and not the dense gradient.

    takes_codec: what replicas send each other may be coded. weighs_samples: replicas count by the samples that they
    computed, so that work may be divided by speed.
    """

    replicas_are: ClassVar[ReplicasAre] = "own_steps"
    takes_sparse: ClassVar[bool] = False
    takes_codec: ClassVar[bool] = False
    weighs_samples: ClassVar[bool] = False

    @property
    def in_canonical_order(self) -> bool:
        """Whether the number of replicas may change no bit."""
        return False

    @property
    def serving_only(self) -> int:
        """Replicas, the last ones, that compute no gradients."""
        return 0

    @property
    def events_are(self) -> EventsAre:
        """Does the run file fix the order in which replicas' contributions count; does a run record it; or neither?"""
        return "ordered"

    def for_one(self) -> Strategy:
        """The strategy for a replica alone, which others have left."""
        return self


class AllReduceConfig(Strategy, frozen=True, tag_field="kind", tag="allreduce"):
    """The replicas' gradients are summed by all-reduce in every step, while the backward still runs."""

    implemented_by: ClassVar[str] = "shoal.sync.strategy:AllReduceSync"
    replicas_are: ClassVar[ReplicasAre] = "lockstep"
    takes_sparse: ClassVar[bool] = True
    takes_codec: ClassVar[bool] = True
    weighs_samples: ClassVar[bool] = True

    order: Annotated[
        Literal["any", "canonical"],
        says(
            "canonical: gradients of `logical_shards` equal parts of the batch are summed in one fixed tree, so that "
            "the number of replicas changes no bit of the weights."
        ),
    ] = "any"
    logical_shards: Annotated[
        int, says('Parts of the batch for `order = "canonical"`; no more replicas than these.', ge=1, le=4096)
    ] = 8

    @property
    def in_canonical_order(self) -> bool:
        return self.order == "canonical"


class OuterKeys(Strategy, frozen=True):
    """The outer optimizer: SGD on what replicas changed. Its defaults are DiLoCo's (arXiv:2311.08105)."""

    period: Annotated[int, says("Steps of each replica between two agreements.", ge=1)] = 50
    outer_lr: Annotated[float, says("Learning rate of the outer optimizer.", gt=0, le=10)] = 0.7
    outer_momentum: Annotated[float, says("Momentum of the outer optimizer.", ge=0, lt=1)] = 0.9
    nesterov: Annotated[bool, says("Nesterov's form of the outer momentum.")] = True


class LocalConfig(OuterKeys, frozen=True, tag_field="kind", tag="local"):
    """Each replica takes steps of its own; every `period` steps they agree on what they changed, by an outer optimizer.

    The defaults are DiLoCo's (arXiv:2311.08105). outer_lr = 1 and outer_momentum = 0 average the parameters: local SGD
    (arXiv:1805.09767). nesterov = false, outer_lr = 1 and per_lr = true: SlowMo (arXiv:1910.00643).
    """

    implemented_by: ClassVar[str] = "shoal.sync.local:LocalSync"
    takes_codec: ClassVar[bool] = True
    weighs_samples: ClassVar[bool] = True

    merge: Annotated[
        Literal["mean", "adasum"],
        says(
            "What becomes of the replicas' changes: their mean; or, parameter by parameter, their adaptive sum "
            "(Adasum, arXiv:2006.02924), which adds what points in other directions. The paper's is with period = 1, "
            "outer_lr = 1 and outer_momentum = 0."
        ),
    ] = "mean"
    per_lr: Annotated[
        bool,
        says(
            "Divide what changed by the learning rate before the outer momentum, and multiply after it, so that a "
            "schedule does not distort the momentum (SlowMo, arXiv:1910.00643)."
        ),
    ] = False
    adapt_every: Annotated[
        int,
        says(
            "Steps after which the period follows the training loss down from `period` (AdaComm, arXiv:1810.08313), or "
            "with wait_share from `longest_period`; 0: it stays.",
            ge=0,
        ),
    ] = 0
    wait_share: Annotated[
        float,
        says(
            "The part of the time that agreements may take: while the run goes on, the period becomes as long as the "
            "measured link asks for, between `period` and `longest_period`, and short again; with adapt_every it is "
            "as long as the loss lets it be, and at least that. 0: it stays.",
            ge=0,
            lt=1,
        ),
    ] = 0.0
    longest_period: Annotated[int, says("wait_share: steps between two agreements at most.", ge=1)] = 500
    warmup_steps: Annotated[
        int, says("First steps after each of which parameters are averaged (post-local SGD, arXiv:1808.07217).", ge=0)
    ] = 0

    def __post_init__(self) -> None:
        if self.adapt_every and self.adapt_every < self.first_period:
            key = "longest_period" if self.wait_share else "period"
            raise ValueError(
                f"adapt_every = {self.adapt_every} with {key} = {self.first_period}: losses are compared once replicas "
                f"have agreed; set it to {self.first_period} or more, or to 0"
            )
        if self.wait_share and self.longest_period < self.period:
            raise ValueError(
                f"longest_period = {self.longest_period} with period = {self.period}, which is the shortest: raise it"
            )

    @property
    def events_are(self) -> EventsAre:
        return "recorded" if self.wait_share else "ordered"

    @property
    def first_period(self) -> int:
        """Where a period that follows the loss begins, and every other one."""
        return self.longest_period if self.adapt_every and self.wait_share else self.period

    @property
    def moves_period(self) -> bool:
        """Whether the period changes while the run goes on."""
        return self.adapt_every > 0 or self.wait_share > 0


class ServerConfig(Strategy, frozen=True, tag_field="kind", tag="server"):
    """A parameter server: workers push gradients and pull parameters; each server's optimizer updates its part for all.

    Every rank is a worker and a server, or the last `servers` ranks serve and the others work.
    """

    implemented_by: ClassVar[str] = "shoal.sync.server:ServerSync"
    replicas_are: ClassVar[ReplicasAre] = "workers"
    takes_sparse: ClassVar[bool] = True
    takes_codec: ClassVar[bool] = True
    weighs_samples: ClassVar[bool] = True

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
    servers: Annotated[
        Natural,
        says(
            "Dedicated servers: the last `servers` of `run.processes` serve and compute no gradients, the others work. "
            "0: every rank works, and serves a part."
        ),
    ] = 0
    topology: Annotated[
        Literal["direct", "hybrid"],
        says(
            "direct: every worker pushes and pulls by itself. hybrid: the workers of a host sum their gradients by "
            "all-reduce, and one of them pushes and pulls for all (BytePS, OSDI 2020)."
        ),
    ] = "direct"

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

    @property
    def in_canonical_order(self) -> bool:
        """Whether the number of replicas may change no bit."""
        return False

    @property
    def serving_only(self) -> int:
        return self.servers

    @property
    def events_are(self) -> EventsAre:
        return "ordered" if self.admission == "sync" else "recorded"

    def for_one(self) -> ServerConfig:
        """Neither dedicated servers nor backup workers can do without others."""
        return ServerConfig() if self.servers or self.backup else self


class HogwildConfig(Strategy, frozen=True, tag_field="kind", tag="hogwild"):
    """The processes of one host update the same parameters in shared memory, without locks (arXiv:1106.5730)."""

    implemented_by: ClassVar[str] = "shoal.sync.hogwild:HogwildSync"
    replicas_are: ClassVar[ReplicasAre] = "workers"
    takes_sparse: ClassVar[bool] = True

    period: Annotated[
        int,
        says(
            "Steps of each process between two agreements, where all wait for each other: evaluations, saves and stops "
            "happen there.",
            ge=1,
        ),
    ] = 50

    @property
    def events_are(self) -> EventsAre:
        return "unordered"


class StreamingConfig(OuterKeys, frozen=True, tag_field="kind", tag="streaming"):
    """Streaming DiLoCo (arXiv:2501.18512): fragments of the model are agreed on in turn, behind further steps."""

    implemented_by: ClassVar[str] = "shoal.sync.streaming:StreamingSync"
    takes_codec: ClassVar[bool] = True

    fragments: Annotated[
        int, says("Parts of the model, whole tensors, that are agreed on one after the other in a period.", ge=1)
    ] = 8
    delay: Annotated[
        int, says("Steps that replicas take while a fragment is on the wire, before it is applied.", ge=0)
    ] = 5
    mixing: Annotated[
        float, says("The part of its own parameters that a replica keeps where it applies a fragment.", ge=0, lt=1)
    ] = 0.5

    def __post_init__(self) -> None:
        if self.fragments > self.period:
            raise ValueError(
                f"fragments = {self.fragments} with period = {self.period}: each has a step of its own in a period; "
                f"set fragments to {self.period} or less"
            )
        if self.delay >= self.period // self.fragments:
            raise ValueError(
                f"delay = {self.delay} with period = {self.period} and fragments = {self.fragments}: a fragment must "
                f"arrive before the next one leaves; set delay to {self.period // self.fragments - 1} or less"
            )


class EASGDConfig(Strategy, frozen=True, tag_field="kind", tag="easgd"):
    """Elastic averaging SGD (arXiv:1412.6651): replicas and a centre pull each other together, and stay different."""

    implemented_by: ClassVar[str] = "shoal.sync.easgd:EASGDSync"

    period: Annotated[int, says("Steps of each replica between two pulls.", ge=1)] = 10
    beta: Annotated[
        float, says("Part of the way to the mean of the replicas that the centre goes in a pull.", gt=0, le=1)
    ] = 0.9


class GossipConfig(Strategy, frozen=True, tag_field="kind", tag="gossip"):
    """After each step a replica mixes its parameters with those of its neighbours in a graph; replicas differ."""

    implemented_by: ClassVar[str] = "shoal.sync.gossip:GossipSync"

    algorithm: Annotated[
        Literal["d_psgd", "sgp"],
        says(
            "d_psgd: D-PSGD (arXiv:1705.09056), for doubly stochastic weights. sgp: push-sum SGP (arXiv:1811.10792), "
            "for any connected graph."
        ),
    ] = "d_psgd"
    graph: Annotated[
        Literal["ring", "torus", "exponential", "neighbours", "weights"],
        says(
            "Who sends to whom: exponential is the one-peer graph, in which step k sends half to the replica 2^k "
            "further on; neighbours and weights are given by the keys of these names."
        ),
    ] = "exponential"
    neighbours: Annotated[
        list[list[int]], says('For each replica those that it sends to, for `graph = "neighbours"`.')
    ] = msgspec.field(default_factory=list)
    weights: Annotated[
        list[list[float]], says('The mixing matrix, for `graph = "weights"`: row i has what replica i takes from each.')
    ] = msgspec.field(default_factory=list)
    delay: Annotated[
        int,
        says(
            "Steps after which shares are added; they are on the wire behind computation. With `asynchronous`: at the "
            "latest. For sgp.",
            ge=0,
            le=64,
        ),
    ] = 0
    asynchronous: Annotated[
        bool,
        says(
            "A replica adds the shares that have come, and waits for none that is less than `delay` steps late "
            "(asynchronous push-sum, arXiv:1811.10792). For sgp."
        ),
    ] = False
    meet_every: Annotated[
        int,
        says(
            "Steps after which the replicas' average is taken, for evaluations and saves; it changes no replica.", ge=1
        ),
    ] = 100

    def __post_init__(self) -> None:
        for key in ("neighbours", "weights"):
            given = bool(getattr(self, key))
            if given != (self.graph == key):
                found = f'{key} with graph = "{self.graph}"' if given else f'graph = "{key}" without {key}'
                raise ValueError(f"{found}: each asks for the other; give both or neither")
        if self.asynchronous and self.algorithm == "d_psgd":
            raise ValueError(
                'asynchronous = true with algorithm = "d_psgd": what is on its way would be missing from the average; '
                'use algorithm = "sgp", whose weights count it'
            )
        if self.delay and self.algorithm == "d_psgd":
            raise ValueError(
                f'delay = {self.delay} with algorithm = "d_psgd": what is on its way would be missing from the '
                'average; use algorithm = "sgp", whose weights count it'
            )
        if self.asynchronous and not self.delay:
            raise ValueError(
                "asynchronous = true without delay: it says how many steps late a share may be before it is waited "
                "for; set delay, such as delay = 4"
            )

    @property
    def events_are(self) -> EventsAre:
        return "recorded" if self.asynchronous else "ordered"

    def matrices(self, replicas: int) -> tuple[Matrix, ...]:
        """One mixing matrix a step, in turn. Raises `ValueError` for a graph that cannot serve so many replicas."""
        doubly = self.algorithm == "d_psgd"
        if self.graph == "exponential":
            found = one_peer_exponential(replicas)
        elif self.graph == "weights":
            found = (tuple(tuple(row) for row in self.weights),)
        else:
            neighbours = {"ring": ring, "torus": torus}.get(self.graph, lambda _: self.neighbours)(replicas)
            if len(neighbours) != replicas:
                raise ValueError(f"neighbours has {len(neighbours)} rows for {replicas} replicas: give one for each")
            found = (metropolis(neighbours) if doubly else equal_shares(neighbours),)
        check_mixing(found, replicas=replicas, doubly=doubly)
        return found


SyncConfig = AllReduceConfig | LocalConfig | StreamingConfig | EASGDConfig | GossipConfig | ServerConfig | HogwildConfig
