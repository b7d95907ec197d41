"""Keys, shares of secrets, and masks.

**Keys**: X25519 agreement (RFC 7748), HKDF-SHA256 (RFC 5869) for a key of each purpose, ChaCha20-Poly1305 (RFC 8439).
Every key and every sealed message is bound to its session, to its two ends and to what it is for, so that nothing that
was recorded in one round is worth anything in another.

**Shamir's secret sharing** over the field of p = 2^256 + 297, the smallest prime in which 32 bytes fit:

    f(z) = secret + a_1 z + ... + a_(t-1) z^(t-1)  mod p,   share i = f(i),   secret = f(0)

Any t shares give the secret by Lagrange's formula; t - 1 say nothing (Shamir, Communications of the ACM 22, 1979).

**Masks**: the key stream of AES-128 in counter mode, as numbers modulo 2^32 or 2^64. The stream is a pseudo-random
generator as ChaCha20's is, and with the instructions that processors have for AES several times as fast; it is most of
what secure aggregation costs. Its key is as hard to find as those of X25519 that it is agreed by.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from shoal.errors import MissingExtra

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise MissingExtra("cryptography", extra="federated", purpose="secure aggregation") from error

try:
    from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
except ImportError as error:
    raise MissingExtra("cryptography", extra="federated", purpose="secure aggregation") from error


KEY_BYTES = 32
_NONCE = bytes(12)
"""Every key of a pair seals one message in each direction, so its nonce may stand still."""


class BadMessage(ValueError):
    """A key or a sealed message that is none."""


def new_private() -> bytes:
    """A private key from the operating system's entropy."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_of(private: bytes) -> bytes:
    """The public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, *, purpose: str, session: bytes) -> bytes:
    """The key of 32 bytes that both ends have. Raises `BadMessage` for a public key of low order."""
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise BadMessage("a public key is none of X25519") from error
    return HKDF(SHA256(), KEY_BYTES, salt=session, info=f"shoal secure aggregation, {purpose}".encode()).derive(shared)


def seal(key: bytes, content: bytes, *, sender: str, receiver: str, session: bytes) -> bytes:
    """`content` for `receiver` alone. `key` is agreed for the direction, or it would seal two messages."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, content, _bound(sender, receiver, session))


def unseal(key: bytes, sealed: bytes, *, sender: str, receiver: str, session: bytes) -> bytes:
    """What was sealed. Raises `BadMessage` where it was changed, or is of another sender, receiver or session."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, _bound(sender, receiver, session))
    except InvalidTag as error:
        raise BadMessage(f"what {sender} sealed for {receiver} was changed on the way") from error


def _bound(sender: str, receiver: str, session: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in (session, sender.encode(), receiver.encode()))


PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33


def split(secret: bytes, *, threshold: int, places: Iterable[int]) -> dict[int, bytes]:
    """A share for each place, which are different whole numbers from 1. Any `threshold` of them give `secret` back."""
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {place: _at(coefficients, place).to_bytes(SHARE_BYTES, "big") for place in places}


def join(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret behind the shares by place; None where they give no 32 bytes, so that some of them are wrong."""
    total = _through(shares, 0)
    return total.to_bytes(SECRET_BYTES, "big") if total < 1 << (8 * SECRET_BYTES) else None


def join_checked(
    shares: Mapping[int, bytes], *, threshold: int, fits: Callable[[bytes], bool]
) -> tuple[bytes, frozenset[int]] | None:
    """The secret that `fits`, and the places whose share was wrong; None where no `threshold` shares give it.

    It first takes the shares as they are, and then looks for one that lies: what it cannot find is left to the caller.
    Shares that were not needed are looked at only when one that was is wrong.
    """
    for tried, some in enumerate(_choices(shares, threshold)):
        secret = join(some)
        if secret is not None and fits(secret):
            return secret, frozenset(_wrong(shares, some) if tried else ())
    return None


def _choices(shares: Mapping[int, bytes], threshold: int) -> Iterator[dict[int, bytes]]:
    """Sets of `threshold` shares: the first, then such as leave each one out, then every window."""
    places = sorted(shares)
    if len(places) < threshold:
        return
    yield {place: shares[place] for place in places[:threshold]}
    for lost in places:
        some = list(islice((place for place in places if place != lost), threshold))
        if len(some) == threshold:
            yield {place: shares[place] for place in some}
    for first in range(1, len(places) - threshold + 1):
        yield {place: shares[place] for place in places[first : first + threshold]}


def _wrong(shares: Mapping[int, bytes], good: Mapping[int, bytes]) -> Iterator[int]:
    """The places whose share does not lie on the polynomial through `good`."""
    for place, share in shares.items():
        if place not in good and _through(good, place) != int.from_bytes(share, "big"):
            yield place


def _through(shares: Mapping[int, bytes], at: int) -> int:
    """The value at `at`, where no share lies, of the polynomial through the shares.

    f(at) = prod (at - p) sum of f(p) / w_p,   w_p = (at - p) prod over others of (p - other),
    and all w_p are inverted together, by one inverse of their product.
    """
    weights, node = [], 1
    for place in shares:
        weight = at - place
        node = node * weight % PRIME
        for other in shares:
            if other != place:
                weight *= place - other
        weights.append(weight % PRIME)
    terms = zip(shares.values(), _inverses(weights), strict=True)
    return node * sum(int.from_bytes(share, "big") * inverse for share, inverse in terms) % PRIME


def _inverses(numbers: list[int]) -> list[int]:
    """1 / x mod p of each number that is not 0 (Montgomery)."""
    products = [1]
    for number in numbers:
        products.append(products[-1] * number % PRIME)
    last, found = pow(products[-1], -1, PRIME), []
    for number, before in zip(reversed(numbers), reversed(products[:-1]), strict=True):
        found.append(last * before % PRIME)
        last = last * number % PRIME
    return found[::-1]


def _at(coefficients: list[int], place: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % PRIME
    return value


CHUNK_BYTES = 1 << 17
"""Bytes of a mask that are made at a time: they stay in the cache until they are added."""
_ZEROS = memoryview(bytes(CHUNK_BYTES))


def add_masks(vector: np.ndarray, masks: Sequence[tuple[bytes, bool]]) -> None:
    """Adds the masks of all seeds to `vector` in place, or subtracts those that are negative: (seed, negative).

    All of them go into one piece of the vector before the next, so that the vector goes through the cache once.
    """
    streams = [(_stream(seed), np.subtract if negative else np.add) for seed, negative in masks]
    room = bytearray(CHUNK_BYTES + 16)
    numbers = CHUNK_BYTES // vector.itemsize
    for first in range(0, vector.size, numbers):
        part = vector[first : first + numbers]
        mask, zeros = np.frombuffer(room, vector.dtype, part.size), _ZEROS[: part.nbytes]
        for stream, add in streams:
            stream.update_into(zeros, room)
            add(part, mask, out=part)


def _stream(seed: bytes) -> CipherContext:
    """The first half of a seed is the key, the second the block at which it begins to count."""
    return Cipher(algorithms.AES(seed[:16]), modes.CTR(seed[16:])).encryptor()
