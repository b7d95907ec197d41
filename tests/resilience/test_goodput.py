"""The interval between saves, and how many replicas are wanted."""

from __future__ import annotations

import math

import pytest

from shoal.cost.interval import mean_between_failures_s, steps_between_saves
from shoal.fleet.scaling import wanted_replicas
from shoal.resilience.config import ElasticConfig


def test_the_failure_rate_moves_to_what_is_seen() -> None:
    """From the expectation, to the measured mean."""
    assert mean_between_failures_s(0, 0.0, expected_s=3600) == 3600
    assert mean_between_failures_s(999, 999 * 60.0, expected_s=3600) == pytest.approx(60, rel=0.07)


def test_the_interval_is_daly_s() -> None:
    """sqrt(2 d M) - d, in steps; never less than one."""
    assert steps_between_saves(1.0, 2.0, 3600.0) == round(math.sqrt(2 * 2 * 3600) - 2)
    assert steps_between_saves(100.0, 2.0, 60.0) == 1
    with pytest.raises(ValueError, match="measure one first"):
        steps_between_saves(0.0, 1.0, 60.0)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"min": 3, "max": 2}, "min = 3 is more than max = 2"),
        ({"policy": "price"}, "set price_limit and price_file"),
        ({"price_limit": 1.0}, "looks at no price"),
    ],
)
def test_impossible_tables_are_refused(keys: dict, words: str) -> None:
    """With the repair."""
    with pytest.raises(ValueError, match=words):
        ElasticConfig(**keys)


def test_policies() -> None:
    """All that are there; while another pays; while it is cheap."""
    every = ElasticConfig(min=1, max=4)
    assert wanted_replicas(every, 2, samples_per_s={}) == 4
    fast = ElasticConfig(min=1, max=4, policy="throughput")
    assert wanted_replicas(fast, 1, samples_per_s={1: 100.0}) == 2
    assert wanted_replicas(fast, 2, samples_per_s={1: 100.0, 2: 190.0}) == 3
    assert wanted_replicas(fast, 3, samples_per_s={1: 100.0, 2: 190.0, 3: 200.0}) == 2
    assert wanted_replicas(fast, 2, samples_per_s={1: 100.0, 2: 190.0, 3: 200.0}) == 2
    cheap = ElasticConfig(min=1, max=4, policy="price", price_limit=2.0, price_file="price")
    assert wanted_replicas(cheap, 2, samples_per_s={}, price=1.5) == 4
    assert wanted_replicas(cheap, 2, samples_per_s={}, price=2.5) == 1
    with pytest.raises(ValueError, match="the present price is not known"):
        wanted_replicas(cheap, 2, samples_per_s={})
