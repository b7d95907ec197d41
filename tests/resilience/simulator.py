"""Worlds of replicas, a coordinator and a network that fail at random, by seed; every rule is checked as it runs.

The replicas' state is its own history: a chain of `Applied`, so that equal states are the same object, and every
position that a state has used can be read off. A collective is over when every member of a generation is in it; its end
may reach some members and not others.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.resilience.events import Answer, Committed, Decision, Ended, Event, Formed, Heartbeat, Leave, Look, Scale
from shoal.resilience.ledger import audit
from shoal.resilience.membership import Membership, Rules
from shoal.resilience.participant import Participant

QUIET_TICKS = 120
"""Within so many ticks without faults, every world has to take steps again."""


@dataclass(frozen=True, eq=False)
class Applied:
    """A state: the one after `step`, whose last update used the positions start, ..., stop - 1."""

    parent: Applied | None
    generation: int
    step: int
    start: int
    stop: int


FIRST = Applied(None, 0, 0, 0, 0)


@dataclass
class Process:
    """A replica's processes. `state` is None until there is one."""

    part: Participant
    state: Applied | None = None
    alive: bool = True
    paused_until: int = 0
    cut_until: int = 0  # from the coordinator
    apart_until: int = 0  # from its peers
    source: str = ""
    leaving: bool = False
    waiting: int = 0  # ticks in a collective

    def awake(self, now: int) -> bool:
        return self.alive and self.paused_until <= now


