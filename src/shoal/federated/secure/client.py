"""A client's half of secure aggregation. Pure: it takes the server's messages, and gives its own; each once."""

from __future__ import annotations

import hashlib
import os
from typing import NoReturn

import msgspec
import numpy as np

from shoal.errors import EnvironmentFault
from shoal.federated.secure.messages import (
    PAIR,
    Keys,
    Revealed,
    Roster,
    Sealed,
    Survivors,
    neighbours,
    pair,
    places_of,
    shares_needed,
)
from shoal.federated.secure.primitives import BadMessage, add_masks, agree, new_private, public_of, seal, split, unseal


class ProtocolBroken(EnvironmentFault):
    """The server asks for what would reveal this client's update: it takes no further part in the round."""


class SecureClient:
    """One client in one round. `session` names round and attempt, the same for all; nothing of it serves twice.

    `least`: of the whole round, fewer clients than these are not enough to hide among.
    """

    def __init__(self, name: str, session: bytes, *, least: int) -> None:
        self.name, self.session, self.least = name, session, least
        self._sealing, self._masking, self._seed = new_private(), new_private(), os.urandom(32)
        self._phase = 0
        self._roster: Roster | None = None
        self._neighbours: tuple[str, ...] = ()
        self._needed = 0
        self._shares: dict[str, tuple[bytes, bytes]] = {}

    def keys(self) -> Keys:
        """Phase 1: this client's public keys."""
        self._enter(1)
        return Keys(public_of(self._sealing), public_of(self._masking))

    def shares(self, roster: Roster) -> Sealed:
        """Phase 2: its secrets, shared among its neighbours. Raises `ProtocolBroken`."""
        self._enter(2)
        mine = roster.keys.get(self.name)
        if mine != Keys(public_of(self._sealing), public_of(self._masking)):
            self._broken("the roster has other keys for this client than it sent")
        everybody = [key for keys in roster.keys.values() for key in (keys.sealing, keys.masking)]
        if len(set(everybody)) != len(everybody):
            self._broken("two clients have the same key")
        if len(roster.keys) < self.least or not 0.5 < roster.threshold <= 1:
            self._broken(f"{len(roster.keys)} clients with threshold {roster.threshold:g} are too few to hide among")
        self._roster = roster
        graph = neighbours({name: keys.masking for name, keys in roster.keys.items()}, roster.degree)
        self._neighbours = graph[self.name]
        self._needed = shares_needed(roster.threshold, len(self._neighbours))
        return self._boxes(roster)

    def _boxes(self, roster: Roster) -> Sealed:
        holders = sorted((*self._neighbours, self.name))
        places = places_of(roster)
        where = [places[holder] for holder in holders]
        seeds = split(self._seed, threshold=self._needed, places=where)
        keys = split(self._masking, threshold=self._needed, places=where)
        own = places[self.name]
        self._shares[self.name] = seeds[own], keys[own]
        boxes = {
            other: seal(
                self._direction(self.name, other, roster.keys[other].sealing),
                pair(seeds[places[other]], keys[places[other]]),
                sender=self.name,
                receiver=other,
                session=self.session,
            )
            for other in self._neighbours
        }
        return Sealed(boxes, hashlib.sha256(self._seed).digest())

    def masked(self, sealed: Sealed, vector: np.ndarray) -> np.ndarray:
        """Phase 3: `vector` (uint32 or uint64 [numel]) under its masks, as a new one. Raises `ProtocolBroken`."""
        self._enter(3)
        assert self._roster is not None
        if not set(sealed.boxes) <= set(self._neighbours):
            self._broken("shares came from a client that is no neighbour")
        if len(sealed.boxes) + 1 < self._needed:
            self._broken(f"{len(sealed.boxes)} neighbours are left, and {self._needed - 1} must be")
        for other, box in sealed.boxes.items():
            self._shares[other] = self._opened(other, box)
        masks = [(self._seed, False)]
        for other in sealed.boxes:
            seed = agree(self._masking, self._roster.keys[other].masking, purpose="mask", session=self.session)
            masks.append((seed, other < self.name))
        result = vector.copy()
        add_masks(result, masks)
        return result

    def _opened(self, other: str, box: bytes) -> tuple[bytes, bytes]:
        assert self._roster is not None
        try:
            key = self._direction(other, self.name, self._roster.keys[other].sealing)
            content = unseal(key, box, sender=other, receiver=self.name, session=self.session)
            shares = PAIR.decode(content)
        except (BadMessage, msgspec.DecodeError) as error:
            self._broken(f"the shares of {other} cannot be opened ({error})")
        return shares.seed, shares.key

    def revealed(self, survivors: Survivors) -> Revealed:
        """Phase 4: shares of the seeds of those that are there, and of the keys of those that were lost.

        Raises `ProtocolBroken` where the server asks for both of one client, or for too few survivors.
        """
        self._enter(4)
        there, lost = set(survivors.there), set(survivors.lost)
        if there & lost:
            self._broken(f"the server asks for both secrets of {min(there & lost)}")
        if self.name not in there or not there | lost <= set(self._shares):
            self._broken("the survivors are not this client and its neighbours")
        if len(there) < self._needed:
            self._broken(f"{len(there)} of this client and its neighbours are left, and {self._needed} must be")
        return Revealed(
            {name: self._shares[name][0] for name in sorted(there)},
            {name: self._shares[name][1] for name in sorted(lost)},
        )

    def _direction(self, sender: str, receiver: str, public: bytes) -> bytes:
        return agree(self._sealing, public, purpose=f"shares from {sender} to {receiver}", session=self.session)

    def _enter(self, phase: int) -> None:
        if phase != self._phase + 1:
            self._broken(f"phase {phase} follows phase {self._phase}: every phase comes once, in order")
        self._phase = phase

    def _broken(self, what: str) -> NoReturn:
        self._phase = 99
        raise ProtocolBroken(
            f"secure aggregation of client {self.name}: {what}; it takes no further part in this round"
        )
