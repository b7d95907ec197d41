"""Which of the calls that ranks have begun can be carried out now, and in which order: the same answer on all ranks.

Ranks begin calls by name, in any order: gradients become ready in another order on each. In a round every rank tells
what it has begun; a call that all have begun is carried out, in the order of the lowest rank that still trains. A rank
that has joined has no more data: it takes part in all calls, with zeros (Sergeev and Del Balso, "Horovod: fast and easy
distributed deep learning in TensorFlow", arXiv:1802.05799, section 3; `join` is of later versions). Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

Kind = Literal["allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier"]


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has begun. A group has a shape for each tensor; `splits` are the rows for each rank of `alltoall`."""

    name: str
    kind: Kind
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str = "sum"
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = "cpu"
    splits: tuple[int, ...] = ()


class Word(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says in a round."""

    begun: tuple[Begun, ...] = ()
    joined: bool = False


WORDS = msgspec.msgpack.Decoder(Word)


def ready(words: Sequence[Word]) -> list[str]:
    """The names of the calls that all ranks which have not joined have begun, in the order of the lowest of them."""
    at_work = [word for word in words if not word.joined]
    if not at_work:
        return []
    others = [{call.name for call in word.begun} for word in at_work[1:]]
    return [call.name for call in at_work[0].begun if all(call.name in names for names in others)]


def conflict(calls: Mapping[int, Begun], size: int) -> str | None:
    """Why the calls of one name, by rank, do not fit together; None where they do."""
    first_rank, first = next(iter(calls.items()))
    for rank, call in calls.items():
        if (difference := _difference(first, call)) is not None:
            return f"{first.name}: {difference} on ranks {first_rank} and {rank}: begin the same call on all ranks"
    if len(calls) < size and first.kind in ("broadcast", "alltoall"):
        return f"{first.name}: {first.kind} after a rank has joined: it has nothing to give; call it before join"
    return None


def fused(calls: Sequence[Begun], *, most_bytes: int, sizes: Sequence[int]) -> list[list[int]]:
    """Which of `calls`, of so many bytes each, are summed as one vector: neighbours, if alike, up to `most_bytes`."""
    found: list[list[int]] = []
    total = 0
    for place, (call, size) in enumerate(zip(calls, sizes, strict=True)):
        before = calls[found[-1][0]] if found else None
        if before is not None and _alike(before, call) and total + size <= most_bytes:
            found[-1].append(place)
            total += size
        else:
            found.append([place])
            total = size
    return found


def _alike(one: Begun, other: Begun) -> bool:
    of = [(c.kind, set(c.dtypes), c.op, c.prescale, c.postscale, c.device) for c in (one, other)]
    return of[0] == of[1] and one.kind == "allreduce" and len(set(one.dtypes)) == 1 and one.op != "adasum"


def _difference(one: Begun, other: Begun) -> str | None:
    if one.kind == "allgather" or one.kind == "alltoall":
        shapes = [tuple(shape[1:] for shape in call.shapes) for call in (one, other)]
    else:
        shapes = [call.shapes for call in (one, other)]
    pairs = {
        "kind": (one.kind, other.kind), "dtype": (one.dtypes, other.dtypes), "shape": tuple(shapes),
        "reduction": (one.op, other.op), "root": (one.root, other.root), "device": (one.device, other.device),
        "scale": ((one.prescale, one.postscale), (other.prescale, other.postscale)),
    }  # fmt: skip
    return next((f"{what} {a} and {b}" for what, (a, b) in pairs.items() if a != b), None)


NAMED = 4


def missing(words: Sequence[Word], name: str) -> str:
    """Which ranks have not begun the call `name` by their last words, and what they wait in; without words, that others
    have not.
    """
    late = {rank: word for rank, word in enumerate(words) if not (word.joined or name in {c.name for c in word.begun})}
    if not late:
        return "other ranks have not begun it"
    said = [f"rank {rank} has not begun it{_waits(word)}" for rank, word in list(late.items())[:NAMED]]
    return "; ".join([*said, f"nor have {len(late) - NAMED} others"] if len(late) > NAMED else said)


def _waits(word: Word) -> str:
    names = ", ".join(call.name for call in word.begun[:NAMED])
    return f", and waits in {names}" if names else ""
