"""`LinkWatch`: what a run chose by its links, it chooses anew when they change.

    algorithm     groups that price algorithms on measured links (`algorithms.group`, "auto") measure them again, and
                  with them choose between flat rings, trees and hierarchies of hosts
    bucket size   all sizes are tried anew (`gradients.replicated`)

In every step ranks agree on the shortest wait among them: that of the rank that came last, which waited for the link
alone. When it has changed (`Alarm`), and in each `REGULAR`th step, they time one all-reduce. The link has changed where

    1. it takes `CHANGED` times as long as when they chose last, or as short, beyond what processors explain,
    2. the difference over all bytes of a step is a notable part of the step, and
    3. the timings of the next steps agree: `CONFIRMED` in all, or twice as many for a small change.

Then they choose again. On a link that is back, as its all-reduce says, they take what they had chosen on it, and
neither measure nor search. Every step sends 24 bytes for this. A wait that changed for another reason costs an
all-reduce or two; a link that changed costs the measurements of its pairs, some all-reduces more, and some steps with
buckets of other sizes. Ranks that share memory have no link, and watch none.

Others' work on the same cores makes an all-reduce take ten times as long, for as long as it lasts, and is no change of
the link. Linux knows what it cost: seconds for which threads of this process could have run and no core was free
(`waits_for_cores`). Between two timings, the difference of these seconds is what processors explain, twice that of the
rank which waited longest, because a message has two ends. Seconds for which threads ran explain nothing: they may be
those of a thread that reads data all the while.

All ranks in lock-step choose alike, for they compare numbers that they agree on. What was chosen follows from the
clock: `decided` records it, or gives what was recorded, and then nothing is measured.
"""

from __future__ import annotations

import glob
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from shoal.comm.algorithms.group import AlgorithmGroup, Followed
from shoal.comm.collective import Collective, GroupCollective, Handle
from shoal.comm.exchanges.choice import LONG_ENOUGH_S, NOTABLE, PROBE_BYTES, TIMINGS, Alarm, Clock
from shoal.comm.ledger import Ledger
from shoal.comm.seam import Seam
from shoal.errors import ConfigError
from shoal.topology.links import Links

CHANGED = 1.5
"""Between two timings of one all-reduce."""
CONFIRMED = 3
"""Timings, one a step, of which the shortest is what an all-reduce usually takes, or which all have to say that it
changed.
"""
LARGE = 2.0
"""Changes by less than this factor need twice as many timings: noise from other guests of the host is as large."""
REGULAR = 50
"""Steps after which ranks time an all-reduce though nothing calls for it: a busy machine hides a change of the link."""
MOST_RANKS = 16
"""Of a group whose pairs are measured while a run trains: 240 pairs, some milliseconds each on a fast link."""
USUAL_BYTES = 1 << 20
"""Of a sum whose algorithm is named in a line where no size of buckets is searched."""


class Search(Protocol):
    """The search for the size of buckets."""

    @property
    def searching(self) -> bool:
        """Whether the next step is one that is tried."""
        ...

    @property
    def size(self) -> int:
        """Bytes of a bucket in the next step."""
        ...

    def again(self) -> None:
        """All sizes are tried anew."""
        ...

    def use(self, size: int) -> None:
        """The next step uses `size`; nothing is searched."""
        ...


KNOWN_LINKS = 4
"""Those that a run comes back to."""


class Step(NamedTuple):
    """What ranks agree on: the shortest wait among them, and the most seconds and bytes."""

    waited_s: float
    step_s: float
    sent_bytes: float


class Timing(NamedTuple):
    """Of an all-reduce: what it took on the slowest rank, and how long one waited for a core meanwhile."""

    seconds: float
    for_core_s: float


class Chosen(NamedTuple):
    """What was chosen on a link, by label of the group, the bytes of a bucket, and what an all-reduce took by it."""

    usual: Timing
    followed: Mapping[str, Followed]
    size: int | None


