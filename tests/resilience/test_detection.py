"""Slow, hung and corrupted replicas are named, and well ones are not."""

from __future__ import annotations

import random

import pytest

from shoal.resilience import events as ev
from shoal.resilience.detection import LASTING_S, Doing, Slow, Stalls, Stragglers, compare
from shoal.resilience.membership import Membership
from tests.resilience.simulator import exchange, exchange_all, ready, step

NOISE = 0.1
"""Sigma of the lognormal noise of a step: more than any that was seen on an idle host."""


BUSY_NOISE = 0.5
"""On a host that others use, too: steps of one replica differ by more than those of a slow one from the others'."""


def steps(replicas: int, seed: int, slow: str = "", ratio: float = 1.5, noise: float = NOISE):
    """Noisy seconds by replica, step after step."""
    draw = random.Random(seed)
    while True:
        times = {f"r{n}": draw.lognormvariate(0, noise) for n in range(replicas)}
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
@pytest.mark.parametrize("noise", [NOISE, BUSY_NOISE])
def test_noise_alone_names_nobody(replicas: int, count: int, noise: float) -> None:
    """A thousand noisy steps, and a thousand noisy replicas."""
    watch = Stragglers()
    for _, times in zip(range(count), steps(replicas, seed=replicas, noise=noise), strict=False):
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


def beat(machine: Membership, now_s: float, **doing: tuple[int, Doing]) -> None:
    """A heartbeat of each replica, with its progress and what it does."""
    for name, (progress, what) in doing.items():
        machine.handle(ev.Heartbeat(name, 0, progress, what), now_s)


def test_a_replica_that_hangs_while_others_wait_for_it_is_fenced() -> None:
    """Its heartbeats go on, and name nothing new; the others form the next generation."""
    machine, parts = ready(3)
    step(machine, parts)
    for now_s in range(1, 48):
        beat(machine, now_s, r0=(5, "waits"), r1=(4, "computes"), r2=(5, "waits"))
        machine.tick(now_s)
        assert ("r1" in machine.fenced) == (now_s > 1 + machine.rules.hang_s), now_s
    assert machine.fenced["r1"].reason == "its rank 0 hangs: it made no progress for 45 s, and others wait for it"
    left = {name: parts[name] for name in ("r0", "r2")}
    for part in left.values():
        part.hear(machine.handle(ev.Look(), 48).answer)
    exchange_all(machine, left, 48)
    assert (machine.members, machine.ledger.step) == (("r0", "r2"), 1)


def test_a_long_step_is_no_hang() -> None:
    """All compute for as long as they like; one that is later than the others by less than `hang_s` stays."""
    machine, _ = ready(2)
    for now_s in range(0, 300, 4):
        late: Doing = "waits" if now_s > 260 else "computes"
        beat(machine, now_s, r0=(1, "computes"), r1=(1, late))
        machine.tick(now_s)
    assert not machine.fenced


def test_a_replica_that_hangs_is_fenced_when_the_others_have_given_up_their_collective() -> None:
    """They have accepted the next generation, and wait for it: no longer than `hang_s`, which is less than
    `accept_s`."""
    machine, parts = ready(2)
    parts["r0"].failed()
    exchange(machine, parts["r0"])
    for now_s in range(1, 48):
        beat(machine, now_s, r0=(6, ""), r1=(5, "computes"))
        machine.tick(now_s)
    assert machine.fenced["r1"].reason.startswith("its rank 0 hangs")
    exchange(machine, parts["r0"], 48)
    assert machine.members == ("r0",)


def test_a_slow_member_is_named_once() -> None:
    """When it has been slower than all others for two minutes; the view says so to who asks later, and forgets it in
    the next generation."""
    machine, parts, ratio = *ready(3), 2.0
    named = []
    for now_s in range(0, 240, 5):
        for name, part in parts.items():
            part.applied(stop=part.position + 8, sample_s=ratio if name == "r2" else 1.0)
            for event in part.unsent():
                outcome = machine.handle(event, now_s)
                if now_s < LASTING_S:
                    assert not outcome.slow
                named += outcome.slow
                part.hear(outcome.answer)
    assert named == [Slow("r2", ratio)]
    assert machine.view().slow == {"r2": ratio}
    machine.handle(ev.Ended("r0"), 240)
    rest = {name: parts[name] for name in ("r1", "r2")}
    for part in rest.values():
        part.hear(machine.handle(ev.Look(), 240).answer)
    exchange_all(machine, rest, 240)
    assert machine.view().slow == {}


def test_who_measures_no_times_makes_nobody_slow() -> None:
    """A server among the members."""
    machine, parts = ready(2)
    for _ in range(32):
        for name, part in parts.items():
            part.applied(stop=part.position + 8, sample_s=0.0 if name == "r0" else 1.0)
            for event in part.unsent():
                assert machine.handle(event, 0).slow == ()
