"""Ranks that called different things: what they tell each other through the store, and the sentence that names them.

Ranks that make a call because it is the expected one, without asking, and others that call something else instead.

Who calls something else makes nothing: it asks all ranks first. Those that have made the expected call do not answer,
because they have asked nothing. So who has waited for answers for some time writes down in the store with which call;
and who has made a call that does not end reads there whether another rank asks about it, or about one before. If so,
the two called different things: all that came before was the same, and the same calls are made or asked about alike.
"""

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


MOST_LOOKED_AT = 64


class Dissent:
    """What one rank of a group knows of it. Calls are numbered from 1."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._made = self._agreed = self._agreed_before = self._asked = 0

    def made(self, number: int) -> None:
        """This rank has made an expected call."""
        self._made = number

    def agreed(self, number: int) -> None:
        """All ranks are known to have called the same in this call, and so in all before."""
        self._agreed = max(self._agreed, number)

    def overdue(self) -> bool:
        """Whether calls that were made have not ended since this was last asked."""
        stood_still, self._agreed_before = self._agreed == self._agreed_before, self._agreed
        return stood_still and self._made > self._agreed

    def ask(self, number: int) -> None:
        """This rank has waited with a call for the others for long."""
        if number != self._asked:
            self._store.set(f"asks/{number}", "")
            self._asked = number

    def conclude(self, number: int) -> None:
        """Ranks differ in this call: those that have not seen it shall hear of it."""
        self._store.set("differs", str(number))

    def heard(self) -> int | None:
        """A call in which ranks differ, if there is one that can be known."""
        if self._store.check(["differs"]):
            return int(self._store.get("differs"))
        last = min(self._made, self._agreed + MOST_LOOKED_AT)
        asked = (number for number in range(self._agreed + 1, last + 1) if self._store.check([f"asks/{number}"]))
        found = next(asked, None)
        if found is not None:
            self.conclude(found)
        return found
