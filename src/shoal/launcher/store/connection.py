"""`StoreConnection`: a rank's connection to the job's store; it imports no torch.

All threads share one connection; requests have numbers. So a wait in one thread holds up no other, and each wait is one
for a queue, which has a limit of time and hears signals.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import queue
import random
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from shoal.errors import CollectiveError, EnvironmentFault, GenerationOver
from shoal.launcher import frames, handshake, sockets
from shoal.launcher.environment import LOOPBACK, Place
from shoal.launcher.store.messages import (
    MOST_FRAME_BYTES,
    MOST_VALUE_BYTES,
    REPLIES,
    SERVICE,
    Operation,
    Reply,
    Request,
)

if TYPE_CHECKING:
    from shoal.launcher.store.server import StoreServer


# A wait that says what it waits for, and ends.
#
# Calls into a store or a socket library may block without a bound of their own (a rank that is stopped, a cable that is
# cut). So the work is done by a thread, and the caller waits for the thread: it says on standard error what is missing,
# first after 5 s, then after twice as long each time, and gives up when its time is over.


SAY_AFTER_S = 5.0
T = TypeVar("T")


def bounded(
    work: Callable[[threading.Event], T], *, rank: int, timeout_s: float, missing: Callable[[], str], repair: str
) -> T:
    """What `work` returns; it should end soon once its argument is set, which happens when nobody waits any more.

    `missing` says what is waited for now, as "rank 1 of 2". Raises what `work` raises, or `CollectiveError` once
    `timeout_s` is over.
    """
    over = threading.Event()
    done: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()

    def run() -> None:
        future: Future[T] = Future()
        try:
            future.set_result(work(over))
        except Exception as error:
            future.set_exception(error)
        done.put(future)

    threading.Thread(target=run, name="shoal-wait", daemon=True).start()
    begin_s, next_word_s = time.monotonic(), SAY_AFTER_S
    try:
        while True:
            until_s = begin_s + min(next_word_s, timeout_s)
            try:
                return done.get(timeout=max(0.0, until_s - time.monotonic())).result()
            except queue.Empty:
                if next_word_s >= timeout_s:
                    raise CollectiveError(
                        f"rank {rank} waited {timeout_s:g} s in vain for {missing()}: {repair}"
                    ) from None
            with contextlib.suppress(OSError):  # the terminal may be gone
                waited = f"{next_word_s:g} of at most {timeout_s:g} s"
                print(f"rank {rank} waits for {missing()}, {waited}", file=sys.stderr, flush=True)
            next_word_s *= 2
    finally:
        over.set()


ANSWER_S = 30.0
"""How long a reply may take beyond the time that the store was asked to wait for keys."""
SEND_S = 60.0
HANDSHAKE_S = 10.0
SEE = "see whether it runs and what its log says"
START_KEY = "run.start_timeout_s (start_timeout_s of wire.init) sets how long a start waits"
MANY_RANKS = 64
"""From so many ranks on, the store waits in their place, instead of being polled."""
POLLS_A_SECOND = 2048.0
"""Of all ranks together, who look whether one has failed."""
_RETRY_S = 0.5
_NAMED = 8
_WHICH_TOKEN = (
    "all processes of a job need the same one; where hosts share no folder, copy the file, and name it by "
    "SHOAL_JOB_TOKEN on each"
)


class StoreLate(Exception):
    """Nobody has set the keys in time."""


class StoreLost(Exception):
    """The store is gone, or does not answer."""


class StoreConnection:
    """Over a `connection` whose handshake is done. `server`: the store itself, where this process hosts it, which ends
    with `close`.
    """

    def __init__(self, connection: socket.socket, *, server: StoreServer | None = None) -> None:
        connection.settimeout(SEND_S)
        self._connection, self._server = connection, server
        self._pending: dict[int, queue.SimpleQueue[Reply | None]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._lost = ""
        self._given_up: str | None = None
        self.kept_alive: object = None  # as long as the connection is read
        threading.Thread(target=self._read, name="shoal-store-reader", daemon=True).start()

    def ask(
        self,
        operation: Operation,
        keys: Sequence[str] = (),
        values: Sequence[bytes | str] = (),
        *,
        amount: int = 0,
        timeout_s: float = 0.0,
    ) -> Reply:
        """What the store answers. Raises `StoreLate` for keys that nobody sets within `timeout_s`, `StoreLost`, and
        `GenerationOver` after `give_up`.
        """
        whole = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
        if largest := max((len(value) for value in whole if len(value) > MOST_VALUE_BYTES), default=0):
            raise ValueError(f"a value for the store has {largest} bytes: it may have {MOST_VALUE_BYTES}; divide it")
        number, replies = next(self._numbers), queue.SimpleQueue[Reply | None]()
        self._pending[number] = replies
        try:
            self._send(Request(number, operation, list(keys), whole, amount, timeout_s))
            reply = replies.get(timeout=timeout_s + ANSWER_S)
        except queue.Empty:
            raise StoreLost(f"the store did not answer: {operation} of {_listed(keys)}") from None
        finally:
            del self._pending[number]
        if reply is None:
            raise self._gone(self._lost)
        if operation in ("get", "wait") and not reply.found:
            raise StoreLate(f"nobody has set {_listed(keys)} within {timeout_s:g} s")
        return reply

    def get_all(self, keys: Sequence[str], *, timeout_s: float) -> list[bytes]:
        """The values of `keys`, once they are there; in as many replies as it takes. Raises as `ask`."""
        values: list[bytes] = []
        while len(values) < len(keys):
            values += self.ask("get", keys[len(values) :], timeout_s=timeout_s).values
        return values

    def close(self) -> None:
        """Ends the connection, and the store where it is hosted here. Nobody may use a group that still needs it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._server is not None:
            self._server.close()

    def give_up(self, sentence: str) -> None:
        """Ends the connection because nobody should wait for those who meet here: calls that wait in it, and those to
        come, raise `GenerationOver(sentence)`. From any thread.
        """
        self._given_up = self._given_up or sentence
        self.close()

    def _send(self, request: Request) -> None:
        with self._lock:
            if self._lost:
                raise self._gone(self._lost)
            try:
                self._connection.sendall(frames.encode(request))
            except OSError as error:  # perhaps in the middle of a frame: nothing can follow
                self._end(str(error))
                raise self._gone(str(error)) from None

    def _gone(self, reason: str) -> StoreLost | GenerationOver:
        if self._given_up is not None:
            return GenerationOver(self._given_up)
        return StoreLost(f"the connection to the store was lost ({reason})")

    def _read(self) -> None:
        reason = "it was closed"
        try:
            while True:
                reply = frames.decode(
                    frames.receive(self._connection, most_bytes=MOST_FRAME_BYTES, patient=True), REPLIES
                )
                if (replies := self._pending.get(reply.number)) is not None:  # else nobody waits for it any more
                    replies.put(reply)
        except (OSError, frames.FrameError) as error:
            reason = str(error)
        with self._lock:
            self._end(reason)
        self._connection.close()
        self.kept_alive = None

    def _end(self, reason: str) -> None:
        """All calls that wait fail, and those to come. Holds the lock."""
        self._lost = self._lost or reason
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        for replies in list(self._pending.values()):
            replies.put(None)


