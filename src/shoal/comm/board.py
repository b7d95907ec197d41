"""`Board`: small messages between ranks through the run's store, beside its collectives. Every call ends in time.

Messages have keys, and so no order that could differ between ranks: groups that do not exist yet meet here, ranks whose
collective failed tell each other why, and a background thread (a checkpoint that is being written) exchanges messages
while the main thread's collectives run.

Note: bounded calls
-------------------
The timeout of a PyTorch store bounds how long the *server* waits for a key. The client waits for the server's answer
without a limit, and does not see Ctrl-C: where the network is cut, or the server's host has stopped, `set`, `get` and
`check` never return. So each call of a board runs in a thread of its own (50 us), and is given up after its time. The
thread stays behind, blocked, until the process ends.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistError, DistStoreError  # pyright: ignore[reportPrivateImportUsage]

from shoal.comm.packing import MANY, packed, unpacked
from shoal.errors import CollectiveError

# `AT_WORK`: what daemon threads do in there is done before the interpreter ends.
#
# When it ends, a daemon thread that comes back from code without the interpreter lock is unwound where it stands. In
# C++ (a future that is completed, a group that is dropped) that aborts the process: "terminate called without an active
# exception". So the end waits until threads are out of there, and keeps them out.


PATIENCE_S = 2.0
"""What the interpreter's end waits for all of them together: one may wait for a peer that does not come."""


class _Gate:
    """A context that many threads are in at a time, and none any more after `close`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside, self.closed = 0, False

    def __enter__(self) -> None:
        with self._changed:
            while self.closed:
                self._changed.wait()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """At the interpreter's end. Waits for those inside, and for so long at most."""
        with self._changed:
            self.closed = True
            self._changed.wait_for(lambda: self._inside == 0, PATIENCE_S)

    def reopen(self) -> None:
        """In a child that was forked: the threads are its parent's."""
        self.__init__()


AT_WORK = _Gate()
atexit.register(AT_WORK.close)
os.register_at_fork(after_in_child=AT_WORK.reopen)


PART_BYTES = 4 << 20
"""The store drops a client that sends more than 8 MiB at once (torch 2.13, libuv backend)."""
GRACE_S = 1.0
"""What a call may take beyond the time that the server was asked to wait."""
LOOK_S = 0.5
LEAST_S = 0.001
"""The store takes shorter times for none at all, and waits for ever."""
NAMED = 8
"""Missing ranks or keys that a message lists."""

T = TypeVar("T")


