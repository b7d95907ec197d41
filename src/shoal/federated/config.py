"""Tables `[federated]`, `[partition]`, `[privacy]` and `[secure_aggregation]`. Imports no torch.

A new strategy is its module and its table here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from shoal.config.check import Positive, PositiveFloat, Table, says

MOST_WIDTHS = 16


class _Strategy(Table, frozen=True):
    """Keys that every strategy has. A round is a step of the run: there are `run.steps` of them.

    asynchronous: clients train without rounds. weighs: it can weight clients by their samples. sends_control: clients
    send a second vector, as long as the model.
    """

    asynchronous: ClassVar[bool] = False
    weighs: ClassVar[bool] = True
    sends_control: ClassVar[bool] = False
    sums: ClassVar[bool] = True
    """Whether it needs the weighted sum of the updates alone, as secure aggregation gives it."""
    averages: ClassVar[bool] = False
    """Whether all it takes of a round is the weighted mean of the updates."""

    clients: Annotated[
        int, says("Clients there are: those of a simulation, and how many a server enrols at most.", ge=1, le=10**6)
    ] = 10
    cohort: Annotated[Positive | None, says("Clients that take part in a round; default: all.")] = None
    least: Annotated[
        Positive | None, says("Contributions without which a round fails and is tried again; default: half a cohort.")
    ] = None
    over_selection: Annotated[
        float, says("Clients asked beyond the cohort, as a part of it: the round ends with the first ones.", ge=0, le=4)
    ] = 0.0
    sampling: Annotated[
        Literal["uniform", "by_size", "importance"],
        says(
            "uniform: all clients are equally likely. by_size: in proportion to its samples; updates then count alike. "
            "importance: by its samples and the norm of its last update; updates count the more, the less likely "
            "(arXiv:2010.13723)."
        ),
    ] = "uniform"
    deadline_s: Annotated[float, says("Longest that a round waits for clients.", gt=0, le=10**7)] = 600.0
    local_steps: Annotated[
        Positive | None, says("Steps of a client in a round, of `batch.global_samples` each; default: by epochs.")
    ] = None
    local_epochs: Annotated[int, says("Passes of a client over its data in a round.", ge=1, le=10**4)] = 1
    weights: Annotated[
        Literal["samples", "equal"] | None,
        says("How clients count in the average; default: by their samples where the strategy can."),
    ] = None
    server_lr: Annotated[float, says("Learning rate of the server.", gt=0, le=1e3)] = 1.0
    evaluate_every: Annotated[int, says("Rounds between two evaluations on held-out data; the last counts.", ge=1)] = 1
    keep_local: Annotated[
        tuple[str, ...],
        says(
            "Patterns of parameters that stay with each client: norms (FedBN, arXiv:2102.07623), heads (FedPer, "
            "arXiv:1912.00818)."
        ),
    ] = ()
    ditto: Annotated[
        PositiveFloat | None,
        says(
            "Each client also trains a model of its own, pulled to the model of the round by this weight (Ditto, "
            "arXiv:2012.04221); it never leaves the client."
        ),
    ] = None
    largest_norm: Annotated[
        PositiveFloat | None,
        says("An update of a larger norm is refused, and its client named: no client can pull the model far."),
    ] = None

    def __post_init__(self) -> None:
        if self.cohort is not None and self.cohort > self.clients:
            raise ValueError(
                f"cohort = {self.cohort} of clients = {self.clients}: a cohort is a part of them; lower it"
            )
        if self.least is not None and self.least > self.cohort_size:
            raise ValueError(f"least = {self.least} of a cohort of {self.cohort_size}: lower it")
        if self.ditto is not None and self.keep_local:
            raise ValueError("ditto with keep_local: a client has a whole model of its own, or parts; leave one out")
        if self.weights == "samples" and not self.weighs:
            raise ValueError(f'weights = "samples": {self.variant} counts all clients alike; leave it out')
        if self.weights == "samples" and self.sampling == "by_size":
            raise ValueError(
                'sampling = "by_size" with weights = "samples" would count samples twice: leave one of them out'
            )

        if self.sampling == "importance" and not self.averages:
            raise ValueError(
                f'sampling = "importance" with kind = "{self.variant}": it weighs updates in a mean, which this kind '
                'does not take; use "uniform", or kind = "fedavg"'
            )

    @property
    def cohort_size(self) -> int:
        """`cohort`, the default resolved."""
        return self.clients if self.cohort is None else self.cohort

    @property
    def least_contributions(self) -> int:
        """`least`, the default resolved."""
        return self.least or -(-self.cohort_size // 2)

    @property
    def models(self) -> int:
        """Models that a client is sent."""
        return 1

    @property
    def all_widths(self) -> tuple[float, ...]:
        """Widths that models have, as parts of the whole one."""
        return (1.0,)

    @property
    def by_samples(self) -> bool:
        """Whether updates count by the samples of their clients."""
        return self.weighs and self.sampling != "by_size" and self.weights != "equal"


class FedAvgConfig(_Strategy, frozen=True, tag_field="kind", tag="fedavg"):
    """The mean of what clients changed (arXiv:1602.05629)."""

    implemented_by: ClassVar[str] = "shoal.federated.strategies:FedAvg"
    averages: ClassVar[bool] = True


class FedAvgMConfig(_Strategy, frozen=True, tag_field="kind", tag="fedavgm"):
    """The mean goes through the server's momentum (arXiv:1909.06335)."""

    implemented_by: ClassVar[str] = "shoal.federated.strategies:FedAvgM"
    averages: ClassVar[bool] = True

    momentum: Annotated[float, says("Momentum of the server.", ge=0, lt=1)] = 0.9


