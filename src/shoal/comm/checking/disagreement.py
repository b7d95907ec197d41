"""Ranks that called different things: what they tell each other through the store, and the sentence that names them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.errors import CollectiveError

PATIENCE_S = 3.0
"""How long a rank that found a difference waits for what the others have to say."""
POLL_S = 0.005
SILENT = "something that it has not told"
NOT_YET = "nothing yet"
Rows = tuple[Sequence[int], Sequence[int]]
"""What a rank sends to each rank, and what it expects of each."""


def told(store: Store, key: str, rank: int, size: int, mine: str) -> dict[int, str]:
    """What each rank says under `key`; those that say nothing within the patience are left out."""
    store.set(f"{key}/{rank}", mine)
    deadline_s, found = time.monotonic() + PATIENCE_S, {}
    while len(found) < size and time.monotonic() < deadline_s:
        for other in set(range(size)) - found.keys():
            if store.check([f"{key}/{other}"]):
                found[other] = store.get(f"{key}/{other}").decode()
        time.sleep(POLL_S)
    return found


def said(text: str | None) -> str:
    """What a rank called, for people: None where it does not answer, empty where it has not come to the call."""
    return SILENT if text is None else text or NOT_YET


def disagreement(texts: Sequence[str], what: str, members: Sequence[str]) -> str:
    """From what each rank called: the sentence that names them, ranks of one call together."""
    callers: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        callers.setdefault(text, []).append(rank)
    told = "; ".join(f"{_named(members, ranks)} called {text}" for text, ranks in callers.items())
    return (
        f"{what} differs between ranks: {told}: all ranks of a group have to make the same calls, with the same shapes "
        "and types, in the same order; make the two places alike"
    )


def judge_rows(told: Tensor, what: str, members: Sequence[str]) -> None:
    """What rank i sends to rank j (`told[i, j]`) has to be what j expects of i (`told[j, n + i]`). Raises if not."""
    n = len(members)
    sent, expected = told[:, :n], told[:, n:].T
    wrong = (sent != expected).nonzero().tolist()
    if wrong:
        i, j = wrong[0]
        raise CollectiveError(
            f"{what}, an all_to_all: {members[i]} sends {sent[i, j]} rows to {members[j]}, which expects "
            f"{expected[i, j]}: both have to say the same; exchange the sizes before the rows"
        )


def _named(members: Sequence[str], ranks: Sequence[int]) -> str:
    """The first in full, the others by number."""
    more = ", ".join(f"{members[rank].split(' (')[0]}" for rank in ranks[1:8])
    rest = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return members[ranks[0]] + (f", {more}" if more else "") + rest
