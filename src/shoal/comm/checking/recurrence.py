"""What a rank calls next, if it goes on as it did before: programs that train repeat themselves, step by step.

The calls so far are a text, whose next letter is guessed as Lempel and Ziv's sliding window guesses it (IEEE
Transactions on Information Theory 23(3), 1977): the place is looked up where the last calls stood before, and then
followed for as long as the calls are those that came then. Ranks that have made the same calls guess the same.
"""

from __future__ import annotations

CONTEXT = 4
"""So many last calls say where the program is."""
MOST = 1 << 16
"""After so many calls all is forgotten, and learnt anew."""


class Recurrence:
    """The calls of one rank in one group, as numbers that are equal where the calls are."""

    def __init__(self) -> None:
        self._calls: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._place: int | None = None

    @property
    def expected(self) -> int | None:
        """The next call; None where the last ones have never stood together before."""
        return None if self._place is None else self._calls[self._place]

    def add(self, number: int) -> None:
        """This is what was called."""
        if len(self._calls) == MOST:
            self._calls, self._after, self._place = [], {}, None
        followed = self._place is not None and self._calls[self._place] == number
        self._calls.append(number)
        last = tuple(self._calls[-CONTEXT:])
        self._place = self._place + 1 if followed and self._place is not None else self._after.get(last)
        self._after[last] = len(self._calls)
