"""Ranks that make a call because it is the expected one, without asking, and others that call something else instead.

Who calls something else makes nothing: it asks all ranks first. Those that have made the expected call do not answer,
because they have asked nothing. So who has waited for answers for some time writes down in the store with which call;
and who has made a call that does not end reads there whether another rank asks about it, or about one before. If so,
the two called different things: all that came before was the same, and the same calls are made or asked about alike.
"""

from __future__ import annotations

from torch._C._distributed_c10d import Store

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
