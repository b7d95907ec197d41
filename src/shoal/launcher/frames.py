"""Messages on the wire: four bytes of length, most significant first, and a body in MessagePack.

A body is decoded into one of the expected structs, whose fields have bounds; anything else ends the connection. Sizes
are checked before memory is taken.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.errors import EnvironmentFault

if TYPE_CHECKING:
    import asyncio


_HEAD_BYTES = 4


class FrameError(EnvironmentFault):
    """What came over the wire is no message of this protocol."""


def encode(message: msgspec.Struct) -> bytes:
    """`message` as a frame."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_HEAD_BYTES, "big") + body


def decode(body: bytes, decoder: Any) -> Any:
    """The message in `body`. Raises `FrameError`."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(
            f"a frame holds no message of this version ({error}): run one version of Shoal everywhere"
        ) from None


async def read(reader: asyncio.StreamReader, *, most_bytes: int, begin_s: float | None, rest_s: float | None) -> bytes:
    """The next body. `begin_s`: how long the peer may be silent; `rest_s`: how long the frame may take from there
    (None: as long as it likes).

    Raises `FrameError` for one that is too long, `TimeoutError`, and `asyncio.IncompleteReadError` at the end.
    """
    import asyncio  # 50 ms, which only a service takes

    if begin_s is None and rest_s is None:  # a store reads thousands of requests a second so
        return await reader.readexactly(_checked(await reader.readexactly(_HEAD_BYTES), most_bytes))
    async with asyncio.timeout(begin_s):
        first = await reader.readexactly(1)
    async with asyncio.timeout(rest_s):
        length = _checked(first + await reader.readexactly(_HEAD_BYTES - 1), most_bytes)
        return await reader.readexactly(length)


def receive(connection: socket.socket, *, most_bytes: int, patient: bool = False) -> bytes:
    """The next body, on a blocking socket; `patient`: a peer that is silent for longer than its timeout is waited for.

    Raises `FrameError` and `OSError`.
    """
    head = _exactly(connection, _HEAD_BYTES, patient=patient)
    return _exactly(connection, _checked(head, most_bytes), patient=patient)


def _checked(head: bytes, most_bytes: int) -> int:
    length = int.from_bytes(head, "big")
    if not 0 < length <= most_bytes:
        raise FrameError(
            f"a frame says that it has {length} bytes: it may have 1 to {most_bytes}; the peer speaks another protocol"
        )
    return length


def _exactly(connection: socket.socket, count: int, *, patient: bool) -> bytes:
    pieces = []
    while count:
        try:
            piece = connection.recv(min(count, 1 << 16))
        except TimeoutError:
            if patient:
                continue
            raise
        if not piece:
            raise ConnectionResetError("the other end closed the connection")
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)
