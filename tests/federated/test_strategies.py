"""Strategies on problems whose answers are known, with the plain formulas as oracles."""

from __future__ import annotations

import statistics

import msgspec
import pytest
import torch
from torch import Tensor

from shoal.errors import EnvironmentFault
from shoal.federated.config import (
    ClusteredConfig,
    FedAvgConfig,
    FedAvgMConfig,
    FedBuffConfig,
    FedDynConfig,
    FederatedConfig,
    FedNovaConfig,
    FedOptConfig,
    FedProxConfig,
    GeometricMedianConfig,
    HeteroFLConfig,
    KrumConfig,
    MedianConfig,
    ScaffoldConfig,
    TrimmedMeanConfig,
)
from shoal.federated.strategies import Clustered, accumulated
from shoal.federated.strategy import Outcome, Update, build_strategy
from shoal.federated.work import ServerModel
from tests.federated.tasks import task

CURVATURES, OPTIMA, RATE, STEPS = (1.0, 10.0), (0.0, 1.0), 0.05, 20
EXACT = 1e-9
"""Float64 and a few thousand sums."""


def play(config: FederatedConfig, *, rounds: int = 60, steps: tuple[int, int] = (STEPS, STEPS)) -> float:
    """Where two clients with f_i(y) = curvature_i / 2 (y - optimum_i)^2 bring the model from 0.5."""
    strategy = build_strategy(config, 1)
    model = torch.tensor([0.5], dtype=torch.float64)
    states: list[Tensor | None] = [None, None]
    for version in range(rounds):
        plan, updates = strategy.configure(), []
        for client in range(2):
            shift, y = strategy.shift(plan, states[client]), model.clone()
            for _ in range(steps[client]):
                gradient = CURVATURES[client] * (y - OPTIMA[client]) + plan.pull * (y - model)
                y = y - RATE * (gradient + (0 if shift is None else shift))
            outcome = Outcome(y - model, steps[client], RATE)
            states[client], control = strategy.finish(plan, states[client], outcome)
            updates.append(Update(str(client), version, 1, y - model, steps[client], control=control))
        model = strategy.aggregate(model, updates, version=version)
    return float(model)


def test_fedavg_stops_between_the_optima_and_scaffold_at_the_optimum() -> None:
    """The optimum of the sum is 10/11. FedAvg's fixed point is (1 - b) / (2 - a - b), a = 0.95^20, b = 0.5^20."""
    a, b = (1 - RATE) ** STEPS, (1 - 10 * RATE) ** STEPS
    fedavg, scaffold = play(FedAvgConfig(clients=2)), play(ScaffoldConfig(clients=2))
    assert round(fedavg, 4) == 0.6092
    assert fedavg == pytest.approx((1 - b) / (2 - a - b), abs=EXACT)
    assert round(scaffold, 4) == 0.9091
    assert scaffold == pytest.approx(10 / 11, abs=EXACT)


def test_feddyn_reaches_the_optimum_and_fedprox_comes_nearer() -> None:
    assert play(FedDynConfig(clients=2, alpha=5.0), rounds=120) == pytest.approx(10 / 11, abs=1e-4)
    assert play(FedAvgConfig(clients=2)) < play(FedProxConfig(clients=2, mu=5.0)) < 10 / 11


def test_fednova_does_not_follow_the_client_with_more_steps() -> None:
    """With 4 local steps of one and 1 of the other, FedAvg is drawn to the first, FedNova much less."""
    by_average = play(FedAvgConfig(clients=2), steps=(4, 1))
    by_nova = play(FedNovaConfig(clients=2), steps=(4, 1))
    assert abs(by_nova - 10 / 11) < abs(by_average - 10 / 11) / 2


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_accumulated_weight_is_that_of_the_steps(momentum: float) -> None:
    """a_i counts how often each gradient comes into the sum of SGD with momentum."""
    velocity = total = 0.0
    for _ in range(7):
        velocity = momentum * velocity + 1.0
        total += velocity
    assert accumulated(7, momentum) == pytest.approx(total)


