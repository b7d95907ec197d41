"""Exposed communication: what is measured, against what, and when nothing can be measured."""

from __future__ import annotations

import random

import pytest

from benchmarks.exposed import AGAIN, ALONE, CALLS, GLOO, INSTANT, OURS, checks_of, exposed, row_of

NOISE_S, SEED = 1e-3, 1


def turns(*, gloo_s: float, ours_s: float, calls: float | None = None) -> list[dict[str, float]]:
    """Steps of 0.1 s on the instant network, `gloo_s` and `ours_s` longer on the backends, with noise; `calls`: how
    many times longer Gloo's all-reduces alone take."""
    noise, found = random.Random(SEED), []
    for number in range(30):
        common_s = noise.uniform(0, 0.05)  # a slow moment slows all sides
        sides = {INSTANT: 0.1, AGAIN: 0.1, GLOO: 0.1 + gloo_s, OURS: 0.1 + ours_s}
        turn = {side: common_s + own_s + noise.gauss(0, NOISE_S) for side, own_s in sides.items()}
        if calls is not None:
            turn |= {CALLS + OURS: 0.001, CALLS + GLOO: 0.001 * calls}
        if number % 3 == 0:
            turn[ALONE] = common_s + 0.09
        found.append(turn)
    return found


def first_check(found: list[dict[str, float]]) -> dict:
    return checks_of("tensor", 2, found, tokens=256)[0]


def test_exposed_is_what_is_longer_than_on_the_instant_network() -> None:
    """Not than the bare model; slow moments do not count."""
    found = exposed(turns(gloo_s=0.02, ours_s=0.008))
    assert (found.gloo_s, found.ours_s) == (pytest.approx(0.02, abs=NOISE_S), pytest.approx(0.008, abs=NOISE_S))
    assert found.ratio == pytest.approx(found.gloo_s / found.ours_s)
    assert 0 < found.noise_s < 2 * NOISE_S


def test_less_than_the_noise_counts_as_the_noise() -> None:
    """A ratio over next to nothing would be as large as one likes."""
    found = exposed(turns(gloo_s=0.02, ours_s=0.0))
    assert found.measurable
    assert found.ratio == pytest.approx(found.gloo_s / found.noise_s)
    assert "at least" in first_check(turns(gloo_s=0.02, ours_s=0.0))["name"]
    assert "at least" not in first_check(turns(gloo_s=0.02, ours_s=0.008))["name"]


def test_where_nothing_is_measurable_the_check_is_about_the_all_reduces_alone_and_says_so() -> None:
    """The check neither holds of noise nor fails of it."""
    good, bad = (first_check(turns(gloo_s=0.0, ours_s=0.0, calls=calls)) for calls in (3.0, 1.5))
    assert "not measurable" in good["name"]
    assert (good["value"], good["holds"]) == (pytest.approx(3.0), True)
    assert (bad["value"], bad["holds"]) == (pytest.approx(1.5), False)
    assert "not measurable" not in first_check(turns(gloo_s=0.02, ours_s=0.0, calls=3.0))["name"]


def test_nothing_measurable_and_no_calls_to_time_is_no_success() -> None:
    """Noise over noise is one."""
    found = first_check(turns(gloo_s=0.0, ours_s=0.0))
    assert "not measurable" in found["name"]
    assert (found["value"], found["holds"]) == (1.0, False)


def test_a_row_has_the_bare_model_although_not_every_turn_does() -> None:
    """It is timed in every third."""
    line = row_of("ddp", 2, turns(gloo_s=0.02, ours_s=0.008), tokens=256)
    assert line["alone_ms"] > 90
    assert line["faster_lower_95"] <= line["faster_median"]


def test_fsdp2_at_256_tokens_has_a_promise_of_its_own() -> None:
    """1.5 times as fast as on Gloo."""
    slow = turns(gloo_s=0.02, ours_s=0.008)
    assert [check["bound"] for check in checks_of("fsdp2", 2, slow, tokens=256)] == [2.0, 1.0, 1.5]
    assert [check["bound"] for check in checks_of("fsdp2", 2, slow, tokens=2048)] == [2.0, 1.0]
