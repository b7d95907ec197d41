"""What a rank calls next, if it goes on as it did before: programs that train repeat themselves, step by step.

The calls so far are a text, whose next letter is guessed as Lempel and Ziv's sliding window guesses it (IEEE
Transactions on Information Theory 23(3), 1977): the place is looked up where the last calls stood before, and then
followed for as long as the calls are those that came then. Ranks that have made the same calls guess the same.

Collectives that were called and are not yet known to be the same on all ranks, in the order of the calls.

Whoever waits for one goes on with all before it. A thread does so for those that nobody has waited for within some
milliseconds: a rank may start a collective, and then wait for something else that depends on it. The same thread
listens, now and then, whether ranks differ in a call that this one has made without asking.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from shoal.comm.checking.disagreement import Dissent
from shoal.comm.checking.fingerprint import Comparison
from shoal.comm.checking.revocable import Revocable
from shoal.comm.checking.waiting import Board, Stall, patiently, waited
from shoal.errors import CollectiveError

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


GRACE_S = 0.005
"""After which the thread takes over."""
LISTEN_S = 0.5
"""How long a call may wait for other ranks before they are told, and listened to."""


class Call:
    """The `number`-th call; `launch` makes the collective, its work is `made`. No `comparison`: it was expected."""

    def __init__(self, number: int, comparison: Comparison | None, launch: Callable[[], Any]) -> None:
        self.number, self.comparison, self._launch = number, comparison, launch
        self.made: Any = None
        self.judged = False
        self.posted_s = time.monotonic()

    def arrived(self) -> bool:
        """Whether the collective may be made without waiting."""
        return self.comparison is None or self.comparison.arrived()

    def make(self) -> None:
        """Makes the collective."""
        self.made = self._launch()
        self.judged = True
        del self._launch  # and the tensors with it


class Pending:
    """The calls of one group. Its thread ends with those who hold it; what is pending then is made first.

    `explain`, called with a number of a call in which ranks differ, raises the `CollectiveError` that says so. Then
    the `groups` are given up, in their order, and those who wait in other groups of the `board` are told.
    """

    def __init__(
        self, dissent: Dissent, explain: Callable[[int], None], groups: Sequence[Revocable], board: Board | None
    ) -> None:
        self._dissent, self._explain, self._groups, self._board = dissent, explain, groups, board
        self._calls: deque[Call] = deque()
        self._lock, self._posted = threading.Lock(), threading.Event()
        self._error: Exception | None = None
        self._listened_s = time.monotonic()
        thread = threading.Thread(target=_tend, args=(weakref.ref(self), self._posted), name="shoal-check")
        thread.daemon = True
        thread.start()
        weakref.finalize(self, self._posted.set).atexit = False

    @property
    def refused(self) -> bool:
        """Whether the ranks differ: nothing more is made."""
        return self._error is not None

    def add(self, call: Call) -> None:
        """The newest call. It is made at once where nothing has to be waited for."""
        if call.comparison is None and not self._calls and self._error is None:
            self._make(call)
            return
        self._calls.append(call)
        self._posted.set()

    def finish(self, call: Call, stall: Stall | None) -> None:
        """Returns when `call` was made. Raises what is wrong with it, or with one before it."""
        while not call.judged:
            patiently(lambda limit_s: self._lock.acquire(timeout=limit_s), self._raise, stall)
            try:
                self._go_on(call, stall)
            finally:
                self._lock.release()

    def end(self, call: Call, stall: Stall | None) -> None:
        """Returns when `call`, which was made, is over on this rank. Raises what is wrong with it."""
        if call.made is None:
            return
        if call.comparison is None:
            self._wait(call.made, stall)
            self._dissent.agreed(call.number)
        else:
            call.made.wait()  # all ranks make it
        call.made = None  # Gloo keeps a group open as long as somebody holds one of its works

    def advance(self) -> None:
        """Goes on as far as nobody has to be waited for."""
        if self._calls and self._lock.acquire(blocking=False):
            try:
                self._go_on_while_arrived()
            finally:
                self._lock.release()

    def take_over(self) -> bool:
        """Goes on with what has been pending for too long; whether anything is pending still."""
        first = self._first()
        if first is not None and time.monotonic() - first.posted_s > GRACE_S:
            self.advance()
        return bool(self._calls) and self._error is None

    def listen(self, *, at_once: bool = False) -> None:
        """Tells the others which call this rank has waited with for long, and hears whether ranks differ."""
        now_s, first = time.monotonic(), self._first()
        if self._error is not None or not (at_once or now_s - self._listened_s > LISTEN_S):
            return
        self._listened_s = now_s
        waits = first is not None and now_s - first.posted_s > LISTEN_S
        try:
            if first is not None and waits and first.comparison is not None:
                self._dissent.ask(first.number)
            if (self._dissent.overdue() or waits or at_once) and (number := self._dissent.heard()) is not None:
                self._explain(number)
        except CollectiveError as error:  # kept for the one who waits
            self._error = error
        except RuntimeError:  # the store is gone, and its host: whoever waits for that will see
            return

    def give_up(self) -> None:
        """Lets go of the groups, where ranks differ: calls of this rank may still hang in them, or of others."""
        if self._error is not None:
            if self._board is not None and isinstance(self._error, CollectiveError):
                self._board.failed = self._error
            with self._lock:  # who has it goes on with the first call, or sees the error within a slice of its wait
                self._calls.clear()
            for group in self._groups:
                group.revoke()

    def _go_on(self, last: Call, stall: Stall | None) -> None:
        while not last.judged:
            self._raise()
            call = self._calls[0]
            if call.comparison is not None:
                self._wait(call.comparison.work, stall)
            self._make_first()

    def _go_on_while_arrived(self) -> None:
        while self._error is None and self._calls and self._calls[0].arrived():
            try:
                self._make_first()
            except Exception:  # kept for the one who waits
                return

    def _make_first(self) -> None:
        """The first of those that are pending, for which all ranks have posted."""
        call = self._calls[0]
        try:
            self._judge(call)
            self._make(call)
        except Exception as error:
            self._error = error
            raise
        self._calls.popleft()

    def _judge(self, call: Call) -> None:
        if call.comparison is None:
            return
        call.comparison.work.wait()
        if not call.comparison.same():
            self._dissent.conclude(call.number)
            self._explain(call.number)
        self._dissent.agreed(call.number)

    def _make(self, call: Call) -> None:
        call.make()
        if call.comparison is None:
            self._dissent.made(call.number)

    def _wait(self, work: Any, stall: Stall | None) -> None:
        try:
            patiently(lambda limit_s: waited(work, limit_s), self._raise, stall)
        except RuntimeError:  # a rank that has heard of a difference before us may have left
            self.listen(at_once=True)
            self._raise()
            raise

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _first(self) -> Call | None:
        try:
            return self._calls[0]
        except IndexError:
            return None


def _tend(pending: weakref.ref[Pending], posted: threading.Event) -> None:
    """The thread's main. It holds what it works on while something is pending, and ends with it."""
    while True:
        if posted.wait(LISTEN_S):
            posted.clear()
            time.sleep(GRACE_S)
        mine = pending()
        if mine is None:
            return
        while mine.take_over():
            mine.listen()
            time.sleep(GRACE_S)
        mine.listen()
        mine.give_up()
        del mine