def updates_of(*rows: list[float], samples: tuple[int, ...] = ()) -> list[Update]:
    counts = samples or (1,) * len(rows)
    return [Update(str(i), 0, counts[i], torch.tensor(row, dtype=torch.float64)) for i, row in enumerate(rows)]


def once(config: FederatedConfig, updates: list[Update], *, version: int = 0) -> list[float]:
    numel = updates[0].delta.numel()
    strategy = build_strategy(config, numel)
    return strategy.aggregate(torch.zeros(numel, dtype=torch.float64), updates, version=version).tolist()


def test_samples_weigh_unless_clients_count_alike() -> None:
    updates = updates_of([1.0], [4.0], samples=(3, 1))
    assert once(FedAvgConfig(clients=2), updates) == pytest.approx([1.75])
    assert once(FedAvgConfig(clients=2, weights="equal"), updates) == pytest.approx([2.5])
    assert once(FedAvgConfig(clients=2, sampling="by_size"), updates) == pytest.approx([2.5])


def test_momentum_and_adaptive_servers_follow_their_formulas() -> None:
    """Two rounds by hand."""
    first, second = updates_of([1.0]), updates_of([2.0])
    strategy = build_strategy(FedAvgMConfig(clients=1, momentum=0.5), 1)
    x = strategy.aggregate(torch.zeros(1, dtype=torch.float64), first, version=0)
    assert strategy.aggregate(x, second, version=1).item() == pytest.approx(1 + 2.5)
    for rule, v in {
        "adam": 0.99 * (0.99 * 1e-6 + 0.01) + 0.04,
        "adagrad": 1e-6 + 1 + 4,
        "yogi": (1e-6 + 0.01) + 0.04,
    }.items():
        strategy = build_strategy(FedOptConfig(clients=1, rule=rule, server_lr=1.0), 1)  # type: ignore[arg-type]
        x = strategy.aggregate(torch.zeros(1, dtype=torch.float64), first, version=0)
        step = strategy.aggregate(x, second, version=1).item() - x.item()
        assert strategy.kept["v"].item() == pytest.approx(v), rule
        assert step == pytest.approx((0.9 * 0.1 + 0.2) / (v**0.5 + 1e-3)), rule


def test_robust_means_leave_a_liar_out() -> None:
    """Nine honest clients near 1 and one at -1000: the mean follows it, the four others do not."""
    rows = [[1 + 0.01 * i, 2 - 0.01 * i] for i in range(9)] + [[-1000.0, 1000.0]]
    updates = updates_of(*rows)
    assert once(FedAvgConfig(clients=10), updates)[0] < -90
    for config in (
        TrimmedMeanConfig(clients=10),
        MedianConfig(clients=10),
        KrumConfig(clients=10),
        KrumConfig(clients=10, kept=3),
        GeometricMedianConfig(clients=10),
    ):
        x, y = once(config, updates)
        assert abs(x - 1.04) < 0.05, config
        assert abs(y - 1.96) < 0.05, config


