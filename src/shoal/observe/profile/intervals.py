"""Spans of time as sorted lists of (begin, end) that do not touch: union, intersection, difference, length. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Spans = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """All the time that any of them covers."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def intersection(first: Spans, second: Spans) -> Spans:
    """The time that both cover; both are results of `union`."""
    found: Spans = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            found.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(first: Spans, second: Spans) -> Spans:
    """The time that the first covers and the second does not; both are results of `union`."""
    found: Spans = []
    j = 0
    for begin, end in first:
        while j < len(second) and second[j][1] <= begin:
            j += 1
        at, k = begin, j
        while k < len(second) and second[k][0] < end:
            if at < second[k][0]:
                found.append((at, second[k][0]))
            at = max(at, second[k][1])
            k += 1
        if at < end:
            found.append((at, end))
    return found


def length(spans: Spans) -> float:
    """How much time they cover; of results of `union`."""
    return sum(end - begin for begin, end in spans)