def reach_store(
    place: Place,
    address: str,
    port: int,
    *,
    token: bytes,
    timeout_s: float,
    listen_fd: int | None = None,
    look: Callable[[], None] = lambda: None,
) -> StoreConnection:
    """A connection to the store at that address; `listen_fd`: host it, on that listening socket.

    `look` is called from time to time: it raises where there is nothing to wait for any more. Raises `TokenRefused`
    where the store knows another token, and `CollectiveError` where it does not answer within `timeout_s`, or is no
    store.
    """
    server = None if listen_fd is None else _host(listen_fd, token)
    state = ["not tried yet"]

    def work(over: threading.Event) -> StoreConnection:
        while True:
            try:
                with contextlib.ExitStack() as stack:
                    connection = stack.enter_context(sockets.connected(address, port))
                    state[:] = ["connected, but it does not answer"]
                    while not sockets.readable(connection, _RETRY_S):
                        look()
                        if over.is_set():
                            raise TimeoutError(state[0])  # nobody hears it any more
                    _shake_hands(connection, token)
                    stack.pop_all()
                    return StoreConnection(connection, server=server)
            except OSError as error:
                state[:] = [sockets.reason_of(error)]
            look()
            if over.wait(_RETRY_S * (0.5 + random.random())):
                raise TimeoutError(state[0])

    def missing() -> str:
        return f"rank 0 at {address}:{port} ({state[0]})"

    repair = f"{SEE}, and whether MASTER_ADDR, MASTER_PORT and the firewall are right; {START_KEY}"
    try:
        return bounded(work, rank=place.rank, timeout_s=timeout_s, missing=missing, repair=repair)
    except frames.FrameError as error:
        raise CollectiveError(
            f"what listens at {address}:{port} is not the store of rank 0: set MASTER_ADDR and MASTER_PORT to those of "
            "rank 0 on every rank"
        ) from error


