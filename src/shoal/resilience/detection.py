"""What is wrong with a rank that does not fail: it hangs, it is slow, it computes wrongly, or peers cannot reach it.

**Hung ranks** (`Stalls`) are alive by their heartbeat, without progress, and others wait for them. When one rank of a
lock-step group hangs, the others soon stand still, too, in the collective that they wait in. So a rank hangs that has
stood still for `limit_s` *outside* of a collective, while another has stood still for as long *inside* of one. Long
steps are no hang: there nobody waits, or not for so long.

**Slow replicas** (`Stragglers`) are found by robust statistics over what each step cost each replica, waiting for
others left out. They work on logarithms, since noise of run times is multiplicative. Over the last n `steps` a
replica's level is the median m_r, and its noise s_r is 1.4826 times the median absolute deviation. Against the median M
of the others' levels

    z = (m_r - M) / (1.2533 s sqrt(1 / n) sqrt(1 + 1 / (R - 1))),   s the median of all s_r, R the number of replicas

is about standard normal while all are alike: 1.2533 is the ratio of a median's standard error to a mean's (Huber,
"Robust statistics", 1981). A replica is slow when z > `SIGMAS` and it costs `factor` times the others: the first keeps
noise from being an alarm, the second what is too little to matter. Other programs on a host slow a replica for seconds,
which nobody has to act on: a warning is for who stays slow for minutes (`Lasting`).

**Silent corruption** (`compare`): memory and arithmetic units fail without an error now and then (Dixit et al., "Silent
data corruptions at scale", arXiv:2102.11245). Replicas that apply the same updates hold the same bits; each puts a
fingerprint of its parameters into its report, and the majority is right. With two replicas a difference is seen, but
not whose it is. The other replicas' gradients contained those that the culprit computed since its parameters changed;
they are equal to each other, and so is the run that goes on. How old the difference can be is the number of steps
between fingerprints.

**Broken links** (`cut_off`): of replicas that cannot reach each other, the one that has to go.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple

Doing = Literal["", "computes", "waits"]
"""What a rank does: it takes no steps of a generation; it does, outside of a collective; it waits in one."""


class Activity(NamedTuple):
    """A rank within a generation. `calls` counts its collectives, `doing` is what it does now."""

    calls: int
    doing: Doing


Rank = tuple[str, int]
"""A replica, and the number of one of its ranks."""


@dataclass
class Stalls:
    """`limit_s`: how long a rank may keep others waiting; 0: for ever."""

    limit_s: float
    last: dict[Rank, tuple[int, Doing]] = field(default_factory=dict)
    since_s: dict[Rank, float] = field(default_factory=dict)

    def heard(self, rank: Rank, progress: int, doing: Doing, now_s: float) -> None:
        """A heartbeat of `rank`, with the count of what it has done."""
        if self.last.get(rank) != (progress, doing):
            self.last[rank], self.since_s[rank] = (progress, doing), now_s

    def forget(self, rank: Rank) -> None:
        """A rank that has gone."""
        self.last.pop(rank, None)
        self.since_s.pop(rank, None)

    def hung(self, now_s: float, *, others_wait: bool = False) -> list[Rank]:
        """Those that hang; `others_wait`: it is known otherwise that some have waited for `limit_s`."""
        if not self.limit_s:
            return []
        still = [rank for rank, since_s in self.since_s.items() if now_s - since_s > self.limit_s]
        if not others_wait and not any(self.last[rank][1] == "waits" for rank in still):
            return []
        return [rank for rank in still if self.last[rank][1] == "computes"]


STEPS = 16
FACTOR = 1.2
SIGMAS = 6.0
LASTING_S = 120.0
"""Seconds without a break after which a slow replica is somebody's business."""
_LEAST_NOISE = 0.005


@dataclass(frozen=True)
class Slow:
    """`ratio`: how many times the others' cost a step has on this replica."""

    replica: str
    ratio: float

    def sentence(self, who: str) -> str:
        """For people; `who` names the replica: see `ranks_of`."""
        verb, its = ("have", "their") if who.startswith("ranks ") else ("has", "its")
        return f"{who} {verb} long taken {self.ratio:.2f} times as long for a sample as the others: check {its} host"


def ranks_of(replica: int, ranks: int) -> str:
    """The ranks of a replica of `ranks` ranks, as the live line names them: "rank 2", "ranks 4 to 7"."""
    return f"rank {replica}" if ranks == 1 else f"ranks {replica * ranks} to {replica * ranks + ranks - 1}"


@dataclass
class Lasting:
    """Of the slow replicas, those that have been so for `lasting_s` seconds without a break. Each is told of once."""

    lasting_s: float = LASTING_S
    told: set[str] = field(default_factory=set)
    _since_s: dict[str, float] = field(default_factory=dict)

    def newly(self, slow: Iterable[Slow], now_s: float) -> list[Slow]:
        """Who is to be told of now, of those that are slow at `now_s`, seconds of any clock that never goes back."""
        slow = list(slow)
        self._since_s = {one.replica: self._since_s.get(one.replica, now_s) for one in slow}
        found = [
            one for one in slow if one.replica not in self.told and now_s - self._since_s[one.replica] >= self.lasting_s
        ]
        self.told |= {one.replica for one in found}
        return found