class FedProxConfig(_Strategy, frozen=True, tag_field="kind", tag="fedprox"):
    """A term of each client's loss pulls its copy to the model of the round (arXiv:1812.06127)."""

    implemented_by: ClassVar[str] = "shoal.federated.strategies:FedProx"
    averages: ClassVar[bool] = True

    mu: Annotated[float, says("Half the weight of the squared distance.", gt=0, le=1e4)] = 0.01


class FedNovaConfig(_Strategy, frozen=True, tag_field="kind", tag="fednova"):
    """Each change is divided by the steps that made it, so that fast clients do not count more (arXiv:2007.07481)."""

    implemented_by: ClassVar[str] = "shoal.federated.strategies:FedNova"
    averages: ClassVar[bool] = True
    sums: ClassVar[bool] = False


class ScaffoldConfig(_Strategy, frozen=True, tag_field="kind", tag="scaffold"):
    """Control variates take the drift out of every local step (arXiv:1910.06378). Uploads twice the model."""

    implemented_by: ClassVar[str] = "shoal.federated.strategies:Scaffold"
    sends_control: ClassVar[bool] = True
    sums: ClassVar[bool] = False


class FedDynConfig(_Strategy, frozen=True, tag_field="kind", tag="feddyn"):
    """Each client's loss gets a linear and a quadratic term, so that all optima agree (arXiv:2111.04263)."""

    implemented_by: ClassVar[str] = "shoal.federated.strategies:FedDyn"
    weighs: ClassVar[bool] = False

    alpha: Annotated[float, says("Weight of both terms.", gt=0, le=1e4)] = 0.01


