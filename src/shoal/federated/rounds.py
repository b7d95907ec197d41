"""`Rounds`: who trains from which model, whose contribution counts, and when a round ends. Pure; the clock is given.

Events (a client asks, contributes, leaves; time passes) make decisions. A caller that keeps decisions in a journal and
gives them back as `history` has the same state again: that is how a server survives its restart.

Every piece of work has a *ticket*: round, attempt and client; in asynchronous training model version, number and
client. A ticket counts once. A contribution that comes again is told so, and one that comes too late is refused.

Who takes part is a pure function of the seed, the round, the attempt and who is there:

    uniform    the first of a random order
    by size    without replacement, in proportion to sizes: the largest of u_i^(1 / size_i), u_i uniform
               (Efraimidis, Spirakis, Information Processing Letters 97, 2006)
    Poisson    each client by itself with chance q: what the accountants of differential privacy assume
    importance with chance pi_i = min(1, a s_i), s_i = samples of i x the norm of its last update, where a makes the
               chances add up to the cohort (arXiv:2010.13723, equation 7): all points u, u + 1, ... on the sum of the
               chances in a random order, u uniform (Madow 1949). An update counts 1 / pi_i times (Hajek 1971)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import torch

from shoal.federated.config import FedBuffConfig, FederatedConfig
from shoal.maths.counter import key_of, uniform

Verdict = Literal["counted", "again", "late", "unknown", "stale"]


class Ticket(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """One piece of work: of `client`, from model `version`, the `number`-th try there (an attempt at the round)."""

    client: str
    version: int
    number: int


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """A round begins with these clients; `chances` of each, where they weigh updates."""

    version: int
    attempt: int
    cohort: tuple[str, ...]
    chances: tuple[float, ...] = ()


class Given(msgspec.Struct, frozen=True, tag="given"):
    """Asynchronous work was given out."""

    ticket: Ticket


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """Asynchronous work will not count: its client is gone, or what it sent cannot be used."""

    ticket: Ticket


class Counted(msgspec.Struct, frozen=True, tag="counted"):
    """A contribution counts; `digest` says which bytes it was."""

    ticket: Ticket
    digest: str = ""


class Abandoned(msgspec.Struct, frozen=True, tag="abandoned"):
    """An attempt ended with too few contributions; none of them counts."""

    version: int
    attempt: int
    reason: str = ""


class Advanced(msgspec.Struct, frozen=True, tag="advanced"):
    """The model of the next version is made from these contributions; `norms` of each, where they weigh clients."""

    version: int
    tickets: tuple[Ticket, ...]
    norms: tuple[float, ...] = ()


class Revealing(msgspec.Struct, frozen=True, tag="revealing"):
    """Clients are about to be asked for what unmasks a secret sum: this attempt is the round's last."""

    version: int
    attempt: int


Decision = Revealing | Dropped | Opened | Given | Counted | Abandoned | Advanced


@dataclass
class _Open:
    """The round that is open. `began_s` is None after a restart: the deadline is counted from the first event on."""

    attempt: int
    cohort: tuple[str, ...]
    began_s: float | None
    members: frozenset[str]
    revealing: bool = False
    counted: dict[Ticket, str] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    chances: dict[str, float] = field(default_factory=dict)


