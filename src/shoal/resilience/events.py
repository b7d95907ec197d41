"""What replicas and the coordinator tell each other, and what the coordinator writes down.

An `Event` comes from a replica, the launcher or an operator. The coordinator answers with a `Pulse`, a `View` or a
`Refusal`. A `Decision` is what it must not forget: it is in the journal before the answer leaves.

`replica` is one incarnation of a replica: a process that starts again takes a new name. So a name that was fenced stays
fenced, and a message that arrives late or twice can do no harm.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.resilience.detection import Doing

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
MOST_SUSPECTS = 64
Text = Annotated[str, msgspec.Meta(max_length=500)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """One message; its class is its kind."""


class Join(Message, frozen=True):
    """A replica of `ranks` ranks is up and can take part. `address`: where it hosts a store, as "host:port"."""

    replica: Name
    ranks: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    address: Annotated[str, msgspec.Meta(max_length=255)] = ""


class Heartbeat(Message, frozen=True):
    """One rank of a replica is alive. `progress` counts what it has done: it stands still in a rank that hangs, and in
    those that wait for it; `doing` tells them apart.
    """

    replica: Name
    rank: Count
    progress: Count = 0
    doing: Doing = ""


class Report(Message, frozen=True):
    """A replica has applied `step` in `generation`, on the samples at positions start, ..., stop - 1.

    `fingerprint` is that of its parameters after the step (0: none was taken), `sample_s` the seconds that forward and
    backward of a sample took it, waits for others left out (0: not measured).
    """

    replica: Name
    generation: Count
    step: Count
    start: Count
    stop: Count
    fingerprint: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    sample_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Accept(Message, frozen=True):
    """A replica leaves every generation before `number`, for good, and would take part in it.

    It has entered `generation`, and holds the state after `step` (None: no state).
    """

    replica: Name
    number: Count
    generation: Count = 0
    step: Count | None = None


class Broken(Message, frozen=True):
    """A collective of `generation` failed in a replica that goes on. `suspects` are members that it cannot reach."""

    replica: Name
    generation: Count
    suspects: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_SUSPECTS)] = ()


class Restored(Message, frozen=True):
    """The members of a generation without state have loaded the checkpoint after `step` (0: a new run)."""

    replica: Name
    generation: Count
    step: Count
    position: Count


class Leave(Message, frozen=True):
    """A replica wants to go after the present step. It goes when a generation without it has taken over its state."""

    replica: Name


class Ended(Message, frozen=True):
    """The launcher's word that no process of a replica is left."""

    replica: Name
    reason: Text = "its processes ended"


class Expel(Message, frozen=True):
    """A replica has to go now: a detector's or an operator's order."""

    replica: Name
    reason: Text


class Scale(Message, frozen=True):
    """From now on a generation has so many replicas, within the rules' bounds."""

    replicas: Count


class Look(Message, frozen=True):
    """Asks for a `View`, and which of `replicas` were fenced beside members."""

    replicas: Annotated[tuple[Name, ...], msgspec.Meta(max_length=100)] = ()


Event = Join | Heartbeat | Report | Accept | Broken | Restored | Leave | Ended | Expel | Scale | Look


class Pulse(Message, frozen=True):
    """The least that a replica has to know. `number` > `generation`: the generation is about to end.

    `committed` is the newest step of the generation in the ledger, 0 while it has no state.
    """

    number: int
    generation: int
    committed: int


class View(Message, frozen=True):
    """The newest generation that was formed, and how it begins.

    `holders` have the state after `step`, at `position`; the other members copy it from one of them, which may be a
    replica that leaves (one of `shoal train` shares no state then). Without holders all members load the newest
    checkpoint. `committed` as in `Pulse`. `addresses` are those that the members joined with, in their order. `fenced`
    are lost members, and why, beside those that were asked for and may still run: one that has left is not among them.
    `disagreement`: members differ in what should be equal, and no majority says who is right. `slow` are members that
    have needed that many times as long for a sample as the others for minutes.
    """

    number: int
    generation: int
    members: tuple[str, ...]
    holders: tuple[str, ...]
    step: int
    position: int
    committed: int
    addresses: tuple[str, ...] = ()
    fenced: dict[str, str] = {}
    disagreement: str = ""
    slow: dict[str, float] = {}

    @property
    def pulse(self) -> Pulse:
        """The same in short."""
        return Pulse(self.number, self.generation, self.committed)


class Refusal(Message, frozen=True):
    """Why an event was not accepted. `fenced`: the replica must drop its state, and join under a new name."""

    sentence: str
    fenced: bool = False


Answer = Pulse | View | Refusal


class Admitted(Message, frozen=True):
    replica: str
    ranks: int
    address: str = ""


class Fenced(Message, frozen=True):
    """Nothing that `replica` says counts any more. `ended`: nothing of it runs any more."""

    replica: str
    reason: str
    ended: bool = False


class Proposed(Message, frozen=True):
    """Generation `number` is to follow the present one."""

    number: int


class Formed(Message, frozen=True):
    """Generation `number` stands; `step` and `position` are those of its holders' state."""

    number: int
    members: tuple[str, ...]
    holders: tuple[str, ...]
    step: int
    position: int


class Rewound(Message, frozen=True):
    """A generation without holders has loaded the checkpoint after `step`."""

    generation: int
    step: int
    position: int


class Committed(Message, frozen=True):
    """Every member of `generation` has applied `step` on positions start, ..., stop - 1."""

    generation: int
    step: int
    start: int
    stop: int


class Continued(Message, frozen=True):
    """In a shortened journal: the ledger of `generation` stands after `step`, at `position`."""

    generation: int
    step: int
    position: int


class Scaled(Message, frozen=True):
    replicas: int


Decision = Admitted | Fenced | Proposed | Formed | Rewound | Committed | Continued | Scaled
