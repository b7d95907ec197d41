"""`Choice`: which codec the ranks of a group use, or none, by what their link and their processors are measured to do.

In a look the ranks time an empty all-reduce and one of 256 KiB, before the first bucket of a step is filled. At the
first look each also times the coding of a bucket with every candidate. The slowest rank counts, so that all compare the
same numbers, and choose alike. What the last codec has kept back is sent with the next sum.

Where processes share cores, one look may be far off, so the median of three counts. While looks find nothing new they
become rarer, `RAREST` times at most. The sums themselves show when a look is due (`Alarm`): in every step ranks agree
on the shortest wait among them, that of the rank that came last, which waited for the link alone. When it has changed,
ranks look at once, and that one look counts. If the look finds nothing new, such a wait is taken as usual for a while,
and the looks before it count again. So a link that becomes slow costs one or two steps by the old way. One that becomes
fast unnoticed would save less than a tenth of a step; regular looks find it.

With error feedback a rank keeps back e of g + e. In units of the gradient that is

    backlog = |e|^2 / (|g + e|^2 - |e|^2)

which settles where a codec keeps up. A codec whose backlog has grown by `most_growth` since then is set aside for some
looks: what it would save is paid for in accuracy.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.codec.codec import Codec
from shoal.comm.collective import Collective, Handle
from shoal.comm.exchanges.exchange import Segment

# What a sum of gradients costs a step, with a codec and without, on a link that was measured.
#
#     wire     = calls alpha + bytes / rate
#     exposed  = coding + processor bytes + max(wire / buckets, wire - window)
#
# Coding is done by the processor that computes, so that nothing hides it; so is the work of sending, where ranks fill
# the cores (`processor_s_byte`, 0 for links that do it themselves). The wire works while the backward fills further
# buckets, for the seconds of `window`; the last bucket has nothing to hide behind. (Agarwal et al., "On the Utility of
# Gradient Compression in Distributed Training Systems", arXiv:2103.00543, section 4: the same terms, for one bucket.)


STAYS_WITHIN = 0.9
"""A choice is left for one that costs at most this part of it: measurements are noisy, and a change has a price."""


@dataclass(frozen=True)
class Way:
    """One way to sum all buckets of a step: collectives of a rank, bytes that it sends, seconds of coding."""

    name: str
    calls: float
    sent_bytes: float
    coding_s: float


@dataclass(frozen=True)
class MeasuredLink:
    """`alpha_s` is the time of a collective without content, `bytes_s` the rate at which a rank sends,
    `processor_s_byte` what its processor works for each of the bytes.
    """

    alpha_s: float
    bytes_s: float
    processor_s_byte: float = 0.0

    @staticmethod
    def of(short_s: float, long_s: float, long_bytes: float, *, processor_s: float = 0.0) -> MeasuredLink:
        """From the seconds of a collective that sends nothing to speak of, and of one that sends `long_bytes`, which
        kept the processor busy for `processor_s`.
        """
        return MeasuredLink(short_s, long_bytes / max(long_s - short_s, long_s / 10, 1e-9), processor_s / long_bytes)

    def wire_s(self, way: Way) -> float:
        """Seconds for which the link works in a step."""
        return way.calls * self.alpha_s + way.sent_bytes / self.bytes_s


def exposed_s(way: Way, link: MeasuredLink, *, window_s: float, buckets: int) -> float:
    """Seconds that a step takes longer than one without communication."""
    wire_s = link.wire_s(way)
    return way.coding_s + way.sent_bytes * link.processor_s_byte + max(wire_s / max(buckets, 1), wire_s - window_s)


def choose(
    ways: Sequence[Way], link: MeasuredLink, *, window_s: float, buckets: int, present: str | None = None
) -> tuple[str, str]:
    """The name of the way that costs least, and why in a line. The `present` one stays where none is clearly better."""
    costs = {way.name: exposed_s(way, link, window_s=window_s, buckets=buckets) for way in ways}
    best = min(costs, key=lambda name: costs[name])
    if present in costs and costs[best] > STAYS_WITHIN * costs[present]:
        best = present
    others = ", ".join(f"{name} {1e3 * cost:.1f} ms" for name, cost in costs.items() if name != best)
    return best, (
        f"{best} costs {1e3 * costs[best]:.1f} ms a step at {8e-6 * link.bytes_s:.0f} Mbit/s and "
        f"{1e6 * link.alpha_s:.0f} us a call ({others})"
    )


Clock = Callable[[], float]
NONE = "none"
PROBE_BYTES = 256 << 10
"""Long beside what a shaped link lets through at once, and 40 ms at 50 Mbit/s."""
TIMINGS, LOOKS, RARER, RAREST = 3, 3, 4, 16
LONG_ENOUGH_S = 0.02
"""A timing beside which the noise of a processor is small: one is enough."""
NOTABLE, LARGE = 0.1, 0.2
"""Of a step: a change of the wait that calls for a look, at first and after a call in vain."""
STEADY, REMEMBERED = 3, 300
"""Steps whose median is the wait that is usual, and steps for which a wait that called in vain is usual, too."""
SETTLING, ASIDE = 5, 20
"""Looks with a backlog until it has settled, and looks for which a codec is set aside."""


class Alarm:
    """Says when the wait of a step is not what it was, by a part of the step. Pure: it is told seconds.

    Waits of steps that differ, as where batches have many lengths, differ as well. So a wait for which it rang in vain
    belongs to the usual ones for the next `REMEMBERED` steps: what lies between the least and the most of them calls
    for no look. The part is `LARGE` after a call in vain.
    """

    def __init__(self) -> None:
        self._part, self._steps = NOTABLE, 0
        self._usual: list[float] = []
        self._in_vain: deque[tuple[int, float]] = deque()
        self._waited_s = 0.0

    def rings(self, waited_s: float, step_s: float) -> bool:
        """Whether this step's wait calls for a look. The first steps say what is usual."""
        self._steps, self._waited_s = self._steps + 1, waited_s
        if len(self._usual) < STEADY:
            self._usual.append(waited_s)
            return False
        while self._in_vain and self._in_vain[0][0] < self._steps - REMEMBERED:
            self._in_vain.popleft()
        usual = [statistics.median(self._usual), *(seconds for _, seconds in self._in_vain)]
        part_s = self._part * step_s
        return not min(usual) - part_s <= waited_s <= max(usual) + part_s

    def looked(self, *, changed: bool, rang: bool) -> None:
        """A look is over: whether it has changed the choice, and whether the alarm had called for it."""
        if changed:
            self._usual.clear()
            self._in_vain.clear()
            self._part = NOTABLE
        elif rang:
            self._in_vain.append((self._steps, self._waited_s))
            self._part = LARGE


