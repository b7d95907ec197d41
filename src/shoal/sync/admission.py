"""Admission: who may go on, and whose contribution counts. Pure state machines, driven by events.

A worker reads parameters, computes a contribution to an update, and sends it. Every contribution carries the version
that it was computed from: the number of updates made before the worker read. A rule answers each event with effects:

    synchronous   an update is made of one contribution of every worker that is present
    backup        an update is made of the first N contributions; those that come later are dropped by their version
                  (Chen et al. 2016, arXiv:1604.00981)
    asynchronous  every contribution is an update at once
    bounded       a worker may be `bound` contributions ahead of the slowest (stale-synchronous parallel, Ho et al.
                  2013); contributions with the same number are one update

A rule does no I/O and reads no clock: an event says when it happens, so a test replays any interleaving. A worker that
dies leaves; what it has sent still counts, and nobody waits for it. One that returns begins with the newest version:
what it computed from an older one is dropped, under every rule.

Under `Bounded`, the version is the smallest number of contributions that any worker present has made. So a worker that
begins its contribution c reads parameters with all updates up to c - bound - 1, and with a bound of 0 the rule is the
synchronous one. Each update holds the contributions of one number, as in synchronous training; so any optimizer serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Contribution(NamedTuple):
    """One worker's `number`th contribution, computed from the parameters of `version`."""

    worker: int
    number: int
    version: int


class Update(NamedTuple):
    """One update, which brings the parameters to `version`, of these contributions."""

    version: int
    contributions: tuple[Contribution, ...]


class Effects(NamedTuple):
    """What follows from an event, in this order: updates, then workers that may read and go on.

    `dropped` is the contribution that came too late for its update. `late` are the workers that are still computing
    for an update that has been made: they may give up and begin the next one.
    """

    updates: tuple[Update, ...] = ()
    released: tuple[int, ...] = ()
    dropped: Contribution | None = None
    late: tuple[int, ...] = ()


class Rule(Protocol):
    """Who may go on. Workers are named by numbers; all that `present` names may compute from version 0."""

    @property
    def version(self) -> int:
        """The updates made so far."""
        ...

    @property
    def present(self) -> frozenset[int]:
        """The workers that have not left."""
        ...

    def arrive(self, contribution: Contribution) -> Effects:
        """A contribution is here. One that its worker computed from a version before its return is dropped.

        Raises `ValueError` if the worker is not present, already waits, or is ahead of the version.
        """
        ...

    def leave(self, worker: int) -> Effects:
        """A worker died, or is done. Raises `ValueError` if it is not present."""
        ...

    def join(self, worker: int) -> Effects:
        """A worker is new, or returned: it is released at once. Raises `ValueError` if it is present."""
        ...


class FirstComers:
    """Synchronous; with `counted`, of backup workers: an update is made of the first `counted` contributions.

    `counted` = None: of one of each worker present. If fewer workers are present than `counted`, theirs are enough.
    """

    def __init__(self, workers: Iterable[int], *, counted: int | None = None) -> None:
        """Raises `ValueError` for a `counted` below 1, or above the number of workers."""
        self.version = 0
        self._present = set(workers)
        if counted is not None and not 1 <= counted <= len(self._present):
            raise ValueError(f"{counted} of {len(self._present)} contributions cannot make an update")
        self._counted = counted
        self._pool: dict[int, Contribution] = {}

    @property
    def present(self) -> frozenset[int]:
        return frozenset(self._present)

    def arrive(self, contribution: Contribution) -> Effects:
        worker = contribution.worker
        _check(contribution, self._present, self.version, waiting=self._pool)
        if contribution.version < self.version:
            return Effects(released=(worker,), dropped=contribution)
        self._pool[worker] = contribution
        return self._complete()

    def leave(self, worker: int) -> Effects:
        _remove(worker, self._present)
        return self._complete()

    def join(self, worker: int) -> Effects:
        _add(worker, self._present)
        return Effects(released=(worker,))

    def _complete(self) -> Effects:
        """The update, if it is complete."""
        all_here = self._present <= self._pool.keys()
        enough = self._counted is not None and len(self._pool) >= self._counted
        if not self._pool or not (all_here or enough):
            return Effects()
        self.version += 1
        update = Update(self.version, tuple(self._pool.values()))
        released = tuple(worker for worker in self._pool if worker in self._present)
        late = tuple(sorted(self._present - self._pool.keys()))
        self._pool = {}
        return Effects((update,), released, late=late)


class Asynchronous:
    """Every contribution is an update; one that is more than `cap` updates old is dropped (None: none is)."""

    def __init__(self, workers: Iterable[int], *, cap: int | None = None) -> None:
        """Raises `ValueError` for a negative cap."""
        if cap is not None and cap < 0:
            raise ValueError(f"a cap of {cap} updates drops everything; it must be 0 or more")
        self.version, self._cap = 0, cap
        self._since = dict.fromkeys(workers, 0)  # by worker present: the version at which it began

    @property
    def present(self) -> frozenset[int]:
        return frozenset(self._since)

    def arrive(self, contribution: Contribution) -> Effects:
        _check(contribution, self._since, self.version)
        too_old = self._cap is not None and self.version - contribution.version > self._cap
        if too_old or contribution.version < self._since[contribution.worker]:
            return Effects(released=(contribution.worker,), dropped=contribution)
        self.version += 1
        return Effects((Update(self.version, (contribution,)),), (contribution.worker,))

    def leave(self, worker: int) -> Effects:
        _remove(worker, self._since)
        return Effects()

    def join(self, worker: int) -> Effects:
        _add(worker, self._since)
        self._since[worker] = self.version
        return Effects(released=(worker,))


