"""`Coded`: the sum of a buffer over a group, of which less is sent: every rank encodes its part with a codec.

    c_r = g_r + e_r                      this rank's term, and what it has not sent so far
    result = sum over r of decode(encode(c_r))
    e_r = c_r - decode(encode(c_r))      error feedback

(Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv:1901.09847,
algorithm 2.) How the sum is made is `coded_sum`'s. Nothing is lost on any way: over all ranks,

    result + sum of e_r (new) = sum of g_r + sum of e_r (old)

up to the rounding of sums. A new residual counts when its step has led to an update (`commit`); otherwise the step is
forgotten. What is not finite on one rank makes the result not finite on all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shoal.codec.codec import Codec
from shoal.comm.collective import Collective
from shoal.comm.exchanges.between_hosts import BetweenHosts, InOrder, Levels
from shoal.comm.exchanges.choice import Choice
from shoal.comm.exchanges.coded_sum import CodedPushes, CodedSum, Coding, Spent, as_it_is, coded_sum
from shoal.comm.exchanges.exchange import Exchange, Segment
from shoal.maths.counter import key_of
from shoal.maths.norm import two_norm

MEASURE_EVERY = 10
"""Rounds of which one has its norms taken: they are two passes over memory, as much as an encoding."""
IN_FIRST_ROUND = 2
"""Buffers of a group that are in their first round at once; beyond them the oldest goes on. So the second round of a
sum travels while the backward fills other buffers."""


class Coded:
    """The sum of `buffer` `[numel]` over `group`, in place. `segments` say what lies in it; what lies outside of them
    is zero, and stays so. Without a codec all is sent.

    `feedback`: keep what was not sent, in float32 at least. `key` is that of the codec's random numbers, the same on
    all ranks of the group. `spent` is added to. `rounds` counts sums, and random numbers follow from it; `updates`
    counts those that led to an update. `flying` are the group's exchanges in their first round, shared by all of them.
    `later`: see `coded_sum`; None: `group`.
    """

    def __init__(
        self,
        codec: Codec | None,
        group: Collective,
        buffer: Tensor,
        segments: Sequence[Segment],
        *,
        feedback: bool,
        key: int,
        spent: Spent | None = None,
        flying: deque[Coded] | None = None,
        later: Collective | None = None,
    ) -> None:
        self.group, self.result, self.segments, self.rounds = group, buffer, tuple(segments), 0
        self.updates, self._later = 0, group if later is None else later
        self.feedback, self._key, self._spent, self._measured = feedback, key, spent or Spent(), False
        self._bound: dict[int, tuple[Codec, CodedSum]] = {}
        self._dtype = torch.promote_types(buffer.dtype, torch.float32)
        self._gaps = _gaps(segments, buffer)
        self._residual: Tensor | None = None
        self._next: Tensor | None = None
        self._arrivals: list[Tensor] = []
        self.arrived = False
        """Whether something has come to the residual that no round has taken in yet."""
        self._flying = deque() if flying is None else flying
        self._sent, self._term = False, 0.0
        self.norms = 0.0, 0.0
        """Squared, of what was to be sent in this round and of what was not; zeros in rounds that are not measured."""
        self.use(codec)
        if feedback and codec is not None:
            self._residual, self._next = self._zeros(), self._zeros()

    def use(self, codec: Codec | None) -> None:
        """From the next step on. None: terms leave as they are, with all that was not sent before."""
        if codec is None:
            self._codec, self._sum = None, as_it_is(self.group, self.result)
            return
        if id(codec) not in self._bound:
            places = [segment.place for segment in self.segments]
            bound = codec.bound(places, key=self._key, rank=self.group.rank, ranks=self.group.size)
            self._bound[id(codec)] = bound, coded_sum(bound, self.group, self.result, self._spent, later=self._later)
        self._codec, self._sum = self._bound[id(codec)]

    @property
    def residual(self) -> Tensor | None:
        """What this rank has not sent so far, `[numel]`; None if there is nothing."""
        while self._arrivals:
            arrived = self._arrivals.pop()
            self._residual = arrived if self._residual is None else self._residual.add_(arrived)
        return self._residual

    @property
    def state(self) -> Mapping[str, Tensor]:
        """What the codec has learned, the same on all ranks of the group; to be saved."""
        return {} if self._codec is None else self._codec.state

    @property
    def payload_bytes(self) -> int:
        """Bytes of one payload."""
        return self.result.nbytes if self._codec is None else self._codec.wire_bytes(self.result.numel())

    def kept_back(self) -> Tensor | None:
        """Between `wait` and `commit`: what this rank keeps of this round, less what it had kept before, `[numel]`.
        None where both are nothing.
        """
        if not self._sent or not self.feedback:
            return None
        new = None if self._codec is None else self._next
        if new is None or self.residual is None:
            return new if self.residual is None else -self.residual
        return new - self.residual

    def arrival(self) -> Tensor:
        """A tensor `[numel]` of zeros; what is written into it is added to the residual before that is next used."""
        self.arrived = True
        self._arrivals.append(self._zeros())
        return self._arrivals[-1]

    def hand_over(self, *, leaving: bool) -> None:
        """Between two steps: ranks that are `leaving` give what they have not sent to the first that stays. All ranks
        of the group call it together; nothing changes where none leaves, or none stays.
        """
        leavers = torch.zeros(self.group.size, device=self.result.device)
        leavers[self.group.rank] = float(leaving)
        self.group.all_reduce(leavers).wait()
        stays = torch.nonzero(leavers == 0).view(-1).tolist()
        if not stays or len(stays) == self.group.size:
            return
        for unsent, arrival in self._unsent():
            given = unsent.clone() if leaving and unsent is not None else self._zeros()
            if given.numel():
                self.group.all_reduce(given).wait()
            if self.group.rank == stays[0]:
                arrival().copy_(given)
            elif leaving and unsent is not None:
                unsent.zero_()

    def _unsent(self) -> Sequence[tuple[Tensor | None, Callable[[], Tensor]]]:
        """(what this rank keeps until it is sent, what makes the place where more of it arrives)"""
        return [(self.residual, self.arrival)]

    def start(self) -> None:
        self._sent = False

    def send(self, buffer: Tensor) -> None:
        self.rounds += 1
        if self._codec is not None:
            self._codec.begin(self.rounds)
        term, residual, keeps = buffer.to(self._dtype), self.residual, self.feedback and self._codec is not None
        if keeps:
            self._next = self._zeros() if self._next is None else self._next
            term = self._next.copy_(term) if residual is None else torch.add(term, residual, out=self._next)
        elif residual is not None:
            term = term + residual
        self._measured = keeps and self.rounds % MEASURE_EVERY == 1
        if self._measured:
            self._term = float(two_norm(term)) ** 2
        self._sum.send(term, residual=keeps, key=key_of(self._key, self.rounds))
        self._sent = True
        self._flying.append(self)
        while len(self._flying) > IN_FIRST_ROUND:
            self._flying.popleft()._sum.advance()

    def land(self) -> None:
        """The buffer was read when it was sent, or is the result."""

    def settle(self) -> None:
        self._flying.clear()
        self._sum.advance()

    def wait(self) -> None:
        self.norms = 0.0, 0.0
        if not self._sent:
            return
        self._sum.wait()
        if self._codec is None:
            return
        self.result[self._gaps] = 0
        if self._next is not None:
            self._next[self._gaps] = 0
        if self._measured and self._next is not None:
            self.norms = self._term, float(two_norm(self._next)) ** 2
            self._spent.add(Coding(term=self._term, error=self.norms[1]))

    def commit(self) -> None:
        if not self._sent:
            return
        self._sent = self.arrived = False
        self.updates += 1
        if self._codec is None:
            self._residual = self._next = None
        else:
            self._residual, self._next = self._next, self._residual

    def _zeros(self) -> Tensor:
        return torch.zeros_like(self.result, dtype=self._dtype)


NewChoice = Callable[[Collective], Choice]
"""From a group to what its ranks choose together."""


class Chosen:
    """A coded exchange whose codec is that of `choice`, which may change from step to step."""

    def __init__(self, coded: Coded, choice: Choice) -> None:
        self.result, self._coded, self._choice = coded.result, coded, choice
        self._number = choice.add(coded.result.numel(), coded.segments)

    def start(self) -> None:
        if self._number == 0:
            self._choice.begin()
        self._coded.use(self._choice.codec)
        self._coded.start()

    def send(self, buffer: Tensor) -> None:
        self._coded.send(buffer)
        self._choice.sent()

    def land(self) -> None:
        self._coded.land()

    def settle(self) -> None:
        self._coded.settle()

    def wait(self) -> None:
        begin_s = self._choice.clock()
        self._coded.wait()
        self._choice.waited(self._choice.clock() - begin_s)
        self._choice.note_norms(*self._coded.norms)

    def commit(self) -> None:
        self._coded.commit()


class CodedExchanges:
    """The `NewExchange` of a run with a codec; `made` are those of its exchanges that code on this rank; `new` makes
    one.

    `codec` may be what makes the `Choice` of a group instead. `levels` says how a group lies on hosts; None: on one, or
    with one rank on each. Between hosts only the sums of hosts are coded (`between_hosts`). `later` are the ranks that
    sum partitions (`partition`), once more: the later rounds of their sums go there.
    """

    def __init__(
        self,
        codec: Codec | NewChoice,
        *,
        feedback: bool,
        seed: int,
        levels: Callable[[Collective], Levels | None] = lambda group: None,
        new: Callable[..., Coded] = Coded,
        later: Collective | None = None,
    ) -> None:
        self._new, self._later = new, later
        self._codec, self._feedback, self._seed, self._levels = codec, feedback, seed, levels
        self._choices: dict[int, Choice] = {}
        self._spent, self.by_microbatch = Spent(), False
        self._flying: dict[int, deque[Coded]] = {}
        self._orders: dict[int, InOrder | None] = {}
        self.made: list[Coded | CodedPushes] = []

    def __call__(self, group: Collective, buffer: Tensor, segments: Sequence[Segment]) -> Exchange:
        order = self._order_of(group)
        if order is None:
            return self._coded(group, buffer, segments)
        leader, (mates, across, _) = order.next_leader(), order.levels
        inner = None
        if across is not None and mates.rank == leader:
            inner = self._coded(across, buffer, segments)
        return BetweenHosts(order, buffer, leader=leader, inner=inner)

    def partition(self, group: Collective, buffer: Tensor, segments: Sequence[Segment]) -> Coded:
        """The sum of one partition of gradients. Partitions start on all ranks in the same order, and may go on at any
        time. Every rank codes its own, also where several share a host.
        """
        assert isinstance(self._codec, Codec), "a choice is measured between steps, and refused for partitions"
        return self._made(self._codec, group, buffer, segments, later=self._later)

    def pushes(self, rank: int, pushers: Sequence[int], segments: Sequence[Segment], dtype: torch.dtype) -> CodedPushes:
        """What codes the pushes of `rank`, one of `pushers`, to servers: gradients in which `segments` lie."""
        assert isinstance(self._codec, Codec), "a choice is measured on sums, and refused for pushes"
        found = CodedPushes(
            self._codec,
            rank,
            pushers,
            segments,
            dtype=dtype,
            feedback=self._feedback,
            seed=self._seed,
            spent=self._spent,
        )
        self.made.append(found)
        return found

    def _coded(self, group: Collective, buffer: Tensor, segments: Sequence[Segment]) -> Coded | Chosen:
        if isinstance(self._codec, Codec):
            return self._made(self._codec, group, buffer, segments)
        if id(group) not in self._choices:
            self._choices[id(group)] = self._codec(group)
        return Chosen(self._made(None, group, buffer, segments), self._choices[id(group)])

    def _made(
        self,
        codec: Codec | None,
        group: Collective,
        buffer: Tensor,
        segments: Sequence[Segment],
        **others: object,
    ) -> Coded:
        cuts = (segment.skipped for segment in segments if segment.skipped)
        key = key_of(self._seed, "codec", *(segment.name for segment in segments), *cuts)
        exchange = self._new(
            codec,
            group,
            buffer,
            segments,
            feedback=self._feedback,
            key=key,
            spent=self._spent,
            **(others or {"flying": self._flying.setdefault(id(group), deque())}),
        )
        self.made.append(exchange)
        return exchange

    def _order_of(self, group: Collective) -> InOrder | None:
        if id(group) not in self._orders:
            levels = None if group.size == 1 else self._levels(group)
            self._orders[id(group)] = None if levels is None else InOrder(levels)
        return self._orders[id(group)]

    def hand_over(self, replicas: Collective, *, leaving: bool) -> None:
        """As `Coded.hand_over` and, between the ranks of `replicas`, `CodedPushes.hand_over`, of all that was made on
        this rank. Raises `CollectiveError` where a rank is lost.
        """
        for one in self.made:
            if isinstance(one, CodedPushes) and one.feedback:
                one.hand_over(replicas, leaving=leaving)
            elif isinstance(one, Coded) and one.feedback:
                one.hand_over(leaving=leaving)

    def shrinks(self) -> bool:
        """Whether any payload on this rank has fewer bytes than what it stands for; true where nothing is coded."""
        coded = [one for one in self.made if isinstance(one, Coded) and one.result.numel()]
        return not coded or any(one.payload_bytes < one.result.nbytes for one in coded)

    def take_lines(self) -> list[str]:
        """Which codec was chosen and why, in a line for each choice that has changed since the last call."""
        return [f"codec: {line}" for choice in self._choices.values() if (line := choice.take_line()) is not None]

    def take_figures(self) -> dict[str, float]:
        """Measurements since the last call: seconds, and with error feedback how much of what this rank had to send it
        has kept back, |e| / |g + e|.
        """
        spent = self._spent.take()
        figures = {"codec/encode_s": spent.encode_s, "codec/decode_s": spent.decode_s}
        if spent.term > 0:
            figures["codec/error"] = math.sqrt(spent.error / spent.term)
        return figures


def _gaps(segments: Sequence[Segment], buffer: Tensor) -> Tensor:
    """The places of `buffer` that belong to no segment, int64."""
    outside = torch.ones(buffer.numel(), dtype=torch.bool)
    for segment in segments:
        outside[segment.slice] = False
    return torch.nonzero(outside).view(-1).to(buffer.device)
