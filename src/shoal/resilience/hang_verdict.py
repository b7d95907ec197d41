"""Why a run hangs, in a sentence: from what every rank says of itself, who waits for whom, and for whom nobody else.

A rank's report holds its newest call in each of its groups, and its stack. A rank that is in a collective waits for the
members of the group that have made fewer calls there. Followed from rank to rank, these edges end at a rank that is in
no collective (it is to blame, and its stack says where), at one that has not reported (dead, stopped, or cut off), or
in a circle (two groups used in different orders). Ranks that have made the same call with different arguments are found
first: they wait for nobody and never end.

`hang.json` in a run directory: the newest verdict on a hang, from the rank that found it to the launcher.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from shoal.errors import UsageError
from shoal.files import read_json


class CodePlace(msgspec.Struct, frozen=True):
    """A line of code."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" ({self.function})" if self.function else "")


class LastCall(msgspec.Struct, frozen=True):
    """A rank's newest collective in one group: the `number`-th there, from 1.

    `signature` is all that has to be the same on all ranks; `ended`: it is over here; `pending`: as many calls up to
    this one wait for a thread of the backend.
    """

    number: int
    signature: str
    place: CodePlace
    ended: bool = False
    pending: int = 0


class RankReport(msgspec.Struct, frozen=True):
    """One rank, when it was asked. `calls` by the group's name; `stack` is the main thread's, the innermost last;
    `groups`: the members of those that are open on it, by their names.
    """

    rank: int
    host: str
    calls: dict[str, LastCall]
    stack: tuple[CodePlace, ...] = ()
    groups: dict[str, tuple[int, ...]] = {}


class HangVerdict(msgspec.Struct, frozen=True):
    """`ranks` are to blame; `place` is where the first of them is, None for a rank that did not report."""

    ranks: tuple[int, ...]
    place: CodePlace | None
    sentence: str


_ACTIVITIES = (
    (("acquire", "__enter__ of lock"), "waits for a lock"),
    (("sleep",), "sleeps"),
    (("fsync", "write", "pwrite", "rename"), "waits for the disk"),
)
"""The innermost function's name, and what a rank does there."""
_DEVICE = "/shoal/state.py", "wait_for"
"""File and function in which a rank waits for its GPU, which may wait for others or compute."""
_FEED = "/shoal/data/feed.py"
"""A rank with a frame of it waits for its next samples: others read them."""


def hang_verdict(
    groups: Mapping[str, Sequence[int]],
    reports: Mapping[int, RankReport],
    *,
    library: Sequence[str] = ("/shoal/", "/torch/", "/threading.py", "/queue.py", "<frozen"),
) -> HangVerdict:
    """Who is to blame, from the members of each group and the reports of the ranks that sent one.

    `library`: parts of paths that are not the user's code. Raises `ValueError` where no rank has reported.
    """
    if not reports:
        raise ValueError("no rank has reported, so nothing is known of the hang: ask each host for its processes")
    silent = sorted({rank for members in groups.values() for rank in members if rank not in reports})
    if silent:
        return _silent(silent, groups, reports)
    for name, members in groups.items():
        if found := _different(name, members, reports):
            return found
    waits = {rank: _waits_for(rank, groups, reports) for rank in reports}
    ends = [rank for rank, edges in waits.items() if not edges and any(rank in found for found in waits.values())]
    if ends:
        return _elsewhere(min(ends), groups, reports, library)
    if circle := _circle(waits):
        return _left_out(circle, groups, reports) or _deadlock(circle, reports)
    return _all_inside(groups, reports)


def _open_calls(report: RankReport) -> dict[str, LastCall]:
    return {name: call for name, call in report.calls.items() if not call.ended}


def _waits_for(rank: int, groups: Mapping[str, Sequence[int]], reports: Mapping[int, RankReport]) -> set[int]:
    found = set()
    for name, call in _open_calls(reports[rank]).items():
        for member in groups.get(name, ()):
            made = reports[member].calls.get(name)
            if made is None or made.number < call.number:
                found.add(member)
    return found


