"""`LinkWatch`: what a run chose by its links, it chooses anew when they change.

    algorithm     groups that price algorithms on measured links (`algorithms.group`, "auto") measure them again, and
                  with them choose between flat rings, trees and hierarchies of hosts
    bucket size   all sizes are tried anew (`gradients.replicated`)

With every step ranks agree on the shortest wait among them, that of the rank that came last and waited for the link
alone. Where it is not what it was (`Alarm`), they time one all-reduce. Only if that takes `CHANGED` times as long as
when they chose last, or as short, they choose again. So a step pays for a message of 16 bytes; a wait that changed for
another reason, for one all-reduce; and a link that changed, for the measurements of its pairs and some steps with
buckets of other sizes.

All ranks in lock-step choose alike, for they compare numbers that they agree on. What was chosen follows from the
clock: `decided` records it, or gives what was recorded, and then nothing is measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from shoal.comm.algorithms.group import AlgorithmGroup
from shoal.comm.collective import Collective, Handle
from shoal.comm.exchanges.choice import PROBE_BYTES, TIMINGS, Alarm, Clock
from shoal.comm.ledger import Ledger
from shoal.comm.seam import Seam
from shoal.errors import ConfigError
from shoal.topology.links import Links

CHANGED = 1.5
"""Between two timings of one all-reduce: processes that share cores make less of a difference than that."""
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


class LinkWatch:
    """Watches the steps of the ranks of `lockstep`. `opened` gives their groups by label; those that choose by measured
    links follow them, and so does `search`. `ledger` knows how long this rank waits.
    """

    def __init__(
        self,
        lockstep: Collective,
        ledger: Ledger,
        opened: Callable[[], Mapping[str, Seam]],
        search: Search | None,
        *,
        decided: Callable[[str], str] | None = None,
        repeats: bool = False,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._lockstep, self._ledger, self._opened, self._search = lockstep, ledger, opened, search
        self._decided, self._repeats, self._clock = decided, repeats, clock
        self._alarm, self._agreed = Alarm(), None
        self._usual_s: float | None = None
        self._was_searching = False
        self._lines: list[str] = []
        self._waited_s, self._begun_s = 0.0, clock()

    _agreed: tuple[torch.Tensor, Handle] | None

    def begin(self) -> None:
        """A step begins: chooses anew where the last one's wait calls for it. All ranks in lock-step call it."""
        if not self._repeats:
            self._watch()
        if self._decided is not None:
            found = self._decided(self._said())
            if self._repeats:
                self._repeat(json.loads(found))
        self._waited_s, self._begun_s = self._ledger.total().exposed_s, self._clock()

    def end(self) -> None:
        """The step is over: ranks begin to agree on its wait."""
        if not self._repeats:
            waited_s = self._ledger.total().exposed_s - self._waited_s
            said = torch.tensor([-waited_s, self._clock() - self._begun_s], dtype=torch.float64)
            self._agreed = said, self._lockstep.all_reduce(said, "max")

    def take_lines(self) -> list[str]:
        """What has changed since the last call, and why."""
        lines, self._lines = self._lines, []
        return lines

    def _watch(self) -> None:
        if self._agreed is None:
            return
        said, handle = self._agreed
        handle.wait()
        self._agreed = None
        if self._search is not None and self._search.searching:
            self._was_searching = True  # waits of steps that try sizes say nothing of the link
            return
        if self._usual_s is None or self._was_searching:
            self._begin_to_watch()
            return
        less_waited_s, step_s = said.tolist()
        if self._alarm.rings(-less_waited_s, step_s):
            changed = self._look()
            self._alarm.looked(changed=changed, rang=True)
            if changed and self._search is not None:
                self._search.again()

    def _begin_to_watch(self) -> None:
        """The run is warm, and a search over: what the next steps wait is usual. The link may have changed meanwhile,
        which a search notices by itself.
        """
        if self._was_searching and self._search is not None:
            self._lines.append(f"buckets of {self._search.size >> 20} MiB are the fastest on the link as it is")
        self._was_searching = False
        self._alarm.looked(changed=True, rang=False)
        if self._usual_s is None:
            self._usual_s = self._timed_s()
        else:
            self._look()

    def _look(self) -> bool:
        """Times an all-reduce. If the link has changed, groups choose by its new links; whether it has."""
        now_s, usual_s = self._timed_s(), self._usual_s or 0.0
        if 1 / CHANGED < now_s / max(usual_s, 1e-9) < CHANGED:
            return False
        found = [_chosen_anew(seam, group, self._bucket_bytes()) for seam, group in self._groups().values()]
        self._usual_s = self._timed_s()
        self._lines.append(
            f"the link has changed: {PROBE_BYTES >> 10} KiB took {1e3 * usual_s:.1f} ms and take {1e3 * now_s:.1f}"
            + "".join(f"; {line}" for line in found)
        )
        return True

    def _timed_s(self) -> float:
        """Of one all-reduce, on the slowest rank: the shortest of some, as processes share cores."""
        long = torch.zeros(PROBE_BYTES // 4)
        self._lockstep.barrier().wait()
        return min(self._one_s(long) for _ in range(TIMINGS))

    def _one_s(self, tensor: torch.Tensor) -> float:
        begin_s = self._clock()
        self._lockstep.all_reduce(tensor).wait()
        own = torch.tensor(self._clock() - begin_s, dtype=torch.float64)
        self._lockstep.all_reduce(own, "max").wait()
        return float(own)

    def _groups(self) -> dict[str, tuple[Seam, AlgorithmGroup]]:
        """Those that follow their links, in an order that is the same on all ranks."""
        opened = sorted(self._opened().items())
        chosen = {label: (seam, seam.inner) for label, seam in opened if isinstance(seam.inner, AlgorithmGroup)}
        return {
            label: (seam, group)
            for label, (seam, group) in chosen.items()
            if group.measures and seam.size() <= MOST_RANKS
        }

    def _bucket_bytes(self) -> int:
        return USUAL_BYTES if self._search is None else self._search.size

    def _said(self) -> str:
        """What the next step uses, as JSON."""
        said: dict[str, Any] = {label: _as_lists(group.links) for label, (_, group) in self._groups().items()}
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
        for label, links in said.items():
            groups[label][1].follow(_from_lists(links))
        if self._search is not None and size is not None:
            self._search.use(size)


BUCKET = "bucket bytes"
"""No label of a group."""


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


def _as_lists(links: Links) -> list[Any]:
    return [links.latency_s, links.bytes_s, links.hosts, links.gap_s]


def _from_lists(said: list[Any]) -> Links:
    latency_s, bytes_s, hosts, gap_s = said
    return Links(tuple(map(tuple, latency_s)), tuple(map(tuple, bytes_s)), tuple(hosts), gap_s)
