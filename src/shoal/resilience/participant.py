"""A replica's side of membership: what it may do, and what it has to say. A state machine without time or sockets.

Per step, a trainer asks `ending` at the boundary; while it is false the trainer takes the step and calls `applied`.
When it is true it calls `accept`, which is a promise: no step of an earlier generation is applied from then on. When a
view names this replica as a member of the number it accepted, `enter` starts the new generation: with the state that it
holds, a copy from a holder, or the newest checkpoint; `ready` says that the state is there.

Messages may be lost: `unsent` is everything that the coordinator has not yet confirmed, to be sent again as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from shoal.errors import CollectiveError
from shoal.resilience.events import MOST_SUSPECTS, Accept, Broken, Event, Join, Pulse, Refusal, Report, Restored, View

StateFrom = Literal["here", "peer", "checkpoint"]


class FencedOut(CollectiveError):
    """The run goes on without this replica: its state is dropped, and it may join under a new name."""


@dataclass
class Participant:
    """`step` and `position`: the state after that step, or None without state. `generation` is the one it is in.
    `address`: where it hosts a store."""

    replica: str
    ranks: int = 1
    address: str = ""
    step: int | None = None
    position: int = 0
    generation: int = 0
    promised: int = 0
    heard: Pulse = field(default_factory=lambda: Pulse(0, 0, 0))
    view: View | None = None
    fenced: str = ""
    admitted: bool = False
    reports: deque[Report] = field(default_factory=deque)
    restored: Restored | None = None
    broken: Broken | None = None

    def hear(self, answer: Pulse | View | Refusal) -> None:
        """Takes an answer; those that arrive late or twice change nothing."""
        if isinstance(answer, Refusal):
            if answer.fenced:
                self.fenced = answer.sentence
            return
        pulse = answer.pulse if isinstance(answer, View) else answer
        self.admitted = True
        if (pulse.number, pulse.generation, pulse.committed) > _order(self.heard):
            self.heard = pulse
        if isinstance(answer, View) and (self.view is None or answer.generation >= self.view.generation):
            self.view = answer
        if pulse.number > self.generation and self.broken is not None and not self.broken.suspects:
            self.broken = None  # heard; suspects are named until the next generation begins
        if pulse.generation == self.generation:
            if self.restored is not None and pulse.committed >= max(1, self.restored.step):
                self.restored = None
            while self.reports and self.reports[0].step <= pulse.committed:
                self.reports.popleft()

    @property
    def ending(self) -> bool:
        """Is the present generation over, or about to be?"""
        return bool(self.fenced) or self.heard.number > self.generation

    @property
    def may_enter(self) -> bool:
        """Does the view hold a generation that this replica has accepted and is a member of?"""
        view = self.view
        return (
            view is not None
            and view.generation == self.promised > self.generation
            and self.replica in view.members
            and not self.fenced
        )

    @property
    def stands_by(self) -> bool:
        """Do others train, in a generation without this replica that nothing is about to end?"""
        view, heard = self.view, self.heard
        if view is None or self.replica in view.members:
            return False
        return heard.number == heard.generation == view.generation > self.generation

    def accept(self) -> None:
        """Leaves every generation before the number that is out: no step of theirs is applied any more."""
        self.promised = max(self.promised, self.heard.number)

    def enter(self) -> StateFrom:
        """Begins the generation of the view; says where its state comes from.

        Raises `FencedOut` where the run goes on without this replica, `ValueError` unless `may_enter`.
        """
        self._require_admitted()
        view = self.view
        if view is None or not self.may_enter:
            raise ValueError(f"replica {self.replica} has not accepted a generation that it is a member of: wait")
        self.generation = view.generation
        self.reports.clear()
        self.restored = self.broken = None
        if self.replica in view.holders:
            return "here"
        self.step = None
        return "peer" if view.holders else "checkpoint"

    def follow(self, view: View) -> None:
        """Enters the generation that another rank, which speaks for the replica, has entered."""
        self.view, self.promised, self.generation = view, view.generation, view.generation

    def ready(self, *, step: int, position: int) -> None:
        """The state after `step` was copied or loaded."""
        self.step, self.position = step, position
        if self.view is not None and not self.view.holders:
            self.restored = Restored(self.replica, self.generation, step, position)

    def dropped(self) -> None:
        """The state is lost: a step failed after it had begun to change it."""
        self.step = None

    def applied(self, *, stop: int, fingerprint: int = 0, sample_s: float = 0.0) -> None:
        """The next step was applied, with all members, on the positions up to `stop`.

        Raises `FencedOut` where it must not be: the replica was fenced, has left this generation, or has no state.
        """
        self._require_admitted()
        if self.promised > self.generation or self.step is None:
            raise FencedOut(
                f"replica {self.replica} has left generation {self.generation}, and applies no step of it: "
                "wait for the next generation"
            )
        self.step += 1
        self.reports.append(
            Report(self.replica, self.generation, self.step, self.position, stop, fingerprint, sample_s)
        )
        self.position = stop

    def failed(self, suspects: Sequence[str] = ()) -> None:
        """A collective of the generation failed here: another generation is asked for, if only of the same members.
        `suspects` cannot be reached from here.
        """
        self.broken = Broken(self.replica, self.generation, tuple(suspects[:MOST_SUSPECTS]))

    def unsent(self) -> list[Event]:
        """What the coordinator has not confirmed, in the order in which it is to be sent."""
        if self.fenced:
            return []
        if not self.admitted:
            return [Join(self.replica, self.ranks, self.address)]
        said: list[Event] = []
        if self.restored is not None and self.heard.generation == self.generation:
            said.append(self.restored)
        said.extend(self.reports)
        if self.broken is not None:
            said.append(self.broken)
        if self.promised == self.heard.number > self.heard.generation:
            said.append(Accept(self.replica, self.promised, self.generation, self.step))
        return said

    def _require_admitted(self) -> None:
        if self.fenced:
            raise FencedOut(f"{self.fenced}: its state is dropped; join again under a new name")


def _order(pulse: Pulse) -> tuple[int, int, int]:
    return pulse.number, pulse.generation, pulse.committed