def _host(listen_fd: int, token: bytes) -> StoreServer:
    from shoal.launcher.store.server import StoreServer  # rank 0 alone pays for asyncio

    return StoreServer(socket.socket(fileno=listen_fd), token=token)


def _shake_hands(connection: socket.socket, token: bytes) -> None:
    """Both ends prove that they know the token, once the store's first frame is there; takes at most `HANDSHAKE_S`.

    Raises `TokenRefused`, `FrameError` where no store answers, and `OSError`.
    """
    connection.settimeout(HANDSHAKE_S)
    handshake.shake_hands(connection, handshake.key_for(token, SERVICE), which=_WHICH_TOKEN)


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(keys[:_NAMED]) + (f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else "")


# Where ranks that mpiexec started meet: rank 0 takes a free port, and says over MPI where. It imports no torch.


TOKEN_BYTES = 32
_MPI_TEXT_BYTES = 512
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.1


class Met(NamedTuple):
    """Where the store is, and which token it asks for; rank 0 has a socket that listens there."""

    address: str
    port: int
    token: bytes
    listen_fd: int | None


def mpi_is_there() -> bool:
    """Whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def meet_over_mpi(place: Place, environ: Mapping[str, str], *, timeout_s: float) -> Met:
    """Rank 0 takes a free port, and says over MPI where it is, and which token it asks for."""
    address = environ.get("MASTER_ADDR") or (LOOPBACK if place.one_host else socket.gethostname())
    listener = sockets.listen_at(address, 0, one_host=place.one_host) if place.rank == 0 else None
    port = listener.getsockname()[1] if listener is not None else 0
    said = _broadcast(place, f"{secrets.token_hex(TOKEN_BYTES)} {port} {address}", timeout_s=timeout_s)
    token, found, address = said.split(" ", 2)
    return Met(address, int(found), token.encode(), listener.detach() if listener is not None else None)


def _broadcast(place: Place, text: str, *, timeout_s: float) -> str:
    """Rank 0's `text`, up to 512 bytes, on every rank; the others pass anything.

    Raises `EnvironmentFault` where there is no MPI library, or mpi4py and mpiexec are of different MPIs, and
    `CollectiveError` where the others have not called it within `timeout_s`.
    """
    try:
        mpi: Any = importlib.import_module("mpi4py.MPI")  # its import starts MPI
    except (ImportError, RuntimeError) as error:
        found = str(error).splitlines()[0]
        raise EnvironmentFault(
            f"mpi4py does not start ({found}): it needs an MPI library; load the cluster's, or pip install mpich"
        ) from error
    world = mpi.COMM_WORLD
    if (found := (world.Get_rank(), world.Get_size())) != (place.rank, place.world_size):
        raise EnvironmentFault(
            f"mpiexec says rank {place.rank} of {place.world_size}, mpi4py rank {found[0]} of {found[1]}: both have to "
            "be of one MPI; start them with the mpiexec of the MPI that mpi4py finds"
        )
    message = bytearray(text.encode().ljust(_MPI_TEXT_BYTES, b"\0"))
    request = world.Ibcast([message, mpi.BYTE], root=0)

    def work(over: threading.Event) -> None:
        pause_s = _FIRST_POLL_S
        while not request.Test() and not over.wait(pause_s):
            pause_s = min(2 * pause_s, _LAST_POLL_S)

    missing = "the other ranks" if place.rank == 0 else "rank 0"
    bounded(
        work,
        rank=place.rank,
        timeout_s=timeout_s,
        missing=lambda: f"{missing}, to meet over MPI",
        repair=f"{SEE}; {START_KEY}",
    )
    return message.rstrip(b"\0").decode()
