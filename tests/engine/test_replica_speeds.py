"""How fast replicas are: who is named as slow, and how work follows."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch

from shoal.comm.mesh import build_mesh
from shoal.data.cursor import Interval
from shoal.data.order import share
from shoal.engine.replica_speeds import Noted, ReplicaSpeeds
from shoal.topology.layout import Layout
from tests.ranks import TestPlace

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


def play(place: TestPlace, steps: int, slow: list[tuple[int, int, float]], divides: bool) -> Played:
    """Steps whose seconds are drawn; (first step, replica, factor) says who is slow from when on."""
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
        mesh.world, place.rank, place.size, torch.device("cpu"), warn=say, note=say, divide=divide if divides else None
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
    """1.5 times as slow as the others from step 101 on: once, within 20 steps, and when it is over."""
    played, *others = ranks(REPLICAS, play, 200, [(101, 2, 1.5), (151, 2, 1.0)], divides)
    (named, sentence), (ended, end) = played.said
    assert 101 <= named <= 100 + WITHIN
    assert sentence.startswith("replica 2 needs 1.")
    assert 151 <= ended <= 150 + WITHIN
    assert end == "replica 2 is as fast as the others again"
    assert all(other.said == played.said for other in others)


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
