"""How fast replicas are: who is named as slow, and how work follows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from shoal.comm.board import Board
from shoal.comm.mesh import build_mesh
from shoal.data.cursor import Interval
from shoal.data.order import share
from shoal.engine.measure import Noted, ReplicaSpeeds, SpeedBoard
from shoal.resilience.detection import Lasting, Stragglers
from shoal.topology.layout import Layout
from tests.comm.local import local_group
from tests.ranks import TestPlace
from tests.waiting import HANG_S

SAMPLES, REPLICAS = 64, 4
NOISE = 0.05
"""Relative, of a step's seconds: as much as a shared machine has."""
WITHIN = 20
SAMPLE_S, STEP_S = 1e-3, 2e-3
"""A sample's seconds on a replica that is not slow, and what a step costs beside its samples."""


class Played(NamedTuple):
    """What rank 0 said, after which step, and the seconds of the slowest replica in each step."""

    said: list[tuple[int, str]]
    step_s: list[float]
    parts: list[list[int]]


def play(
    place: TestPlace, steps: int, slow: list[tuple[int, int, float]], divides: bool, lasting_s: float = 0
) -> Played:
    """Steps whose seconds are drawn, and which the clock counts as a second each; (first step, replica, factor)
    says who is slow from when on."""
    mesh = build_mesh(Layout(replicate=place.size), place.rank, store=place.store, device=torch.device("cpu"))
    said: list[tuple[int, str]] = []
    speeds: list[float] = []
    step = 0

    def say(sentence: str) -> None:
        said.append((step, sentence))

    def divide(found) -> None:
        speeds[:] = found

    draws = random.Random(7)
    watch = ReplicaSpeeds(
        mesh.world,
        place.rank,
        place.size,
        torch.device("cpu"),
        warn=say,
        divide=divide if divides else None,
        lasting=Lasting(lasting_s),
        clock=lambda: float(step),
    )
    step_s, parts = [], []
    for step in range(1, steps + 1):
        whole = Interval(0, SAMPLES)
        parts.append(
            [len(share(whole, replicas=place.size, replica=k, speeds=speeds or None)) for k in range(place.size)]
        )
        factors = [1.0] * place.size
        for first, replica, factor in slow:
            if step >= first:
                factors = [factor if k == replica else 1.0 for k in range(place.size)]
        noise = [draws.lognormvariate(0, NOISE) for _ in factors]
        seconds = [(STEP_S + SAMPLE_S * n) * f * z for n, f, z in zip(parts[-1], factors, noise, strict=True)]
        watch.took(Noted(parts[-1][place.rank], seconds[place.rank]))
        watch.after_step(agreed=True)
        step_s.append(max(seconds))
    return Played(said, step_s, parts)


@pytest.mark.parametrize("divides", [False, True], ids=["even", "by speed"])
def test_a_slow_replica_is_named(ranks, divides: bool) -> None:
    """1.5 times as slow as the others from step 101 on, and again from step 171 on: once, within 20 steps."""
    played, *others = ranks(REPLICAS, play, 200, [(101, 2, 1.5), (151, 2, 1.0), (171, 2, 1.5)], divides)
    ((named, sentence),) = played.said
    assert 101 <= named <= 100 + WITHIN
    assert sentence.startswith("rank 2 has long taken 1.")
    assert all(other.said == played.said for other in others)


