"""How many replicas a launcher asks for: prices from a file, speeds from the coordinator's decisions."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from shoal.coordinator.service import coordinator_in
from shoal.errors import EnvironmentFault
from shoal.fleet.scaling import MEASURED_STEPS, WARMUP_STEPS, Speeds, price_in, scaling
from shoal.resilience.config import ElasticConfig
from shoal.resilience.events import Committed, Formed, Scaled
from shoal.resilience.membership import Rules
from tests.waiting import HANG_S


def take_steps(speeds: Speeds, replicas: int, step_s: float, *, number: int = 1) -> None:
    """A generation takes as many steps as a measurement needs."""
    speeds.heard(Formed(number, tuple(f"r{index}" for index in range(replicas)), (), 0, 0), 0.0)
    for step in range(1, WARMUP_STEPS + MEASURED_STEPS + 1):
        speeds.heard(Committed(number, step, 0, 0), step * step_s)


def test_speeds_are_those_of_each_number_of_replicas() -> None:
    """Samples a second, without the first steps; a generation that is too short says nothing."""
    speeds = Speeds(10)
    take_steps(speeds, 2, 0.5)
    speeds.heard(Formed(2, ("r0",), (), 0, 0), 100.0)
    speeds.heard(Committed(2, 26, 0, 0), 100.5)
    assert speeds.measured == pytest.approx({2: 20.0})
    assert speeds.present == 1


@pytest.mark.parametrize("content", ["", "cheap", "nan", "inf", "-1", "9" * 100 + "x"])
def test_a_file_without_a_price_is_refused(tmp_path: Path, content: str) -> None:
    """With its name and what to do; also a file that is missing."""
    (tmp_path / "price").write_text(content)
    with pytest.raises(EnvironmentFault, match="write the present price, a number"):
        price_in(tmp_path / "price")
    with pytest.raises(EnvironmentFault, match="cannot be read"):
        price_in(tmp_path / "none")


def test_the_price_decides_between_min_and_max(tmp_path: Path) -> None:
    """Above the limit the coordinator is asked for min, below it for max; a file that is damaged meanwhile is named
    once, and the last price counts."""
    price = tmp_path / "price"
    price.write_text("5.0")
    config = ElasticConfig(min=1, max=3, policy="price", price_limit=2.0, price_file=str(price))
    told: queue.SimpleQueue[object] = queue.SimpleQueue()
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    with (
        coordinator_in(tmp_path, Rules(1, 3), told=told.put) as address,
        scaling(config, address, Speeds(10), say=said.put, poll_s=0.01),
    ):
        assert told.get(timeout=HANG_S) == Scaled(1)
        assert said.get(timeout=HANG_S).startswith("1 replicas from now on: the price is 5")
        write(price, "?")
        assert "until then the last one counts, 5" in said.get(timeout=HANG_S)
        write(price, "2.0")
        assert told.get(timeout=HANG_S) == Scaled(3)
        assert said.get(timeout=HANG_S).startswith("3 replicas")
    assert said.empty()


def write(file: Path, text: str) -> None:
    """Whole or not at all."""
    draft = file.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(file)


def test_replicas_are_added_while_that_pays(tmp_path: Path) -> None:
    """Begins with the fewest; the second one nearly doubles the speed and stays, the third brings little and goes."""
    config = ElasticConfig(min=1, max=4, policy="throughput")
    told: queue.SimpleQueue[object] = queue.SimpleQueue()
    speeds = Speeds(12)
    with (
        coordinator_in(tmp_path, Rules(1, 4), told=told.put) as address,
        scaling(config, address, speeds, say=str, poll_s=0.01),
    ):
        assert told.get(timeout=HANG_S) == Scaled(1)
        for number, (replicas, step_s, wanted) in enumerate(((1, 1.0, 2), (2, 0.55, 3), (3, 0.5, 2)), start=1):
            take_steps(speeds, replicas, step_s, number=number)
            assert told.get(timeout=HANG_S) == Scaled(wanted)
        take_steps(speeds, 2, 0.55, number=4)
    assert told.empty()


def test_a_price_that_is_not_known_at_the_start_is_an_error(tmp_path: Path) -> None:
    """Before any replica is started."""
    config = ElasticConfig(max=2, policy="price", price_limit=1.0, price_file=str(tmp_path / "none"))
    with (
        coordinator_in(tmp_path, Rules(1, 2), told=lambda decision: None) as address,
        pytest.raises(EnvironmentFault, match="price_file"),
        scaling(config, address, Speeds(1), say=str),
    ):
        raise AssertionError("it began without a price")