@dataclass
class World:
    """One random history. `violations` of a rule raise `AssertionError` at once, with the seed."""

    seed: int
    faults: float = 0.08
    replicas: int = 0
    ranks: int = 1
    membership_of: Callable[..., Membership] = Membership
    now: int = 0
    journal: list[Decision] = field(default_factory=list)
    history: list[Decision] = field(default_factory=list)
    processes: dict[str, Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        maximum = self.replicas or self.random.randint(1, 4)
        self.rules = Rules(self.random.randint(1, maximum), maximum, silence_s=5, accept_s=20, start_s=4)
        self.coordinator: Membership | None = self.membership_of(self.rules, 0)
        self.back_at = 0
        self.started = 0
        self.mail: list[tuple[int, int, str, Event]] = []
        self.sent = 0
        self.inside: dict[tuple[int, int], set[str]] = {}
        self.applied: dict[tuple[int, int], Applied] = {}
        self.formed: dict[int, tuple[str, ...]] = {}
        self.newest_generation = 0
        self.checkpoint = FIRST
        self.loss = self.random.choice((0.0, 0.02, 0.2))
        self.delay = self.random.choice((0, 1, 4))
        for _ in range(maximum + self.random.randint(0, 1)):
            self.start()

    def require(self, holds: bool, rule: str) -> None:
        assert holds, f"seed {self.seed}, tick {self.now}: {rule}"

    def start(self) -> None:
        """A new incarnation."""
        self.started += 1
        name = f"r{self.started}"
        self.processes[name] = Process(Participant(name, self.ranks))

    # --- time

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now += 1
            if self.faults and self.random.random() < self.faults:
                self.fault()
            self.supervise()
            while self.mail and self.mail[0][0] <= self.now:
                _, _, name, event = heapq.heappop(self.mail)
                self.tell(name, event)
            if self.coordinator is not None:
                outcome = self.coordinator.tick(self.now)
                self.write(outcome.decisions)
            for name, process in list(self.processes.items()):
                if process.awake(self.now):
                    self.act(name, process)
            self.collectives()

    def settle(self) -> None:
        """No faults from here on: steps must be taken again, and all members must be equal."""
        self.faults = self.loss = 0.0
        self.delay, self.back_at = 0, self.now
        for process in self.processes.values():
            process.paused_until = process.cut_until = process.apart_until = 0
        self.supervise()
        while sum(p.alive and not p.leaving for p in self.processes.values()) < self.rules.maximum:
            self.start()
        before = audit(self.history).step
        for _ in range(QUIET_TICKS):
            self.run(1)
            found = self.coordinator
            # Reports of steps before may still come in. Those of a member that is lost never do: then another
            # generation is on its way, and goes on from what the others hold.
            if found is None or not found.known or found.number > found.generation:
                continue
            if found.ledger.step >= max(before, found.formed_step) + 3:
                break
        else:
            self.require(False, f"no step in {QUIET_TICKS} ticks without faults: {self.describe()}")
        self.run(2)
        coordinator = self.coordinator
        assert coordinator is not None
        ledger = audit(self.history)
        for name in coordinator.members:
            process = self.processes[name]
            state = process.state
            if process.source or process.part.generation != coordinator.generation:
                continue
            self.require(state is not None and state.step - ledger.step in (0, 1, 2), f"{name} is not where others are")
        self.require(
            audit(self.journal).position == ledger.position == coordinator.ledger.position, "journal and ledger differ"
        )

    def describe(self) -> str:
        c = self.coordinator
        states = {n: (p.part.generation, p.part.promised, p.part.step) for n, p in self.processes.items() if p.alive}
        return f"{c and c.view()}, {states}, {self.rules}"

    # --- faults

    def fault(self) -> None:
        draw = self.random
        names = [name for name, process in self.processes.items() if process.alive]
        kind = draw.randrange(9)
        until = self.now + draw.choice((2, 4, 8, 25))
        if kind == 0 and self.coordinator is not None:
            self.coordinator, self.back_at = None, until
        elif kind == 1:
            self.start()
        elif kind == 2:
            self.post("operator", Scale(draw.randint(self.rules.minimum, self.rules.maximum)))
        elif names:
            name = draw.choice(names)
            process = self.processes[name]
            if kind in (3, 4):
                process.alive = False
            elif kind == 5:
                process.paused_until = until
            elif kind == 6:
                process.cut_until = process.apart_until = until
            elif kind == 7:
                process.apart_until = until
            elif draw.random() < 0.3:
                process.leaving = True
            else:
                process.cut_until = until

    def supervise(self) -> None:
        """The launcher: restarts the coordinator, tells of the dead, replaces them."""
        if self.coordinator is None and self.now >= self.back_at:
            self.coordinator = self.membership_of(self.rules, self.now, history=self.journal)
            live = self.membership_of(self.rules, self.now, history=self.history)
            self.require(self.coordinator.view() == live.view(), "a journal that was shortened tells another story")
        if self.now % 3 == 0:
            for name, process in self.processes.items():
                if not process.alive and self.coordinator is not None:
                    known = self.coordinator.fenced.get(name)
                    if known is None or not known.ended:
                        self.tell(name, Ended(name))
        if self.faults and sum(process.alive for process in self.processes.values()) < self.rules.minimum:
            self.start()

    # --- the network

    def post(self, name: str, event: Event) -> None:
        process = self.processes.get(name)
        if process is not None and process.cut_until > self.now:
            return
        for _ in range(2 if self.loss and self.random.random() < 0.05 else 1):
            if self.loss and self.random.random() < self.loss:
                continue
            if not self.delay:
                self.tell(name, event)
                continue
            self.sent += 1
            heapq.heappush(self.mail, (self.now + self.random.randint(0, self.delay), self.sent, name, event))

    def tell(self, name: str, event: Event) -> None:
        """The coordinator takes an event; its answer may be lost, or it dies before it has written or answered."""
        if self.coordinator is None:
            return
        outcome = self.coordinator.handle(event, self.now)
        if self.faults and self.random.random() < 0.002:
            if self.random.random() < 0.5:
                self.write(outcome.decisions)
            self.coordinator, self.back_at = None, self.now + self.random.randint(1, 10)
            return
        self.write(outcome.decisions)
        process = self.processes.get(name)
        lost = self.loss and self.random.random() < self.loss
        if process is not None and process.awake(self.now) and process.cut_until <= self.now and not lost:
            process.part.hear(outcome.answer)

    def write(self, decisions: tuple[Decision, ...]) -> None:
        for decision in decisions:
            self.journal.append(decision)
            self.history.append(decision)
            if isinstance(decision, Formed):
                self.formed[decision.number] = decision.members
                self.require(decision.number > self.newest_generation, "a generation began beside a newer one")
            if isinstance(decision, Committed):
                state = self.applied.get((decision.generation, decision.step))
                self.require(
                    state is not None and (state.start, state.stop) == (decision.start, decision.stop),
                    f"{decision} was applied by nobody",
                )
        if decisions and self.coordinator is not None and self.random.random() < 0.02:
            self.journal = list(self.coordinator.snapshot())

    # --- a replica

    def act(self, name: str, process: Process) -> None:
        part = process.part
        if part.fenced:
            process.alive = False
            if self.faults == 0 or self.random.random() < 0.7:
                self.start()
            return
        for rank in range(self.ranks):
            self.post(name, Heartbeat(name, rank))
        if process.leaving:
            self.post(name, Leave(name))
        for event in part.unsent():
            self.post(name, event)
        if part.heard.generation == part.heard.number > part.generation and not part.fenced:
            self.post(name, Look())
        if part.may_enter:
            self.leave_collective(name, process)
            process.source = part.enter()
            if process.source == "here":
                process.source = ""
        elif part.ending and part.promised < part.heard.number:
            if self.random.random() < 0.6:
                self.leave_collective(name, process)
                part.accept()
        elif process.source and part.promised == part.generation:
            self.fill(process)
        elif part.promised == part.generation > 0 and part.step is not None and part.broken is None:
            self.inside.setdefault((part.generation, part.step + 1), set()).add(name)
            process.waiting += 1
            if process.waiting > 4:
                self.leave_collective(name, process)
                part.failed(self.unreachable(name, process))

    def fill(self, process: Process) -> None:
        """Copies the state from a holder, or loads the checkpoint."""
        part = process.part
        view = part.view
        assert view is not None
        if process.source == "checkpoint":
            process.state, process.source = self.checkpoint, ""
            part.ready(step=process.state.step, position=process.state.stop)
            return
        for name in view.holders:
            peer = self.processes[name]
            reachable = peer.awake(self.now) and peer.apart_until <= self.now and process.apart_until <= self.now
            if reachable and peer.part.promised >= part.generation and peer.part.step == view.step:
                process.state, process.source = peer.state, ""
                self.require(peer.state is not None and peer.state.stop == view.position, "a copy of another position")
                part.ready(step=view.step, position=view.position)
                return

    def unreachable(self, name: str, process: Process) -> list[str]:
        others = [m for m in (process.part.view.members if process.part.view else ()) if m != name]
        if process.apart_until > self.now:
            return others
        return [m for m in others if self.processes[m].apart_until > self.now]

    def leave_collective(self, name: str, process: Process) -> None:
        process.waiting = 0
        for members in self.inside.values():
            members.discard(name)

    def collectives(self) -> None:
        """Those in which all members are, and reach each other, are over."""
        for (generation, step), names in list(self.inside.items()):
            if not names:
                del self.inside[generation, step]
                continue
            members = self.formed[generation]
            if names != set(members) or any(
                not self.processes[n].awake(self.now) or (self.processes[n].apart_until > self.now and len(members) > 1)
                for n in members
            ):
                continue
            del self.inside[generation, step]
            self.apply(generation, step, members)

    def apply(self, generation: int, step: int, members: tuple[str, ...]) -> None:
        states = {self.processes[name].state for name in members}
        self.require(len(states) == 1, f"members of generation {generation} begin step {step} with different states")
        before = states.pop()
        assert before is not None
        self.require(
            generation >= self.newest_generation, f"generation {generation} takes step {step} after a newer one"
        )
        self.require(before.step == step - 1, f"step {step} follows step {before.step}")
        self.newest_generation = generation
        state = Applied(before, generation, step, before.stop, before.stop + 8 + step % 3)
        self.applied[generation, step] = state
        failing = self.faults and self.random.random() < 0.05
        for name in members:
            process = self.processes[name]
            process.waiting = 0
            if process.part.fenced:
                continue  # its call to `applied` would say so, and it ends
            if failing and self.random.random() < 0.5:
                process.part.failed()
                continue
            process.part.applied(stop=state.stop)
            self.require(process.part.position == state.stop, "a replica and its state are at different positions")
            process.state = state
            if step % 4 == 0 and step >= self.checkpoint.step:
                self.checkpoint = state


def used_once(state: Applied | None) -> bool:
    """Has `state` used every position up to its own exactly once, in order?"""
    while state is not None and state.parent is not None:
        if state.start != state.parent.stop or state.step != state.parent.step + 1:
            return False
        state = state.parent
    return True


def play(seed: int, *, ticks: int = 80, **options: object) -> World:
    """A world with faults for `ticks`, and then without."""
    world = World(seed, **options)  # pyright: ignore[reportArgumentType]
    world.run(ticks)
    world.settle()
    for process in world.processes.values():
        world.require(used_once(process.state), "a state has used a position twice, or none")
    return world


def ready(count: int, *, minimum: int = 1, maximum: int | None = None) -> tuple[Membership, dict[str, Participant]]:
    """A generation of `count` replicas at step 0, and their own sides."""
    machine = Membership(Rules(minimum, maximum or count, silence_s=5, accept_s=60, start_s=0), 0)
    parts = {f"r{index}": Participant(f"r{index}") for index in range(count)}
    for part in parts.values():
        exchange(machine, part)
    exchange_all(machine, parts)
    for part in parts.values():
        assert part.enter() == "checkpoint"
        part.ready(step=0, position=0)
    exchange_all(machine, parts)
    return machine, parts


def exchange(machine: Membership, part: Participant, now_s: float = 0.0) -> list[Answer]:
    """Accepts what is proposed, and sends what is unsent; the answers."""
    answers: list[Answer] = []
    for _ in range(2):
        for event in part.unsent():
            answers.append(machine.handle(event, now_s).answer)
            part.hear(answers[-1])
        if part.ending and not part.fenced:
            part.accept()
    part.hear(machine.handle(Look(), now_s).answer)
    return answers


def exchange_all(machine: Membership, parts: dict[str, Participant], now_s: float = 0.0) -> None:
    for _ in range(2):
        for part in parts.values():
            exchange(machine, part, now_s)


def step(machine: Membership, parts: dict[str, Participant], *, samples: int = 8, now_s: float = 0.0) -> None:
    for part in parts.values():
        part.applied(stop=part.position + samples)
        for event in part.unsent():
            part.hear(machine.handle(event, now_s).answer)