def test_who_is_slow_for_a_while_is_nobodys_business(ranks) -> None:
    """On a shared machine now one replica is slow for 60 s and now another: no word. One that stays slow is named when
    it has been for two minutes."""
    busy = [(first, (first // 60) % 2, 1.5) for first in range(1, 541, 60)]
    played, *_ = ranks(2, play, 800, [*busy, (541, 1, 1.5)], False, 120)
    ((named, sentence),) = played.said
    assert 541 + 120 <= named <= 540 + 120 + 2 * WITHIN
    assert sentence.startswith("rank 1 has long taken 1.")
    assert sentence.endswith("times as long for a sample as the others: check its host")


def test_even_replicas_are_no_alarm(ranks) -> None:
    """In 1,000 steps whose seconds vary by 5 %."""
    played, *_ = ranks(REPLICAS, play, 1000, [], False)
    assert played.said == []


def test_work_follows_when_another_replica_is_slow(ranks) -> None:
    """Replica 0 is four times as slow as the others, from step 101 on replica 3: within 20 steps the throughput is at
    least 85 % of the best that any division could give.
    """
    played, *_ = ranks(REPLICAS, play, 200, [(1, 0, 4.0), (101, 3, 4.0)], True)
    best_s = min(
        max(4 * (STEP_S + SAMPLE_S * n), STEP_S + SAMPLE_S * -(-(SAMPLES - n) // 3)) for n in range(1, SAMPLES)
    )
    for first in (1, 101):
        settled = played.step_s[first + WITHIN - 1 : first + 99]
        assert best_s * len(settled) / sum(settled) >= 0.85
    assert played.parts[99][0] < played.parts[99][3]
    assert played.parts[199][3] < played.parts[199][0]
    assert all(sum(parts) == SAMPLES for parts in played.parts)


def play_apart(
    steps: int, slow: Sequence[tuple[int, int, float]], stragglers: Stragglers | None = None
) -> list[tuple[int, str]]:
    """Replicas that never agree, each at its own pace on a virtual clock, until the slowest has taken `steps`: what
    rank 0 said, after which step of the slowest. (first step, replica, factor)
    says who is slow from which of its own
    steps on.
    """
    store, said, draws = HashStore(), list[tuple[int, str]](), random.Random(3)
    taken, clock_s = [0] * REPLICAS, [0.0] * REPLICAS

    def say(sentence: str) -> None:
        said.append((min(taken), sentence))

    watches = [
        ReplicaSpeeds(
            ranks, rank, REPLICAS, torch.device("cpu"),
            warn=say, stragglers=stragglers or Stragglers(), lasting=Lasting(0), board=Board(store, timeout_s=HANG_S),
        )
        for rank, ranks in enumerate(local_group(REPLICAS))
    ]  # fmt: skip
    while min(taken) < steps:
        rank = min(range(REPLICAS), key=lambda one: clock_s[one])
        factor = next((f for first, one, f in reversed(slow) if one == rank and taken[rank] + 1 >= first), 1.0)
        seconds = SAMPLE_S * SAMPLES / REPLICAS * factor * draws.lognormvariate(0, NOISE)
        clock_s[rank], taken[rank] = clock_s[rank] + seconds, taken[rank] + 1
        watches[rank].took(Noted(SAMPLES // REPLICAS, seconds))
        watches[rank].after_step(agreed=False)
    return said


@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_replica_is_named_long_before_an_agreement(slow: int) -> None:
    """Replicas that take steps of their own and agree on nothing in 200 steps: one that is 1.5 times as slow from its
    step 101 on is named within 20 of its steps. Rank 0 names itself too.
    """
    ((named, sentence),) = play_apart(200, [(101, slow, 1.5), (151, slow, 1.0)])
    assert 101 <= named <= 100 + WITHIN
    assert sentence.startswith(f"rank {slow} has long taken 1.")


def test_even_replicas_that_never_agree_are_no_alarm() -> None:
    """In 1,000 steps whose seconds vary by 5 %."""
    assert play_apart(1000, []) == []


def test_how_slow_and_for_how_long_is_stated() -> None:
    """1.5 times as slow is not slow with a factor of 2; over 40 steps it takes more of them to be named."""
    assert play_apart(60, [(1, 1, 1.5)], Stragglers(factor=2.0)) == []
    ((named, _),) = play_apart(60, [(1, 1, 1.5)], Stragglers(steps=40))
    assert 40 <= named <= 40 + WITHIN


def test_a_replica_is_as_slow_as_the_slowest_of_its_ranks() -> None:
    """Of two ranks each; a rank that computes nothing tells nothing, and one that has not told yet is left out."""
    store = Board(HashStore(), timeout_s=HANG_S)
    boards = [SpeedBoard(store, rank, 6) for rank in range(6)]
    assert boards[0].heard() == {}
    for rank, (replica, row) in enumerate([(0, [1.0, 2.0, 3.0]), (0, [2.5, 2.5]), (1, [4.0]), (1, []), (None, [])]):
        boards[rank].tell(replica, row)
    assert boards[0].heard() == {0: [2.5, 3.0], 1: []}
    boards[3].tell(1, [5.0])
    assert boards[0].heard()[1] == [5.0]