class Choice:
    """Of `candidates` by name. `every` is the number of steps from one look to the next; None: there is no choice, and
    nothing is measured. `clock` counts seconds. `name` is what the next step uses, and `why` says so in a line.

    `decided` takes the name that a step would use, and returns the one that it uses. The same, which is recorded; or,
    where it `repeats` a run, the recorded one, and nothing is measured.
    """

    def __init__(
        self,
        candidates: Mapping[str, Codec],
        group: Collective,
        *,
        every: int | None,
        most_growth: float = math.inf,
        clock: Clock = time.perf_counter,
        decided: Callable[[str], str] | None = None,
        repeats: bool = False,
    ) -> None:
        self._decided, self._repeats = decided, repeats
        self.name, self.why = NONE, "none: all ranks share a host, where a sum is faster than any codec"
        self.changed = every is None and not repeats
        self._candidates, self._group, self._every, self._steps = candidates, group, every, 0
        self.clock = clock
        self._buffers: list[tuple[int, Sequence[Segment]]] = []
        self._ways: list[Way] = []
        self._looks: deque[tuple[float, float, float]] = deque(maxlen=LOOKS)
        self._first_s = self._last_s = 0.0
        self._most_growth, self._term, self._error = most_growth, 0.0, 0.0
        self._backlogs: list[float] = []
        self._aside: dict[str, int] = {}
        self._alarm, self._agreed = Alarm(), None
        self._next_look, self._interval = 0, every or 0
        self._waits, self._waited_s, self._begun_s = 0, 0.0, clock()

    _agreed: tuple[torch.Tensor, Handle] | None

    @property
    def codec(self) -> Codec | None:
        """What the next step uses; None: gradients leave as they are."""
        return self._candidates.get(self.name)

    @property
    def _measures(self) -> bool:
        return self._every is not None and self._group.size > 1 and not self._repeats

    def add(self, numel: int, segments: Sequence[Segment]) -> int:
        """One more buffer takes part; its number."""
        self._buffers.append((numel, segments))
        return len(self._buffers) - 1

    def begin(self) -> None:
        """A step begins: looks at the link where that is due. All ranks of the group call it."""
        if self._measures and self._every is not None:
            rang = self._rings()
            if rang or self._steps >= self._next_look:
                self._look_now(self._every, rang=rang)
        if self._decided is not None:
            self._take(self._decided(self.name))
        self._steps += 1
        self._first_s = self._last_s = self._waited_s = 0.0
        self._waits, self._begun_s = 0, self.clock()

    def _take(self, name: str) -> None:
        """The next step uses `name`, as was decided."""
        if self._repeats and (name != self.name or not self._steps):
            self.why, self.changed = f"{name}: as recorded", True
        self.name = name

    def sent(self) -> None:
        """A buffer has been sent."""
        self._last_s = self.clock()
        self._first_s = self._first_s or self._last_s

    def waited(self, seconds: float) -> None:
        """For one of the buffers. After the last one ranks begin to agree on the wait of the step."""
        self._waits, self._waited_s = self._waits + 1, self._waited_s + seconds
        if not self._measures or self._waits < len(self._buffers):
            return
        said = torch.tensor([-self._waited_s, self.clock() - self._begun_s], dtype=torch.float64)
        self._agreed = said, self._group.all_reduce(said, "max")

    def _rings(self) -> bool:
        """Whether the last step's wait, as ranks agreed on it, calls for a look."""
        if self._agreed is None:
            return False
        said, handle = self._agreed
        handle.wait()
        self._agreed = None
        less_waited_s, step_s = said.tolist()
        return self._alarm.rings(-less_waited_s, step_s)

    def _look_now(self, every: int, *, rang: bool) -> None:
        before, earlier = self.name, list(self._looks)
        if rang:
            self._looks.clear()
        self._look(every)
        changed = self.name != before
        if rang and not changed:
            self._looks = deque([*earlier, *self._looks], maxlen=LOOKS)
        self._alarm.looked(changed=changed, rang=rang)
        seconds = [long_s for _, long_s, _ in self._looks]
        doubtful = not 0.5 < seconds[-1] / max(statistics.median(seconds), 1e-9) < 2
        again = changed or rang or doubtful or bool(self._aside) or not self._steps
        self._interval = every if again else min(RARER * self._interval, RAREST * every)
        self._next_look = self._steps + self._interval

    def note_norms(self, term: float, error: float) -> None:
        """Squared norms of what a rank had to send of a buffer, and of what it has not sent."""
        self._term, self._error = self._term + term, self._error + error

    def _look(self, every: int) -> None:
        if not self._ways:
            self._ways = self._timed_ways()
        short, long = torch.zeros(1), torch.zeros(PROBE_BYTES // 4)
        self._group.barrier().wait()
        short_s, _ = min(self._seconds_of(short) for _ in range(TIMINGS))
        long_s, processor_s = self._seconds_of(long)
        if self._slowest(long_s) < LONG_ENOUGH_S:
            long_s, processor_s = min((long_s, processor_s), *(self._seconds_of(long) for _ in range(TIMINGS - 1)))
        worst = torch.tensor(
            [short_s, long_s, processor_s, self._first_s - self._last_s, self._take_backlog()], dtype=torch.float64
        )
        self._group.all_reduce(worst, "max").wait()
        short_s, long_s, processor_s, less_window_s, backlog = worst.tolist()
        self._looks.append((short_s, long_s, processor_s))
        short_s, long_s, processor_s = (statistics.median(column) for column in zip(*self._looks, strict=True))
        ranks = self._group.size
        link = MeasuredLink.of(short_s, long_s, 2 * (ranks - 1) / ranks * PROBE_BYTES, processor_s=processor_s)
        before, grown = self.name, self._growth_line(backlog)
        self.name, self.why = choose(
            [way for way in self._ways if way.name not in self._aside],
            link,
            window_s=-less_window_s,
            buckets=len(self._buffers),
            present=before if self._steps else None,
        )
        if self.name != before:
            self._backlogs.clear()
        self.why += grown
        self.changed = self.changed or self.name != before or not self._steps

    def _take_backlog(self) -> float:
        """Of this rank, since the last look; 0 where nothing was kept back or measured."""
        sent = self._term - self._error
        backlog = self._error / max(sent, 1e-12 * self._term) if self._error else 0.0
        self._term = self._error = 0.0
        return backlog

    def _growth_line(self, backlog: float) -> str:
        """Sets the present codec aside where its backlog has grown too much, and says so."""
        self._aside = {name: looks - 1 for name, looks in self._aside.items() if looks > 1}
        if not backlog:
            return ""
        if len(self._backlogs) < SETTLING:
            self._backlogs.append(backlog)
            return ""
        settled = max(self._backlogs)
        if backlog <= self._most_growth * settled:
            return ""
        self._aside[self.name] = ASIDE
        return (
            f"; {self.name} is set aside for {ASIDE} looks: what it has not sent is {math.sqrt(backlog):.2g} times the "
            f"gradient, and was {math.sqrt(settled):.2g} times when it had settled"
        )

    def take_line(self) -> str | None:
        """Why this codec, where that has changed since the last call."""
        said, self.changed = (self.why if self.changed else None), False
        return said

    def _seconds_of(self, tensor: torch.Tensor) -> tuple[float, float]:
        """Of an all-reduce: by the clock, and of this process's processors."""
        begin_s, busy_s = self.clock(), time.process_time()
        self._group.all_reduce(tensor).wait()
        return self.clock() - begin_s, time.process_time() - busy_s

    def _slowest(self, own_s: float) -> float:
        """The largest of the ranks' numbers."""
        seconds = torch.tensor(own_s, dtype=torch.float64)
        self._group.all_reduce(seconds, "max").wait()
        return float(seconds)

    def _timed_ways(self) -> list[Way]:
        """What every candidate costs, by the bytes of all buffers and the seconds of the largest one."""
        ranks, numbers = self._group.size, sum(numel for numel, _ in self._buffers)
        share = 2 * (ranks - 1) / ranks
        ways = [Way(NONE, calls=len(self._buffers), sent_bytes=share * 4 * numbers, coding_s=0.0)]
        largest = max(self._buffers, key=lambda buffer: buffer[0])
        for name, codec in self._candidates.items():
            coding_s = self._slowest(_coding_s(codec, *largest, clock=self.clock))
            sent = calls = 0.0
            for numel, segments in self._buffers:
                bound = codec.bound([segment.place for segment in segments], key=0, rank=self._group.rank, ranks=ranks)
                gathered, halves = (ranks - 1) * bound.wire_bytes(numel), 2 * (ranks - 1)
                if codec.linear:
                    sent, calls = sent + share * bound.wire_bytes(numel), calls + 2
                else:
                    two_shot = halves * bound.wire_bytes(-(-numel // ranks))
                    sent, calls = sent + min(gathered, two_shot), calls + (1 if gathered <= two_shot else 2)
            ways.append(Way(name, calls, sent, coding_s * numbers / largest[0]))
        return ways


def _coding_s(codec: Codec, numel: int, segments: Sequence[Segment], *, clock: Clock) -> float:
    """Seconds of what one rank does with a buffer in a step: the addition of error feedback, encoding, decoding."""
    bound = codec.bound([segment.place for segment in segments], key=0, rank=0, ranks=1)
    term = torch.linspace(-1.0, 1.0, numel)
    x, total = torch.empty_like(term), torch.empty_like(term)
    taken = []
    for _ in range(1 + TIMINGS):
        begin_s = clock()
        torch.add(term, term, out=x)
        if codec.linear:
            for _ in bound.summing_into(x, total, key=0, residual=True):
                pass
        else:
            payload = bound.encode(x, key=0)
            x.sub_(bound.decode(payload, numel, key=0))
            total.copy_(bound.decode(payload, numel, key=0))
        taken.append(clock() - begin_s)
    return min(taken)
