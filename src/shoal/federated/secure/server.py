"""The server's half of secure aggregation. Pure: messages and a clock in, messages out.

A phase ends when all that may still speak have spoken, or at its deadline with those that have. Where fewer are left
than the threshold asks for, the round is over without a sum. The server adds masked vectors as they come and keeps
none. `Secrets` holds what clients reveal, and refuses the second kind of share of any client: a server that follows
this code cannot unmask one client's vector, whatever it is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

import numpy as np

from shoal.errors import EnvironmentFault
from shoal.federated.config import SecureAggregationConfig
from shoal.federated.secure.messages import (
    FromServer,
    Keys,
    Revealed,
    Roster,
    Sealed,
    Survivors,
    neighbours,
    places_of,
    shares_needed,
)
from shoal.federated.secure.primitives import BadMessage, add_masks, agree, join_checked, public_of

Kind = Literal["seed", "key"]
Phase = Literal["keys", "shares", "vectors", "secrets", "summed", "failed"]


class Refused(EnvironmentFault):
    """A client's message that has no place in the protocol. It changes nothing."""


class Secrets:
    """Shares by the client whose secret they are of and by who gave them; of each client of one kind alone."""

    def __init__(self, there: frozenset[str], lost: frozenset[str]) -> None:
        if there & lost:
            raise AssertionError(f"{min(there & lost)} would be both there and lost")
        self.kind: dict[str, str] = dict.fromkeys(there, "seed") | dict.fromkeys(lost, "key")
        self.shares: dict[str, dict[str, bytes]] = {name: {} for name in self.kind}

    def add(self, giver: str, kind: Kind, shares: Mapping[str, bytes]) -> None:
        """Takes what `giver` reveals. Raises `Refused` for a share of the other kind; then none of them is kept."""
        for name in shares:
            if self.kind.get(name) != kind:
                raise Refused(
                    f"client {giver} sent a share of the {kind} of {name}, of which the {self.kind.get(name)} alone "
                    "may be known: with both, its update would be"
                )
        for name, share in shares.items():
            self.shares[name][giver] = share