@dataclass
class Stragglers:
    """What the members of one generation needed for its last steps. Slow is who needs `factor` times as long as the
    others over `steps` steps.
    """

    factor: float = FACTOR
    steps: int = STEPS
    times: dict[str, deque[float]] = field(default_factory=dict)

    def took(self, step_s: Mapping[str, float]) -> list[Slow]:
        """One step's seconds by replica, without waiting; who is slow now, the slowest first.

        Replicas that are not in `step_s` are forgotten. Raises `ValueError` for seconds that are not positive.
        """
        logarithms = {name: _logarithm(name, seconds) for name, seconds in step_s.items()}
        self.times = {name: self.times.get(name, deque(maxlen=self.steps)) for name in step_s}
        for name, logarithm in logarithms.items():
            self.times[name].append(logarithm)
        return self._slow_of(self.times)

    def among(self, rows: Mapping[str, Sequence[float]]) -> list[Slow]:
        """Who is slow where each replica tells the seconds of its last steps by itself, the slowest first.

        Replicas that have told of fewer than `steps` are left out. Raises `ValueError`: see `took`.
        """
        logarithms = {name: [_logarithm(name, one) for one in row[-self.steps :]] for name, row in rows.items()}
        return self._slow_of(logarithms)

    def _slow_of(self, rows: Mapping[str, Sequence[float]]) -> list[Slow]:
        full = {name: row for name, row in rows.items() if len(row) == self.steps}
        return _slow(full, factor=self.factor, steps=self.steps) if len(full) > 1 else []


def _logarithm(name: str, seconds: float) -> float:
    if not seconds > 0 or not math.isfinite(seconds):
        raise ValueError(f"a step of replica {name} took {seconds} s: it must be positive and finite")
    return math.log(seconds)


def _slow(rows: Mapping[str, Sequence[float]], *, factor: float, steps: int) -> list[Slow]:
    """Of logarithms of seconds, [steps] for each replica."""
    levels = {name: median(row) for name, row in rows.items()}
    spreads = [1.4826 * median(abs(value - levels[name]) for value in row) for name, row in rows.items()]
    noise = max(median(spreads), _LEAST_NOISE)
    error = 1.2533 * noise * math.sqrt((1 + 1 / (len(rows) - 1)) / steps)
    ordered = sorted(levels.values())
    found = []
    for name, level in levels.items():
        if level <= ordered[len(ordered) // 2 - 1]:
            continue  # not above the middle
        above = level - median(value for other, value in levels.items() if other != name)
        if above > SIGMAS * error and above > math.log(factor):
            found.append(Slow(name, math.exp(above)))
    return sorted(found, key=lambda slow: -slow.ratio)


@dataclass(frozen=True)
class Divergence:
    """After `step` replicas differ. `culprits` differ from a majority; none are named where there is no majority."""

    step: int
    culprits: tuple[str, ...]
    sentence: str


def compare(step: int, fingerprints: Mapping[str, int]) -> Divergence | None:
    """Who differs after `step`; None where all are equal, or nobody took a fingerprint (0)."""
    taken = {name: value for name, value in fingerprints.items() if value}
    counts = Counter(taken.values()).most_common(1)
    if not counts or counts[0][1] == len(taken):
        return None
    value, votes = counts[0]
    if 2 * votes <= len(taken):
        names = ", ".join(sorted(taken))
        return Divergence(
            step,
            (),
            f"after step {step} the parameters of {names} differ, and no majority says whose are right: "
            "resume from the newest checkpoint, and run 3 replicas or more",
        )
    culprits = tuple(sorted(name for name, found in taken.items() if found != value))
    return Divergence(
        step,
        culprits,
        f"after step {step} the parameters of {', '.join(culprits)} differ from those of the {votes} others: "
        "check the memory and the devices of the host",
    )


NAMED, NAME_LENGTH = 4, 64
"""Of what one cannot reach, in a sentence."""


def cut_off(members: Sequence[str], suspects: Mapping[str, Collection[str]]) -> tuple[str, str] | None:
    """Which of the `members` has to go, and why, when each says which it `suspects`; None where none suspects another.

    A pair is broken where one of the two cannot reach the other, for a step needs both ways. The member of the most
    broken pairs goes: the one that none of the others reach, and also the one that reaches none of them, though it is
    the only one to say so. Of several it is the one that most others suspect, and of these the last of `members`.
    """
    said = {(a, b) for a in members for b in suspects.get(a, ()) if b in members and a != b}
    if not said:
        return None
    broken = Counter(name for pair in {frozenset(pair) for pair in said} for name in pair)
    accused = Counter(b for _, b in said)
    ranked = [(broken[name], accused[name], index) for index, name in enumerate(members)]
    name = members[max(ranked)[2]]
    if accused[name]:
        return name, "its peers cannot reach it"
    lost = sorted(b for a, b in said if a == name)
    more = f" and {len(lost) - NAMED} others" if len(lost) > NAMED else ""
    return name, f"it cannot reach {', '.join(name[:NAME_LENGTH] for name in lost[:NAMED])}{more}"