class Rounds:
    """`versions`: how many models are made. `poisson`: the chance of each client to take part, instead of a cohort.

    `turns` and `last`: how many contributions of a client went into a model, and which was the last; `norms`: the norm
    of that, where it weighs clients.
    """

    def __init__(
        self,
        config: FederatedConfig,
        *,
        versions: int,
        seed: int,
        poisson: float | None = None,
        history: Iterable[Decision] = (),
    ) -> None:
        self.config, self.versions, self.seed, self.poisson = config, versions, seed, poisson
        self.version = self.attempt = 0
        self.present: dict[str, int] = {}
        self.open: _Open | None = None
        self.given: dict[str, Ticket] = {}
        self.buffer: dict[Ticket, str] = {}
        self.used: dict[Ticket, str] = {}
        self.turns: dict[str, int] = {}
        self.last: dict[str, Ticket] = {}
        self.norms: dict[str, float] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        self._made: list[Decision] = []
        for decision in history:
            self._apply(decision, None)

    @property
    def over(self) -> bool:
        """Whether the last model is made."""
        return self.version >= self.versions

    def decisions(self) -> tuple[Decision, ...]:
        """What was decided since the last call, to be made durable before anybody hears of it."""
        made, self._made = tuple(self._made), []
        return made

    def join(self, client: str, samples: int) -> None:
        """A client is there."""
        self.present[client] = samples
        one = self.open
        if one is not None and client in one.members and client not in one.refused:
            counted = Ticket(client, self.version, one.attempt) in one.counted
            one.waiting |= set() if counted else {client}

    def leave(self, client: str) -> None:
        """A client is gone: what it was given is lost, and a round does not wait for it."""
        self.present.pop(client, None)
        self._drop(client)
        if self.open is not None:
            self.open.waiting.discard(client)

    def ask(self, client: str, now_s: float) -> Ticket | None:
        """Work for a client that is there and has none; None: not now."""
        if client not in self.present or self.over:
            return None
        if self.config.asynchronous:
            return self._ask_any_time(client, now_s)
        self._open_round(now_s)
        one = self.open
        if one is None or client not in one.members or client in one.refused:
            return None
        ticket = Ticket(client, self.version, one.attempt)
        return None if ticket in one.counted else ticket

    def contribute(self, ticket: Ticket, digest: str, now_s: float) -> Verdict:
        """A contribution has come, whole and of good form."""
        if ticket in self.used or ticket in self.buffer or (self.open is not None and ticket in self.open.counted):
            return "again"
        if self.config.asynchronous:
            return self._contribute_any_time(ticket, digest)
        one = self.open
        if one is None or (ticket.version, ticket.number) != (self.version, one.attempt):
            return "late" if (ticket.version, ticket.number) < (self.version, self.attempt) else "unknown"
        if ticket.client not in one.members:
            return "unknown"
        if len(one.counted) >= self._full(one):
            return "late"
        self._decide(Counted(ticket, digest), now_s)
        return "counted"

    def refuse(self, client: str) -> None:
        """What a client of the open round sent cannot be used; the round does not wait for it any more."""
        self._drop(client)
        if self.open is not None and client in self.open.members:
            self.open.refused.add(client)
            self.open.waiting.discard(client)

    def tick(self, now_s: float) -> tuple[Ticket, ...] | None:
        """The contributions that make the next model, in order of their clients, when there are enough; the caller
        makes it and calls `advance`. None: not yet. A round without enough is abandoned."""
        if self.over:
            return None
        if self.config.asynchronous:
            assert isinstance(self.config, FedBuffConfig)
            return tuple(sorted(self.buffer)) if len(self.buffer) >= self.config.buffer else None
        self._open_round(now_s)
        one = self.open
        if one is None:
            return None
        if one.began_s is None:
            one.began_s = now_s
        if one.waiting and len(one.counted) < self._full(one) and now_s - one.began_s < self.config.deadline_s:
            return None
        if len(one.counted) >= self._least(one):
            return tuple(sorted(one.counted))
        self.abandon(f"{len(one.counted)} of at least {self._least(one)} contributions", now_s)
        return None

    def begin(self, now_s: float) -> None:
        """Opens the next round where enough clients are there; `tick` does it, too."""
        if not self.config.asynchronous:
            self._open_round(now_s)

    def reveal(self, now_s: float) -> None:
        """Secret sums: from here on the round is not tried again, for two sums of it could be told apart."""
        if self.open is not None and not self.open.revealing:
            self._decide(Revealing(self.version, self.open.attempt), now_s)

    def chance_of(self, client: str) -> float:
        """How likely a client was to take part in the open round; 1 where that weighs no update."""
        return 1.0 if self.open is None else self.open.chances.get(client, 1.0)

    def advance(self, now_s: float, tickets: tuple[Ticket, ...], norms: Sequence[float] = ()) -> None:
        """The next model is made, from `tickets`; `norms` of their updates, where they weigh clients."""
        self._decide(Advanced(self.version + 1, tickets, tuple(norms)), now_s)

    def abandon(self, reason: str, now_s: float) -> None:
        """The open attempt ends without a model, and the round is tried again with other clients."""
        if self.open is not None:
            self._decide(Abandoned(self.version, self.open.attempt, reason), now_s)

    def deadline_s(self) -> float | None:
        """When the open round ends at the latest, on the caller's clock."""
        one = self.open
        return None if one is None or one.began_s is None else one.began_s + self.config.deadline_s

    def _full(self, one: _Open) -> int:
        return len(one.cohort) if self.poisson is not None else min(self.config.cohort_size, len(one.cohort))

    def _least(self, one: _Open) -> int:
        return 0 if self.poisson is not None else self.config.least_contributions

    def _open_round(self, now_s: float) -> None:
        if self.open is not None or self.over:
            return
        if len(self.present) < (self.config.cohort_size if self.poisson is None else self.config.clients):
            return  # of Poisson sampling the chance of each client is that of `clients` of them
        drawn = {"seed": self.seed, "round": self.version, "attempt": self.attempt}
        chances: dict[str, float] = {}
        if self.poisson is not None:
            cohort = choose_each(self.poisson, tuple(self.present), **drawn)
        elif self.config.sampling == "importance":
            chances = choose_important(self.config, self.present, self.norms, **drawn)
            cohort = list(chances)
        else:
            cohort = choose(self.config, self.present, **drawn)
        self._decide(Opened(self.version, self.attempt, tuple(cohort), tuple(chances.values())), now_s)

    def _ask_any_time(self, client: str, now_s: float) -> Ticket | None:
        if client in self.given:
            return self.given[client]
        if len(self.given) >= self.config.cohort_size:
            return None
        number = self._numbers.get((client, self.version), 0)
        self._decide(Given(Ticket(client, self.version, number)), now_s)
        return self.given[client]

    def _contribute_any_time(self, ticket: Ticket, digest: str) -> Verdict:
        assert isinstance(self.config, FedBuffConfig)
        if self.given.get(ticket.client) != ticket:
            return "unknown"
        if self.version - ticket.version > self.config.stalest:
            self._drop(ticket.client)
            return "stale"
        self._decide(Counted(ticket, digest), None)
        return "counted"

    def _drop(self, client: str) -> None:
        if client in self.given:
            self._decide(Dropped(self.given[client]), None)

    def _decide(self, decision: Decision, now_s: float | None) -> None:
        self._made.append(decision)
        self._apply(decision, now_s)

    def _apply(self, decision: Decision, now_s: float | None) -> None:
        match decision:
            case Opened(version=version, attempt=attempt, cohort=cohort, chances=chances):
                self.version, self.attempt = version, attempt
                self.open = _Open(attempt, cohort, now_s, frozenset(cohort), waiting=set(cohort))
                self.open.chances |= zip(cohort, chances, strict=False)  # most sampling has none
            case Given(ticket=ticket):
                self.given[ticket.client] = ticket
                self._numbers[ticket.client, ticket.version] = ticket.number + 1
            case Dropped(ticket=ticket):
                self.given.pop(ticket.client, None)
            case Counted(ticket=ticket, digest=digest):
                self.given.pop(ticket.client, None)
                if self.config.asynchronous:
                    self.buffer[ticket] = digest
                    self._note(ticket)
                elif self.open is not None:
                    self.open.counted[ticket] = digest
                    self.open.waiting.discard(ticket.client)
            case Revealing():
                if self.open is not None:
                    self.open.revealing = True
            case Abandoned(attempt=attempt):
                self.open, self.attempt = None, attempt + 1
            case Advanced(version=version, tickets=tickets, norms=norms):
                self.norms |= zip((ticket.client for ticket in tickets), norms, strict=False)
                counted = self.buffer if self.config.asynchronous else self.open.counted if self.open else {}
                self.used |= {ticket: counted.get(ticket, "") for ticket in tickets}
                for ticket in () if self.config.asynchronous else tickets:
                    self._note(ticket)
                self.buffer = {t: d for t, d in self.buffer.items() if t not in set(tickets)}
                self.version, self.attempt, self.open = version, 0, None

    def _note(self, ticket: Ticket) -> None:
        self.turns[ticket.client] = self.turns.get(ticket.client, 0) + 1
        self.last[ticket.client] = ticket