class Board:
    """What the ranks of a run, or of a group, tell each other. `timeout_s` bounds each call that has no other limit.

    A call that waits holds the store's connection: threads that wait use a board each (`clone`).
    Every method raises `CollectiveError` where the store does not answer in time.
    """

    def __init__(self, store: Store, *, timeout_s: float) -> None:
        self.store, self.timeout_s = store, timeout_s

    def under(self, prefix: str) -> Board:
        """The same board for keys below `prefix`."""
        return Board(PrefixStore(prefix, self.store), timeout_s=self.timeout_s)

    def clone(self) -> Board:
        """The same board over a connection of its own."""
        store = bounded(self.store.clone, timeout_s=self.timeout_s + GRACE_S)  # pyright: ignore[reportAttributeAccessIssue] missing in torch's stubs
        return Board(store, timeout_s=self.timeout_s)

    def publish(self, key: str, value: bytes | str) -> None:
        """Makes `value` readable under `key`, whole or not at all, for as long as the store lives."""
        content = value.encode() if isinstance(value, str) else value
        self._call(lambda: _write(self.store, key, content), self.timeout_s)

    def collect(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """The values of `keys`, in their order, once all are published.

        Raises `CollectiveError`, which names the keys that are missing after `timeout_s`.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        found = self.collect_some(keys, limit_s)
        if missing := [key for key in keys if key not in found]:
            raise CollectiveError(
                f"nothing was published under {_listed(missing)} ({len(missing)} of {len(keys)} keys) within "
                f"{limit_s:g} s: every rank has to; see the log of those ranks"
            )
        return [found[key] for key in keys]

    def collect_some(self, keys: Sequence[str], timeout_s: float) -> dict[str, bytes]:
        """The values of those `keys` that are published within `timeout_s`; returns early when all are."""
        return self._call(lambda: _read_some(self.store, keys, timeout_s), timeout_s)

    def published(self, key: str) -> bool:
        """Whether there is something under `key` now; never waits for it."""
        return self._call(lambda: self.store.check([key]), self.timeout_s)

    def forget(self, keys: Sequence[str]) -> None:
        """Removes what was published under `keys`; a key that is not there is no error."""
        self._call(lambda: _delete(self.store, keys), self.timeout_s)

    def all_gather(self, key: str, text: str, *, rank: int, ranks: Sequence[int]) -> tuple[str, ...]:
        """What each rank of a group passes as `text`, in the group's order. Blocks until all have called it, once.

        `rank` is this rank's place in the group, and `ranks` are the names of its members in messages.
        Raises `CollectiveError`, which names the ranks that are missing after the board's `timeout_s`.
        """
        keys = [f"{key}/{place}" for place in range(len(ranks))]

        def exchange() -> dict[str, bytes]:
            _write(self.store, keys[rank], text.encode())
            if len(keys) >= MANY and rank != 0:
                return self._of_all(key, keys)
            found = _read_some(self.store, keys, self.timeout_s)
            if len(keys) >= MANY and len(found) == len(keys):
                _write(self.store, f"{key}/all", packed(found[place] for place in keys))
            return found

        found = self._call(exchange, self.timeout_s)
        if missing := [f"rank {name}" for name, place in zip(ranks, keys, strict=True) if place not in found]:
            raise CollectiveError(
                f"rank {ranks[rank]} waited {self.timeout_s:g} s for {_listed(missing)} to open a group of "
                f"{len(ranks)} ranks: they are dead, stopped or slow to start; see their logs, or raise "
                "wire.timeout_s"
            )
        return tuple(found[place].decode() for place in keys)

    def _of_all(self, key: str, keys: Sequence[str]) -> dict[str, bytes]:
        """What rank 0 has read and put together; raises `CollectiveError` where that does not come."""
        whole = _read_some(self.store, [f"{key}/all"], self.timeout_s)
        if not whole:
            raise CollectiveError(
                f"waited {self.timeout_s:g} s for rank 0 to put together what {len(keys)} ranks say ({key}): its log "
                "names the ranks that are missing"
            )
        return dict(zip(keys, unpacked(whole[f"{key}/all"]), strict=True))

    def announce(self, key: str, find: Callable[[], str], *, rank: int, timeout_s: float | None = None) -> str:
        """What `find()` returns on rank 0, on every rank. `find` runs on rank 0 only; the others wait for it."""
        if rank == 0:
            self.publish(key, text := find())
            return text
        return self.collect([key], timeout_s)[0].decode()

    def _call(self, call: Callable[[], T], limit_s: float) -> T:
        return bounded(call, timeout_s=limit_s + GRACE_S)


def bounded(call: Callable[[], T], *, timeout_s: float, look: Callable[[], object] | None = None) -> T:
    """`call()`, which talks to the store. Raises what it raises, and `CollectiveError` where it takes too long.

    `look` is called every `LOOK_S` meanwhile: what it raises ends the wait, too. The call goes on behind the caller's
    back then (see the Note above).
    """
    answers: SimpleQueue[tuple[T, None] | tuple[None, Exception]] = SimpleQueue()
    end_s = time.monotonic() + timeout_s

    def run() -> None:
        with AT_WORK:
            try:
                answers.put((call(), None))
            except Exception as error:  # for the one who waits
                answers.put((None, error))

    threading.Thread(target=run, name="shoal-board", daemon=True).start()
    while True:
        left_s = max(0.0, end_s - time.monotonic())
        try:
            value, error = answers.get(timeout=left_s if look is None else min(left_s, LOOK_S))
            break
        except Empty:
            if look is None or left_s <= LOOK_S:
                raise CollectiveError(
                    f"the run's store did not answer within {timeout_s:g} s: rank 0, or the launcher that hosts it, is "
                    "dead or stopped, or the network to it is cut"
                ) from None
        look()
    if isinstance(error, DistError) and not isinstance(error, DistStoreError):  # that is a wait whose time is over
        raise CollectiveError(
            f"the run's store is gone ({str(error).splitlines()[0]}): rank 0, or the launcher that hosts it, has "
            "ended; see its log"
        ) from None
    if error is not None:
        raise error
    return value  # pyright: ignore[reportReturnType] None only where T is


# A value lies under its key: a line that says in how many parts, then the first of them. The other parts are written
# before that, so that a key that is there is whole.


def _write(store: Store, key: str, value: bytes) -> None:
    parts = max(1, -(-len(value) // PART_BYTES))
    for part in range(1, parts):
        store.set(f"{key}/part-{part}", value[part * PART_BYTES : (part + 1) * PART_BYTES])  # pyright: ignore[reportArgumentType] bytes are legal
    store.set(key, b"%d\n" % parts + value[:PART_BYTES])  # pyright: ignore[reportArgumentType]


def _whole(store: Store, key: str, value: bytes) -> bytes:
    """What was published under `key`, which holds `value`."""
    count, _, first = value.partition(b"\n")
    return b"".join((first, *(store.get(f"{key}/part-{part}") for part in range(1, int(count)))))


def _read_some(store: Store, keys: Sequence[str], timeout_s: float) -> dict[str, bytes]:
    try:
        store.wait(list(keys), timedelta(seconds=max(timeout_s, LEAST_S)))
        there = list(keys)
    except DistStoreError:  # time is over
        there = [key for key in keys if store.check([key])]
    firsts = store.multi_get(there) if there else []  # pyright: ignore[reportAttributeAccessIssue] missing in torch's stubs
    return {key: _whole(store, key, first) for key, first in zip(there, firsts, strict=True)}


def _delete(store: Store, keys: Sequence[str]) -> None:
    for key in keys:
        if store.check([key]):
            count = int(store.get(key).partition(b"\n")[0])
            for name in (key, *(f"{key}/part-{part}" for part in range(1, count))):
                store.delete_key(name)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
