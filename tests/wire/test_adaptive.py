"""A choice among ways of summing follows the link: near the best of each phase, ahead of every fixed one over all."""

from __future__ import annotations

import random

import pytest

from shoal.wire.adaptive import Way, WayChoice
from tests.wire.processes import run

FAST, SLOW = 125e6, 6.25e6  # bytes a second: 1 Gbit/s, 50 Mbit/s
WAYS = {"plain": Way(4e6, 0.0), "half": Way(2e6, 0.02), "sparse": Way(1e5, 0.045)}
PHASE = 100
LOST = 1.10
NOISE = 0.2


def played(
    seed: int, *, phases: tuple[float, ...] = (FAST, SLOW, FAST)
) -> tuple[WayChoice, list[tuple[str, float, float]]]:
    """The choice over the phases, from guesses of coding that are half off: way, seconds of exchange, of coding."""
    draw = random.Random(seed)
    guessed = {name: way._replace(coding_s=way.coding_s * draw.uniform(0.5, 1.5)) for name, way in WAYS.items()}
    choice, log = WayChoice(guessed), []
    for rate in phases:
        for _ in range(PHASE):
            way = WAYS[choice.name]
            times = way.sent_bytes / rate * (1 + NOISE * draw.random()), way.coding_s * (1 + NOISE * draw.random())
            log.append((choice.name, *times))
            choice.note(*times)
    return choice, log


def fixed_s(way: str, rate: float) -> float:
    """Of a phase by one way, with the mean of the noise."""
    return PHASE * (WAYS[way].sent_bytes / rate + WAYS[way].coding_s) * (1 + NOISE / 2)


@pytest.mark.parametrize("seed", range(5))
def test_it_loses_little_to_the_best_of_each_phase_and_beats_every_fixed_way(seed: int) -> None:
    """1 Gbit/s, then 50 Mbit/s, then 1 Gbit/s again."""
    choice, log = played(seed)
    for phase, rate in enumerate((FAST, SLOW, FAST)):
        taken_s = sum(a + b for _, a, b in log[phase * PHASE : (phase + 1) * PHASE])
        assert taken_s <= LOST * min(fixed_s(way, rate) for way in WAYS) + 2 * WAYS["plain"].sent_bytes / SLOW
    total_s = sum(a + b for _, a, b in log)
    for way in WAYS:
        assert total_s < sum(fixed_s(way, rate) for rate in (FAST, SLOW, FAST))
    assert {way for way, _, _ in log[PHASE + 5 : 2 * PHASE]} == {"sparse"}
    assert choice.changes <= 4


ONE_BEST = {"plain": Way(4e6, 0.0), "int8": Way(1e6, 0.02), "top-k": Way(8e4, 0.008)}
JITTER_S = 0.003
FEW = 20


@pytest.mark.parametrize("seed", range(20))
def test_it_stays_with_a_way_that_is_the_best_on_every_link(seed: int) -> None:
    """Whose sums show the rate badly: a message of 0.6 ms beside up to 3 ms of jitter, in phases of 20 sums. It begins
    with that way by the rate of a short sum, and what another way was once measured to take is believed.
    """
    draw = random.Random(seed)

    def taken(name: str, rate: float) -> tuple[float, float]:
        way = ONE_BEST[name]
        return way.sent_bytes / rate + JITTER_S * draw.random() ** 3, way.coding_s * (1 + NOISE * draw.random())

    probe_bytes = 262_144
    choice = WayChoice(ONE_BEST, bytes_s=probe_bytes / (probe_bytes / FAST + JITTER_S * draw.random() ** 3))
    for rate in (FAST, SLOW, FAST):
        begun, least_s = 0.0, 0.0
        for _ in range(FEW):
            own, best = taken(choice.name, rate), taken("top-k", rate)
            begun, least_s = begun + sum(own), least_s + sum(own if choice.name == "top-k" else best)
            choice.note(*own)
        assert begun <= LOST * least_s


def test_it_is_replayed_from_the_times_alone() -> None:
    draw = random.Random(3)
    guessed = {name: way._replace(coding_s=way.coding_s * draw.uniform(0.5, 1.5)) for name, way in WAYS.items()}
    _, log = played(3)
    again = WayChoice(guessed)
    for way, exchange_s, coding_s in log:
        assert again.name == way
        again.note(exchange_s, coding_s)


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
    assert len(first[1]) == 19
