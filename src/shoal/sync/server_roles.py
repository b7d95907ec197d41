"""Which ranks work, which serve, and who speaks for whom. Pure.

    decentralised       0 1 2 3 work and serve
    dedicated servers   0 1 2 3 work | 4 5 serve
    hybrid              (0 1) (2 3) work, 0 and 2 push and pull for their hosts | 4 5 serve     BytePS, OSDI 2020

A party contributes as one worker: a rank alone, or the workers of a host, which sum their gradients first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.sync.config import ServerConfig

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Roles:
    """`servers` in ascending order; the first rank of a party pushes and pulls for it."""

    parties: tuple[Ranks, ...]
    servers: Ranks

    @property
    def workers(self) -> Ranks:
        """The ranks that push and pull: one of each party."""
        return tuple(party[0] for party in self.parties)

    def party_of(self, rank: int) -> Ranks:
        """The party of `rank`; empty for one that only serves."""
        return next((party for party in self.parties if rank in party), ())


def roles_of(config: ServerConfig, size: int, hosts: Sequence[str] = ()) -> Roles:
    """The roles of `size` ranks. `hosts` are their hosts' identities in rank order; empty: nobody knows, or cares.

    Raises `ConfigError` where no worker, or no party that counts, is left.
    """
    working = size - config.servers
    if working < 1:
        raise ConfigError(
            f"sync.servers = {config.servers} of {size} ranks leaves none to work: lower it, or raise run.processes"
        )
    parties: dict[str, list[int]] = {}
    for rank in range(working):
        shared = config.topology == "hybrid" and len(hosts) == size
        parties.setdefault(hosts[rank] if shared else str(rank), []).append(rank)
    if config.backup is not None and config.backup >= len(parties):
        raise ConfigError(
            f"sync.backup = {config.backup}, and {len(parties)} contribute to an update: none would be left to count; "
            "lower it"
        )
    return Roles(
        tuple(tuple(party) for party in parties.values()), tuple(range(working if config.servers else 0, size))
    )
