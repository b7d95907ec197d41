"""A wait that says what it waits for, and ends.

Calls into a store or a socket library may block without a bound of their own (a rank that is stopped, a cable that is
cut). So the work is done by a thread, and the caller waits for the thread: it says on standard error what is missing,
first after 5 s, then after twice as long each time, and gives up when its time is over.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from shoal.errors import CollectiveError

SAY_AFTER_S = 5.0
T = TypeVar("T")


def bounded(
    work: Callable[[threading.Event], T], *, rank: int, timeout_s: float, missing: Callable[[], str], repair: str
) -> T:
    """What `work` returns; it should end soon once its argument is set, which happens when nobody waits any more.

    `missing` says what is waited for now, as "rank 1 of 2". Raises what `work` raises, or `CollectiveError` once
    `timeout_s` is over.
    """
    over = threading.Event()
    done: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()

    def run() -> None:
        future: Future[T] = Future()
        try:
            future.set_result(work(over))
        except Exception as error:
            future.set_exception(error)
        done.put(future)

    threading.Thread(target=run, name="shoal-wait", daemon=True).start()
    begin_s, next_word_s = time.monotonic(), SAY_AFTER_S
    try:
        while True:
            until_s = begin_s + min(next_word_s, timeout_s)
            try:
                return done.get(timeout=max(0.0, until_s - time.monotonic())).result()
            except queue.Empty:
                if next_word_s >= timeout_s:
                    raise CollectiveError(
                        f"rank {rank} waited {timeout_s:g} s in vain for {missing()}: {repair}"
                    ) from None
            with contextlib.suppress(OSError):  # the terminal may be gone
                waited = f"{next_word_s:g} of at most {timeout_s:g} s"
                print(f"rank {rank} waits for {missing()}, {waited}", file=sys.stderr, flush=True)
            next_word_s *= 2
    finally:
        over.set()
