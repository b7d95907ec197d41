"""Which way to sum, while links change: chosen by what the last sums took, alike on all ranks.

    reducer = wire.Adaptive(group, {"plain": None, "int8": wire.Int8()})
    mean = reducer.all_reduce(gradient, op="avg")

`Choice` is a bandit whose arms' times jump now and then: it tries every way `probes` times, keeps to the fastest, and
begins again when the time of that one leaves what it was by more than `change` (Cao et al., "Nearly Optimal Adaptive
Procedure with Change Detection for Piecewise-Stationary Bandit", arXiv:1802.03692; here the detector is a median, as
sums are long and noise is one-sided). One way at a time is tried again, so rarely that it costs at most `share` of the
time: this finds ways that became faster while the present one stayed.

Regret against the best way of each phase, in the time of sums: the trials after a change, at most probes x (sum of all
ways' times), the `window` sums until a change is seen, and `share`.

The time of a sum is the largest of all ranks', which they agree on with the next one: so all ranks choose alike, and
the choices follow from these numbers alone (`log` replays them).
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.errors import UsageError
from shoal.wire.arrays import Array
from shoal.wire.codecs import Codec
from shoal.wire.group import Group, Reduction


class Choice:
    """Of `ways`, by name. Pure: it is told seconds, and reads no clock."""

    def __init__(
        self, ways: Sequence[str], *, probes: int = 2, window: int = 3, change: float = 1.3, share: float = 0.02
    ) -> None:  # fmt: skip
        if not ways:
            raise UsageError("a choice of no ways: give one or more")
        self._ways, self._probes, self._window = tuple(ways), probes, window
        self._change, self._share = change, share
        self._times: dict[str, list[float]] = {}
        self._recent: deque[float] = deque(maxlen=window)
        self._waited_s: dict[str, float] = {}
        self._best, self._expected_s = self._ways[0], 0.0
        self.name = self._ways[0]
        self.changes = -1
        self._begin()

    def note(self, seconds: float) -> None:
        """What a sum by `name` took on the slowest rank; `name` is then the way of the next one."""
        if self._trying:
            self._tried(seconds)
        elif self.name != self._best:
            self._tried_again(seconds)
        else:
            self._kept(seconds)

    def _begin(self) -> None:
        """Nothing that was measured counts any more."""
        self.changes += 1
        self._times = {way: [] for way in self._ways}
        self._waited_s = dict.fromkeys(self._ways, 0.0)
        self._recent.clear()
        self._trying = [way for way in self._ways for _ in range(self._probes)]
        self.name = self._trying[0]

    def _tried(self, seconds: float) -> None:
        self._times[self._trying.pop(0)].append(seconds)
        if self._trying:
            self.name = self._trying[0]
            return
        self._best = min(self._ways, key=lambda way: min(self._times[way]))
        self._expected_s = 0.0
        self.name = self._best

    def _kept(self, seconds: float) -> None:
        self._recent.append(seconds)
        if len(self._recent) == self._window:
            median_s = statistics.median(self._recent)
            if not self._expected_s:
                self._expected_s = median_s
            elif not 1 / self._change <= median_s / self._expected_s <= self._change:
                self._begin()
                return
        for way in self._ways:
            self._waited_s[way] += seconds
        others = [way for way in self._ways if way != self._best]
        due = [way for way in others if self._share * self._waited_s[way] >= len(others) * min(self._times[way])]
        self.name = due[0] if due else self._best

    def _tried_again(self, seconds: float) -> None:
        way = self.name
        self._waited_s[way], self._times[way] = 0.0, [seconds]
        self.name = self._best
        if self._expected_s and seconds < self._expected_s / self._change:
            self._begin()


class Adaptive:
    """Sums over `group` by one of `ways`: a codec by name, None for none. All ranks make the same calls.

    `log` has (way, seconds) of every sum but the last.
    """

    def __init__(self, group: Group, ways: Mapping[str, Codec | None], **settings: Any) -> None:
        self._group, self._ways, self.choice = group, dict(ways), Choice(list(ways), **settings)
        self.log: list[tuple[str, float]] = []
        self._last_s = 0.0

    def all_reduce(self, array: Any, op: Reduction = "sum", *, out: Any = None) -> Array:
        """See `Group.all_reduce`. One small message more, in which ranks agree on what the last sum took."""
        if self._last_s:
            seconds = float(self._group.all_reduce(np.array([self._last_s]), op="max")[0])
            self.log.append((self.choice.name, seconds))
            self.choice.note(seconds)
        begin_s = time.perf_counter()
        found = self._group.all_reduce(array, op, out=out, codec=self._ways[self.choice.name])
        self._last_s = time.perf_counter() - begin_s
        return found
