"""Where the ranks of a run find each other: one key-value store, hosted by rank 0 (or by torchrun's agent).

    store = open_store(place, os.environ, timeout_s=600)      # returns once every rank is connected
    start = Rendezvous(store, place, timeout_s=600)
    generation = start.announce("generation", find_on_rank_0)
    start.barrier("the first collective")

Every wait is bounded and says which ranks are missing (`wait.bounded`). It ends at once when another rank has said
that it failed (`tell_failure`). Ranks that mpiexec started and that have mpi4py need no address: rank 0 takes a free
port and says so over MPI.

The store of rank 0 serves nobody without the job's token (`launcher.store`); that of torchrun's agent serves everybody
who reaches it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from typing import TypeVar

# torch.distributed documents these, but does not list them in its `__all__`.
from torch.distributed import DistError, DistStoreError, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from shoal.errors import CollectiveError, EnvironmentFault
from shoal.launcher import sockets
from shoal.launcher.environment import STORE_FD, Place, master_from
from shoal.launcher.store.client import AuthenticatedStore
from shoal.launcher.store.connection import (
    MANY_RANKS,
    POLLS_A_SECOND,
    SAY_AFTER_S,
    SEE,
    START_KEY,
    bounded,
    meet_over_mpi,
    mpi_is_there,
    reach_store,
)
from shoal.launcher.store.messages import job_token

STORE_TIMEOUT_S = 60.0
"""How long a call on the opened store may take, unless it brings a timeout of its own."""
TELL_S = 5.0
"""How long a rank that failed takes to tell the others."""
STARTED = "the first collective"
"""The last barrier of a start."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_FAILED, _HEARD = "failed", "failed/heard"
_CONNECTED = "the store"
_FIRST_POLL_S, _LAST_POLL_S, _RETRY_S = 0.002, 0.1, 0.5
_MOST_NAMED = 8
T = TypeVar("T")


def open_store(place: Place, environ: Mapping[str, str], *, timeout_s: float) -> Store:
    """This rank's connection to the run's store, once all ranks have theirs; rank 0 hosts it where nobody else does.

    Raises `InUse` for a port that is taken, `EnvironmentFault` for an address at which rank 0 cannot listen, and
    `CollectiveError` where rank 0, or then another rank, does not come within `timeout_s`.
    """
    store = _connected(place, environ, timeout_s=timeout_s)
    Rendezvous(store, place, timeout_s=timeout_s).barrier(_CONNECTED)
    return store


def interface_for(place: Place, environ: MutableMapping[str, str]) -> str | None:
    """Keep Gloo on loopback while all ranks share a host, unless the user chose; returns the interface's name."""
    if place.one_host and not environ.get(GLOO_INTERFACE):
        environ[GLOO_INTERFACE] = sockets.interface_name()
    return environ.get(GLOO_INTERFACE)


