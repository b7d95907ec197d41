"""`Members`: this rank among ranks that come and go, as one replica of a launcher's fleet (`shoal launch --min`).

    a generation     the ranks that the coordinator has brought together; its store is that of its first member
    it ends          when a member is lost: calls in it fail; or when one joins or leaves: all hear it in `commit`
    the next begins  with those that hold the newest commit as its first ranks: rank 0's state is the one to take

Commits are what the coordinator counts as steps: so it knows who holds the newest one, and that replacements come to
something.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

import msgspec

from shoal.coordinator.client import Client
from shoal.elastic.rendezvous import (
    hosts_lost,
    place_of,
    require_none_lost,
    said_of_lost,
    shut_down_connections,
    unreachable,
)
from shoal.errors import Stopped
from shoal.fleet.processes import assignment_from
from shoal.horovod.engine import number_of
from shoal.launcher.environment import STORE_FD, Place, master_from
from shoal.launcher.store.connection import StoreConnection, reach_store
from shoal.launcher.supervision import say_arrived
from shoal.resilience.events import View
from shoal.resilience.participant import FencedOut
from shoal.wire.connect import Met

ELASTIC_TIMEOUT = "HOROVOD_ELASTIC_TIMEOUT"
"""Seconds for which members wait for enough others; 600."""
START_S = 600.0
CONNECT_S = 10.0
JOIN_S = 24 * 3600.0
"""How long a newcomer waits: the others let it in at their next commit."""
LEAVE_S = 3.0
"""How long a rank that leaves waits for the others to go on. They hold its commit, and may be too few, or all leave."""


class Members:
    """Raises `EnvironmentFault` where the launcher's variables are not whole, and `CollectiveError` where this rank's
    own store does not start.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._mine, (host, port) = assignment_from(environ), master_from(environ)
        self._wait_s = number_of(ELASTIC_TIMEOUT, START_S, environ=environ)
        self._address, self._token = f"{host}:{port}", self._mine.coordinator.token
        place = Place(0, 1, 0, 1, 0, "shoal")
        self._own = reach_store(
            place, host, port, token=self._token, timeout_s=START_S, listen_fd=int(environ[STORE_FD])
        )
        self._connection: StoreConnection | None = None
        self._view: View | None = None
        self._commits = 0
        self._leaving_since_s: float | None = None
        self._had: int | None = None
        self._stdout_fd = os.dup(1)
        self._client = Client(
            self._mine.coordinator, self._mine.replica, store_address=self._address, on_lost=self._stop_waiting_for
        )
        say_arrived(environ, replica=self._mine.replica)
        self._client.__enter__()

    @property
    def changing(self) -> bool:
        """Whether ranks wait to join, or to leave."""
        return self._client.ending or self.leaving

    @property
    def leaving(self) -> bool:
        """Whether this rank was asked to leave."""
        return self._leaving_since_s is not None

    @property
    def state_held(self) -> bool:
        """Whether one of the ranks holds the newest commit."""
        return self._view is not None and bool(self._view.holders)

    def leave(self) -> None:
        """Asks to go; the others take the next generation without this rank. Safe in a signal's handler: it takes no
        lock, and the next heartbeat says it.
        """
        self._leaving_since_s = time.monotonic()
        self._client.leave()

    def next(self, *, failed: bool) -> tuple[int, Met]:
        """Waits for the next generation: its number, and this rank among its members. `failed`: a call in the last one
        has.

        Raises `Stopped` where this rank was asked to leave, `FencedOut` where the others go on without it,
        `NoGeneration` where too few are left, and `CollectiveError` where a member is lost before all have met.
        """
        self._part()
        if failed:
            self._say_failed()
        late = self._mine.late and self._view is None
        begun_s = time.monotonic()

        def has_waited() -> bool:
            since_s = self._leaving_since_s
            return since_s is not None and time.monotonic() - max(begun_s, since_s) > LEAVE_S

        try:
            begin = self._client.generation(JOIN_S if late else self._wait_s, stopping=has_waited)
        except (FencedOut, Stopped) as error:
            if self.leaving:
                raise Stopped(f"{self._mine.replica} has left") from error
            raise
        view = self._view = holders_first(begin.view)
        place = place_of(view, view.members.index(self._mine.replica), 0, 1, "shoal")
        self._rank_0_writes_to_the_terminal(place.rank)
        if place.rank == 0 and (lost := lost_state(view, had=self._had)) is not None:
            print(f"shoal: {lost}", file=sys.stderr, flush=True)
        own_host = self._address.rpartition(":")[0]
        if place.world_size == 1:
            return view.generation, Met(place, None, self._token, own_host)
        host, _, port = view.addresses[0].rpartition(":")
        connection = self._connection = reach_store(
            place, host, int(port), token=self._token, timeout_s=CONNECT_S,
            look=lambda: require_none_lost(self._client.lost),
        )  # fmt: skip
        require_none_lost(self._client.lost)
        return view.generation, Met(place, connection, self._token, own_host)

    def ready(self) -> None:
        """This rank has the state of the generation's first commit."""
        assert self._view is not None
        self._commits = self._had = self._view.step
        self._client.ready(step=self._view.step, position=self._view.position)

    def committed(self) -> None:
        """This rank holds another commit. Raises `FencedOut` where the others go on without it."""
        self._commits += 1
        self._had = self._commits
        self._client.applied(stop=self._commits)

    def close(self) -> None:
        """The rank ends."""
        self._part()
        self._client.__exit__()
        self._own.close()

    def _part(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _say_failed(self) -> None:
        """Also which members this rank cannot reach: the others go on without one, if it stays so."""
        self._client.failed()
        if self._view is not None and self._mine.several_hosts:
            self._client.failed(unreachable(self._view, self._mine.replica))

    def _stop_waiting_for(self, lost: frozenset[str]) -> None:
        """Ends what waits for lost members at the generation's store, and on hosts out of reach. From any thread."""
        connection, view = self._connection, self._view
        if connection is not None:
            connection.give_up(said_of_lost(lost))
        if view is not None and self._mine.several_hosts:
            shut_down_connections(hosts_lost(view, lost, here=self._address.rpartition(":")[0]))

    def _rank_0_writes_to_the_terminal(self, rank: int) -> None:
        """Whichever process is rank 0 now; the others write where they did when they were started."""
        os.dup2(self._mine.terminal_fd if rank == 0 else self._stdout_fd, 1)


def lost_state(view: View, *, had: int | None) -> str | None:
    """What is to be said where no member of `view` holds the newest commit; rank 0 `had` an older one, or none."""
    if view.holders or view.step == 0:
        return None
    lost = f"all ranks that held it are lost, and nobody holds commit {view.step}"
    if had is None:
        return f"{lost}: training begins anew, from what the script has before its first commit"
    return f"{lost}: training goes on from what rank 0 has since commit {had}"


def holders_first(view: View) -> View:
    """`view` with its members in the order of ranks: who holds the newest commit comes before who has to hear of it."""
    pairs = sorted(zip(view.members, view.addresses, strict=True), key=lambda pair: pair[0] not in view.holders)
    members, addresses = zip(*pairs, strict=True)
    return msgspec.structs.replace(view, members=members, addresses=addresses)