class FedOptConfig(_Strategy, frozen=True, tag_field="kind", tag="fedopt"):
    """The mean is the gradient of an adaptive optimizer at the server (arXiv:2003.00295)."""

    implemented_by: ClassVar[str] = "shoal.federated.strategies:FedOpt"
    averages: ClassVar[bool] = True

    rule: Annotated[Literal["adam", "yogi", "adagrad"], says("How squared means accumulate.")] = "adam"
    server_lr: Annotated[float, says("Learning rate of the server.", gt=0, le=1e3)] = 0.01
    beta1: Annotated[float, says("Decay of the mean.", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, says("Decay of the squared mean; adagrad has none.", ge=0, lt=1)] = 0.99
    adaptivity: Annotated[float, says("Added to the root of the squared mean (tau).", gt=0)] = 1e-3


class ClusteredConfig(_Strategy, frozen=True, tag_field="kind", tag="clustered"):
    """Several models: each client trains the one that serves its samples best (IFCA, arXiv:2006.04088)."""

    implemented_by: ClassVar[str] = "shoal.federated.strategies:Clustered"
    sums: ClassVar[bool] = False

    clusters: Annotated[int, says("Models there are; each client gets all of them in each round.", ge=2, le=64)] = 2

    @property
    def models(self) -> int:
        """Models that a client is sent."""
        return self.clusters


class HeteroFLConfig(_Strategy, frozen=True, tag_field="kind", tag="heterofl"):
    """Weak clients train a narrower model, a corner of each parameter (HeteroFL, arXiv:2010.01264)."""

    implemented_by: ClassVar[str] = "shoal.federated.strategies:HeteroFL"
    sums: ClassVar[bool] = False

    widths: Annotated[
        tuple[float, ...],
        says("Widths of hidden layers, as parts of the whole model's, which is the first; a client has one of them."),
    ] = (1.0, 0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        falling = all(wide > narrow > 0 for wide, narrow in pairwise(self.widths))
        if self.widths[:1] != (1.0,) or not 2 <= len(self.widths) <= MOST_WIDTHS or not falling:
            raise ValueError(
                f"widths = {list(self.widths)}: 1.0 comes first, and up to {MOST_WIDTHS - 1} smaller ones follow, the "
                "largest first"
            )
        if self.keep_local or self.ditto is not None:
            key = "ditto" if self.ditto is not None else "keep_local"
            raise ValueError(f'{key} with kind = "heterofl": clients have models of several widths; leave it out')

    @property
    def all_widths(self) -> tuple[float, ...]:
        """Widths that models have, as parts of the whole one."""
        return self.widths


class TrimmedMeanConfig(_Strategy, frozen=True, tag_field="kind", tag="trimmed_mean"):
    """Of every number the largest and smallest are left out (arXiv:1803.01498)."""

    implemented_by: ClassVar[str] = "shoal.federated.robust:TrimmedMean"
    weighs: ClassVar[bool] = False
    sums: ClassVar[bool] = False

    trim: Annotated[float, says("The part of the clients left out at either end.", gt=0, lt=0.5)] = 0.2


class MedianConfig(_Strategy, frozen=True, tag_field="kind", tag="median"):
    """The median of every number (arXiv:1803.01498)."""

    implemented_by: ClassVar[str] = "shoal.federated.robust:Median"
    weighs: ClassVar[bool] = False
    sums: ClassVar[bool] = False


class KrumConfig(_Strategy, frozen=True, tag_field="kind", tag="krum"):
    """The update nearest to its neighbours, or the mean of several such (Blanchard et al., NeurIPS 2017)."""

    implemented_by: ClassVar[str] = "shoal.federated.robust:Krum"
    weighs: ClassVar[bool] = False
    sums: ClassVar[bool] = False

    malicious: Annotated[int, says("Clients of a round that may lie; it must have 2 x this + 3.", ge=0)] = 1
    kept: Annotated[int, says("Updates that are averaged; 1: Krum itself.", ge=1)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least_contributions < 2 * self.malicious + 3:
            raise ValueError(
                f"malicious = {self.malicious} with rounds of {self.least_contributions} contributions: Krum needs "
                f"2 x malicious + 3 = {2 * self.malicious + 3}; raise least, or lower malicious"
            )
        if self.kept > self.least_contributions - self.malicious:
            raise ValueError(f"kept = {self.kept}: a round has so many honest updates only if it is lower; lower it")


class GeometricMedianConfig(_Strategy, frozen=True, tag_field="kind", tag="geometric_median"):
    """The point with the smallest sum of distances to all updates (RFA, arXiv:1912.13445)."""

    implemented_by: ClassVar[str] = "shoal.federated.robust:GeometricMedian"
    sums: ClassVar[bool] = False

    iterations: Annotated[int, says("Steps of the smoothed Weiszfeld algorithm, at most.", ge=1, le=1000)] = 32
    smoothing: Annotated[float, says("Smallest distance that is divided by.", gt=0)] = 1e-6


class FedBuffConfig(_Strategy, frozen=True, tag_field="kind", tag="fedbuff"):
    """Clients train without rounds; the server steps whenever `buffer` updates are there (arXiv:2106.06639)."""

    implemented_by: ClassVar[str] = "shoal.federated.strategies:FedBuff"
    asynchronous: ClassVar[bool] = True
    weighs: ClassVar[bool] = False
    sums: ClassVar[bool] = False

    buffer: Annotated[int, says("Updates in a step of the server.", ge=1, le=10**6)] = 10
    stalest: Annotated[int, says("An update that began more steps ago is left out.", ge=0)] = 100


FederatedConfig = (
    FedAvgConfig
    | FedAvgMConfig
    | FedProxConfig
    | FedNovaConfig
    | ScaffoldConfig
    | FedDynConfig
    | FedOptConfig
    | ClusteredConfig
    | HeteroFLConfig
    | TrimmedMeanConfig
    | MedianConfig
    | KrumConfig
    | GeometricMedianConfig
    | FedBuffConfig
)


class Iid(Table, frozen=True, tag_field="kind", tag="iid"):
    """Samples are dealt out at random, as many to each client."""


class Dirichlet(Table, frozen=True, tag_field="kind", tag="dirichlet"):
    """Each class is divided by proportions drawn from a Dirichlet distribution (arXiv:1909.06335)."""

    concentration: Annotated[float, says("0.1: a client has few classes; 100: nearly all alike.", gt=0, le=1e6)] = 0.5


class Pathological(Table, frozen=True, tag_field="kind", tag="pathological"):
    """Samples are sorted by class and cut into shards; each client gets some (arXiv:1602.05629)."""

    shards: Annotated[int, says("Shards of each client, and so about as many classes.", ge=1, le=10**4)] = 2


class QuantitySkew(Table, frozen=True, tag_field="kind", tag="quantity"):
    """Classes are mixed, and sizes differ: proportions are drawn from a Dirichlet distribution."""

    concentration: Annotated[float, says("Small: few clients have most samples.", gt=0, le=1e6)] = 0.5


class Contiguous(Table, frozen=True, tag_field="kind", tag="contiguous"):
    """Each client has samples that follow on each other: of a text, its own documents."""


PartitionConfig = Iid | Dirichlet | Pathological | QuantitySkew | Contiguous


class DeviceConfig(Table, frozen=True):
    """What simulated clients are: their speeds and links, drawn for every client from the run's seed."""

    step_s: Annotated[float, says("Seconds of a local step of the median client.", gt=0)] = 0.05
    step_spread: Annotated[float, says("Speeds are log-normal: the deviation of their logarithm.", ge=0, le=5)] = 0.0
    up_bytes_per_s: Annotated[float, says("Upload rate of the median client.", gt=0)] = 1.25e6
    down_bytes_per_s: Annotated[float, says("Download rate of the median client.", gt=0)] = 1.25e7
    link_spread: Annotated[float, says("Rates are log-normal: the deviation of their logarithm.", ge=0, le=5)] = 0.0
    latency_s: Annotated[float, says("Seconds that a message takes beside its bytes.", ge=0)] = 0.05
    together: Annotated[
        int, says("Clients that train at once, by one `torch.func.vmap`; 1: one after another.", ge=1, le=10**5)
    ] = 64
    dropout: Annotated[float, says("Chance that a client is lost in a round that it takes part in.", ge=0, lt=1)] = 0.0


class SecureAggregationConfig(Table, frozen=True):
    """Clients mask their updates, so that the server learns the sum of a round and nothing else (SecAgg, SecAgg+)."""

    threshold: Annotated[
        float,
        says(
            "The part of a client's neighbours whose shares recover it; with fewer left, the round fails.", gt=0.5, le=1
        ),
    ] = 0.67
    neighbours: Annotated[
        Annotated[int, msgspec.Meta(ge=2, le=4096)] | None,
        says("Clients that each masks with (SecAgg+, dl.acm.org/doi/10.1145/3372297.3417885); default: all."),
    ] = None
    bits: Annotated[int, says("Bits of a quantised number of one client.", ge=4, le=32)] = 20
    clip: Annotated[float, says("Numbers of an update are cut to this magnitude before they are quantised.", gt=0)] = (
        1.0
    )


class PrivacyConfig(Table, frozen=True):
    """Differential privacy, and the budget at which the run stops."""

    unit: Annotated[
        Literal["client", "sample"],
        says(
            "What is hidden: a client's part in the model (DP-FedAvg), or a sample's in its client's update (DP-SGD)."
        ),
    ] = "client"
    noise: Annotated[float, says("Deviation of the noise over the clip norm (noise multiplier).", gt=0, le=1e3)] = 1.0
    noise_by: Annotated[
        Literal["server", "clients"],
        says(
            "Who adds the noise of `unit = client`: the server, or with `[secure_aggregation]` each client a part of "
            "it, in whole numbers (Skellam, arXiv:2110.04995), so that nobody sees the sum without it."
        ),
    ] = "server"
    clip: Annotated[float, says("Largest norm: of an update, or of the gradient of a sample.", gt=0)] = 1.0
    adaptive: Annotated[
        bool, says("The clip norm of updates follows a quantile of their norms (arXiv:1905.03871); unit = client.")
    ] = False
    quantile: Annotated[float, says("The part of updates that the adaptive norm leaves whole.", gt=0, lt=1)] = 0.5
    clip_lr: Annotated[float, says("Learning rate of the adaptive norm.", gt=0, le=10)] = 0.2
    count_noise: Annotated[
        PositiveFloat | None,
        says("Deviation of the noise on the count behind the quantile; default: a twentieth of the cohort."),
    ] = None
    delta: Annotated[float, says("Probability that the bound does not hold.", gt=0, lt=0.5)] = 1e-5
    epsilon: Annotated[float, says("The budget: the round that would spend more is not begun.", gt=0)] = 8.0

    def __post_init__(self) -> None:
        if self.adaptive and self.unit != "client":
            raise ValueError('adaptive = true with unit = "sample": only norms of updates are followed; leave it out')
        if self.noise_by == "clients" and self.unit != "client":
            raise ValueError('noise_by = "clients" with unit = "sample": DP-SGD is the client\'s already; leave it out')


@dataclass(frozen=True)
class FederatedClient:
    """Train as `name`, whose certificate is in the folder `certificates`, for the `server` at HOST:PORT.

    `part`: on that part of the data alone, as `[partition]` cuts it; None: on all of it. `patience_s`: seconds for
    which the server may be away. `width`: of the client's model, one of `federated.widths`.
    """

    server: str
    certificates: str | Path
    name: str
    part: int | None = None
    width: float = 1.0
    patience_s: float = 60.0
