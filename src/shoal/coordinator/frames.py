"""Messages on the wire: four bytes of length, most significant first, and a body in MessagePack.

A body is decoded into one of the expected structs, whose fields have bounds; anything else ends the connection. Sizes
are checked before memory is taken.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec

from shoal.errors import EnvironmentFault
from shoal.resilience.events import Answer, Event

MOST_REQUEST_BYTES = 16 << 10
MOST_ANSWER_BYTES = 8 << 20
_HEAD_BYTES = 4


class FrameError(EnvironmentFault):
    """What came over the wire is no message of this protocol."""


EVENTS = msgspec.msgpack.Decoder(Event)
ANSWERS = msgspec.msgpack.Decoder(Answer)


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


async def read(reader: asyncio.StreamReader, *, most_bytes: int, begin_s: float, rest_s: float) -> bytes:
    """The next body. `begin_s`: how long the peer may be silent; `rest_s`: how long the frame may take from there.

    Raises `FrameError` for one that is too long, `TimeoutError`, and `asyncio.IncompleteReadError` at the end.
    """
    async with asyncio.timeout(begin_s):
        first = await reader.readexactly(1)
    async with asyncio.timeout(rest_s):
        length = _checked(first + await reader.readexactly(_HEAD_BYTES - 1), most_bytes)
        return await reader.readexactly(length)


def receive(connection: socket.socket, *, most_bytes: int) -> bytes:
    """The next body, on a blocking socket. Raises `FrameError` and `OSError`."""
    return _exactly(connection, _checked(_exactly(connection, _HEAD_BYTES), most_bytes))


def _checked(head: bytes, most_bytes: int) -> int:
    length = int.from_bytes(head, "big")
    if not 0 < length <= most_bytes:
        raise FrameError(
            f"a frame says that it has {length} bytes: it may have 1 to {most_bytes}; the peer speaks another protocol"
        )
    return length


def _exactly(connection: socket.socket, count: int) -> bytes:
    pieces = []
    while count:
        piece = connection.recv(min(count, 1 << 16))
        if not piece:
            raise ConnectionResetError("the coordinator closed the connection")
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)
