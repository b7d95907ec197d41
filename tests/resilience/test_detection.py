"""Slow, hung and corrupted replicas are named, and well ones are not."""

from __future__ import annotations

import random

import pytest

from shoal.resilience.detection import Stalls, Stragglers, compare

NOISE = 0.1
"""Sigma of the lognormal noise of a step: more than any that was seen on an idle host."""


def steps(replicas: int, seed: int, slow: str = "", ratio: float = 1.5):
    """Noisy seconds by replica, step after step."""
    draw = random.Random(seed)
    while True:
        times = {f"r{n}": draw.lognormvariate(0, NOISE) for n in range(replicas)}
        if slow:
            times[slow] *= ratio
        yield times


@pytest.mark.parametrize("replicas", [2, 3, 8, 64])
@pytest.mark.parametrize("seed", range(5))
def test_a_replica_that_is_half_slower_is_named_within_20_steps(replicas: int, seed: int) -> None:
    """It, and nobody else."""
    watch = Stragglers()
    found = [watch.took(times) for _, times in zip(range(20), steps(replicas, seed, "r1"), strict=False)]
    assert {slow.replica for step in found for slow in step} == {"r1"}
    assert 1.3 < found[-1][0].ratio < 1.75
    assert found[-1][0].sentence("rank 1").startswith("rank 1 has long taken 1.")


@pytest.mark.parametrize(("replicas", "count"), [(2, 1000), (4, 1000), (16, 1000), (1000, 30)])
def test_noise_alone_names_nobody(replicas: int, count: int) -> None:
    """A thousand noisy steps, and a thousand noisy replicas."""
    watch = Stragglers()
    for _, times in zip(range(count), steps(replicas, seed=replicas), strict=False):
        assert watch.took(times) == []


def test_a_replica_that_recovers_is_no_longer_slow() -> None:
    """The window forgets."""
    watch = Stragglers()
    for _, times in zip(range(20), steps(4, 0, "r2"), strict=False):
        watch.took(times)
    last = [watch.took(times) for _, times in zip(range(20), steps(4, 1), strict=False)][-1]
    assert last == []


def test_seconds_that_cannot_be_are_refused() -> None:
    """A clock that went back."""
    with pytest.raises(ValueError, match="must be positive"):
        Stragglers().took({"a": -1.0})


def test_a_rank_hangs_that_stands_still_while_another_waits_for_as_long() -> None:
    """Not one whose peers have only just begun to wait, nor one that takes no steps."""
    watch = Stalls(limit_s=10)
    watch.heard(("a", 0), 7, "computes", 0.0)
    watch.heard(("b", 0), 8, "waits", 5.0)
    watch.heard(("spare", 0), 0, "", 0.0)
    assert watch.hung(14.0) == []
    assert watch.hung(15.5) == [("a", 0)]
    assert watch.hung(14.0, others_wait=True) == [("a", 0)]
    watch.heard(("a", 0), 8, "computes", 15.0)
    assert watch.hung(16.0) == []


def test_a_rank_that_makes_progress_never_hangs() -> None:
    """However long each part takes below the limit, and however long others wait."""
    watch = Stalls(limit_s=10)
    watch.heard(("b", 0), 1, "waits", 0.0)
    for second in range(0, 100, 9):
        watch.heard(("a", 0), second, "computes", float(second))
        assert watch.hung(second + 9.0) == []


def test_ranks_that_all_compute_or_all_wait_do_not_hang() -> None:
    """A long step on all ranks; collectives that the network does not end. And no limit: nobody ever does."""
    for doing in ("computes", "waits"):
        watch = Stalls(limit_s=10)
        for rank in range(4):
            watch.heard(("a", rank), 7, doing, 0.0)
        assert watch.hung(99.0) == []
    never = Stalls(limit_s=0)
    never.heard(("a", 0), 7, "computes", 0.0)
    never.heard(("b", 0), 7, "waits", 0.0)
    assert never.hung(1e9) == []


def test_a_majority_names_the_culprit_and_two_cannot() -> None:
    """One of three; one of two; nobody where all are equal or no fingerprint was taken."""
    three = compare(5, {"a": 1, "b": 1, "c": 2})
    assert three is not None
    assert three.culprits == ("c",)
    two = compare(5, {"a": 1, "b": 2})
    assert two is not None
    assert two.culprits == ()
    assert "no majority" in two.sentence
    split = compare(5, {"a": 1, "b": 1, "c": 2, "d": 2})
    assert split is not None
    assert split.culprits == ()
    assert compare(5, {"a": 1, "b": 1}) is None
    assert compare(5, {"a": 0, "b": 0}) is None
