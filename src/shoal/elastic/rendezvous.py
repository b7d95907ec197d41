"""Where ranks meet: those of a replica at a store that its first rank hosts, those of a generation at the store of its
first member.

So no store outlives the replicas that need it, and none is lost with a replica that is not the first of the generation.
A rank talks to a generation's store over a connection of its own, also where it hosts the store: when a member is lost,
the rank ends that connection, and with it all that it waits for there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError  # pyright: ignore[reportPrivateImportUsage]

from shoal.assembly.process import Process
from shoal.comm.board import Board
from shoal.coordinator.client import STOPPED_WAITING, Begin, NoGeneration
from shoal.errors import CollectiveError, GenerationOver, Stopped
from shoal.fleet.processes import Assignment
from shoal.launcher.environment import STORE_FD, Launcher, Place, master_from
from shoal.launcher.rendezvous import Rendezvous, connect_store
from shoal.launcher.store.client import AuthenticatedStore
from shoal.launcher.supervision import say_arrived
from shoal.resilience.events import View

# Hosts that are out of reach: finding them, and ending what this process waits for on them.
#
# A host that is gone, or behind a cut link, closes no connection: who waits for it would wait for the timeout of a
# collective, and Gloo does not end a call that is under way. So when the coordinator has fenced all replicas of a host,
# this process shuts down its own ends of all connections to it. Its calls then fail as if the peer had closed them.


FDS = Path("/proc/self/fd")
REACH_S = 3.0
"""How long a member may take to accept a connection."""


def hosts_lost(view: View, lost: Collection[str], *, here: str) -> set[str]:
    """The hosts of `view` that have `lost` members alone, by the addresses that these joined with; `here` is none."""
    hosts = {name: address.rpartition(":")[0] for name, address in zip(view.members, view.addresses, strict=True)}
    living = {hosts[name] for name in hosts if name not in lost}
    return {hosts[name] for name in hosts if name in lost} - living - {"", here}


def shut_down_connections(hosts: Collection[str]) -> int:
    """Shuts down this process's TCP connections to `hosts` (addresses); how many there were. Needs Linux's /proc."""
    count = 0
    for fd in [int(name) for name in os.listdir(FDS)] if hosts and FDS.is_dir() else ():
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            duplicate = os.dup(fd)
        except OSError:  # closed meanwhile
            continue
        with socket.socket(fileno=duplicate) as connection, contextlib.suppress(OSError):  # one that is not connected
            if connection.family in (socket.AF_INET, socket.AF_INET6) and _host_of_peer(connection) in hosts:
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def unreachable(view: View, replica: str, *, within_s: float = REACH_S) -> tuple[str, ...]:
    """The members of `view`, other than `replica`, at whose addresses nothing takes a connection.

    The members' stores listen there. All are tried at once.
    """
    others = [(name, where) for name, where in zip(view.members, view.addresses, strict=True) if name != replica]
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        found = pool.map(lambda other: _answers(other[1], within_s), others)
        return tuple(name for (name, _), answers in zip(others, found, strict=True) if not answers)


def _answers(address: str, within_s: float) -> bool:
    host, _, port = address.rpartition(":")
    if not host:
        return True  # it has gone, which the coordinator knows
    try:
        with socket.create_connection((host, int(port)), within_s):
            return True
    except OSError:
        return False


def _host_of_peer(connection: socket.socket) -> str:
    """A socket of IPv6 that talks to one of IPv4 names its peer "::ffff:10.0.0.2" (RFC 4291, 2.5.5.2)."""
    return str(connection.getpeername()[0]).removeprefix("::ffff:")


CONNECT_S = 10.0
POLL_S = 0.2
START_S = 600.0
"""How long the ranks of a replica wait for its first one, which imports what they import."""


class ReplicaRendezvous:
    """The store of this rank's replica, and its way to those of the others."""

    def __init__(
        self,
        assignment: Assignment,
        place: Place,
        device: torch.device,
        *,
        timeout_s: float,
        environ: Mapping[str, str],
    ) -> None:
        self._assignment, self._device, self._timeout_s, self._environ = assignment, device, timeout_s, environ
        self._launcher: Launcher = place.launcher
        host, port = master_from(environ)
        self.address = f"{host}:{port}"
        listen_fd = int(environ[STORE_FD]) if assignment.rank == 0 else None
        self._token = assignment.coordinator.token
        self._own = connect_store(place, host, port, token=self._token, timeout_s=START_S, listen_fd=listen_fd)
        self._met: AuthenticatedStore | None = None
        self._rendezvous: Rendezvous | None = None
        self._process: Process | None = None
        self._over = threading.Event()
        self._view: View | None = None

    @property
    def inside(self) -> Store:
        """For the ranks of this replica alone."""
        return PrefixStore("replica", self._own)

    @property
    def place_inside(self) -> Place:
        """This rank's place in its replica."""
        rank, ranks = self._assignment.rank, self._assignment.ranks
        return Place(rank, ranks, rank, ranks, 0, self._launcher)

    def alone(self, purpose: str) -> Process:
        """This rank's process for something that its replica does without the others, once for each `purpose`."""
        store = PrefixStore(f"alone/{purpose}", self._own)
        rendezvous = Rendezvous(store, self.place_inside, timeout_s=self._timeout_s)
        return Process(self.place_inside, self._device, store, rendezvous, self._environ)

    def of(self, view: View, *, lost: Callable[[], frozenset[str]] = frozenset) -> Process:
        """This rank's process as one of the generation's. `lost`: the members that are. Raises `CollectiveError`
        without the first member.
        """
        self._over, self._view = threading.Event(), view
        member = view.members.index(self._assignment.replica)
        place = place_of(view, member, self._assignment.rank, self._assignment.ranks, self._launcher)
        host, _, port = (self.address if member == 0 else view.addresses[0]).rpartition(":")
        if not host:
            raise CollectiveError(f"replica {view.members[0]} is gone: the generation has nowhere to meet")

        def look() -> None:
            require_none_lost(lost())

        self._met = connect_store(place, host, int(port), token=self._token, timeout_s=CONNECT_S, look=look)
        named = PrefixStore(f"membership-{view.generation}", self._met)
        self._rendezvous = Rendezvous(named, place, timeout_s=self._timeout_s)
        self._process = Process(place, self._device, named, self._rendezvous, self._environ)
        return self._process

    def end(self, sentence: str) -> None:
        """The generation is over, or about to be: ends its waits at the start, on all ranks. From any thread, and
        without a wait for the store, which may be on a host that is out of reach.
        """
        rendezvous = self._rendezvous
        if rendezvous is not None:
            threading.Thread(target=_give_up, args=(rendezvous, sentence), daemon=True).start()

    def stop_waiting_for(self, lost: frozenset[str]) -> None:
        """Members of the generation are `lost`: ends what this rank waits for at the generation's store, where all
        members meet, and on hosts that have lost members alone. From any thread.
        """
        self._over.set()
        met = self._met
        if met is not None:
            met.give_up(said_of_lost(lost))
        if self._assignment.several_hosts and self._view is not None:
            here = self.address.rpartition(":")[0]
            shut_down_connections(hosts_lost(self._view, lost, here=here))

    def unreachable(self, view: View) -> tuple[str, ...]:
        """The members of the generation whose stores cannot be reached from here."""
        return unreachable(view, self._assignment.replica)

    def exchange(self, process: Process, *, timeout_s: float) -> GenerationExchange:
        """What the saves of this generation go by."""
        return GenerationExchange(Board(process.store, timeout_s=timeout_s).clone(), self._over)

    def part(self, *, within_s: float) -> None:
        """The run ends, and with it the generation that this replica is in, if any. The first rank, which hosts the
        store, waits until all others have read there what became of the last save; `within_s` seconds at most, and not
        for members that are lost.
        """
        if self._rendezvous is None or self._process is None:
            return
        place = self._process.place
        with contextlib.suppress(CollectiveError):
            exchange = self.exchange(self._process, timeout_s=within_s)
            if place.rank:
                exchange.publish(_parted(place.rank), b"")
            else:
                exchange.collect([_parted(rank) for rank in range(1, place.world_size)], within_s)

    def leave(self) -> None:
        """This replica has left the generation: what its saves still wait for does not come."""
        self._over.set()
        self._rendezvous = self._process = None
        if self._met is not None:
            self._met.close()  # kept until there is another: C++ calls its Python half, and holds no reference to it


