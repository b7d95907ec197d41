"""Asynchronous push-sum (Assran et al., arXiv:1811.10792, section 3): a replica adds the shares that have come, and
goes on without the others.

    x_i <- x_i - u_i | send W[j][i] of x_i and w_i to each j | add every share that has arrived by now

What has not come is on its way, and its weight with it: the sums of x and of w over replicas and messages stay the
same however late a share is, and x / w tends to the average. A share that is `delay` steps late is waited for, as in
the paper's algorithm 2: a replica whose shares do not come back would give its weight away, and move z by u / w.

Between two meetings every replica makes the same steps, so that each knows which shares come from whom: `Inbox` has a
thread for each source. At a meeting all shares are added. The order in which they were is all that time decides;
`Rounds` records and repeats it.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.collective import Collective, Handle
from shoal.comm.ledger import Ledger
from shoal.errors import ConfigError
from shoal.maths.mixing import Matrix
from shoal.sync.event_order import AsTheyCome, EventOrder, Rounds
from shoal.sync.gossip_message import message_bytes, pack, unpack
from shoal.sync.push_sum import PushSum, Share

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


class Schedule(NamedTuple):
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
        self, lane: Collective, schedule: Schedule, *, delay: int, ledger: Ledger, rounds: Rounds | None = None
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
