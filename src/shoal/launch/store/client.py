"""`AuthenticatedStore`: a rank's connection to the job's store, as PyTorch's groups and Shoal's own code use one.

Process groups in C++ call a `torch.distributed.Store` that is written in Python through pybind11. Two things follow:

- C++ holds no reference to the Python half. The thread that reads the connection does, until it is closed or lost.
- All threads share one connection; requests have numbers. So a wait in one thread holds up no other, `clone` is the
  same object, and each wait is one for a queue, which has a limit of time and hears signals.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, Store  # pyright: ignore[reportPrivateImportUsage]

from shoal.errors import GenerationOver
from shoal.launch import frames, handshake
from shoal.launch.store.messages import MOST_FRAME_BYTES, MOST_VALUE_BYTES, REPLIES, Operation, Reply, Request
from shoal.launch.store.server import SERVICE, StoreServer

ANSWER_S = 30.0
"""How long a reply may take beyond the time that the store was asked to wait for keys."""
SEND_S = 60.0
HANDSHAKE_S = 10.0
_NAMED = 8
_WHICH_TOKEN = (
    "all processes of a job need the same one; where hosts share no folder, copy the file, and name it by "
    "SHOAL_JOB_TOKEN on each"
)

# pyright: reportIncompatibleMethodOverride=false
# The stubs of Store list overloads that differ from what C++ calls.


def shake_hands(connection: socket.socket, token: bytes) -> None:
    """Both ends prove that they know the token, once the store's first frame is there; takes at most `HANDSHAKE_S`.

    Raises `TokenRefused`, `FrameError` where no store answers, and `OSError`.
    """
    connection.settimeout(HANDSHAKE_S)
    handshake.shake_hands(connection, handshake.key_for(token, SERVICE), which=_WHICH_TOKEN)


class AuthenticatedStore(Store):
    """Over a `connection` whose handshake is done. `server`: the store itself, where this process hosts it, which ends
    with `close`.

    As PyTorch's stores, all methods raise `DistStoreError` where keys do not come within the timeout, and
    `DistNetworkError` where the store is gone or does not answer.
    """

    def __init__(self, connection: socket.socket, *, timeout_s: float, server: StoreServer | None = None) -> None:
        super().__init__()
        connection.settimeout(SEND_S)
        self._connection, self._server = connection, server
        self._pending: dict[int, queue.SimpleQueue[Reply | None]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._lost = ""
        self._given_up: str | None = None
        self.set_timeout(timedelta(seconds=timeout_s))
        threading.Thread(target=self._read, name="shoal-store-reader", daemon=True).start()

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

    def clone(self) -> AuthenticatedStore:
        """This store: its connection serves any number of threads."""
        return self

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", [key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values: list[bytes] = []
        while len(values) < len(keys):
            values += self._ask("get", keys[len(values) :], timeout_s=self._timeout_s).values
        return values

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, timeout_s=self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask("check", keys).found

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", [key], amount=amount).amount

    def append(self, key: str, value: bytes | str) -> None:
        self._ask("append", [key], [value])

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._ask("compare_set", [key], [expected, desired]).values[0]

    def delete_key(self, key: str) -> bool:
        return self._ask("delete_key", [key]).found

    def num_keys(self) -> int:
        return self._ask("num_keys").amount

    def list_keys(self) -> list[str]:
        return [key.decode() for key in self._ask("list_keys").values]

    def has_extended_api(self) -> bool:
        return True

    # By these names C++ calls them.
    deleteKey, getNumKeys = delete_key, num_keys

    @property
    def _timeout_s(self) -> float:
        return self.timeout.total_seconds()  # pyright: ignore[reportAttributeAccessIssue] missing in torch's stubs

    def _ask(
        self,
        operation: Operation,
        keys: Sequence[str] = (),
        values: Sequence[bytes | str] = (),
        *,
        amount: int = 0,
        timeout_s: float = 0.0,
    ) -> Reply:
        whole = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
        if largest := max((len(value) for value in whole if len(value) > MOST_VALUE_BYTES), default=0):
            raise ValueError(f"a value for the store has {largest} bytes: it may have {MOST_VALUE_BYTES}; divide it")
        number, replies = next(self._numbers), queue.SimpleQueue[Reply | None]()
        self._pending[number] = replies
        try:
            self._send(Request(number, operation, list(keys), whole, amount, timeout_s))
            reply = replies.get(timeout=timeout_s + ANSWER_S)
        except queue.Empty:
            raise DistNetworkError(f"the store did not answer: {operation} of {_listed(keys)}") from None
        finally:
            del self._pending[number]
        if reply is None:
            raise self._gone(self._lost)
        if operation in ("get", "wait") and not reply.found:
            raise DistStoreError(f"nobody has set {_listed(keys)} within {timeout_s:g} s")
        return reply

    def _send(self, request: Request) -> None:
        with self._lock:
            if self._lost:
                raise self._gone(self._lost)
            try:
                self._connection.sendall(frames.encode(request))
            except OSError as error:  # perhaps in the middle of a frame: nothing can follow
                self._end(str(error))
                raise self._gone(str(error)) from None

    def _gone(self, reason: str) -> DistNetworkError | GenerationOver:
        if self._given_up is not None:
            return GenerationOver(self._given_up)
        return DistNetworkError(f"the connection to the store was lost ({reason})")

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

    def _end(self, reason: str) -> None:
        """All calls that wait fail, and those to come. Holds the lock."""
        self._lost = self._lost or reason
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        for replies in list(self._pending.values()):
            replies.put(None)


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(keys[:_NAMED]) + (f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else "")