def _waiting(name: str, members: Sequence[int], reports: Mapping[int, RankReport]) -> str:
    """Who waits where in a group: "ranks 0, 1 wait in call 5 (all_reduce of ...) of group 'world' at train.py:10"."""
    inside = [rank for rank in members if rank in reports and name in _open_calls(reports[rank])]
    if not inside:
        return ""
    call = reports[inside[0]].calls[name]
    return f"{_ranks(inside)} in call {call.number} ({call.signature}) of group '{name}' at {call.place}"


MOST_RANGES = 6
"""Of ranks in a sentence."""


def _ranks(ranks: Sequence[int]) -> str:
    """As "ranks 0 to 16, 18 to 1023": of thousands only the first few ranges are named."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    named = ranges if len(ranges) <= MOST_RANGES + 1 else ranges[:MOST_RANGES]
    texts = [_range(first, last) for first, last in named]
    if named is not ranges:
        texts.append(f"and {sum(last - first + 1 for first, last in ranges[MOST_RANGES:])} more")
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(texts)


def _range(first: int, last: int) -> str:
    if last - first < 2:
        return ", ".join(map(str, range(first, last + 1)))
    return f"{first} to {last}"


def _silent(silent: list[int], groups: Mapping[str, Sequence[int]], reports: Mapping[int, RankReport]) -> HangVerdict:
    waiting = [
        text
        for name, members in groups.items()
        if {*silent} & {*members} and (text := _waiting(name, members, reports))
    ]
    tail = f"; for it wait {waiting[0]}" if waiting else ""
    return HangVerdict(
        tuple(silent), None, f"{_ranks(silent)} did not report: killed, stopped, or cut off from the network{tail}"
    )


def _different(name: str, members: Sequence[int], reports: Mapping[int, RankReport]) -> HangVerdict | None:
    calls = {rank: reports[rank].calls[name] for rank in members if name in reports[rank].calls}
    for number in sorted({call.number for call in calls.values()}):
        here = {rank: call for rank, call in calls.items() if call.number == number and not call.ended}
        counts = Counter(call.signature for call in here.values())
        if len(counts) > 1:
            usual = counts.most_common(1)[0][0]
            odd = tuple(rank for rank, call in here.items() if call.signature != usual)
            other = next(call for call in here.values() if call.signature == usual)
            mine = here[odd[0]]
            return HangVerdict(
                odd,
                mine.place,
                f"{_ranks(odd)} made call {number} of group '{name}' as {mine.signature} at {mine.place}, the others "
                f"as {other.signature} at {other.place}: all ranks must make the same calls in the same order",
            )
    return None


def _elsewhere(
    rank: int, groups: Mapping[str, Sequence[int]], reports: Mapping[int, RankReport], library: Sequence[str]
) -> HangVerdict:
    report = reports[rank]
    users = [place for place in report.stack if not any(part in place.file for part in library)]
    place = users[-1] if users else report.stack[-1] if report.stack else None
    inner = report.stack[-1].function if report.stack else ""
    doing = next((text for names, text in _ACTIVITIES if inner in names), "is in no collective")
    if any(place.file.endswith(_FEED) for place in report.stack):
        doing = "waits for data"
    name = next(n for n, members in groups.items() if rank in members and _lacks(rank, n, members, reports))
    members = [member for member in groups[name] if member != rank]
    at = f" at {place}" if place else ""
    return HangVerdict(
        (rank,), place, f"rank {rank} ({report.host}) {doing}{at}; for it wait {_waiting(name, members, reports)}"
    )


def _lacks(rank: int, name: str, members: Sequence[int], reports: Mapping[int, RankReport]) -> bool:
    """Does somebody in the group wait for `rank`?"""
    made = reports[rank].calls.get(name)
    count = made.number if made is not None else 0
    return any(name in (calls := _open_calls(reports[m])) and calls[name].number > count for m in members)


def _circle(waits: Mapping[int, set[int]]) -> list[int]:
    """Ranks that wait for each other, each for the next; empty where there are none."""
    for start in sorted(waits):
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in path:
            path.append(rank)
            rank = min(waits.get(rank, ()), default=None)
        if rank is not None:
            return path[path.index(rank) :]
    return []


def _left_out(
    circle: Sequence[int], groups: Mapping[str, Sequence[int]], reports: Mapping[int, RankReport]
) -> HangVerdict | None:
    """Of a circle, the ranks that went past a call in which most members of its group wait; None without a majority."""
    for name, members in groups.items():
        calls = {rank: reports[rank].calls[name].number for rank in members if name in _open_calls(reports[rank])}
        past = [rank for rank in circle if rank in members and rank not in calls]
        if not past or 2 * len(calls) <= len(members) or len(set(calls.values())) > 1:
            continue
        went_on_to = next(iter(_open_calls(reports[past[0]]).values()))
        return HangVerdict(
            tuple(past),
            went_on_to.place,
            f"{_ranks(past)} left out call {next(iter(calls.values()))} of group '{name}' and went on to "
            f"{went_on_to.signature} at {went_on_to.place}; for it wait {_waiting(name, list(calls), reports)}: all "
            "ranks must make the same calls in the same order",
        )
    return None


def _deadlock(circle: list[int], reports: Mapping[int, RankReport]) -> HangVerdict:
    parts = []
    for rank, following in zip(circle, [*circle[1:], circle[0]], strict=True):
        name, call = next(iter(_open_calls(reports[rank]).items()))
        parts.append(f"rank {rank} waits for rank {following} in call {call.number} of group '{name}' at {call.place}")
    place = next(iter(_open_calls(reports[circle[0]]).values())).place
    return HangVerdict(
        tuple(sorted(circle)), place, f"{'; '.join(parts)}: use the groups in the same order on all ranks"
    )


def _all_inside(groups: Mapping[str, Sequence[int]], reports: Mapping[int, RankReport]) -> HangVerdict:
    for name, members in groups.items():
        inside = {rank: reports[rank].calls[name] for rank in members if name in _open_calls(reports[rank])}
        begun = {rank: call.number - call.pending for rank, call in inside.items()}
        behind = tuple(rank for rank in begun if begun[rank] < max(begun.values()))
        if behind:
            call = inside[behind[0]]
            others = [rank for rank in members if rank not in behind]
            return HangVerdict(
                behind,
                call.place,
                f"the backend's thread of {_ranks(behind)} has not taken call {begun[behind[0]] + 1} of group "
                f"'{name}' (it has been asked for {call.number}, {call.signature} at {call.place}); for it wait "
                f"{_waiting(name, others, reports)}",
            )
    waiting = [text for name, members in groups.items() if (text := _waiting(name, members, reports))]
    if not waiting:
        return HangVerdict((), None, "no rank is in a collective: each works, or waits outside of Shoal's groups")
    ranks = tuple(sorted(rank for rank, report in reports.items() if _open_calls(report)))
    found = f"all members wait, {waiting[0]}, and nobody is missing: "
    if any(_at_device(reports[rank]) for rank in ranks):
        return HangVerdict(
            ranks, None, f"{found}their GPUs compute for so long, or the network between them carries nothing"
        )
    return HangVerdict(ranks, None, f"{found}the network between them carries nothing")


def _at_device(report: RankReport) -> bool:
    file, function = _DEVICE
    return any(place.file.endswith(file) and place.function == function for place in report.stack)


FILE = "hang.json"
MOST_BYTES = 16 << 20
"""Of stacks of all ranks."""


def write_verdict(directory: Path, verdict: HangVerdict) -> None:
    """Replaces the file, so that a reader finds the whole of it. Raises `OSError`."""
    draft = directory / f".{FILE}"
    draft.write_bytes(msgspec.json.encode(verdict))
    draft.replace(directory / FILE)


def read_verdict(directory: Path, *, since_s: float) -> HangVerdict | None:
    """The verdict that was found after `since_s` (Unix time); None where there is none."""
    path = directory / FILE
    try:
        if path.stat().st_mtime < since_s:
            return None
        return read_json(path, HangVerdict, limit_bytes=MOST_BYTES, error=UsageError, repair="")
    except (OSError, UsageError):
        return None