class Rendezvous:
    """What ranks say to each other through the store before their first collective.

    `timeout_s` bounds each wait. All methods raise `CollectiveError`: a rank did not come, failed, or took the store
    with it.
    """

    def __init__(self, store: Store, place: Place, *, timeout_s: float) -> None:
        self._store, self._place, self._timeout_s = store, place, timeout_s

    def barrier(self, name: str) -> None:
        """Return once every rank has called this with the same name; each name serves once."""
        key, size = f"barrier/{name}", self._place.world_size
        missing: list[int] = []

        def work(over: threading.Event) -> None:
            self._store.set(f"{key}/{self._place.rank}", _identity())
            if self._store.add(key, 1) == size:
                self._store.set(f"{key}/all", "")
            self._wait_for(f"{key}/all", over, look=look)

        def look() -> None:
            if size >= MANY_RANKS and self._place.rank != 0:
                return  # rank 0 names them: thousands of ranks that ask would keep the store busy
            missing[:] = missing_ranks(lambda ranks: self._store.check([f"{key}/{rank}" for rank in ranks]), size)

        self._bounded(work, lambda: f"{_ranks(missing, size)} to reach {name}")

    def announce(self, key: str, find: Callable[[], str]) -> str:
        """What `find` returns on rank 0, on every rank."""
        if self._place.rank == 0:
            text = find()
            self._bounded(lambda over: self._store.set(f"announce/{key}", text), lambda: f"the store, to tell {key}")
            return text

        def work(over: threading.Event) -> str:
            self._wait_for(f"announce/{key}", over)
            return self._store.get(f"announce/{key}").decode()

        return self._bounded(work, lambda: f"rank 0, which finds out and tells the others: {key}")

    def first(self, key: str, text: str) -> str:
        """What the first rank said that called this with that key: `text`, if it is this one. Waits for nobody."""
        return self._store.compare_set(f"first/{key}", "", text).decode()

    def give_up(self, sentence: str) -> None:
        """Ends the waits of all ranks, these and those to come: they raise `CollectiveError(sentence)`."""
        self._store.set(_FAILED, sentence)

    def _wait_for(self, key: str, over: threading.Event, look: Callable[[], None] = lambda: None) -> None:
        """Until `key` is there. `look` is called from time to time, in time for the wait's first sentence."""
        pause_s, look_s = _FIRST_POLL_S, time.monotonic() + SAY_AFTER_S / 2
        while not self._there(key):
            if self._store.check([_FAILED]):
                failure = self._store.get(_FAILED).decode()
                self._store.add(_HEARD, 1)
                raise CollectiveError(failure)
            if time.monotonic() >= look_s:
                look()
                look_s = time.monotonic() + 1.0
            if over.wait(pause_s):
                raise TimeoutError(key)  # nobody hears it any more
            pause_s = min(2 * pause_s, _LAST_POLL_S)

    def _there(self, key: str) -> bool:
        """Whether `key` is there. Of many ranks each lets the store wait for it: so many polls would keep it busy."""
        if self._place.world_size < MANY_RANKS:
            return self._store.check([key])
        try:
            self._store.wait([key], timedelta(seconds=self._place.world_size / POLLS_A_SECOND))
        except DistStoreError:  # time is over
            return False
        return True

    def _bounded(self, work: Callable[[threading.Event], T], missing: Callable[[], str]) -> T:
        rank = self._place.rank
        try:
            return bounded(work, rank=rank, timeout_s=self._timeout_s, missing=missing, repair=f"{SEE}; {START_KEY}")
        except DistError as error:
            raise CollectiveError(
                f"rank {rank} waited for {missing()} and lost the store, which rank 0 hosts: see the log of rank 0"
            ) from error


def missing_ranks(there: Callable[[range], bool], size: int) -> list[int]:
    """The first of the ranks that are not there, found by halves: O(log size) questions for each."""
    found: list[int] = []
    open_ = [range(size)]
    while open_ and len(found) <= _MOST_NAMED:
        ranks = open_.pop()
        if there(ranks):
            continue
        if len(ranks) == 1:
            found.append(ranks[0])
            continue
        middle = len(ranks) // 2
        open_ += [ranks[middle:], ranks[:middle]]
    return found


def tell_failure(place: Place, environ: Mapping[str, str], sentence: str) -> None:
    """Tell the ranks that wait for this one at the start why it does not come; after the start nobody listens.

    Takes at most `TELL_S`, and raises nothing. Rank 0 hosts the store: it stays until the others have heard.
    """

    def work(over: threading.Event) -> None:
        address, port = master_from(environ)
        hosts = place.rank == 0 and not _agent_hosts(environ)
        late = hosts and sockets.obstacle(address, port) is not None
        listen_fd = sockets.listen_at(address, port, one_host=place.one_host).detach() if late else None
        store = _met(place, environ, timeout_s=TELL_S, listen_fd=listen_fd)
        own = f"barrier/{_CONNECTED}/{place.rank}"
        if hosts and not late and not (store.check([own]) and store.get(own).decode() == _identity()):
            return  # another run's store, at the port that this one wanted
        if store.check([f"barrier/{STARTED}/all"]):
            return
        store.set(_FAILED, f"rank {place.rank} failed: {sentence}")
        while hosts and store.add(_HEARD, 0) < place.world_size - 1 and not over.is_set():
            over.wait(_LAST_POLL_S)

    with contextlib.suppress(EnvironmentFault, RuntimeError):
        bounded(work, rank=place.rank, timeout_s=TELL_S, missing=lambda: "the others to hear of its failure", repair="")


