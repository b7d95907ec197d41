"""Which way to sum, while links change: chosen by what the last sums took, alike on all ranks.

    reducer = wire.Adaptive(group, {"plain": None, "int8": wire.Int8()})
    mean = reducer.all_reduce(gradient, op="avg")

A way w puts b_w bytes on the wire and takes c_w seconds to code, both known; the rate r of the link is what is not:

    t_w = c_w + b_w / r

Every sum, by whichever way, shows r, a long message better than a short one. So a change of the link is answered
without trials: the way with the smallest t_w is next, if it saves more than `gain`. Of a way that has been used on
this link the median of its last `window` sums counts instead, so that a prediction which was wrong is believed once.
The link is another one where an exchange takes twice as long as that way's last ones, or half, and that is more than
`NOTABLE` of a sum. Regret against the best way of each phase: a sum by the old way after a change, a sum by each way
whose prediction was wrong, and `gain` of the time.

All ranks choose alike, because they agree on the numbers of a sum with the next one: the longest coding, and the
shortest exchange, which is that of the rank that came last and waited for nobody, less what a message without content
takes (such is the agreement itself). The choices follow from these numbers alone (`log`).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shoal.errors import UsageError
from shoal.wire.arrays import Array, readable
from shoal.wire.codecs import Codec
from shoal.wire.group import Group, Reduction


class Way(NamedTuple):
    """What a sum costs: bytes that a rank sends, seconds that it codes."""

    sent_bytes: float
    coding_s: float


class Sum(NamedTuple):
    """What a sum took: seconds of its exchange, and of its coding."""

    exchange_s: float
    coding_s: float


NOTABLE, OTHER = 0.25, 2.0


class WayChoice:
    """Of `ways`, by name; begins with the first, or with the best at `bytes_s` bytes a second. Pure: it is told
    seconds, and reads no clock.
    """

    def __init__(
        self, ways: Mapping[str, Way], *, window: int = 3, gain: float = 0.05, bytes_s: float | None = None
    ) -> None:
        if not ways or window < 1:
            raise UsageError(f"a choice of {len(ways)} ways by {window} sums: give one or more of both")
        self._ways, self._gain, self._window = dict(ways), gain, window
        self._sums: dict[str, deque[Sum]] = {}
        self._bytes_s = bytes_s
        self.name = next(iter(ways))
        self.changes = 0
        if bytes_s is not None:
            self.name = self._best()

    def note(self, exchange_s: float, coding_s: float) -> None:
        """What a sum by `name` took; `name` is then the way of the next one."""
        found = Sum(exchange_s, coding_s)
        if self._is_another_link(found):
            self._sums.clear()
            self._bytes_s = None
        self._ways[self.name] = self._ways[self.name]._replace(coding_s=coding_s)
        self._sums.setdefault(self.name, deque(maxlen=self._window)).append(found)
        best = self._best()
        if self.predicted_s(best) < (1 - self._gain) * self.predicted_s(self.name):
            self.name = best
            self.changes += 1

    def predicted_s(self, name: str) -> float:
        """Seconds of a sum by that way on the link as it is."""
        if name in self._sums:
            return statistics.median(each.exchange_s + each.coding_s for each in self._sums[name])
        way = self._ways[name]
        return way.coding_s + way.sent_bytes / self._rate()

    def _best(self) -> str:
        return min(self._ways, key=self.predicted_s)

    def _rate(self) -> float:
        """Bytes a second: by the longest message that this link has carried."""
        if not self._sums:
            assert self._bytes_s is not None, "asked before the first sum without a rate"
            return self._bytes_s
        longest = max(self._sums, key=lambda name: self._ways[name].sent_bytes)
        exchange_s = statistics.median(each.exchange_s for each in self._sums[longest])
        return self._ways[longest].sent_bytes / max(exchange_s, 1e-9)

    def _is_another_link(self, found: Sum) -> bool:
        before = self._sums.get(self.name)
        if before is None:
            return False
        usual_s = max(statistics.median(each.exchange_s for each in before), 1e-9)
        notable = abs(found.exchange_s - usual_s) > NOTABLE * min(sum(found), usual_s + found.coding_s)
        return notable and not 1 / OTHER < found.exchange_s / usual_s < OTHER


SAMPLE, PROBE = 8, 1 << 16
"""One part of so many of an array is coded to see what coding takes; so many numbers are summed to see the rate."""


class Adaptive:
    """Sums of vectors of one length over `group`, by one of `ways`: a codec by name, None for none.

    All ranks make the same calls. `log` has (way, exchange_s, coding_s) of every sum but the last.
    """

    def __init__(self, group: Group, ways: Mapping[str, Codec | None], **settings: Any) -> None:
        self._group, self._codecs, self._settings = group, dict(ways), settings
        self.choice: WayChoice | None = None
        self.log: list[tuple[str, float, float]] = []
        self._last: tuple[float, float] | None = None
        self._empty_s = 0.0
        self._numel = 0

    def all_reduce(self, array: Any, op: Reduction = "sum", *, out: Any = None) -> Array:
        """See `Group.all_reduce`. One small message more, in which ranks agree on what the last sum took."""
        given = readable(array)
        if self.choice is None:
            self.choice, self._numel = self._first_choice(given), given.size
        if given.size != self._numel:
            raise UsageError(f"an adaptive sum of {given.size} numbers, after {self._numel}: use one for each length")
        if self._last is not None:
            self._agree(self.choice, *self._last)
        waited_s, begin_s = self._group.ledger.total().exposed_s, time.perf_counter()
        found = self._group.all_reduce(given, op, out=out, codec=self._codecs[self.choice.name])
        whole_s = time.perf_counter() - begin_s
        exchange_s = self._group.ledger.total().exposed_s - waited_s
        self._last = exchange_s, max(0.0, whole_s - exchange_s)
        return found

    def _agree(self, choice: WayChoice, own_exchange_s: float, own_coding_s: float) -> None:
        """All ranks on what the last sum took, and on the way of the next one."""
        begin_s = time.perf_counter()
        said = np.array([own_coding_s, -own_exchange_s, -self._empty_s])
        coding_s, less_exchange_s, less_empty_s = map(float, self._group.all_reduce(said, op="max"))
        self._empty_s = time.perf_counter() - begin_s
        exchange_s = max(-less_exchange_s + less_empty_s, -less_exchange_s / 2)
        self.log.append((choice.name, exchange_s, coding_s))
        choice.note(exchange_s, coding_s)

    def _first_choice(self, given: Array) -> WayChoice:
        """By what coding a part of such an array takes, and by a short sum; the slowest rank's seconds count."""
        ranks, share = self._group.size, 2 * (self._group.size - 1) / self._group.size
        ways: dict[str, Way] = {}
        for name, codec in self._codecs.items():
            ways[name] = Way(share * given.nbytes, 0.0)
            if codec is not None:
                payload_bytes, coding_s = _coded_part(_fresh(codec), given, ranks=ranks)
                ways[name] = Way((ranks - 1) * payload_bytes, coding_s)
        probe = np.zeros(max(1, min(PROBE, given.nbytes // 4)), np.float32)
        self._group.barrier()
        begin_s = time.perf_counter()
        self._group.all_reduce(probe)
        own_s = [time.perf_counter() - begin_s, *(way.coding_s for way in ways.values())]
        probe_s, *coding_s = map(float, self._group.all_reduce(np.array(own_s), op="max"))
        agreed = {name: way._replace(coding_s=s) for (name, way), s in zip(ways.items(), coding_s, strict=True)}
        return WayChoice(agreed, bytes_s=max(share * probe.nbytes, 1.0) / max(probe_s, 1e-9), **self._settings)


def _coded_part(codec: Codec, given: Array, *, ranks: int) -> tuple[float, float]:
    """(bytes of a payload, seconds of encoding it and decoding those of all ranks), by a part of the array."""
    part = given.reshape(-1)[: -(-given.size // SAMPLE)]
    scale = given.size / max(part.size, 1)
    begin_s = time.perf_counter()
    payload = codec.encode(part)
    for _ in range(ranks):
        codec.decode(payload, part.size, part.dtype)
    return scale * payload.nbytes, scale * (time.perf_counter() - begin_s)


def _fresh(codec: Codec) -> Codec:
    """`codec` without what it remembers, for a trial."""
    return getattr(codec, "codec", codec)
