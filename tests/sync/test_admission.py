"""Admission rules, on every kind of interleaving: who waits, whose contribution counts, what a death changes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shoal.sync.admission import (
    Accounts,
    Asynchronous,
    Bounded,
    Contribution,
    Effects,
    FirstComers,
    Rule,
    Update,
    staleness_of,
)

INTERLEAVINGS = 100_000
EVENTS, LONG_EVENTS, LONG_EVERY = 8, 40, 20
"""Of an interleaving, and of every twentieth, which is long enough for a bound of 3 to hold workers up often."""
MEMBERSHIP = 0.1  # of the events


class Play:
    """Workers of `rule`, whose next event is drawn: one of those that compute ends, leaves, or one returns."""

    def __init__(self, rule: Rule, workers: int, draw: random.Random) -> None:
        self.rule, self.draw = rule, draw
        self.read = dict.fromkeys(range(workers), 0)  # by worker that computes: the version that it read
        self.made = dict.fromkeys(range(workers), 0)
        self.clock = dict.fromkeys(range(workers), 0)  # contributions made; one that returns begins at the version
        self.gone: set[int] = set()
        self.updates: list[Update] = []

    def end(self, worker: int) -> Effects:
        contribution = Contribution(worker, self.made[worker], self.read.pop(worker))
        self.made[worker] += 1
        self.clock[worker] += 1
        return self._follow(self.rule.arrive(contribution))

    def step(self) -> Effects:
        """One event. Somebody always computes, or has gone: nothing else may happen."""
        assert self.read or not self.rule.present, "a deadlock: nobody computes, and somebody waits"
        if self.gone and (not self.read or self.draw.random() < MEMBERSHIP):
            return self.join(self.gone.pop())
        worker = self.draw.choice(list(self.read))
        return self.leave(worker) if self.draw.random() < MEMBERSHIP else self.end(worker)

    def leave(self, worker: int) -> Effects:
        self.read.pop(worker, None)
        self.gone.add(worker)
        return self._follow(self.rule.leave(worker))

    def join(self, worker: int) -> Effects:
        self.clock[worker] = self.rule.version
        return self._follow(self.rule.join(worker))

    def _follow(self, effects: Effects) -> Effects:
        self.updates += effects.updates
        for worker in effects.released:
            assert worker not in self.read
            self.read[worker] = self.rule.version
        return effects


@pytest.mark.slow
def test_bounded_staleness_holds_in_any_interleaving() -> None:
    """Over 10^5 random interleavings with deaths and returns: nobody that computes is more than `bound` contributions
    ahead of the slowest present, a read for contribution c holds every update up to c - bound - 1, each number makes
    one update, in order, and there is no deadlock.
    """
    draw = random.Random(18)
    for play_number in range(INTERLEAVINGS):
        workers, bound = draw.randint(2, 4), draw.randint(0, 3)
        rule = Bounded(range(workers), bound=bound)
        play = Play(rule, workers, draw)
        for _ in range(EVENTS if play_number % LONG_EVERY else LONG_EVENTS):
            released, clock = play.step().released, play.clock
            slowest = min((clock[worker] for worker in rule.present), default=0)
            assert all(clock[worker] - slowest <= bound for worker in play.read)
            assert all(rule.version >= clock[worker] - bound for worker in released)
        assert [update.version for update in play.updates] == list(range(1, rule.version + 1))
        assert all(0 <= staleness_of(c, update) <= bound for update in play.updates for c in update.contributions)


@pytest.mark.parametrize(
    "rule",
    [
        lambda: FirstComers(range(4)),
        lambda: FirstComers(range(4), counted=2),
        lambda: Asynchronous(range(4)),
        lambda: Asynchronous(range(4), cap=1),
    ],
    ids=["sync", "backup", "async", "async with a cap"],
)
def test_no_interleaving_deadlocks(rule: Callable[[], Rule]) -> None:
    """Deaths and returns included; versions count updates one by one, and no contribution counts twice."""
    draw = random.Random(4)
    for _ in range(2_000):
        play = Play(rule(), 4, draw)
        for _ in range(40):
            play.step()
        counted = [(c.worker, c.number) for update in play.updates for c in update.contributions]
        assert [update.version for update in play.updates] == list(range(1, play.rule.version + 1))
        assert len(counted) == len(set(counted))


def test_a_synchronous_update_holds_everyone() -> None:
    """Nobody goes on before; then all do, from the same version."""
    play = Play(FirstComers(range(3)), 3, random.Random(0))
    assert play.end(1) == Effects()
    assert play.end(0) == Effects()
    effects = play.end(2)
    assert {c.worker for c in effects.updates[0].contributions} == {0, 1, 2}
    assert set(effects.released) == {0, 1, 2}
    assert set(play.read.values()) == {1}


def test_backup_counts_the_first_and_drops_the_late() -> None:
    """Exactly N contributions an update; the late worker's is dropped by its version, and it reads the newest."""
    draw, play = random.Random(7), Play(FirstComers(range(6), counted=4), 6, random.Random(7))
    dropped = 0
    for _ in range(3_000):
        effects = play.end(draw.choice(list(play.read)))
        dropped += effects.dropped is not None
        if effects.dropped is not None:
            assert effects.dropped.version < play.rule.version
            assert effects.released == (effects.dropped.worker,)
    assert all(len(update.contributions) == 4 for update in play.updates)
    assert all(staleness_of(c, update) == 0 for update in play.updates for c in update.contributions)
    assert dropped > 100


def test_who_is_too_late_for_an_update_is_said() -> None:
    """Who still computes for an update that has been made may give up."""
    play = Play(FirstComers(range(3), counted=2), 3, random.Random(0))
    play.end(0)
    assert play.end(2).late == (1,)


