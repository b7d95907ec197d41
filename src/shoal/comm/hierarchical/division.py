"""`Division`: which ranks of a group share a host, in any order and any numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Division:
    """`hosts[h]` are the ranks of host h, ascending; hosts go by their first rank, which leads them."""

    hosts: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Ranks in all."""
        return len(self.order)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The ranks, host by host."""
        return tuple(rank for host in self.hosts for rank in host)

    @property
    def in_order(self) -> bool:
        """Whether ranks are numbered host by host."""
        return self.order == tuple(range(self.size))

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """For each rank its host, and its number within it."""
        return {rank: (h, i) for h, host in enumerate(self.hosts) for i, rank in enumerate(host)}

    def rows(self, host: int) -> slice:
        """Where the ranks of a host stand in `order`."""
        begin = sum(len(ranks) for ranks in self.hosts[:host])
        return slice(begin, begin + len(self.hosts[host]))


def division_of(hosts: Sequence[str]) -> Division:
    """From the identity of each rank's host, in rank order."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return Division(tuple(map(tuple, ranks.values())))
