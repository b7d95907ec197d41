"""Push-sum: the average of what many hold, by shares that are sent one way (Kempe, Dobra, Gehrke, FOCS 2003).

Every node holds a vector x and a weight w, at first 1. To push, it divides both alike: a fraction of each goes to every
receiver, the rest stays. What arrives is added. The sums of x and of w over all nodes and all shares on their way never
change, so that every

    z = x / w

tends to the average, although nodes that receive more than they send hold more than others. A share that comes late is
only late. One that is lost must be sent again, and one that comes twice counts once: shares are numbered.

A pure state machine: who sends when is the caller's.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.collective import Collective, Handle
from shoal.comm.ledger import Ledger
from shoal.errors import ConfigError
from shoal.maths.mixing import Matrix
from shoal.state import numbers_on
from shoal.sync.event_order import AsTheyCome, EventOrder, Rounds


class Share(NamedTuple):
    """What `source` sends to one receiver: a part of x, and of the weight. It is number `number` of those to it."""

    source: int
    number: int
    x: Sequence[Tensor]
    weight: float


@dataclass
class PushSum:
    """Node `rank`. `x` are its tensors, of floating point; they are written in place."""

    rank: int
    x: Sequence[Tensor]
    weight: float = 1.0
    _sent: dict[int, int] = field(default_factory=dict)
    _received: dict[int, _Numbers] = field(default_factory=dict)

    def push(self, fractions: Mapping[int, float]) -> dict[int, Share]:
        """The shares for the receivers in `fractions`; this node keeps the rest of 1.

        Raises `ValueError` if fractions are negative or nothing would be kept.
        """
        kept = 1.0 - sum(fractions.values())
        if kept <= 0 or any(fraction < 0 for fraction in fractions.values()):
            raise ValueError(f"node {self.rank} was asked to send {dict(fractions)}: fractions must sum to less than 1")
        cut = {part: [x * part for x in self.x] for part in set(fractions.values())}
        shares = {to: Share(self.rank, self._next(to), cut[part], self.weight * part) for to, part in fractions.items()}
        for x in self.x:
            x.mul_(kept)
        self.weight *= kept
        return shares

    def receive(self, share: Share) -> bool:
        """Adds a share; False, and nothing is added, if it came before."""
        numbers = self._received.setdefault(share.source, _Numbers())
        if not numbers.add(share.number):
            return False
        for x, part in zip(self.x, share.x, strict=True):
            x.add_(part)
        self.weight += share.weight
        return True

    def z(self) -> list[Tensor]:
        """x / w, new tensors."""
        return [x / self.weight for x in self.x]

    def _next(self, to: int) -> int:
        number = self._sent.get(to, 0)
        self._sent[to] = number + 1
        return number


@dataclass
class _Numbers:
    """Numbers that have come: all below `below`, and those in `beyond`."""

    below: int = 0
    beyond: set[int] = field(default_factory=set)

    def add(self, number: int) -> bool:
        """False if it has come before."""
        if number < self.below or number in self.beyond:
            return False
        self.beyond.add(number)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1
        return True


# A share of gossip as one message: its number and weight, then the tensors.


HEAD = 2
"""float64 numbers before the tensors of a message: the share's number, and its weight."""


def message_bytes(like: Sequence[Tensor]) -> int:
    """Of a message with tensors as those in `like`."""
    return HEAD * 8 + sum(x.nbytes for x in like)


def pack(share: Share, device: torch.device) -> Tensor:
    """One message, uint8: number and weight, then the tensors, the largest element size first."""
    head = numbers_on(device, [float(share.number), share.weight])
    parts = sorted(share.x, key=lambda x: -x.element_size())
    return torch.cat([part.view(torch.uint8) for part in (head, *parts)])


def unpack(message: Tensor, source: int, like: Sequence[Tensor]) -> Share:
    """The share that `pack` made `message` of, with tensors as those in `like`: views of it."""
    number, weight = message[: HEAD * 8].view(torch.float64).tolist()
    x, at = list(like), HEAD * 8
    for index in sorted(range(len(like)), key=lambda index: -like[index].element_size()):
        x[index] = message[at : at + like[index].nbytes].view(like[index].dtype)
        at += like[index].nbytes
    return Share(source, int(number), x, weight)


# Asynchronous push-sum (Assran et al., arXiv:1811.10792, section 3): a replica adds the shares that have come, and
# goes on without the others.
#
#     x_i <- x_i - u_i | send W[j][i] of x_i and w_i to each j | add every share that has arrived by now
#
# What has not come is on its way, and its weight with it: the sums of x and of w over replicas and messages stay the
# same however late a share is, and x / w tends to the average. A share that is `delay` steps late is waited for, as in
# the paper's algorithm 2: a replica whose shares do not come back would give its weight away, and move z by u / w.
#
# Between two meetings every replica makes the same steps, so that each knows which shares come from whom: `Inbox` has a
# thread for each source. At a meeting all shares are added. The order in which they were is all that time decides;
# `Rounds` records and repeats it.


ADD, GO_ON = "a", "g"
"""Events of a replica: a share from a source is added, as in "a1"; the step is over."""


class Late(NamedTuple):
    """A share, and the step in which it was sent."""

    step: int
    share: Share


