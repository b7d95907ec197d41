"""Membership: which replicas take the next steps together. A state machine: events and the time are arguments.

Replicas join, and form **generations**, numbered upwards; the number is the fencing token of all that they write. In a
generation a step needs all members, as each puts its gradient into the sum: they agree on it among themselves, and each
reports it. A step is **committed** when all members have reported it.

A generation ends when a replica is lost, wants to go, or can be added:

1. A number is proposed. A replica that accepts it promises to apply nothing more in earlier generations, as acceptors
   do in Paxos (Lamport, "The part-time parliament", ACM TOCS 1998).
2. When all that are wanted have accepted, the new generation is formed. Its state is the newest that a member of the
   last generation holds; without one, it is the newest checkpoint.

A generation needs all its members for each step. So it is enough that *one* of them has promised to leave: a new
generation forms only with a member of the last one, or when the launcher says that none of its processes is left.
Two generations therefore never take steps at the same time, though nobody's clock is trusted and a silent replica may
only be slow. Time decides nothing but when to stop waiting.

All that must outlive the coordinator is a `Decision`. The state changes by `_apply` alone, and so is a function of the
decisions; what replicas have said since, they say again when they are asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.resilience import events as ev
from shoal.resilience.detection import Divergence, Lasting, Slow, Stalls, Stragglers, compare, cut_off
from shoal.resilience.ledger import SampleLedger

FRUITLESS = 3
"""Generations in a row, of the same members and without a step, after which a replica that peers cannot reach goes."""


@dataclass(frozen=True)
class Rules:
    """How many replicas a generation has, and how long the coordinator waits.

    `silence_s`: a replica is lost when one of its ranks has been silent for so long; `hang_s`: or when one has kept
    others waiting for so long (0: never); `accept_s`: or when it has not accepted a proposal, which it can do after its
    present step; `start_s`: the first generation waits for `maximum` replicas for so long, and then takes those that
    are there.
    """

    minimum: int = 1
    maximum: int = 1
    silence_s: float = 5.0
    accept_s: float = 300.0
    start_s: float = 60.0
    hang_s: float = 45.0

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise ValueError(
                f"{self.minimum} to {self.maximum} replicas cannot be: it must hold that 1 <= min <= max; change one"
            )


@dataclass
class Replica:
    """What the coordinator knows of a live replica. `seen_s` is by rank; `reported` and `position` are those of the
    newest step that it has reported in the present generation."""

    ranks: int
    since_s: float
    address: str = ""
    seen_s: list[float] = field(default_factory=list)
    accepted: ev.Accept | None = None
    reported: int = 0
    position: int = 0
    leaving: bool = False


@dataclass(frozen=True)
class Response:
    """`answer` may leave when `decisions` are in the journal. `verdict` is that of the fingerprints of a step; `slow`:
    members that have become so.
    """

    answer: ev.Answer
    decisions: tuple[ev.Decision, ...] = ()
    verdict: Divergence | None = None
    slow: tuple[Slow, ...] = ()


class Wanted(NamedTuple):
    """Members of the next generation, and replicas that ask to go. `are_others`: not all are members now."""

    members: tuple[str, ...]
    leaving: tuple[str, ...]
    are_others: bool


class Membership:
    """`history`: the decisions of the coordinators before this one, in order. `now_s` is any clock that never goes
    back, the same in all calls."""

    def __init__(self, rules: Rules, now_s: float, *, history: Iterable[ev.Decision] = ()) -> None:
        self.rules, self.target = rules, rules.maximum
        self.replicas: dict[str, Replica] = {}
        self.fenced: dict[str, ev.Fenced] = {}
        self.number = self.generation = self.formed_step = self.formed_position = 0
        self.members: tuple[str, ...] = ()
        self.holders: tuple[str, ...] = ()
        self.ledger, self.known = SampleLedger(), False
        self._votes: dict[int, dict[str, ev.Report]] = {}
        self._proposed_s = self._now_s = now_s
        self._made: list[ev.Decision] = []
        self._suspects: dict[str, tuple[str, ...]] = {}
        self._stalls, self._stragglers, self._lasting = Stalls(rules.hang_s), Stragglers(), Lasting()
        self._slow: dict[str, Slow] = {}
        self._newly_slow: tuple[Slow, ...] = ()
        self._fruitless = 0
        self._wishes: Wanted | None = None
        self._verdict: Divergence | None = None
        self._disagreement = ""
        for decision in history:
            self._apply(decision)

    def handle(self, event: ev.Event, now_s: float) -> Response:
        """Takes one event. Unknown, late, repeated and contradicting events are answered, and change nothing."""
        self._now_s = now_s
        refusal = self._take(event)
        if self._made or not isinstance(event, ev.Heartbeat | ev.Look | ev.Report):
            self._reconsider()
        return self._outcome(refusal or (self.view(event.replicas) if isinstance(event, ev.Look) else self.pulse()))

    def tick(self, now_s: float) -> Response:
        """Lets time pass: to be called a few times per `silence_s`."""
        self._now_s = now_s
        proposed = self.number > self.generation
        wanted = set(self._wanted().members) if proposed else set()
        hung = self._hung(now_s)
        for name, replica in list(self.replicas.items()):
            silent_s = now_s - min(replica.seen_s)
            if silent_s > self.rules.silence_s:
                rank = replica.seen_s.index(min(replica.seen_s))
                self._fence(name, f"its rank {rank} was silent for {silent_s:.1f} s")
            elif name in hung:
                what = f"its rank {hung[name]} hangs: it made no progress for {self.rules.hang_s:g} s"
                self._fence(name, f"{what}, and others wait for it")
            elif (
                name in wanted
                and not self._accepted(replica)
                and now_s - max(self._proposed_s, replica.since_s) > self.rules.accept_s
            ):
                self._fence(name, f"it did not accept generation {self.number} in {self.rules.accept_s:g} s")
        self._reconsider()
        return self._outcome(self.pulse())

    def _hung(self, now_s: float) -> dict[str, int]:
        """The first rank that hangs of each member that has one. Members that have accepted a proposal wait, too."""
        left = [name for name in self.members if name in self.replicas and self._accepted(self.replicas[name])]
        others_wait = bool(left) and now_s - self._proposed_s > self.rules.hang_s
        found: dict[str, int] = {}
        for name, rank in sorted(self._stalls.hung(now_s, others_wait=others_wait)):
            found.setdefault(name, rank)
        return found

    def pulse(self) -> ev.Pulse:
        """What every answer says."""
        return ev.Pulse(self.number, self.generation, self.ledger.step if self.known else 0)

    def view(self, asked: Iterable[str] = ()) -> ev.View:
        """The newest generation, which of its members were fenced, and which of the replicas `asked` for were fenced
        and may still run.
        """
        lost = [name for name in asked if name in self.fenced and not self.fenced[name].ended]
        lost += [name for name in self.members if name in self.fenced]
        return ev.View(
            self.number, self.generation, self.members, self.holders,
            self.formed_step, self.formed_position, self.ledger.step if self.known else 0,
            tuple(self.replicas[name].address if name in self.replicas else "" for name in self.members),
            {name: self.fenced[name].reason for name in lost},
            self._disagreement,
            {name: slow.ratio for name, slow in self._slow.items()},
        )  # fmt: skip

    @property
    def spares(self) -> tuple[str, ...]:
        """Live replicas that stand by."""
        return tuple(name for name in self.replicas if name not in self.members)

    def snapshot(self) -> tuple[ev.Decision, ...]:
        """Few decisions that lead to the same state as all that were made: what the journal is shortened to."""
        kept: list[ev.Decision] = [ev.Scaled(self.target)]
        kept += [ev.Admitted(name, replica.ranks, replica.address) for name, replica in self.replicas.items()]
        kept += self.fenced.values()
        if self.generation:
            kept.append(ev.Formed(self.generation, self.members, self.holders, self.formed_step, self.formed_position))
            if self.known and not self.holders:
                kept.append(ev.Rewound(self.generation, self.formed_step, self.formed_position))
            kept.append(ev.Continued(self.generation, self.ledger.step, self.ledger.position))
        if self.number > self.generation:
            kept.append(ev.Proposed(self.number))
        return tuple(kept)

    def _outcome(self, answer: ev.Answer) -> Response:
        outcome = Response(answer, tuple(self._made), self._verdict, self._newly_slow)
        self._made, self._verdict, self._newly_slow = [], None, ()
        return outcome

    def _take(self, event: ev.Event) -> ev.Refusal | None:
        if isinstance(event, ev.Look):
            return None
        if isinstance(event, ev.Scale):
            return self._scale(event)
        if isinstance(event, ev.Ended | ev.Expel):
            self._fence(event.replica, event.reason, ended=isinstance(event, ev.Ended))
            return None
        if event.replica in self.fenced:
            return ev.Refusal(f"replica {event.replica} was fenced: {self.fenced[event.replica].reason}", fenced=True)
        if isinstance(event, ev.Join):
            return self._join(event)
        replica = self.replicas.get(event.replica)
        if replica is None:
            return ev.Refusal(f"replica {event.replica} is unknown: it has to join first")
        if isinstance(event, ev.Heartbeat):
            return self._heartbeat(event, replica)
        if isinstance(event, ev.Report):
            return self._report(event, replica)
        if isinstance(event, ev.Accept):
            return self._accept(event, replica)
        if isinstance(event, ev.Broken):
            return self._broken(event)
        if isinstance(event, ev.Restored):
            return self._restored(event)
        replica.leaving = True
        self._wishes = None
        return None

    def _join(self, event: ev.Join) -> ev.Refusal | None:
        known = self.replicas.get(event.replica)
        if known is None:
            self._decide(ev.Admitted(event.replica, event.ranks, event.address))
        elif known.ranks != event.ranks:
            return ev.Refusal(
                f"replica {event.replica} joins with {event.ranks} ranks, and has joined with {known.ranks}: "
                "give each process a name of its own"
            )
        return None

    def _heartbeat(self, event: ev.Heartbeat, replica: Replica) -> ev.Refusal | None:
        if event.rank >= replica.ranks:
            return ev.Refusal(f"replica {event.replica} has {replica.ranks} ranks, and no rank {event.rank}")
        replica.seen_s[event.rank] = self._now_s
        if event.replica in self.members:
            self._stalls.heard((event.replica, event.rank), event.progress, event.doing, self._now_s)
        return None

    def _report(self, event: ev.Report, replica: Replica) -> ev.Refusal | None:
        if event.generation != self.generation or event.replica not in self.members:
            return ev.Refusal(
                f"replica {event.replica} reports step {event.step} of generation {event.generation}: "
                f"generation {self.generation} holds the samples"
            )
        if event.step <= replica.reported:
            return None
        if self._accepted(replica):
            return ev.Refusal(f"replica {event.replica} has left generation {event.generation}")
        votes = self._votes.setdefault(event.step, {})
        others = next(iter(votes.values()), event)
        in_order = self.known and event.step == replica.reported + 1 and event.start == replica.position
        if not in_order or event.stop < event.start or others.stop != event.stop:
            return ev.Refusal(
                f"replica {event.replica} reports step {event.step} on positions [{event.start}, {event.stop}): it "
                f"stands after step {replica.reported} at position {replica.position}, and all members use the same"
            )
        votes[event.replica] = event
        replica.reported, replica.position = event.step, event.stop
        if len(votes) == len(self.members):
            self._commit(event, votes)
        return None

    def _commit(self, event: ev.Report, votes: dict[str, ev.Report]) -> None:
        self._decide(ev.Committed(event.generation, event.step, event.start, event.stop))
        self._judge_speeds({name: vote.sample_s for name, vote in votes.items()})
        self._verdict = compare(event.step, {name: vote.fingerprint for name, vote in votes.items()})
        if self._verdict is not None and not self._verdict.culprits:
            self._disagreement = self._verdict.sentence
        for name in self._verdict.culprits if self._verdict else ():
            self._fence(name, f"its parameters after step {event.step} differ from the majority's")

    def _judge_speeds(self, sample_s: dict[str, float]) -> None:
        """Who is slow, by what a step's samples took each member; nothing where one has not measured it."""
        if all(sample_s.values()):
            slow = {one.replica: one for one in self._stragglers.took(sample_s)}
            self._newly_slow = tuple(self._lasting.newly(slow.values(), self._now_s))
            self._slow = {name: one for name, one in slow.items() if name in self._lasting.told}

    def _accept(self, event: ev.Accept, replica: Replica) -> ev.Refusal | None:
        if event.number != self.number or self.number == self.generation:
            return None  # late; the answer says which number is out
        entered = event.generation == self.generation
        holds = event.replica in self.holders and self.ledger.step == self.formed_step
        if event.replica not in self.members or not self.known or not (entered or holds):
            event = ev.Accept(event.replica, event.number)
        elif event.step is not None and event.step != replica.reported:
            return ev.Refusal(
                f"replica {event.replica} accepts with the state after step {event.step} and has reported "
                f"{replica.reported}: it has to report its steps first"
            )
        replica.accepted = event
        return None

    def _broken(self, event: ev.Broken) -> ev.Refusal | None:
        """Proposes a generation. When several in a row came to nothing, one replica has to go (`cut_off`)."""
        if event.generation != self.generation or event.replica not in self.members:
            return None
        self._suspects[event.replica] = event.suspects
        if self.number == self.generation:
            self._propose()
        return None

    def _restored(self, event: ev.Restored) -> ev.Refusal | None:
        if event.generation != self.generation or event.replica not in self.members or self.holders:
            return ev.Refusal(f"replica {event.replica} restores no state of generation {self.generation}")
        if not self.known:
            self._decide(ev.Rewound(event.generation, event.step, event.position))
        elif (event.step, event.position) != (self.formed_step, self.formed_position):
            return ev.Refusal(
                f"replica {event.replica} loaded the checkpoint of step {event.step}, others that of "
                f"{self.formed_step}: all replicas must see the same checkpoints"
            )
        return None

    def _scale(self, event: ev.Scale) -> ev.Refusal | None:
        if not self.rules.minimum <= event.replicas <= self.rules.maximum:
            return ev.Refusal(
                f"{event.replicas} replicas were asked for: the run has {self.rules.minimum} to {self.rules.maximum}"
            )
        if event.replicas != self.target:
            self._decide(ev.Scaled(event.replicas))
        return None

    def _fence(self, name: str, reason: str, *, ended: bool = False) -> None:
        before = self.fenced.get(name)
        if before is None or (ended and not before.ended):
            self._decide(ev.Fenced(name, reason if before is None else before.reason, ended))

    def _reconsider(self) -> None:
        """Proposes, and forms, what the present replicas ask for."""
        unused = self.known and self.ledger.step == self.formed_step  # its state may still have to be copied
        serving = self.holders if unused else ()
        for name in [name for name in self._wanted().leaving if name not in (*self.members, *serving)]:
            self._fence(name, "it left", ended=True)
        wanted = self._wanted()
        holders_lost = unused and self.holders and not any(name in self.replicas for name in self.holders)
        if self.number == self.generation and (wanted.are_others or holders_lost):
            self._propose()
        if self.number > self.generation and self._may_form(wanted.members):
            self._form(wanted.members)

    def _propose(self) -> None:
        self._proposed_s = self._now_s
        self._decide(ev.Proposed(self.number + 1))

    def _wanted(self) -> Wanted:
        """Members first, in their order, then spares in theirs; kept until an event changes it, as few do."""
        if self._wishes is None:
            names = dict.fromkeys(name for name in (*self.members, *self.replicas) if name in self.replicas)
            leaving = tuple(name for name in names if self.replicas[name].leaving)
            members = tuple(name for name in names if not self.replicas[name].leaving)[: self.target]
            self._wishes = Wanted(members, leaving, set(members) != set(self.members))
        return self._wishes

    def _may_form(self, wanted: tuple[str, ...]) -> bool:
        if len(wanted) < self.rules.minimum or not all(self._accepted(self.replicas[name]) for name in wanted):
            return False
        if self.generation == 0:
            return len(wanted) == self.target or self._now_s - self._proposed_s >= self.rules.start_s
        left = (name for name in self.members if name in self.replicas and self._accepted(self.replicas[name]))
        return any(left) or all(name in self.fenced and self.fenced[name].ended for name in self.members)

    def _form(self, wanted: tuple[str, ...]) -> None:
        leaving = [name for name in self.members if name in self.replicas and name not in wanted]
        states = {name: self.replicas[name].accepted for name in (*wanted, *leaving)}
        steps = {name: state.step for name, state in states.items() if state is not None and state.step is not None}
        step, position = self.ledger.step, self.ledger.position
        holders = tuple(name for name, held in steps.items() if held == max(steps.values()))
        if holders:
            step, position = steps[holders[0]], self.replicas[holders[0]].position
        fruitless = self._fruitless + 1 if step == self.formed_step and wanted == self.members else 0
        suspects, self._suspects = self._suspects, {}
        cut = cut_off(wanted, suspects) if fruitless >= FRUITLESS else None
        if cut is not None:
            self._fence(cut[0], f"{cut[1]}: {fruitless} generations with it took no step")
            return
        self._fruitless = fruitless
        self._decide(ev.Formed(self.number, wanted, holders, step, position))

    def _accepted(self, replica: Replica) -> bool:
        return replica.accepted is not None and replica.accepted.number == self.number > self.generation

    def _decide(self, decision: ev.Decision) -> None:
        self._made.append(decision)
        self._apply(decision)

    def _apply(self, decision: ev.Decision) -> None:
        """The only place where what must outlive the coordinator changes."""
        self._wishes = None
        match decision:
            case ev.Admitted(name, ranks, address):
                now_s = self._now_s
                self.replicas[name] = Replica(ranks, now_s, address, [now_s] * ranks)
            case ev.Fenced(name):
                gone = self.replicas.pop(name, None)
                for rank in range(gone.ranks if gone is not None else 0):
                    self._stalls.forget((name, rank))
                self.fenced[name] = decision
            case ev.Scaled(replicas):
                self.target = replicas
            case ev.Proposed(number):
                self.number = number
            case ev.Formed(number, members, holders, step, position):
                self.number = self.generation = number
                self.members, self.holders, self.known = members, holders, bool(holders)
                self._stalls, self._stragglers, self._slow = Stalls(self.rules.hang_s), Stragglers(), {}
                self._begin(step, position)
            case ev.Rewound(_, step, position):
                self.known = True
                self._begin(step, position)
            case ev.Committed(generation, step, start, stop):
                self.ledger.commit(generation, step, start=start, stop=stop)
                self._reached(step, stop)
                self._votes.pop(step, None)
            case ev.Continued(generation, step, position):
                self.ledger.begin(generation, step=step, position=position)
                self._reached(step, position)

    def _begin(self, step: int, position: int) -> None:
        """The generation starts from the state after `step`."""
        self.formed_step, self.formed_position = step, position
        self.ledger.begin(self.generation, step=step, position=position)
        self._votes.clear()
        for name in self.members:
            if name in self.replicas:
                self.replicas[name].reported, self.replicas[name].position = step, position

    def _reached(self, step: int, position: int) -> None:
        """In a journal that is read again: what is committed was reported by all members."""
        for name in self.members:
            replica = self.replicas.get(name)
            if replica is not None and replica.reported < step:
                replica.reported, replica.position = step, position