class SecureServer:
    """One attempt at a round among `clients`. The vectors have `numel` numbers of `dtype`."""

    def __init__(
        self,
        config: SecureAggregationConfig,
        clients: tuple[str, ...],
        *,
        session: bytes,
        numel: int,
        dtype: np.dtype,
        least: int,
        phase_s: float,
        now_s: float,
    ) -> None:
        self.config, self.session, self.least, self.phase_s = config, session, least, phase_s
        self.phase: Phase = "keys"
        self.reason = ""
        self.total = np.zeros(numel, dtype)
        self.liars: set[str] = set()
        self._waits, self._said, self._began_s = set(clients), set[str](), now_s
        self._gone: set[str] = set()
        self._keys: dict[str, Keys] = {}
        self._sealed: dict[str, Sealed] = {}
        self._there: frozenset[str] = frozenset()
        self._roster: Roster | None = None
        self._graph: dict[str, tuple[str, ...]] = {}
        self._secrets: Secrets | None = None

    @property
    def over(self) -> bool:
        """Whether there is a sum, or there will be none."""
        return self.phase in ("summed", "failed")

    @property
    def revealing(self) -> bool:
        """Whether clients have been asked for secrets: another attempt at the same round could tell two sums apart."""
        return self._secrets is not None

    def take_keys(self, client: str, keys: Keys, now_s: float) -> None:
        """Phase 1. Raises `Refused`, as the others do, for what is out of order, sent twice or of the wrong form."""
        self._check(client, "keys")
        known = {key for one in self._keys.values() for key in (one.sealing, one.masking)}
        if keys.sealing == keys.masking or known & {keys.sealing, keys.masking}:
            raise Refused(f"client {client} sent a key that is used already: every key is new")
        self._keys[client] = keys
        self._spoken(client, now_s)

    def take_shares(self, client: str, sealed: Sealed, now_s: float) -> None:
        """Phase 2."""
        self._check(client, "shares")
        if set(sealed.boxes) != set(self._graph[client]) or len(sealed.commitment) != 32:
            raise Refused(f"client {client} sent shares for others than its {len(self._graph[client])} neighbours")
        self._sealed[client] = sealed
        self._spoken(client, now_s)

    def take_vector(self, client: str, vector: np.ndarray, now_s: float) -> None:
        """Phase 3: the masked vector goes into the sum."""
        self.check_vector(client)
        if vector.shape != self.total.shape or vector.dtype != self.total.dtype:
            raise Refused(
                f"client {client} sent {vector.size} numbers of {vector.dtype}: the sum has {self.total.size} of "
                f"{self.total.dtype}"
            )
        np.add(self.total, vector, out=self.total)
        self._spoken(client, now_s)

    def check_vector(self, client: str) -> None:
        """Raises `Refused` where no vector of the client is wanted now; asked before it is read."""
        self._check(client, "vectors")

    def take_secrets(self, client: str, revealed: Revealed, now_s: float) -> None:
        """Phase 4."""
        self._check(client, "secrets")
        assert self._secrets is not None
        wanted = self.survivors(client)
        if set(revealed.seeds) != set(wanted.there) or set(revealed.keys) != set(wanted.lost):
            both = sorted(set(revealed.seeds) & set(revealed.keys))
            what = f"both secrets of {both[0]}" if both else "other shares than it was asked for"
            raise Refused(f"client {client} sent {what}: it may send those of the survivors that it was told of")
        self._secrets.add(client, "seed", revealed.seeds)
        self._secrets.add(client, "key", revealed.keys)
        self._spoken(client, now_s)

    def message_for(self, client: str) -> FromServer | None:
        """What a client that asks is told; None: nothing yet, or it is not among those that go on."""
        if not self.waits_for(client):
            return None
        if self.phase == "shares":
            return self._roster
        if self.phase == "vectors":
            neighbours = [other for other in self._graph[client] if other in self._sealed]
            return Sealed({other: self._sealed[other].boxes[client] for other in neighbours})
        return self.survivors(client) if self.phase == "secrets" else None

    def waits_for(self, client: str) -> bool:
        """Whether the client has yet to speak in this phase."""
        return client in self._waits and client not in self._said

    def survivors(self, client: str) -> Survivors:
        """Of a client and its neighbours those that are there, and those that were lost after phase 2."""
        around = sorted({client, *self._graph[client]} & set(self._sealed))
        there = tuple(name for name in around if name in self._there)
        return Survivors(there, tuple(name for name in around if name not in self._there))

    def lose(self, client: str, now_s: float) -> None:
        """A client is gone: nobody waits for it. What it has said in this phase stands."""
        if client not in self._said:
            self._waits.discard(client)
        self._gone.add(client)
        self.tick(now_s)

    def tick(self, now_s: float) -> None:
        """Ends a phase for which nobody is waited any more, or whose deadline is over."""
        if not self.over and (self._said >= self._waits or now_s - self._began_s >= self.phase_s):
            self._end_phase(now_s)

    @property
    def contributors(self) -> tuple[str, ...]:
        """Whose vectors are in the sum."""
        return tuple(sorted(self._there))

    def _check(self, client: str, phase: Phase) -> None:
        if self.phase != phase:
            raise Refused(f"client {client} sent {phase} in the phase of {self.phase}: every message has one phase")
        if client in self._said:
            raise Refused(f"client {client} sent {phase} twice: the first counts")
        if client not in self._waits:
            raise Refused(f"client {client} is not among those that go on in the phase of {phase}")

    def _spoken(self, client: str, now_s: float) -> None:
        self._said.add(client)
        self.tick(now_s)

    def _end_phase(self, now_s: float) -> None:
        said = frozenset(self._said)
        if len(said) < self.least and self.phase != "secrets":
            self._fail(f"{len(said)} of at least {self.least} clients sent {self.phase}")
            return
        ended = self.phase
        self._waits, self._said, self._began_s = set(said) - self._gone, set(), now_s
        if ended == "keys":
            self._begin_shares()
        elif ended == "shares":
            self.phase = "vectors"
            self._stop_where_few_are_left(said)
        elif ended == "vectors":
            self._there, self.phase = said, "secrets"
            self._stop_where_few_are_left(said)
            if not self.over:
                self._secrets = Secrets(said, self._lost())
        else:
            self._unmask()

    def _begin_shares(self) -> None:
        self._roster = Roster(dict(sorted(self._keys.items())), self.config.neighbours, self.config.threshold)
        self._graph = neighbours({name: keys.masking for name, keys in self._keys.items()}, self.config.neighbours)
        self.phase = "shares"

    def _lost(self) -> frozenset[str]:
        """Those that shared secrets, sent no vector, and masked with somebody who did."""
        return frozenset(self._sealed) - self._there

    def _needed(self, client: str) -> int:
        return shares_needed(self.config.threshold, len(self._graph[client]))

    def _stop_where_few_are_left(self, left: frozenset[str]) -> None:
        """A client with too few neighbours would be lost; its secrets could not be recovered either."""
        for client in self._sealed:
            around = {client, *self._graph[client]} & left
            if len(around) < self._needed(client):
                self._fail(
                    f"of client {client} and its neighbours {len(around)} are left, and {self._needed(client)} must be"
                )
                return

    def _unmask(self) -> None:
        """Takes the masks off the sum."""
        assert self._secrets is not None
        assert self._roster is not None
        places, masks = places_of(self._roster), list[tuple[bytes, bool]]()
        for client in sorted(self._secrets.kind):
            by_place = {places[giver]: share for giver, share in self._secrets.shares[client].items()}
            needed, kind = self._needed(client), self._secrets.kind[client]
            fits = self._fits_seed if kind == "seed" else self._fits_key
            found = join_checked(by_place, threshold=needed, fits=lambda s, c=client, f=fits: f(c, s))
            if found is None:
                wrong = "wrong shares among them" if len(by_place) >= needed else f"{needed} are needed"
                self._fail(f"{len(by_place)} shares of the {kind} of {client} came: {wrong}")
                return
            self.liars |= {name for name, place in places.items() if place in found[1]}
            try:
                masks += [(found[0], True)] if kind == "seed" else self._masks_with(client, found[0])
            except BadMessage as error:
                self._fail(f"the masks of {client} cannot be made again ({error})")
                return
        add_masks(self.total, masks)
        self.phase = "summed"

    def _masks_with(self, client: str, private: bytes) -> list[tuple[bytes, bool]]:
        """What takes off the masks that others added because of a client that was lost."""
        assert self._roster is not None
        found = []
        for other in self._graph[client]:
            if other in self._there:
                public = self._roster.keys[other].masking
                found.append((agree(private, public, purpose="mask", session=self.session), client > other))
        return found

    def _fits_seed(self, client: str, secret: bytes) -> bool:
        return hashlib.sha256(secret).digest() == self._sealed[client].commitment

    def _fits_key(self, client: str, secret: bytes) -> bool:
        return public_of(secret) == self._keys[client].masking

    def _fail(self, reason: str) -> None:
        self.phase, self.reason = "failed", reason