def choose(
    config: FederatedConfig, present: Mapping[str, int], *, seed: int, round: int, attempt: int = 0
) -> list[str]:
    """The clients of a round among those that are `present` (their samples by name), at most the cohort and what
    `over_selection` adds, sorted by name."""
    names = sorted(present)
    wanted = math.ceil(config.cohort_size * (1 + config.over_selection))
    if len(names) <= wanted:
        return names
    drawn = _uniform(names, seed, "cohort", round, attempt)
    if config.sampling == "by_size":
        sizes = torch.tensor([max(1, present[name]) for name in names], dtype=torch.float64)
        drawn = -(drawn.log() / sizes)
    first = drawn.sort(stable=True).indices[:wanted].tolist()
    return sorted(names[index] for index in first)


LEAST_SCORE = 0.1
"""The lowest score beside the mean one: what was last of little weight is looked at again."""


def choose_important(
    config: FederatedConfig,
    present: Mapping[str, int],
    norms: Mapping[str, float],
    *,
    seed: int,
    round: int,
    attempt: int = 0,
) -> dict[str, float]:
    """The clients of a round and the chance that each had, sorted by name. `norms`: of each client's last update; one
    that has sent none is taken for the mean of the others. Where all scores are 0, or one is not finite, they count as
    equal: a round has its cohort whatever clients have sent."""
    names = sorted(present)
    wanted = min(len(names), math.ceil(config.cohort_size * (1 + config.over_selection)))
    known = [norms[name] for name in names if name in norms]
    usual = sum(known) / len(known) if sum(known) > 0 else 1.0
    sizes = [max(1, present[name]) if config.by_samples else 1 for name in names]
    scores = torch.tensor(
        [size * norms.get(name, usual) for name, size in zip(names, sizes, strict=True)], dtype=torch.float64
    )
    largest = float(scores.max())
    scores = scores / largest if 0 < largest < math.inf else torch.ones_like(scores)
    chances = _chances(scores.clamp(min=LEAST_SCORE * float(scores.mean())), wanted)
    order = _uniform(names, seed, "cohort", round, attempt).argsort(stable=True)
    start = float(_uniform(["start"], seed, "cohort", round, attempt))
    passed = (chances[order].cumsum(0) - start).ceil().clamp(min=0, max=wanted)  # points at or before each place
    taken = passed.diff(prepend=torch.zeros(1, dtype=torch.float64)) > 0
    return {names[index]: float(chances[index]) for index in sorted(order[taken].tolist())}


