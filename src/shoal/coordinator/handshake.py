"""Both ends prove that they know the job's token, which never travels.

    coordinator -> peer    a random challenge
    peer -> coordinator    a random challenge of its own, HMAC-SHA256(token, "peer", both challenges)
    coordinator -> peer    HMAC-SHA256(token, "coordinator", both challenges)

Challenges are new for each connection, so a recorded proof is worth nothing in another (RFC 2104; the exchange is that
of ISO/IEC 9798-4, three passes). It says who connects, not what follows: beyond loopback the connection is TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Annotated

import msgspec

from shoal.errors import EnvironmentFault
from shoal.files import read_file

CHALLENGE_BYTES = 32
FEWEST_TOKEN_BYTES = 32
PROTOCOL = 1
MOST_HANDSHAKE_BYTES = 512
MOST_REFUSALS = 3
"""In a row, after which a token counts as refused: a coordinator that dies, or has too many peers, closes one, too."""
_Challenge = Annotated[bytes, msgspec.Meta(min_length=CHALLENGE_BYTES, max_length=CHALLENGE_BYTES)]
_Mac = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The coordinator's first frame."""

    challenge: _Challenge
    protocol: int = PROTOCOL


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The peer's answer."""

    challenge: _Challenge
    mac: _Mac
    protocol: int = PROTOCOL


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The coordinator's own proof."""

    mac: _Mac


HELLOS = msgspec.msgpack.Decoder(Hello)
PROOFS = msgspec.msgpack.Decoder(Proof)
WELCOMES = msgspec.msgpack.Decoder(Welcome)


class TokenRefused(EnvironmentFault):
    """The other end does not know the job's token, or speaks another version."""


def hello() -> Hello:
    """A new challenge."""
    return Hello(secrets.token_bytes(CHALLENGE_BYTES))


def prove(token: bytes, greeting: Hello) -> Proof:
    """The peer's answer to `greeting`. Raises `TokenRefused` where the coordinator speaks another version."""
    if greeting.protocol != PROTOCOL:
        raise TokenRefused(
            f"the coordinator speaks version {greeting.protocol} of the protocol, this process {PROTOCOL}: "
            "run one version of Shoal everywhere"
        )
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    return Proof(challenge, _mac(token, b"peer", greeting.challenge, challenge))


def welcome(token: bytes, greeting: Hello, proof: Proof) -> Welcome | None:
    """The coordinator's answer; None to a peer that has not proved anything. Takes the same time for any proof."""
    expected = _mac(token, b"peer", greeting.challenge, proof.challenge)
    if not hmac.compare_digest(expected, proof.mac) or proof.protocol != PROTOCOL:
        return None
    return Welcome(_mac(token, b"coordinator", greeting.challenge, proof.challenge))


def check_welcome(token: bytes, greeting: Hello, proof: Proof, answer: Welcome) -> None:
    """Raises `TokenRefused` unless the coordinator knows the token, too."""
    if not hmac.compare_digest(_mac(token, b"coordinator", greeting.challenge, proof.challenge), answer.mac):
        raise TokenRefused(
            "what listens at the coordinator's address does not know this job's token: check the address"
        )


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
    """The token in `path`; a new one, written for its owner alone, where there is none. Raises `EnvironmentFault`."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise EnvironmentFault(
            f"{path} cannot be written ({error.strerror}): give another path for the token"
        ) from error
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{secrets.token_hex(32)}\n")
    return read_token(path)


def _mac(token: bytes, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(token, side + b"\0" + first + second, hashlib.sha256).digest()
