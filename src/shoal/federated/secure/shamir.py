"""Shamir's secret sharing over the field of p = 2^256 + 297, the smallest prime in which 32 bytes fit.

    f(z) = secret + a_1 z + ... + a_(t-1) z^(t-1)  mod p,   share i = f(i),   secret = f(0)

Any t shares give the secret by Lagrange's formula; t - 1 say nothing (Shamir, Communications of the ACM 22, 1979).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33


def split(secret: bytes, *, threshold: int, places: Iterable[int]) -> dict[int, bytes]:
    """A share for each place, which are different whole numbers from 1. Any `threshold` of them give `secret` back."""
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {place: _at(coefficients, place).to_bytes(SHARE_BYTES, "big") for place in places}


def join(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret behind the shares by place; None where they give no 32 bytes, so that some of them are wrong."""
    total = 0
    for place, share in shares.items():
        above = below = 1
        for other in shares:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        total += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    total %= PRIME
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
    total = 0
    for place, share in shares.items():
        above = below = 1
        for other in shares:
            if other != place:
                above, below = above * (at - other) % PRIME, below * (place - other) % PRIME
        total += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    return total % PRIME


def _at(coefficients: list[int], place: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % PRIME
    return value
