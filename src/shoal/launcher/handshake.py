"""Both ends of a connection prove that they know the job's token, which never travels: a service (the coordinator, the
store of the ranks) and its peers.

    service -> peer    a random challenge
    peer -> service    a random challenge of its own, HMAC-SHA256(token, "peer", both challenges)
    service -> peer    HMAC-SHA256(token, "coordinator", both challenges), or that it refuses the peer

`admit` is the service's half (`admit_one` on a blocking socket), `shake_hands` the peer's.

Challenges are new for each connection, so a recorded proof is worth nothing in another (RFC 2104; the exchange is that
of ISO/IEC 9798-4, three passes). It says who connects, not what follows: that needs TLS where the network is not
trusted. Each service has a key of its own (`key_for`), so that a proof for one is worth nothing at another.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from shoal.errors import EnvironmentFault
from shoal.files import read_file
from shoal.launcher import frames

if TYPE_CHECKING:
    import asyncio

CHALLENGE_BYTES = 32
FEWEST_TOKEN_BYTES = 32
ANSWER_S = 10.0
"""How long a peer of `admit_one` may take for each of its frames."""
PROTOCOL = 1
MOST_HANDSHAKE_BYTES = 512
_Challenge = Annotated[bytes, msgspec.Meta(min_length=CHALLENGE_BYTES, max_length=CHALLENGE_BYTES)]
_Mac = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The service's first frame."""

    challenge: _Challenge
    protocol: int = PROTOCOL


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The peer's answer."""

    challenge: _Challenge
    mac: _Mac
    protocol: int = PROTOCOL


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="welcome"):
    """The service's own proof."""

    mac: _Mac


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refusal"):
    """What a service says to a peer that does not know the token, so that an honest one need not try again."""


HELLOS = msgspec.msgpack.Decoder(Hello)
PROOFS = msgspec.msgpack.Decoder(Proof)
WELCOMES = msgspec.msgpack.Decoder(Welcome | Refusal)


class TokenRefused(EnvironmentFault):
    """The other end does not know the job's token, or speaks another version."""


def key_for(token: bytes, service: bytes) -> bytes:
    """The key of one service: another for each, of which none tells the token (HMAC-SHA256 of its name)."""
    return hmac.new(token, service, hashlib.sha256).digest()


def hello() -> Hello:
    """A new challenge."""
    return Hello(secrets.token_bytes(CHALLENGE_BYTES))


def prove(token: bytes, greeting: Hello) -> Proof:
    """The peer's answer to `greeting`. Raises `TokenRefused` where the service speaks another version."""
    if greeting.protocol != PROTOCOL:
        raise TokenRefused(
            f"the other end speaks version {greeting.protocol} of the protocol, this process {PROTOCOL}: "
            "run one version of Shoal everywhere"
        )
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    return Proof(challenge, _mac(token, b"peer", greeting.challenge, challenge))


def welcome(token: bytes, greeting: Hello, proof: Proof) -> Welcome | None:
    """The service's answer; None to a peer that has not proved anything. Takes the same time for any proof."""
    expected = _mac(token, b"peer", greeting.challenge, proof.challenge)
    if not hmac.compare_digest(expected, proof.mac) or proof.protocol != PROTOCOL:
        return None
    return Welcome(_mac(token, b"coordinator", greeting.challenge, proof.challenge))


def check_welcome(token: bytes, greeting: Hello, proof: Proof, answer: Welcome | Refusal, *, which: str = "") -> None:
    """Raises `TokenRefused` unless the service knows the token, too, and says that this process does."""
    if isinstance(answer, Refusal):
        raise TokenRefused(f"it refuses this process's token: {which or 'all processes of a job need the same one'}")
    if not hmac.compare_digest(_mac(token, b"coordinator", greeting.challenge, proof.challenge), answer.mac):
        raise TokenRefused(
            "what listens at this address does not know this job's token: check the address, and that all hosts have "
            "one token"
        )


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, *, limit_s: float) -> bool:
    """The service's half: whether the peer knows the token. One that does not is told so, and has to be closed.

    Raises `TimeoutError` where the whole takes longer than `limit_s`, `FrameError`, `OSError`, and
    `asyncio.IncompleteReadError` where the peer hangs up.
    """
    import asyncio  # as in `frames.read`

    async with asyncio.timeout(limit_s):
        greeting = hello()
        writer.write(frames.encode(greeting))
        await writer.drain()
        body = await frames.read(reader, most_bytes=MOST_HANDSHAKE_BYTES, begin_s=limit_s, rest_s=limit_s)
        answer = welcome(token, greeting, frames.decode(body, PROOFS))
        writer.write(frames.encode(Refusal() if answer is None else answer))
        await writer.drain()
    return answer is not None


