"""Seconds and bytes of a table of `shoal.collectives` on given links, by walking it: alpha-beta-gamma.

A message begins when both ranks have come to its step, and takes the link's latency and as long as its busiest port: a
rank has one port for each direction, and the ranks of a host share one to the other hosts. A port that k messages pass
in one step is busy for the sum of their S/w and for k - 1 gaps g:

    end = max(clock of source, clock of target) + a + max over the ports it passes of (sum of S/w + (k - 1) g)

Then what was received is added at `add_bytes_s`. On uniform links without gaps this gives the closed forms of
`alpha_beta`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shoal.collectives.table import CollectiveTable, Step
from shoal.topology.links import Links


class _Message(NamedTuple):
    source: int
    target: int
    cells: int


def walk_s(table: CollectiveTable, size: float, links: Links, *, add_bytes_s: float = math.inf) -> float:
    """Seconds until the last rank is done; `size` is the whole vector, or what one rank holds for an all-to-all."""
    chunk = size / table.chunks
    clocks = [0.0] * table.ranks
    for step in range(table.steps):
        clocks = _after(clocks, list(_messages(table, step)), chunk, links)
        for rank, row in enumerate(table.rows):
            clocks[rank] += _added(row[step]) * chunk / add_bytes_s
    return max(clocks)


def bytes_between(table: CollectiveTable, size: float, hosts: Sequence[int]) -> float:
    """Bytes that leave a host for another, of all ranks together."""
    crossing = (
        message.cells
        for step in range(table.steps)
        for message in _messages(table, step)
        if hosts[message.source] != hosts[message.target]
    )
    return sum(crossing) * size / table.chunks


def _after(clocks: list[float], messages: Sequence[_Message], chunk: float, links: Links) -> list[float]:
    """The clocks when the messages of one step are through."""
    busy: dict[tuple[str, int], float] = defaultdict(lambda: -links.gap_s)
    for message in messages:
        seconds = links.gap_s + message.cells * chunk / links.bytes_s[message.source][message.target]
        for port in _ports(message, links.hosts):
            busy[port] += seconds
    ends = clocks[:]
    for message in messages:
        source, target, _ = message
        wire = links.latency_s[source][target] + max(busy[port] for port in _ports(message, links.hosts))
        end = max(clocks[source], clocks[target]) + wire
        ends[source], ends[target] = max(ends[source], end), max(ends[target], end)
    return ends


def _ports(message: _Message, hosts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """What a message passes."""
    yield "from rank", message.source
    yield "to rank", message.target
    if hosts[message.source] != hosts[message.target]:
        yield "from host", hosts[message.source]
        yield "to host", hosts[message.target]


def _messages(table: CollectiveTable, step: int) -> Iterator[_Message]:
    for rank, row in enumerate(table.rows):
        for send in row[step].sends:
            yield _Message(rank, send.to, len(send.cells))


def _added(step: Step) -> int:
    """Cells that a rank adds."""
    return sum(len(r.cells) for r in step.receives if r.reduce) + sum(move.reduce for move in step.moves)
