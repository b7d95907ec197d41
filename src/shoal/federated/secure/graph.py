"""Who masks with whom: everybody (SecAgg), or a random graph in which each client has k neighbours (SecAgg+).

The graph is that of Bell et al. (eprint 2020/704, section 3): clients in a random order stand in a circle, and each is
a neighbour of the k / 2 nearest on either side. The order follows from all public keys of the round, so that nobody
knows it before everybody's key is there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence


def neighbours(keys: Mapping[str, bytes], degree: int | None) -> dict[str, tuple[str, ...]]:
    """The neighbours of each client, sorted; `keys` are their public keys. `degree` is rounded up to an even number."""
    names = sorted(keys)
    if degree is None or degree + degree % 2 >= len(names) - 1:
        return {name: tuple(other for other in names if other != name) for name in names}
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + keys[name])
    circle = sorted(names, key=lambda name: hashlib.sha256(digest.digest() + name.encode()).digest())
    return {name: tuple(sorted(_beside(circle, place, -(-degree // 2)))) for place, name in enumerate(circle)}


def shares_needed(threshold: float, neighbours: int) -> int:
    """How many of a client and its `neighbours` must give their shares: the part `threshold`, more than half."""
    holders = neighbours + 1
    return max(math.ceil(threshold * holders), holders // 2 + 1)


def _beside(circle: Sequence[str], place: int, half: int) -> list[str]:
    steps = [step for step in range(-half, half + 1) if step]
    return [circle[(place + step) % len(circle)] for step in steps]
