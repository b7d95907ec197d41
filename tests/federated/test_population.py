"""Partitions, sampling and devices: pure functions, checked over many seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.federated.client_data import ClientData, order_rounds
from shoal.federated.config import (
    Contiguous,
    DeviceConfig,
    Dirichlet,
    FedAvgConfig,
    Iid,
    PartitionConfig,
    Pathological,
    QuantitySkew,
)
from shoal.federated.population import device_of, drops_out, partition
from shoal.federated.rounds import choose, choose_each, choose_important
from shoal.federated.strategy import Update, build_strategy, norms_of
from shoal.maths.counter import bits, key_of

KINDS: list[PartitionConfig] = [
    Iid(),
    Dirichlet(concentration=0.1),
    Pathological(),
    QuantitySkew(concentration=0.2),
    Contiguous(),
]
CLASSES = np.arange(1000) % 10


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.variant)
@settings(max_examples=15)
@given(clients=st.integers(1, 60), seed=st.integers(0, 2**40))
def test_every_sample_has_one_client_and_every_client_a_sample(
    config: PartitionConfig, clients: int, seed: int
) -> None:
    parts = partition(config, clients=clients, samples=1000, classes=CLASSES, seed=seed)
    assert len(parts) == clients
    assert all(len(part) for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1000))
    again = partition(config, clients=clients, samples=1000, classes=CLASSES, seed=seed)
    assert all(map(np.array_equal, parts, again))


def spread(config: PartitionConfig) -> tuple[float, float]:
    """The mean number of classes of a client, and the largest size over the mean size."""
    parts = partition(config, clients=20, samples=1000, classes=CLASSES, seed=1)
    return float(np.mean([len(np.unique(CLASSES[part])) for part in parts])), max(map(len, parts)) / 50


def test_partitions_are_skewed_as_they_say() -> None:
    assert spread(Iid())[0] > 9
    assert spread(Iid())[1] == 1
    assert spread(Pathological(shards=2))[0] <= 2.5
    assert spread(Dirichlet(concentration=0.1))[0] < 5 < spread(Dirichlet(concentration=100.0))[0]
    assert spread(QuantitySkew(concentration=0.2))[1] > 3
    runs = partition(Contiguous(), clients=3, samples=8, classes=None, seed=1)
    assert [run.tolist() for run in runs] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_more_clients_than_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="lower clients"):
        partition(Iid(), clients=11, samples=10, classes=None, seed=0)


def test_cohorts_are_uniform_or_by_size() -> None:
    """Over 500 rounds of 5 of 20 clients, each is chosen 125 times within 5 deviations; by size, the large more."""
    present = {f"c{i:02d}": 1 + 9 * (i >= 10) for i in range(20)}
    uniform, by_size = (FedAvgConfig(clients=20, cohort=5, sampling=kind) for kind in ("uniform", "by_size"))
    counts = dict.fromkeys(present, 0)
    large = 0
    for round in range(500):
        for name in choose(uniform, present, seed=7, round=round):
            counts[name] += 1
        large += sum(present[name] > 1 for name in choose(by_size, present, seed=7, round=round))
    assert max(abs(count - 125) for count in counts.values()) < 5 * (500 * 0.25 * 0.75) ** 0.5
    assert large > 500 * 5 * 0.8
    assert choose(uniform, present, seed=7, round=3) == choose(uniform, present, seed=7, round=3)


def test_importance_draws_as_often_as_it_says_and_weighs_that_away() -> None:
    """Over 2,000 rounds of 4 of 12 clients, each takes part as often as its chance says, and the mean of the updates,
    weighed by 1 / chance, is that of all clients; it varies less than that of uniform cohorts. One large client is
    certain; one that was last of no weight is looked at again, and one without an update is taken for the mean."""
    config = FedAvgConfig(clients=12, cohort=4, sampling="importance")
    names = [f"c{i:02d}" for i in range(12)]
    norms = {name: float(i) for i, name in enumerate(names)} | {names[11]: 100.0}
    del norms[names[5]]
    present = {name: 1 + i % 3 for i, name in enumerate(names)}
    truth = sum(present[name] * norms.get(name, 15.0) for name in names) / sum(present.values())
    strategy = build_strategy(config, 1)

    def mean(chances: dict[str, float]) -> float:
        rows = [
            Update(name, 0, present[name], torch.tensor([norms.get(name, 15.0)]), chance=chance)
            for name, chance in chances.items()
        ]
        return float(strategy.mean(rows))

    counts, found, plain, chance = dict.fromkeys(names, 0), [], [], {}
    for round in range(2000):
        drawn = choose_important(config, present, norms, seed=7, round=round)
        assert len(drawn) == 4
        chance |= drawn
        counts = {name: count + (name in drawn) for name, count in counts.items()}
        found.append(mean(drawn))
        plain.append(mean(dict.fromkeys(choose(FedAvgConfig(clients=12, cohort=4), present, seed=7, round=round), 1.0)))
    assert sum(chance.values()) == pytest.approx(4)
    assert chance[names[11]] == 1
    assert 0 < chance[names[0]] < chance[names[1]] + 1e-9 < chance[names[8]]
    assert all(abs(counts[n] - 2000 * chance[n]) <= 5 * (2000 * chance[n] * (1 - chance[n])) ** 0.5 for n in names)
    assert float(np.mean(found)) == pytest.approx(truth, rel=0.1)
    assert np.std(found) < 0.5 * np.std(plain)


def test_importance_takes_everybody_where_all_are_wanted() -> None:
    config = FedAvgConfig(clients=3, sampling="importance")
    assert choose_important(config, {"a": 1, "b": 5, "c": 2}, {}, seed=1, round=0) == {"a": 1.0, "b": 1.0, "c": 1.0}


@pytest.mark.parametrize(
    "norms",
    [
        dict.fromkeys("abcd", 0.0),
        {"a": 0.0},
        {"a": math.inf, "b": 1.0, "c": 1.0, "d": 1.0},
        {"a": math.nan, "b": 1.0},
        dict.fromkeys("abcd", 1e308),
        {"a": 5e-324, "b": 0.0, "c": 0.0, "d": 0.0},
    ],
)
def test_importance_draws_a_cohort_whatever_the_norms_are(norms: dict[str, float]) -> None:
    """Without one every round would be tried again for ever."""
    config = FedAvgConfig(clients=4, cohort=2, sampling="importance")
    for round in range(20):
        drawn = choose_important(config, dict.fromkeys("abcd", 10), norms, seed=1, round=round)
        assert len(drawn) == 2
        assert all(0 < chance <= 1 for chance in drawn.values())


def test_the_norm_of_a_finite_update_is_finite() -> None:
    config = FedAvgConfig(clients=4, sampling="importance")
    assert norms_of([Update("a", 0, 1, torch.full((4,), 1e30))], config) == [pytest.approx(2e30)]


def test_poisson_sampling_takes_each_by_itself() -> None:
    """The number of clients has the mean and the variance of a binomial distribution."""
    names = [str(i) for i in range(100)]
    sizes = [len(choose_each(0.3, names, seed=1, round=round)) for round in range(500)]
    assert abs(float(np.mean(sizes)) - 30) < 1
    assert 14 < float(np.var(sizes)) < 28


def test_devices_are_drawn_once_and_have_the_spread_asked_for() -> None:
    config = DeviceConfig(step_s=0.1, step_spread=1.0, dropout=0.25)
    logs = np.log([device_of(config, str(i), seed=2).step_s / 0.1 for i in range(600)])
    assert abs(logs.mean()) < 0.1
    assert abs(logs.std() - 1) < 0.1
    assert device_of(config, "a", seed=2) == device_of(config, "a", seed=2)
    lost = sum(drops_out(config, str(i), seed=2, version=0, number=0) for i in range(600))
    assert abs(lost / 600 - 0.25) < 0.05


def test_rounds_of_a_client_go_through_all_its_samples_once_an_epoch() -> None:
    """By steps, whatever their size, and by epochs; every epoch in another order, unless none is asked for."""
    ids = np.array([3, 5, 7, 11, 13, 17, 19])
    data, by_steps = ClientData(ids, seed=1), FedAvgConfig(clients=1, local_steps=2)
    taken = [data.samples_of_step(by_steps, 3, turn=turn, step=step).tolist() for turn in range(7) for step in range(2)]
    flat = [sample for step in taken for sample in step]
    epochs = [flat[i : i + 7] for i in range(0, 42, 7)]
    assert all(sorted(epoch) == ids.tolist() for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert data.samples_of_step(by_steps, 3, turn=2, step=1).tolist() == taken[5]
    by_epochs = FedAvgConfig(clients=1)
    assert data.steps(by_epochs, 3) == 3
    assert [len(data.samples_of_step(by_epochs, 3, turn=4, step=step)) for step in range(3)] == [3, 3, 1]
    plain = ClientData(ids, seed=1, shuffle=False)
    assert plain.samples_of_step(by_epochs, 7, turn=3, step=0).tolist() == ids.tolist()


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    turn=st.integers(0, 50),
    steps=st.one_of(st.none(), st.integers(1, 7)),
)
def test_orders_drawn_at_once_are_those_of_each_client(sizes: list[int], turn: int, steps: int | None) -> None:
    """Against one sort for each epoch of each client."""
    config = FedAvgConfig(clients=1, local_steps=steps, local_epochs=2)
    clients = [ClientData(np.arange(size) * 7 + i, seed=i) for i, size in enumerate(sizes)]
    turns = [turn + i for i in range(len(clients))]
    order_rounds(clients, config, 4, turns=turns)
    for i, (client, at) in enumerate(zip(clients, turns, strict=True)):
        first, last = client.span(config, 4, at)
        expected = []
        for position in range(first, last):
            epoch, place = divmod(position, len(client))
            keys = bits(key_of(i, "order"), torch.arange(epoch * len(client), (epoch + 1) * len(client)))
            expected.append(int(client.ids[keys.argsort()[place]]))
        count = client.steps(config, 4)
        found = [client.samples_of_step(config, 4, turn=at, step=step) for step in range(count)]
        assert np.concatenate(found).tolist() == expected