class Bounded:
    """Stale-synchronous parallel: a worker that has made c contributions may begin the next one if c - version <=
    `bound`.
    """

    def __init__(self, workers: Iterable[int], *, bound: int) -> None:
        """Raises `ValueError` for a negative bound."""
        if bound < 0:
            raise ValueError(f"a bound of {bound} lets nobody go on; it must be 0 or more")
        self.version, self._bound = 0, bound
        self._made = dict.fromkeys(workers, 0)
        self._since = dict(self._made)  # by worker present: the version at which it began
        self._pools: dict[int, list[Contribution]] = {}
        self._blocked: list[int] = []

    @property
    def present(self) -> frozenset[int]:
        return frozenset(self._made)

    def arrive(self, contribution: Contribution) -> Effects:
        """A contribution's number in its pool is the rule's own count: a worker that returned begins at the version."""
        worker = contribution.worker
        _check(contribution, self._made, self.version, waiting=self._blocked)
        if contribution.version < self._since[worker]:
            return Effects(released=(worker,), dropped=contribution)
        number = self._made[worker]
        self._pools.setdefault(number, []).append(contribution)
        self._made[worker] = number + 1
        self._blocked.append(worker)
        return self._advance()

    def leave(self, worker: int) -> Effects:
        _remove(worker, self._made)
        if worker in self._blocked:
            self._blocked.remove(worker)
        return self._advance()

    def join(self, worker: int) -> Effects:
        _add(worker, self._made)
        self._made[worker] = self._since[worker] = self.version
        return Effects(released=(worker,))

    def _advance(self) -> Effects:
        """The updates that are complete, and who is no longer too far ahead."""
        updates, slowest = [], min(self._made.values(), default=self._after_all())
        while self.version < slowest:
            pool = self._pools.pop(self.version)
            self.version += 1
            updates.append(Update(self.version, tuple(pool)))
        released = tuple(worker for worker in self._blocked if self._made[worker] - self.version <= self._bound)
        self._blocked = [worker for worker in self._blocked if worker not in released]
        return Effects(tuple(updates), released)

    def _after_all(self) -> int:
        """The version when everyone has left: what they sent counts."""
        return max(self._pools, default=self.version - 1) + 1


@dataclass
class Account:
    """What a rule did with one worker's contributions. Times are those that events give, in seconds.

    `staleness`: the updates made between a contribution's reading and its own update, added up over those counted.
    """

    counted: int = 0
    dropped: int = 0
    staleness: int = 0
    waited_s: float = 0.0


class Accounts:
    """Keeps an `Account` of every worker, from events and their effects."""

    def __init__(self) -> None:
        self.by_worker: dict[int, Account] = {}
        self._since_s: dict[int, float] = {}

    def arrived(self, contribution: Contribution, effects: Effects, *, now_s: float) -> None:
        """`Rule.arrive` answered `effects` at `now_s`."""
        self._since_s[contribution.worker] = now_s
        self.followed(effects, now_s=now_s)

    def followed(self, effects: Effects, *, now_s: float) -> None:
        """`effects` of any event, which happened at `now_s`."""
        for update in effects.updates:
            for contribution in update.contributions:
                account = self.of(contribution.worker)
                account.counted += 1
                account.staleness += staleness_of(contribution, update)
        if effects.dropped is not None:
            self.of(effects.dropped.worker).dropped += 1
        for worker in effects.released:
            self.of(worker).waited_s += now_s - self._since_s.pop(worker, now_s)

    def of(self, worker: int) -> Account:
        """The account of `worker`, which begins with nothing."""
        return self.by_worker.setdefault(worker, Account())


def staleness_of(contribution: Contribution, update: Update) -> int:
    """tau: the updates made after the contribution's worker read and before this one."""
    return update.version - 1 - contribution.version


def _check(
    contribution: Contribution, present: Iterable[int], version: int, *, waiting: Iterable[int] | Sequence[int] = ()
) -> None:
    worker = contribution.worker
    if worker not in present:
        raise ValueError(f"worker {worker} sent a contribution but is not present: it has to join first")
    if worker in waiting:
        raise ValueError(f"worker {worker} sent a second contribution while it waits for the first: it may not go on")
    if contribution.version > version:
        raise ValueError(
            f"worker {worker} read version {contribution.version}, but only {version} updates were made: it has to read"
            " from the server that it sends to"
        )


def _remove(worker: int, present: set[int] | dict[int, int]) -> None:
    if worker not in present:
        raise ValueError(f"worker {worker} cannot leave: it is not present")
    if isinstance(present, dict):
        del present[worker]
    else:
        present.remove(worker)


def _add(worker: int, present: Iterable[int]) -> None:
    if worker in present:
        raise ValueError(f"worker {worker} cannot join: it is present, and has to leave first")
    if isinstance(present, set):
        present.add(worker)