def _parted(rank: int) -> str:
    return f"parted/{rank}"


def said_of_lost(lost: Collection[str]) -> str:
    """Why a generation with `lost` members takes no step any more."""
    return f"{', '.join(sorted(lost))} {'was' if len(lost) == 1 else 'were'} lost: waiting for another generation"


def require_none_lost(lost: Collection[str]) -> None:
    """Raises `GenerationOver` where members of the generation are `lost`."""
    if lost:
        raise GenerationOver(said_of_lost(lost))


def _give_up(rendezvous: Rendezvous, sentence: str) -> None:
    with contextlib.suppress(RuntimeError, GenerationOver):  # the store is gone, and with it all waits
        rendezvous.give_up(sentence)


def place_of(view: View, member: int, rank: int, ranks: int, launcher: Launcher) -> Place:
    """Where rank `rank` of the `ranks` of a member stands in the generation; members of one address share a host."""
    hosts = [address.rpartition(":")[0] for address in view.addresses]
    here = [index for index, host in enumerate(hosts) if host == hosts[member]]
    return Place(
        member * ranks + rank,
        len(view.members) * ranks,
        here.index(member) * ranks + rank,
        len(here) * ranks,
        list(dict.fromkeys(hosts)).index(hosts[member]),
        launcher,
    )


