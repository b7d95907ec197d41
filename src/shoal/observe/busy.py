"""Work that takes longer than 2 s says what it does. What draws is imported only then."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

SILENCE_S = 2.0


@contextmanager
def busy(text: str, *, after_s: float | None = None) -> Iterator[None]:
    """Shows `text` on standard error when the block takes longer than `after_s` seconds (None: `SILENCE_S`).

    On a terminal it stands with the time elapsed until the block ends; elsewhere it is one line.
    """
    over = threading.Event()

    def show() -> None:
        if over.wait(SILENCE_S if after_s is None else after_s):
            return
        from shoal.observe.terminal import open_progress_bar

        with open_progress_bar(sys.stderr) as bar:
            if not over.is_set():
                bar.update(text)
                over.wait()

    thread = threading.Thread(target=show, name="shoal-busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # the line is erased before anything else is printed, and what forks now has one thread


def importing_torch() -> AbstractContextManager[None]:
    """Around imports that take seconds: says so on a terminal, and nothing elsewhere or where they are made already."""
    if "torch" in sys.modules or not sys.stderr.isatty():
        return nullcontext()
    return busy("importing PyTorch")