def test_bounded_by_zero_is_synchronous() -> None:
    """On the same interleavings, deaths included: the same updates of the same contributions, the same workers
    released.
    """
    for seed in range(2_000):
        draw = random.Random(seed)
        bounded, plain = Play(Bounded(range(3), bound=0), 3, draw), Play(FirstComers(range(3)), 3, draw)
        for _ in range(30):
            worker = draw.choice(list(bounded.read)) if bounded.read else None
            if worker is None or draw.random() < MEMBERSHIP:
                if bounded.gone:
                    gone = bounded.gone.pop()
                    plain.gone.discard(gone)
                    assert bounded.join(gone) == plain.join(gone)
                continue
            if draw.random() < MEMBERSHIP:
                ours, theirs = bounded.leave(worker), plain.leave(worker)
            else:
                ours, theirs = bounded.end(worker), plain.end(worker)
            assert [(u.version, set(u.contributions)) for u in ours.updates] == [
                (u.version, set(u.contributions)) for u in theirs.updates
            ]
            assert set(ours.released) == set(theirs.released)
            assert bounded.rule.version == plain.rule.version


def test_a_worker_may_be_ahead_by_the_bound_and_no_more() -> None:
    """With a bound of 2, one that is alone at work makes contributions 0, 1 and 2, then waits."""
    play = Play(Bounded(range(2), bound=2), 2, random.Random(0))
    assert play.end(0).released == (0,)
    assert play.end(0).released == (0,)
    assert play.end(0).released == ()
    effects = play.end(1)
    assert [update.version for update in effects.updates] == [1]
    assert set(effects.released) == {0, 1}


@pytest.mark.parametrize("rule", [FirstComers(range(2)), Bounded(range(2), bound=1)], ids=["sync", "bounded"])
def test_a_death_frees_those_that_wait_for_it(rule: Rule) -> None:
    """And what the dead worker had sent before counts."""
    play = Play(rule, 2, random.Random(0))
    play.end(0)
    if play.read.get(0) is not None:
        play.end(0)
    effects = play.leave(1)
    assert effects.released == (0,)
    assert {c.worker for update in effects.updates for c in update.contributions} == {0}


def test_a_contribution_of_a_worker_that_died_counts() -> None:
    """It had arrived."""
    play = Play(FirstComers(range(2)), 2, random.Random(0))
    play.end(0)
    play.rule.leave(0)
    (update,) = play.end(1).updates
    assert [c.worker for c in update.contributions] == [0, 1]


@pytest.mark.parametrize(
    "rule",
    [lambda: FirstComers(range(2)), lambda: Asynchronous(range(2)), lambda: Asynchronous(range(2), cap=9),
     lambda: Bounded(range(2), bound=3)],
    ids=["sync", "async", "async with a cap", "bounded"],
)  # fmt: skip
def test_a_worker_that_returned_with_an_old_version_is_dropped(rule: Callable[[], Rule]) -> None:
    """By its version, however much staleness the rule allows; it is counted as dropped, and may go on at once. What it
    computes from the version that it returned to counts.
    """
    admission, accounts = rule(), Accounts()
    admission.leave(1)
    admission.arrive(Contribution(0, 0, 0))
    admission.join(1)
    old = Contribution(1, 0, 0)
    effects = admission.arrive(old)
    accounts.arrived(old, effects, now_s=0.0)
    assert effects == Effects(released=(1,), dropped=old)
    assert accounts.of(1).dropped == 1
    assert admission.version == 1
    fresh = Contribution(1, 1, 1)
    updates = [*admission.arrive(fresh).updates, *admission.leave(0).updates]
    assert [c for update in updates for c in update.contributions] == [fresh]


def test_async_drops_beyond_the_cap() -> None:
    """One that is exactly as old as the cap counts."""
    rule = Asynchronous(range(2), cap=2)
    for number in range(2):
        rule.arrive(Contribution(0, number, number))
    assert rule.arrive(Contribution(1, 0, 0)).dropped is None
    assert rule.arrive(Contribution(1, 1, 0)).dropped == Contribution(1, 1, 0)
    assert rule.version == 3


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (lambda rule: rule.arrive(Contribution(9, 0, 0)), "worker 9 sent a contribution but is not present"),
        (lambda rule: rule.arrive(Contribution(0, 0, 5)), "worker 0 read version 5, but only 0 updates were made"),
        (lambda rule: rule.leave(9), "worker 9 cannot leave"),
        (lambda rule: rule.join(0), "worker 0 cannot join"),
    ],
)
@pytest.mark.parametrize(
    "rule",
    [lambda: FirstComers(range(2)), lambda: Asynchronous(range(2)), lambda: Bounded(range(2), bound=1)],
    ids=["sync", "async", "bounded"],
)
def test_impossible_events_are_refused(rule: Callable[[], Rule], event: Callable[[Rule], Effects], words: str) -> None:
    """In a sentence."""
    with pytest.raises(ValueError, match=words):
        event(rule())


def test_a_second_contribution_of_one_that_waits_is_refused() -> None:
    """It was not released."""
    rule = FirstComers(range(2))
    rule.arrive(Contribution(0, 0, 0))
    with pytest.raises(ValueError, match="worker 0 sent a second contribution"):
        rule.arrive(Contribution(0, 1, 0))


@pytest.mark.parametrize(
    "make", [lambda: FirstComers(range(2), counted=3), lambda: Bounded(range(2), bound=-1),
             lambda: Asynchronous(range(2), cap=-1), lambda: FirstComers(range(2), counted=0)]
)  # fmt: skip
def test_bounds_that_make_no_sense_are_refused(make: Callable[[], Rule]) -> None:
    """More contributions than workers, none at all, and negative bounds."""
    with pytest.raises(ValueError, match=r"must be 0 or more|cannot make an update"):
        make()
