"""A choice among ways of summing follows the link: near the best of each phase, ahead of every fixed one over all."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shoal.wire.adaptive import Choice
from tests.wire.processes import run

MB = 8e6  # bits
FAST, SLOW = 1e9, 5e7
WAYS = {"plain": (4 * MB, 0.0), "half": (2 * MB, 0.012), "int8": (1 * MB, 0.045)}
PHASE = 200
LOST = 1.10


def seconds(way: str, link: float) -> float:
    """Of a sum of 4 MB between two ranks: bits over the link, and coding."""
    bits, coding_s = WAYS[way]
    return bits / link + coding_s


def played(noise: Callable[[], float]) -> tuple[Choice, list[tuple[str, float, float]]]:
    """The choice over three phases: way, seconds, link."""
    choice, log = Choice(list(WAYS)), []
    for step in range(3 * PHASE):
        link = SLOW if PHASE <= step < 2 * PHASE else FAST
        way = choice.name
        taken_s = seconds(way, link) * noise()
        log.append((way, taken_s, link))
        choice.note(taken_s)
    return choice, log


@pytest.mark.parametrize("seed", range(5))
def test_it_loses_little_to_the_best_of_each_phase_and_beats_every_fixed_way(seed: int) -> None:
    """1 Gbit/s, then 50 Mbit/s, then 1 Gbit/s again, with noise of up to a tenth."""
    draw = random.Random(seed)
    choice, log = played(lambda: 1 + 0.1 * draw.random())
    mean = 1.05
    for phase in range(3):
        part = log[phase * PHASE : (phase + 1) * PHASE]
        best_s = min(sum(seconds(way, link) for _, _, link in part) for way in WAYS) * mean
        assert sum(taken_s for _, taken_s, _ in part) <= LOST * best_s
    total_s = sum(taken_s for _, taken_s, _ in log)
    for way in WAYS:
        assert total_s < mean * sum(seconds(way, link) for _, _, link in log)
    assert choice.changes == 2


def test_it_is_replayed_from_the_times_alone() -> None:
    draw = random.Random(1)
    _, log = played(lambda: 1 + 0.1 * draw.random())
    again = Choice(list(WAYS))
    for way, taken_s, _ in log:
        assert again.name == way
        again.note(taken_s)


def test_a_way_that_became_faster_is_found() -> None:
    """The present way stays as it was: only a trial shows it. Trials cost little."""
    choice, spent_s, tried_s = Choice(["present", "other"]), 0.0, 0.0
    for step in range(3000):
        taken_s = 0.01 if choice.name == "present" else (0.05 if step < 1500 else 0.001)
        spent_s, tried_s = spent_s + taken_s, tried_s + (taken_s if choice.name == "other" and step < 1500 else 0.0)
        choice.note(taken_s)
    assert choice.name == "other"
    assert tried_s < 0.03 * 1500 * 0.01 + 2 * 0.05


RANKS = """
reducer = wire.Adaptive(group, {"plain": None, "int8": wire.Int8()})
x = np.ones(20_000, np.float32)
right = all(np.allclose(reducer.all_reduce(x, op="avg"), 1.0, rtol=0.01) for _ in range(20))
result = [right, reducer.log, reducer.choice.name]
"""


def test_ranks_choose_alike() -> None:
    first, second = run(2, RANKS)
    assert first == second
    assert first[0]
    assert {way for way, _ in first[1]} == {"plain", "int8"}