def test_robust_means_are_what_they_say() -> None:
    """Against the statistics module, over blocks of a large vector too."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(6, 17, generator=generator, dtype=torch.float64).tolist()
    found = once(MedianConfig(clients=6), updates_of(*rows))
    assert found == pytest.approx([statistics.median(column) for column in zip(*rows, strict=True)])
    found = once(TrimmedMeanConfig(clients=6, trim=0.2), updates_of(*rows))
    assert found == pytest.approx([statistics.mean(sorted(column)[2:4]) for column in zip(*rows, strict=True)])
    x = torch.tensor(once(GeometricMedianConfig(clients=6, iterations=1000), updates_of(*rows)))
    pulls = [(x - torch.tensor(row)) / (x - torch.tensor(row)).norm() for row in rows]
    assert float(torch.stack(pulls).sum(0).norm()) < 1e-3


def test_krum_needs_enough_updates() -> None:
    with pytest.raises(EnvironmentFault, match="it needs 5"):
        once(KrumConfig(clients=10), updates_of([1.0], [2.0]))
    with pytest.raises(ValueError, match="raise least"):
        KrumConfig(clients=6)


def test_stale_updates_count_less_in_fedbuff() -> None:
    """1 / sqrt(1 + tau), and none beyond the limit."""
    updates = [Update("a", 0, 1, torch.tensor([1.0])), Update("b", 3, 1, torch.tensor([1.0]))]
    strategy = build_strategy(FedBuffConfig(clients=2, stalest=2), 1)
    assert strategy.aggregate(torch.zeros(1), updates, version=3).item() == pytest.approx((0.5 + 1) / 2)
    assert not strategy.takes(updates[0], version=3)  # type: ignore[attr-defined]
    assert strategy.takes(updates[1], version=3)  # type: ignore[attr-defined]


def test_clusters_average_their_own_clients() -> None:
    """Weighted by samples within a cluster; a model that nobody trained stays."""
    strategy = build_strategy(ClusteredConfig(clients=3, clusters=3), 1)
    assert isinstance(strategy, Clustered)
    strategy.start(torch.tensor([10.0, 20.0]))
    updates = [Update("a", 0, 1, torch.tensor([1.0]), cluster=1), Update("b", 0, 3, torch.tensor([5.0]), cluster=1)]
    updates.append(Update("c", 0, 9, torch.tensor([-2.0]), cluster=0))
    made = strategy.aggregate(torch.zeros(1), updates, version=0)
    assert [float(one) for one in strategy.models(made)] == [-2.0, 14.0, 20.0]
    found = strategy.evaluate(updates)
    assert [found[f"clients/cluster {j}"] for j in (1, 2, 3)] == [1, 2, 0]


def test_a_model_that_is_not_finite_leaves_all_of_them_as_they_were() -> None:
    """Also where it is not the first."""
    one = task(federated={"kind": "clustered", "server_lr": 4.0})
    server = ServerModel(one)
    before = [model.clone() for model in server.strategy.models(server.model)]
    with pytest.raises(EnvironmentFault, match="is not finite"):
        server.advance([Update("a", 0, 1, torch.full_like(one.model, 3e38), cluster=1)])
    assert server.version == 0
    for found, wanted in zip(server.strategy.models(server.model), before, strict=True):
        assert torch.equal(found, wanted)


def test_narrow_models_are_averaged_where_they_are() -> None:
    """By the samples of the clients that have a number; one that none of them has stays."""
    strategy = build_strategy(HeteroFLConfig(clients=3, widths=(1.0, 0.5, 0.25)), 4)
    strategy.corners = [torch.tensor([0, 2]), torch.tensor([2])]  # type: ignore[attr-defined]
    wide = Update("a", 0, 1, torch.tensor([1.0, 1.0, 1.0, 1.0]))
    narrow, narrower = (
        Update("b", 0, 3, torch.tensor([5.0, 5.0]), width=1),
        Update("c", 0, 4, torch.tensor([9.0]), width=2),
    )
    made = strategy.aggregate(torch.ones(4), [wide, narrow, narrower], version=0)
    torch.testing.assert_close(made, 1 + torch.tensor([16 / 4, 1.0, (1 + 15 + 36) / 8, 1.0]))
    made = strategy.aggregate(torch.ones(4), [narrower], version=0)
    torch.testing.assert_close(made, torch.tensor([1.0, 1.0, 10.0, 1.0]))


def test_every_kind_has_its_implementation() -> None:
    """The union's tables name classes that are there."""
    import typing

    for table in typing.get_args(FederatedConfig):
        arguments = {"malicious": 0} if table is KrumConfig else {}
        strategy = build_strategy(table(**arguments), 3)
        if isinstance(strategy, Clustered):
            strategy.start(torch.zeros(3))
        assert strategy.configure() is not None
        assert msgspec.structs.fields(table)