def unexplained_s(now: Timing, usual: Timing) -> float:
    """By how much an all-reduce takes longer than usual (or shorter: negative), beyond what processors explain."""
    longer_s, explained_s = now.seconds - usual.seconds, 2 * (now.for_core_s - usual.for_core_s)
    if longer_s > 0:
        return max(0.0, longer_s - max(0.0, explained_s))
    return min(0.0, longer_s - min(0.0, explained_s))


def waits_for_cores() -> dict[str, int]:
    """For each thread of this process, the nanoseconds for which it could have run and no core was free; empty where
    the system does not say so (other than Linux, some containers).
    """
    found: dict[str, int] = {}
    for file in glob.glob("/proc/self/task/*/schedstat"):
        with suppress(OSError, IndexError):  # the thread has ended
            found[file] = int(Path(file).read_text().split()[1])
    return found


def between_s(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Seconds between two looks at `waits_for_cores`; those of threads that have ended are lost."""
    return 1e-9 * sum(max(0, waited - before.get(thread, 0)) for thread, waited in after.items())


class LinkWatch:
    """Watches the steps of the ranks of `lockstep`. `opened` gives their groups by label, each with its ranks of the
    world; those that choose by measured links follow them, and so does `search`. `ledger` knows how long this rank
    waits, and what it sends.
    """

    def __init__(
        self,
        lockstep: Collective,
        ledger: Ledger,
        opened: Callable[[], Mapping[str, tuple[Sequence[int], Seam]]],
        search: Search | None,
        *,
        decided: Callable[[str], str] | None = None,
        repeats: bool = False,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._lockstep, self._ledger, self._opened, self._search = lockstep, ledger, opened, search
        self._decided, self._repeats, self._clock = decided, repeats, clock
        self._alarm = Alarm()
        self._agreed: tuple[torch.Tensor, Handle] | None = None
        self._usual: Timing | None = None
        self._was_searching = self._rang = False
        self._timings: list[Timing] = []
        self._left: list[Chosen] = []  # on links that were others, the last one first
        self._unlooked = 0  # steps since the last timing
        self._lines: list[str] = []
        self._before, self._begun_s = ledger.total(), clock()

    def begin(self) -> None:
        """A step begins: chooses anew where the last one's wait calls for it. All ranks in lock-step call it."""
        if not self._repeats:
            self._watch()
        if self._decided is not None:
            found = self._decided(self._said())
            if self._repeats:
                self._repeat(json.loads(found))
        self._before, self._begun_s = self._ledger.total(), self._clock()

    def end(self) -> None:
        """The step is over: ranks begin to agree on its wait."""
        if self._repeats or _share_memory(self._lockstep):
            return
        now, before = self._ledger.total(), self._before
        waited_s, sent_bytes = now.exposed_s - before.exposed_s, now.bytes_sent - before.bytes_sent
        said = torch.tensor([-waited_s, self._clock() - self._begun_s, sent_bytes], dtype=torch.float64)
        self._agreed = said, self._lockstep.all_reduce(said, "max")

    def take_lines(self) -> list[str]:
        """What has changed since the last call, and why."""
        lines, self._lines = self._lines, []
        return lines

    def _watch(self) -> None:
        step = self._take_agreed()
        if self._search is not None and self._search.searching:
            self._was_searching = True  # waits of steps that try sizes say nothing of the link
            return
        searched = self._searched()
        if step is None:
            return
        rings = not self._timings and self._alarm.rings(step.waited_s, step.step_s)
        self._unlooked += 1
        if self._usual is None:  # the run is warm
            self._time_usual()
        elif self._timings or rings or searched or self._unlooked >= REGULAR:
            self._rang = self._rang if self._timings else rings and not searched
            self._look(step, self._usual)

    def _take_agreed(self) -> Step | None:
        """The last step; None before the first one, and where there is no link."""
        if self._agreed is None:
            return None
        said, handle = self._agreed
        handle.wait()
        self._agreed = None
        less_waited_s, step_s, sent_bytes = said.tolist()
        return Step(-less_waited_s, step_s, sent_bytes)

    def _searched(self) -> bool:
        """Whether a search is just over: what the next steps wait is usual. The link may have changed meanwhile, which
        a search notices by itself.
        """
        searched, self._was_searching = self._was_searching, False
        if searched and self._search is not None:
            self._lines.append(f"buckets of {self._search.size >> 20} MiB are the fastest on the link as it is")
            self._alarm.looked(changed=True, rang=False)
        return searched

    def _time_usual(self) -> None:
        self._timings.append(self._timed())
        if len(self._timings) == CONFIRMED:
            self._looked(usual=min(self._timings))

    def _look(self, step: Step, usual: Timing) -> None:
        """One more timing. If all say that the link has changed, groups choose by its new links, and sizes are tried
        anew.
        """
        self._timings.append(now := self._timed())
        changed = _has_changed(now, usual, step)
        small = any(_alike(each, usual, LARGE) for each in self._timings)
        if changed and len(self._timings) < (2 * CONFIRMED if small else CONFIRMED):
            return
        if changed:
            self._choose_anew(usual, min(self._timings).seconds)
            now = min(self._timed() for _ in range(CONFIRMED))  # by what was chosen now
        another = changed or CHANGED * now.seconds < usual.seconds  # or processors were busier when `usual` was found
        self._looked(usual=now if another else usual)
        self._alarm.looked(changed=another, rang=self._rang)

    def _looked(self, *, usual: Timing) -> None:
        self._usual, self._unlooked = usual, 0
        self._timings.clear()

    def _choose_anew(self, usual: Timing, now_s: float) -> None:
        left = Chosen(usual, {label: group.followed for label, (_, _, group) in self._groups().items()}, self._size())
        if (back := self._known(left)) is None:
            found = self._measured_anew()
            if self._search is not None:
                self._search.again()
        else:
            size = "" if back.size is None else f" with buckets of {back.size >> 20} MiB"
            found = [f"it is as it was before, and so are algorithms{size}"]
        took = f"{PROBE_BYTES >> 10} KiB took {1e3 * usual.seconds:.1f} ms and take {1e3 * now_s:.1f}"
        self._lines.append("; ".join([f"the link has changed: {took}", *found]))
        self._left = [left, *(each for each in self._left if each is not back)][:KNOWN_LINKS]

    def _known(self, left: Chosen) -> Chosen | None:
        """What was chosen on a link which this one is again, and is used from now on; else that of `left` stays."""
        for chosen in self._left:
            if self._all_have(chosen.followed.keys() == left.followed.keys()):
                self._use(chosen)
                if _alike(self._timed(), chosen.usual):
                    return chosen
        self._use(left)
        return None

    def _all_have(self, these: bool) -> bool:
        """Whether it is so on all ranks: of some, groups may have been opened since."""
        lacking = torch.tensor([0.0 if these else 1.0])
        self._lockstep.all_reduce(lacking, "max").wait()
        return lacking.item() == 0.0

    def _use(self, chosen: Chosen) -> None:
        for label, (_, _, group) in self._groups().items():
            group.follow(chosen.followed[label])
        if self._search is not None and chosen.size is not None:
            self._search.use(chosen.size)

    def _size(self) -> int | None:
        return None if self._search is None else self._search.size

    def _measured_anew(self) -> list[str]:
        """Each set of ranks measures its links once, for all groups of these ranks; what they choose."""
        measured: dict[tuple[int, ...], Followed] = {}
        lines: list[str] = []
        for ranks, seam, group in self._groups().values():
            if ranks in measured:
                group.follow(measured[ranks])
            else:
                lines.append(_chosen_anew(seam, group, self._bucket_bytes()))
                measured[ranks] = group.followed
        return lines

    def _timed(self) -> Timing:
        """The shortest of some all-reduces; the first one, if that is long, and not for the processors' sake."""
        long, found = torch.zeros(PROBE_BYTES // 4), list[Timing]()
        waits = waits_for_cores()  # also of what delays the start: the others wait for it
        self._lockstep.barrier().wait()
        for _ in range(TIMINGS):
            begin_s = self._clock()
            self._lockstep.all_reduce(long).wait()
            took_s, before, waits = self._clock() - begin_s, waits, waits_for_cores()
            own = torch.tensor([took_s, between_s(before, waits)], dtype=torch.float64)
            self._lockstep.all_reduce(own, "max").wait()
            found.append(Timing(*own.tolist()))
            if found[-1].seconds - 2 * found[-1].for_core_s > LONG_ENOUGH_S:
                break
        return min(found)

    def _groups(self) -> dict[str, tuple[tuple[int, ...], Seam, AlgorithmGroup]]:
        """Those that follow their links, in an order that is the same on all ranks."""
        return {
            label: (tuple(ranks), seam, seam.inner)
            for label, (ranks, seam) in sorted(self._opened().items(), key=lambda item: item[0])
            if isinstance(seam.inner, AlgorithmGroup) and seam.inner.measures and seam.size() <= MOST_RANKS
        }

    def _bucket_bytes(self) -> int:
        return USUAL_BYTES if self._search is None else self._search.size

    def _said(self) -> str:
        """What the next step uses, as JSON."""
        said: dict[str, Any] = {label: _as_lists(group.followed) for label, (_, _, group) in self._groups().items()}
        if self._search is not None:
            said[BUCKET] = self._search.size
        return json.dumps(said, separators=(",", ":"), sort_keys=True)

    def _repeat(self, said: dict[str, Any]) -> None:
        groups, size = self._groups(), said.pop(BUCKET, None)
        if said.keys() != groups.keys() or (size is None) != (self._search is None):
            raise ConfigError(
                f"the recorded run chose algorithms for the groups {sorted(said)}, and this one would for "
                f"{sorted(groups)}: replay with its keys, on hosts that have as many ranks each"
            )
        for label, followed in said.items():
            groups[label][2].follow(_from_lists(followed))
        if self._search is not None and size is not None:
            self._search.use(size)


BUCKET = "bucket bytes"
"""No label of a group."""


def _has_changed(now: Timing, usual: Timing, step: Step) -> bool:
    """Whether an all-reduce takes another time than it did, which over a step's bytes is a notable part of it."""
    of_step_s = abs(unexplained_s(now, usual)) * max(1.0, step.sent_bytes / PROBE_BYTES)
    return not _alike(now, usual) and of_step_s > NOTABLE * step.step_s


def _alike(now: Timing, usual: Timing, by: float = CHANGED) -> bool:
    factor = (usual.seconds + unexplained_s(now, usual)) / max(usual.seconds, 1e-9)
    return 1 / by < factor < by


def _chosen_anew(seam: Seam, group: AlgorithmGroup, size_bytes: int) -> str:
    """Measures the links of one group. Raises `CollectiveError`, which names who did not come."""
    before, begin_s = group.name_for(size_bytes), time.perf_counter()
    try:
        group.look().wait()
    except RuntimeError as error:
        raise seam.explained(error, "measurement of links", 0, time.perf_counter() - begin_s) from None
    after = group.name_for(size_bytes)
    instead = "" if after == before else f" instead of {before}"
    return f"group '{seam.label}' sums {size_bytes >> 10} KiB by {after}{instead}"


def _share_memory(group: Collective) -> bool:
    return isinstance(group, GroupCollective) and getattr(group.group, "backend", "") == "shm"


def _as_lists(followed: Followed) -> list[Any]:
    links = followed.links
    return [links.latency_s, links.bytes_s, links.hosts, links.gap_s, followed.gloos]


def _from_lists(said: list[Any]) -> Followed:
    """Earlier versions left no all-reduce to Gloo, and do not say so."""
    latency_s, bytes_s, hosts, gap_s, *gloos = said
    links = Links(tuple(map(tuple, latency_s)), tuple(map(tuple, bytes_s)), tuple(hosts), gap_s)
    return Followed(links, *(tuple(each) for each in gloos))