class Inbox:
    """What comes over `lane` in one round, from each source in its own order. `steps`: those in which it sends."""

    def __init__(
        self, lane: Collective, like: Sequence[Tensor], steps: Mapping[int, Sequence[int]], *, ledger: Ledger
    ) -> None:
        self._lane, self._like, self._ledger = lane, like, ledger
        self._coming = {source: deque(numbers) for source, numbers in sorted(steps.items())}
        self._here: dict[int, queue.SimpleQueue[Late | BaseException]] = {
            source: queue.SimpleQueue() for source in steps
        }
        for source, numbers in steps.items():
            name = f"shoal-gossip-{source}"
            threading.Thread(target=self._receive, args=(source, numbers), name=name, daemon=True).start()

    def sources(self, before: float = math.inf) -> list[int]:
        """Those of which a share that was sent in a step up to `before` has not been taken."""
        return [source for source, steps in self._coming.items() if steps and steps[0] <= before]

    def take(self, source: int) -> Late | None:
        """The next share of `source`, if it has come. Raises `CollectiveError` where the source is lost."""
        try:
            return self._taken(source, self._here[source].get_nowait())
        except queue.Empty:
            return None

    def wait_for(self, source: int) -> Late:
        """The next share of `source`. Raises `CollectiveError` where the source is lost."""
        return self._taken(source, self._here[source].get())

    def _taken(self, source: int, found: Late | BaseException) -> Late:
        if isinstance(found, BaseException):
            raise found
        self._coming[source].popleft()
        return found

    def _receive(self, source: int, steps: Sequence[int]) -> None:
        try:
            with self._ledger.behind():
                for step in steps:
                    message = torch.empty(message_bytes(self._like), dtype=torch.uint8)
                    self._lane.recv(message, source=source).wait()
                    self._here[source].put(Late(step, unpack(message, source, self._like)))
        except BaseException as error:
            self._here[source].put(error)


class MixingSchedule(NamedTuple):
    """Who sends to whom in which step: `matrices` in turn. A round ends every `meet_every` steps and after `steps`."""

    matrices: Sequence[Matrix]
    meet_every: int
    steps: int

    def sent(self, step: int, source: int) -> dict[int, float]:
        """The part of what `source` has that each receiver gets in `step`."""
        matrix = self.matrices[(step - 1) % len(self.matrices)]
        return {to: row[source] for to, row in enumerate(matrix) if to != source and row[source] > 0}

    def meets(self, step: int) -> bool:
        return step % self.meet_every == 0 or step == self.steps

    def arriving(self, step: int, at: int) -> dict[int, list[int]]:
        """From each source the steps of its shares to `at`, in the round from `step` on."""
        last = min(self.steps, -(-step // self.meet_every) * self.meet_every)
        found: dict[int, list[int]] = {}
        for number in range(step, last + 1):
            for source in range(len(self.matrices[0])):
                if at in self.sent(number, source):
                    found.setdefault(source, []).append(number)
        return found


class LateShares:
    """Sends and adds the shares of this rank's replica over `lane`, whose ranks are the replicas."""

    def __init__(
        self, lane: Collective, schedule: MixingSchedule, *, delay: int, ledger: Ledger, rounds: Rounds | None = None
    ) -> None:
        self._lane, self._schedule, self._delay, self._ledger = lane, schedule, delay, ledger
        self._rounds = rounds
        self._order: EventOrder = AsTheyCome()
        self._inbox: Inbox | None = None
        self._sent: deque[tuple[int, Handle, Tensor]] = deque()
        self._delays: list[int] = []

    def exchange(self, node: PushSum, step: int) -> None:
        """After the update of `step`: sends this replica's shares, and adds to `node` what has come."""
        if self._inbox is None:
            steps = self._schedule.arriving(step, self._lane.rank)
            self._inbox = Inbox(self._lane, node.x, steps, ledger=self._ledger)
            self._order = AsTheyCome() if self._rounds is None else self._rounds.begin()
        for to, share in node.push(self._schedule.sent(step, self._lane.rank)).items():
            message = pack(share, torch.device("cpu"))
            self._sent.append((step, self._lane.send(message, to=to), message))  # kept while it is on the wire
        self._delays = []
        if self._rounds is not None and self._rounds.repeats:
            self._add_as_recorded(node, step, self._inbox)
        else:
            self._add_what_is_here(node, step, self._inbox)
        self._order.happened(GO_ON)
        meets = self._schedule.meets(step)
        if meets:
            self._meet(node, step, self._inbox)
        while self._sent and (meets or self._sent[0][0] <= step - self._delay):
            self._sent.popleft()[1].wait()

    def figures(self) -> dict[str, float]:
        """Of the last step: the shares that were added, and how many steps late they were, on average and at most."""
        late = self._delays
        return {
            "gossip/shares": float(len(late)),
            "gossip/staleness": sum(late) / max(1, len(late)),
            "gossip/latest": float(max(late, default=0)),
        }

    def _add_what_is_here(self, node: PushSum, step: int, inbox: Inbox) -> None:
        for source in inbox.sources():
            while (late := inbox.take(source)) is not None:
                self._add(node, step, late)
        for source in inbox.sources(before=step - self._delay):
            while source in inbox.sources(before=step - self._delay):
                self._add(node, step, inbox.wait_for(source))

    def _add_as_recorded(self, node: PushSum, step: int, inbox: Inbox) -> None:
        while not self._order.may(GO_ON):
            source = next((source for source in inbox.sources() if self._order.may(f"{ADD}{source}")), None)
            if source is None:
                raise ConfigError(
                    f"the recorded order of step {step} has a share that nobody sends: replay with the graph and the "
                    "number of processes of the run that recorded it"
                )
            self._add(node, step, inbox.wait_for(source))

    def _add(self, node: PushSum, step: int, late: Late) -> None:
        node.receive(late.share)
        self._delays.append(max(0, step - late.step))
        self._order.happened(f"{ADD}{late.share.source}")

    def _meet(self, node: PushSum, step: int, inbox: Inbox) -> None:
        """All replicas are at this step, or come to it: what is still on the way is added, in the order of ranks."""
        while inbox.sources():
            self._add(node, step, inbox.wait_for(inbox.sources()[0]))
        self._inbox = None
        if self._rounds is not None:
            self._rounds.end(step)