class Strangers:
    """Connections to a service that have yet to show that they know its `token`. Of more than `most` at once the oldest
    is cancelled.
    """

    def __init__(self, token: bytes, *, most: int, limit_s: float) -> None:
        self._token, self._most, self._limit_s = token, most, limit_s
        self.tasks: dict[asyncio.Task[object], None] = {}

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """As `admit`, of the current task's connection."""
        import asyncio

        task = asyncio.current_task()
        assert task is not None
        self.tasks[task] = None
        if len(self.tasks) > self._most:
            oldest = next(iter(self.tasks))  # counts no more, although it has yet to end
            del self.tasks[oldest]
            oldest.cancel()
        try:
            return await admit(reader, writer, self._token, limit_s=self._limit_s)
        finally:
            self.tasks.pop(task, None)


def admit_one(connection: socket.socket, token: bytes) -> bool:
    """`admit` on a blocking socket whose timeout bounds each frame. Raises `FrameError` and `OSError`."""
    greeting = hello()
    connection.sendall(frames.encode(greeting))
    proof = frames.decode(frames.receive(connection, most_bytes=MOST_HANDSHAKE_BYTES), PROOFS)
    answer = welcome(token, greeting, proof)
    connection.sendall(frames.encode(Refusal() if answer is None else answer))
    return answer is not None


def shake_hands(connection: socket.socket, token: bytes, *, which: str) -> None:
    """The peer's half, on a blocking socket whose timeout bounds each frame. `which` token to use, for who has another.

    Raises `TokenRefused`, `FrameError` where no service of this version answers, and `OSError`.
    """
    greeting = frames.decode(frames.receive(connection, most_bytes=MOST_HANDSHAKE_BYTES), HELLOS)
    proof = prove(token, greeting)
    connection.sendall(frames.encode(proof))
    answer = frames.decode(frames.receive(connection, most_bytes=MOST_HANDSHAKE_BYTES), WELCOMES)
    check_welcome(token, greeting, proof, answer, which=which)


def read_token(path: Path) -> bytes:
    """The token in a file that only its owner can read. Raises `EnvironmentFault`."""
    repair = "start `shoal coordinator serve`, which writes it, and copy it to the hosts of the job"
    token = read_file(path, limit_bytes=4096, error=EnvironmentFault, repair=repair).strip()
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise EnvironmentFault(
            f"{path} can be read by others than its owner: the token lets everyone who has it join and stop the job; "
            f"chmod 600 {path}"
        )
    if len(token) < FEWEST_TOKEN_BYTES:
        raise EnvironmentFault(
            f"the token in {path} has {len(token)} bytes: it must have {FEWEST_TOKEN_BYTES} or more; "
            "delete the file, and the coordinator writes a new one"
        )
    return token


def make_token(path: Path) -> bytes:
    """The token in `path`; a new one, written for its owner alone, where there is none. Raises `EnvironmentFault`.

    Processes that call this at the same time get the same token: it appears whole, and only once.
    """
    if os.path.exists(path):
        return read_token(path)
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", encoding="ascii") as file:
            file.write(f"{secrets.token_hex(32)}\n")
            file.flush()
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)
    except OSError as error:
        raise EnvironmentFault(
            f"{path} cannot be written ({error.strerror}): give another path for the token"
        ) from error
    return read_token(path)


def _mac(token: bytes, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(token, side + b"\0" + first + second, hashlib.sha256).digest()
