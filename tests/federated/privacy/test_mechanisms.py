"""Clipping and noise are what the papers say, budgets end runs, and privacy goes with secure aggregation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from shoal.errors import ConfigError
from shoal.federated.client_data import ClientData
from shoal.federated.config import FedAvgConfig, PrivacyConfig
from shoal.federated.privacy.accountants import WHOLE_ORDERS, client_budget, rdp_epsilon
from shoal.federated.privacy.mechanisms import (
    PrivateGradient,
    PrivateMean,
    Simulated,
    from_entropy,
    poisson,
    simulated_uniform,
    skellam,
    uniform_from_entropy,
)
from shoal.federated.simulation import Simulation
from shoal.federated.strategy import Update
from tests.federated.tasks import run_file, task

LIKE = torch.zeros(2, dtype=torch.float64)


def silence(numel: int) -> Tensor:
    return torch.zeros(numel, dtype=torch.float64)


def updates_of(*rows: list[float]) -> list[Update]:
    return [Update(str(i), 0, 1, torch.tensor(row, dtype=torch.float64)) for i, row in enumerate(rows)]


def test_updates_are_cut_to_the_norm_and_divided_by_the_expected_cohort() -> None:
    """Not by the number that came, which would tell who was there. An empty round is noise alone."""
    private = PrivateMean(PrivacyConfig(clip=1.0), expected=4.0, noise=silence)
    mean = private.mean(updates_of([3.0, 4.0], [0.3, 0.4]), like=LIKE, version=0)
    assert mean.delta.tolist() == pytest.approx([(0.6 + 0.3) / 4, (0.8 + 0.4) / 4])
    loud = PrivateMean(PrivacyConfig(clip=1.0, noise=2.0), expected=4.0, noise=torch.ones)
    assert loud.mean([], like=LIKE, version=0).delta.tolist() == [0.5, 0.5]


def test_the_adaptive_norm_finds_the_quantile() -> None:
    """From 100 and from 0.01 to the median of norms that are 1 to 9."""
    for start in (100.0, 0.01):
        config = PrivacyConfig(clip=start, adaptive=True, count_noise=10.0)
        private = PrivateMean(config, expected=9.0, noise=silence)
        for _ in range(200):
            private.mean(updates_of(*[[float(i), 0.0] for i in range(1, 10)]), like=LIKE, version=0)
        assert 4 < private.clip < 6.5
    assert private.multiplier == pytest.approx((1 - 20.0**-2) ** -0.5)
    with pytest.raises(ConfigError, match="raise it"):
        PrivateMean(PrivacyConfig(adaptive=True, count_noise=0.5), expected=9.0, noise=silence)


@pytest.mark.parametrize("noise", [from_entropy, Simulated(3)], ids=["entropy", "simulated"])
def test_noise_is_standard_normal_and_never_the_same_twice(noise) -> None:
    drawn = noise(20_000)
    assert abs(float(drawn.mean())) < 0.04
    assert abs(float(drawn.std()) - 1) < 0.03
    assert abs(float((drawn.abs() > 2).double().mean()) - 0.0455) < 0.01
    assert not torch.equal(drawn, noise(20_000))


def test_the_private_gradient_is_the_mean_of_cut_gradients() -> None:
    """Against one backward for each sample; a sample of weight 0 counts not at all."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(5, 3, generator=generator), torch.randn(5, generator=generator)
    model, weights = torch.randn(3, generator=generator), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])

    def loss(w: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return (weights * (inputs @ w - targets).square()).sum() / weights.sum().clamp(min=1e-12)

    gradient, value = PrivateGradient(PrivacyConfig(clip=0.7), batch=4, noise=silence)(loss, model, x, y, weights)
    expected = torch.zeros(3)
    for i in (0, 1, 3, 4):
        one = 2 * (x[i] @ model - y[i]) * x[i]
        expected += one * min(1.0, 0.7 / float(one.norm()))
    assert torch.allclose(gradient, expected / 4, atol=1e-6)
    assert float(value) == pytest.approx(float(loss(model, x, y, weights)), rel=1e-5)
    loud, _ = PrivateGradient(PrivacyConfig(clip=0.7, noise=2.0), batch=4, noise=torch.ones)(loss, model, x, y, weights)
    assert torch.allclose(loud - gradient, torch.full((3,), 2.0 * 0.7 / 4), atol=1e-6)


def test_each_sample_is_in_a_batch_by_itself() -> None:
    """The size of a batch varies as a binomial number does."""
    data = ClientData(np.arange(200), seed=5, each_by_chance=True)
    config = FedAvgConfig(local_steps=1)
    sizes = [len(data.samples_of_step(config, 20, turn=turn, step=0)) for turn in range(300)]
    assert abs(np.mean(sizes) - 20) < 1.5
    assert 10 < np.var(sizes) < 28


def test_a_run_ends_when_its_budget_is_spent() -> None:
    """After the last round that stays within; a budget for no round is refused before the start."""
    federated = {"clients": 8, "cohort": 4, "weights": "equal"}
    keys: dict[str, Any] = {"federated": federated, "privacy": {"noise": 2.0, "epsilon": 4.0}}
    told: list[str] = []
    simulation = Simulation(task(run={"steps": 1000}, **keys), told=told.append)
    rows = simulation.run()
    spent = [row.values["privacy/epsilon"] for row in rows]
    assert spent[-1] <= 4.0 < rdp_epsilon(noise=2.0, chance=0.5, steps=len(rows) + 1, delta=1e-5)
    assert told == [f"the budget of privacy is spent after {len(rows)} of 1000 rounds"]
    assert len({row.asked for row in rows}) > 1  # each client by itself
    with pytest.raises(ConfigError, match=r"raise privacy\.noise"):
        Simulation(task(federated=federated, privacy={"noise": 0.2, "epsilon": 0.1}))
    assert client_budget(PrivacyConfig(noise=2.0), FedAvgConfig(clients=8, cohort=4)).chance == 0.5


def test_private_runs_learn_and_hide_samples_too() -> None:
    """DP-SGD with little noise learns; its budget is that of the client with the fewest samples."""
    keys: dict[str, Any] = {"privacy": {"unit": "sample", "noise": 0.5, "epsilon": 500.0}}
    simulation = Simulation(task(run={"steps": 4}, optimizer={"lr": 0.5}, federated={"local_steps": 5}, **keys))
    rows = simulation.run()
    assert rows[-1].values["accuracy/eval"] > 0.4
    fewest = min(map(len, simulation.shards.values()))
    assert rows[-1].values["privacy/epsilon"] == pytest.approx(
        rdp_epsilon(noise=0.5, chance=16 / fewest, steps=20, delta=1e-5)
    )


def test_a_sum_in_secret_gives_the_same_model() -> None:
    """By samples, alike, and with the noise of privacy: to the quantisation's resolution."""
    for federated, privacy in (
        ({}, {}),
        ({"weights": "equal"}, {}),
        ({"weights": "equal"}, {"privacy": {"noise": 1.0, "clip": 0.5, "epsilon": 1e6}}),
    ):
        keys = {"run": {"steps": 2}, "federated": federated, "partition": {"kind": "quantity"}, **privacy}
        plain, secret = Simulation(task(**keys)), Simulation(task(secure_aggregation={"bits": 20}, **keys))
        plain.run()
        rows = secret.run()
        assert rows[-1].values["secure/clipped"] == 0.0
        assert torch.allclose(plain.server.model, secret.server.model, atol=2e-5)


@pytest.mark.parametrize("mean", [10.0, 37.5, 4e6])
def test_poisson_numbers_have_their_distribution(mean: float) -> None:
    """Against scipy's distribution function, by Kolmogorov's distance: below 1.95 / sqrt(n) in 999 of 1,000 runs."""
    drawn = np.sort(poisson(20_000, mean, simulated_uniform(5, "test")).numpy())
    values, counts = np.unique(drawn, return_counts=True)
    distance = np.abs(np.cumsum(counts) / len(drawn) - stats.poisson.cdf(values, mean)).max()
    assert distance < 1.95 / len(drawn) ** 0.5
    two_sided = skellam(20_000, mean, uniform_from_entropy).double()
    assert abs(float(two_sided.var()) / (2 * mean) - 1) < 0.05
    assert abs(float(two_sided.mean())) < 5 * (2 * mean / 20_000) ** 0.5


def test_noise_that_clients_add_is_what_the_accountant_counts() -> None:
    """The sum of a round is off by noise of the variance that the budget speaks of, or more, never by the server's."""
    keys: dict[str, Any] = {
        "run": {"steps": 1},
        "federated": {"weights": "equal", "least": 4},
        "privacy": {"noise": 1.0, "clip": 0.5, "epsilon": 50.0, "noise_by": "clients"},
        "secure_aggregation": {"bits": 20},
    }
    noisy = Simulation(task(**keys))
    quiet = Simulation(task(**{**keys, "privacy": {**keys["privacy"], "noise": 1e-3, "epsilon": 1e12}}))
    rows = noisy.run()
    quiet.run()
    off = (noisy.server.model - quiet.server.model).double() * 8  # eight clients are expected
    least = 1.0 * 0.5  # noise x clip; eight of at least four clients add twice the variance
    assert float(off.std()) == pytest.approx(least * 2**0.5, rel=0.1)
    assert noisy.budget is not None
    assert noisy.budget.skellam is not None
    assert rows[0].values["privacy/epsilon"] == pytest.approx(
        rdp_epsilon(noise=1.0, chance=1.0, steps=1, delta=1e-5, orders=WHOLE_ORDERS), rel=1e-3
    )
    assert "epsilon_prv" not in noisy.budget.facts(1)


def test_an_update_that_is_quantised_too_coarsely_is_refused() -> None:
    keys: dict[str, Any] = {"federated": {"weights": "equal"}, "secure_aggregation": {"bits": 4, "clip": 100.0}}
    privacy = {"noise": 0.01, "clip": 0.01, "epsilon": 1e12, "noise_by": "clients"}
    with pytest.raises(ConfigError, match=r"raise bits, or lower secure_aggregation\.clip"):
        Simulation(task(privacy=privacy, **keys)).run()


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"federated": {"kind": "scaffold"}, "secure_aggregation": {}}, "it needs each update"),
        ({"federated": {"kind": "median"}, "privacy": {}}, "noise belongs to a sum"),
        ({"privacy": {}}, 'set federated.weights = "equal"'),
        ({"federated": {"kind": "fedbuff"}, "privacy": {}}, "it needs rounds"),
        ({"federated": {"largest_norm": 1.0}, "secure_aggregation": {}}, "nobody sees the norm"),
        ({"optimizer": {"kind": "adamw"}}, 'federated.kind = "fedopt"'),
        ({"federated": {"cohort": 9}}, "lower it"),
        ({"federated": {"weights": "equal"}, "privacy": {"noise_by": "clients"}}, "too little noise"),
        ({"privacy": {"unit": "sample", "noise_by": "clients"}}, "DP-SGD is the client's already"),
        ({"optimizer": {"clip_norm": 1.0}, "privacy": {"unit": "sample"}}, "privacy.clip bounds"),
    ],
)
def test_what_cannot_go_together_is_refused(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_file(**tables)


def test_tables_of_clients_need_the_table_of_the_run() -> None:
    from shoal.runfile.load import run_file_of
    from tests.federated.tasks import TABLES

    tables = {name: keys for name, keys in TABLES.items() if name != "federated"} | {"privacy": {}}
    with pytest.raises(ConfigError, match=r"\[privacy\] without \[federated\]"):
        run_file_of(tables, file="test")
