"""Which way to sum, while links change: chosen by the rate of the last sums, alike on all ranks.

    reducer = wire.Adaptive(group, {"plain": None, "int8": wire.Int8()})
    mean = reducer.all_reduce(gradient, op="avg")

A way w puts b_w bytes on the wire and takes c_w seconds to code, both known; the rate r of the link is what is not:

    t_w = c_w + b_w / r

Every sum, by whichever way, shows r. So a change of the link is answered without trials: the median of the last
`window` rates counts, and the way with the smallest t_w is next, if it saves more than `gain`. Regret against the best
way of each phase: at most (window + 1) / 2 sums by the old way after a change, and `gain` of the time.

All ranks choose alike, because they agree on the two numbers of a sum with the next one: the longest coding, and the
shortest exchange, which is that of the rank that came last and waited for nobody. The choices follow from these numbers
alone (`log`).
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


class Choice:
    """Of `ways`, by name; begins with the first. Pure: it is told seconds, and reads no clock."""

    def __init__(self, ways: Mapping[str, Way], *, window: int = 3, gain: float = 0.05) -> None:
        if not ways or window < 1:
            raise UsageError(f"a choice of {len(ways)} ways by {window} sums: give one or more of both")
        self._ways, self._gain = dict(ways), gain
        self._rates: deque[float] = deque(maxlen=window)
        self.name = next(iter(ways))
        self.changes = 0

    def note(self, exchange_s: float, coding_s: float) -> None:
        """What a sum by `name` took; `name` is then the way of the next one."""
        way = self._ways[self.name]
        self._ways[self.name] = way._replace(coding_s=coding_s)
        self._rates.append(way.sent_bytes / max(exchange_s, 1e-9))
        seconds = {name: self.predicted_s(name) for name in self._ways}
        best = min(seconds, key=lambda name: seconds[name])
        if seconds[best] < (1 - self._gain) * seconds[self.name]:
            self.name = best
            self.changes += 1

    def predicted_s(self, name: str) -> float:
        """Seconds of a sum by that way, at the rate of the last sums."""
        way = self._ways[name]
        return way.coding_s + way.sent_bytes / statistics.median(self._rates)


class Adaptive:
    """Sums of vectors of one length over `group`, by one of `ways`: a codec by name, None for none.

    All ranks make the same calls. `log` has (way, exchange_s, coding_s) of every sum but the last.
    """

    def __init__(self, group: Group, ways: Mapping[str, Codec | None], **settings: Any) -> None:
        self._group, self._codecs, self._settings = group, dict(ways), settings
        self.choice: Choice | None = None
        self.log: list[tuple[str, float, float]] = []
        self._last: tuple[float, float] | None = None
        self._numel = 0

    def all_reduce(self, array: Any, op: Reduction = "sum", *, out: Any = None) -> Array:
        """See `Group.all_reduce`. One small message more, in which ranks agree on what the last sum took."""
        given = readable(array)
        if self.choice is None:
            self.choice, self._numel = Choice(self._priced(given), **self._settings), given.size
        if given.size != self._numel:
            raise UsageError(f"an adaptive sum of {given.size} numbers, after {self._numel}: use one for each length")
        if self._last is not None:
            coding_s, less_exchange_s = self._group.all_reduce(np.array([self._last[1], -self._last[0]]), op="max")
            self.log.append((self.choice.name, -float(less_exchange_s), float(coding_s)))
            self.choice.note(-float(less_exchange_s), float(coding_s))
        waited_s, begin_s = self._group.ledger.total().exposed_s, time.perf_counter()
        found = self._group.all_reduce(given, op, out=out, codec=self._codecs[self.choice.name])
        whole_s = time.perf_counter() - begin_s
        exchange_s = self._group.ledger.total().exposed_s - waited_s
        self._last = exchange_s, max(0.0, whole_s - exchange_s)
        return found

    def _priced(self, given: Array) -> dict[str, Way]:
        """What each way costs for such an array, from one coding of zeros; the slowest rank's counts."""
        ranks, own = self._group.size, {}
        for name, codec in self._codecs.items():
            own[name] = Way(2 * (ranks - 1) / ranks * given.nbytes, 0.0)
            if codec is not None:
                begin_s = time.perf_counter()
                sample = _fresh(codec)
                payload = sample.encode(np.zeros(given.size, given.dtype))
                for _ in range(ranks):
                    sample.decode(payload, given.size, given.dtype)
                own[name] = Way(float((ranks - 1) * payload.nbytes), time.perf_counter() - begin_s)
        worst = self._group.all_reduce(np.array([way.coding_s for way in own.values()]), op="max")
        return {name: way._replace(coding_s=float(s)) for (name, way), s in zip(own.items(), worst, strict=True)}


def _fresh(codec: Codec) -> Codec:
    """`codec` without what it remembers, for a trial."""
    return getattr(codec, "codec", codec)