class GenerationExchange:
    """A save's messages, as `checkpoint.agreement.MessageExchange`; they and the save end with the generation."""

    def __init__(self, board: Board, over: threading.Event) -> None:
        self._board, self._over = board, over

    def publish(self, key: str, value: bytes) -> None:
        self._board.publish(key, value)

    def collect(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Raises `CollectiveError` when the generation is over, or after `timeout_s`."""
        left_s = timeout_s
        while not self._over.is_set():
            found = self._board.collect_some(keys, min(POLL_S, left_s))
            if len(found) == len(set(keys)):
                return [found[key] for key in keys]
            left_s -= POLL_S
            if left_s <= 0:
                return self._board.collect(keys, POLL_S)
        raise CollectiveError("a replica was lost or joined while the checkpoint was written")

    def forget(self, keys: Sequence[str]) -> None:
        self._board.forget(keys)


# The ranks of one replica: they enter and leave every generation together.
#
# They meet at a store that the first of them hosts for as long as the replica lives. It alone asks the coordinator for
# the next generation, and tells the others; at the end of one all say what they hold. The replica holds a state when
# all its ranks hold that of the same step: then the parts fit together. The launcher ends them all when it loses one.


DONE, NOTHING = "done", "nothing"
"""What a rank says that has finished the run, and one that holds no state."""
FIRST_POLL_S, LAST_POLL_S = 0.002, 0.05


class ReplicaRanks:
    """Rank `rank` of `size`. `check` is called while it waits: it raises where there is nothing to wait for any more.
    `stopping`: nobody wants another generation.

    All methods raise `CollectiveError` where the store is gone, and with it the first rank.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, check: Callable[[], None], stopping: Callable[[], bool]
    ) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._check, self._stopping = check, stopping
        self._generations = 0

    def arrive(self, place: Place, replica: str, *, timeout_s: float) -> None:
        """All ranks of `replica` have loaded what they train. Blocks until they have, for `timeout_s` at most."""
        say_arrived(os.environ, replica=replica)
        Rendezvous(self._store, place, timeout_s=timeout_s).barrier("all ranks of the replica")

    def begin(self, find: Callable[[], Begin]) -> Begin:
        """The next generation, which the first rank finds by `find`, on all. On all alike it raises `NoGeneration`, and
        `Stopped` where all were asked to stop.
        """
        self._generations += 1
        if self.size == 1:
            return find()
        key = f"begin/{self._generations}"
        if self.rank == 0:
            try:
                begin = find()
            except NoGeneration as error:
                self._set(key, msgspec.json.encode(str(error)))
                raise
            self._set(key, msgspec.json.encode(begin))
            return begin
        told = self._wait([key], until=self._stopping)
        if not told:
            raise Stopped(STOPPED_WAITING)
        answer = msgspec.json.decode(told[0], type=Begin | str)
        if isinstance(answer, str):
            raise NoGeneration(answer)
        return answer

    def leave_step(self, *, within_s: float) -> None:
        """A collective failed here: gives the others of the replica `within_s` to finish an update that they have
        begun, before this rank ends the groups that they share.
        """
        if self.size > 1:
            self._set(self._key("left", self.rank), b"")
            deadline_s = time.monotonic() + within_s
            keys = [self._key("left", rank) for rank in range(self.size)]
            self._wait(keys, until=lambda: time.monotonic() > deadline_s)

    def end(self, step: int | None, *, done: bool = False) -> tuple[bool, bool]:
        """The generation is over for this rank, which holds the state after `step`, or none; `done`: the run is over.

        (whether all ranks hold the same, whether one of them has finished the run)
        """
        if self.size == 1:
            return step is not None, done
        own = DONE if done else NOTHING if step is None else str(step)
        self._set(self._key("held", self.rank), own.encode())
        said = [text.decode() for text in self._wait([self._key("held", rank) for rank in range(self.size)])]
        return len(set(said)) == 1 and NOTHING not in said, DONE in said

    def part(self, *, within_s: float) -> None:
        """The last that ranks say to each other: the first one, which hosts the store, stays until all have."""
        if self.size > 1:
            self._set(f"parted/{self.rank}", b"")
            if self.rank == 0:
                deadline_s = time.monotonic() + within_s
                keys = [f"parted/{rank}" for rank in range(self.size)]
                self._wait(keys, until=lambda: time.monotonic() > deadline_s)

    def _key(self, what: str, rank: int) -> str:
        return f"{what}/{self._generations}/{rank}"

    def _set(self, key: str, value: bytes) -> None:
        try:
            self._store.set(key, value)  # pyright: ignore[reportArgumentType] bytes are legal
        except DistError as error:
            raise CollectiveError(f"rank 0 of the replica is gone: {error}") from error

    def _wait(self, keys: Sequence[str], until: Callable[[], bool] = lambda: False) -> list[bytes]:
        """The values of `keys` when all are there; none when `until` says so first."""
        pause_s = FIRST_POLL_S
        try:
            while not self._store.check(list(keys)):
                if until():
                    return []
                self._check()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_POLL_S)
            return [self._store.get(key) for key in keys]
        except DistError as error:
            raise CollectiveError(f"rank 0 of the replica is gone: {error}") from error