def _chances(scores: torch.Tensor, wanted: int) -> torch.Tensor:
    """min(1, a s_i), float64, where a makes them add up to `wanted`; scores are above 0."""
    certain = torch.zeros_like(scores, dtype=torch.bool)
    while True:
        left = wanted - int(certain.sum())
        chances = torch.where(certain, 1.0, left * scores / scores[~certain].sum())
        beyond = ~certain & (chances >= 1)
        if not bool(beyond.any()):
            return chances
        certain |= beyond


def choose_each(chance: float, present: Sequence[str], *, seed: int, round: int, attempt: int = 0) -> list[str]:
    """The clients of a round, each taken by itself with `chance`, sorted by name. There may be none."""
    names = sorted(present)
    drawn = _uniform(names, seed, "poisson", round, attempt)
    return [name for name, number in zip(names, drawn.tolist(), strict=True) if number < chance]


def _uniform(names: Sequence[str], seed: int, purpose: str, round: int, attempt: int) -> torch.Tensor:
    """A number in (0, 1) for each name, which does not depend on who else is there."""
    keys = torch.tensor([key_of(seed, purpose, round, attempt, name) for name in names], dtype=torch.int64)
    return uniform(keys, torch.zeros(len(names), dtype=torch.int64), dtype=torch.float64)