def _connected(place: Place, environ: Mapping[str, str], *, timeout_s: float) -> Store:
    """A connection of this rank, whoever hosts the store and wherever it is."""
    if place.launcher == "mpi" and not environ.get("MASTER_PORT") and mpi_is_there():
        met = meet_over_mpi(place, environ, timeout_s=timeout_s)
        return connect_store(
            place, met.address, met.port, token=met.token, timeout_s=timeout_s, listen_fd=met.listen_fd
        )  # fmt: skip
    address, port = master_from(environ)
    listen_fd = None
    if place.rank == 0 and not _agent_hosts(environ):
        # The socket that Shoal's launcher bound, else one of our own.
        own = environ.get(STORE_FD)
        listen_fd = int(own) if own else sockets.listen_at(address, port, one_host=place.one_host).detach()
    return _met(place, environ, timeout_s=timeout_s, listen_fd=listen_fd)


def _met(place: Place, environ: Mapping[str, str], *, timeout_s: float, listen_fd: int | None) -> Store:
    """The store at the master's address, of this process where it is given a socket."""
    address, port = master_from(environ)
    if not _agent_hosts(environ):
        token = job_token(environ)
        return connect_store(place, address, port, token=token, timeout_s=timeout_s, listen_fd=listen_fd)
    # The agent keeps its own keys in its store, and those of the attempts before this one.
    run, restart = environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = connect_agent(place, address, port, timeout_s=timeout_s)
    return PrefixStore(f"shoal/{run}/{restart}", store)


def _agent_hosts(environ: Mapping[str, str]) -> bool:
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect_store(
    place: Place,
    address: str,
    port: int,
    *,
    token: bytes,
    timeout_s: float,
    listen_fd: int | None = None,
    look: Callable[[], None] = lambda: None,
) -> AuthenticatedStore:
    """A connection to the store at that address; `listen_fd`: host it, on that listening socket.

    Raises what `reach_store` raises.
    """
    connection = reach_store(
        place, address, port, token=token, timeout_s=timeout_s, listen_fd=listen_fd, look=look
    )  # fmt: skip
    return AuthenticatedStore(connection, timeout_s=STORE_TIMEOUT_S)


def connect_agent(place: Place, address: str, port: int, *, timeout_s: float) -> TCPStore:
    """A connection to the store that torchrun's agent hosts, which asks nobody for a token.

    Raises `CollectiveError` where it does not answer within `timeout_s`.
    """
    state = ["not tried yet"]

    def work(over: threading.Event) -> TCPStore:
        # Before TCPStore tries, which reports each failure with a page of its own frames.
        while (found := sockets.obstacle(address, port)) is not None:
            state[:] = [found]
            if over.wait(_RETRY_S):
                raise TimeoutError(found)  # nobody hears it any more
        state[:] = ["connected, but it does not answer"]
        store = TCPStore(address, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
        store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        return store

    def missing() -> str:
        return f"torchrun's agent at {address}:{port} ({state[0]})"

    try:
        return bounded(work, rank=place.rank, timeout_s=timeout_s, missing=missing, repair=f"{SEE}; {START_KEY}")
    except DistError as error:
        raise CollectiveError(
            f"what listens at {address}:{port} is not the store of torchrun's agent: give all agents one "
            "--rdzv-endpoint"
        ) from error


def _ranks(ranks: Sequence[int], size: int) -> str:
    """As "rank 3 of 8" or "ranks 1, 2 of 8"; "the other ranks" where it is not known yet which."""
    if not ranks:
        return "the other ranks"
    shown = ", ".join(map(str, ranks[:_MOST_NAMED])) + (", ..." if len(ranks) > _MOST_NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown} of {size}"


def _identity() -> str:
    return f"{socket.gethostname()} {os.getpid()}"
