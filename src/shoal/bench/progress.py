"""How far a benchmark has come: its ranks say it, the process that the user started shows it.

Rank 0 writes a line for each part of the work to a pipe in the benchmark's folder (`tell`); a thread of the user's
process reads them and moves a bar on standard error (`shown`). Nobody waits for a reader: what does not fit is dropped.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from shoal.launch.environment import place_from
from shoal.observe.progress_bar import ProgressBar, open_progress_bar

PIPE = "SHOAL_BENCH_PROGRESS"
"""The variable that names the pipe to the ranks."""
T = TypeVar("T")


def tell(text: str, *, done: int = 0, total: int = 0) -> None:
    """This rank is now at `text`; `done` of `total` parts are behind it (a total of 0: not known).

    Does nothing outside of a benchmark and on ranks other than 0.
    """
    path, place = os.environ.get(PIPE), place_from(os.environ)
    if path is None or place is None or place.rank != 0:
        return
    with suppress(OSError):  # nobody reads, or the pipe is full
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, (json.dumps([text, done, total]) + "\n").encode())
        finally:
            os.close(descriptor)


def told(items: Iterable[T], text: str, *, total: int = 0) -> Iterator[T]:
    """`items` as they are; how many of them are done is told each time that one is asked for."""
    for done, item in enumerate(items):
        tell(text, done=done, total=total)
        yield item


@contextmanager
def shown(part: str, folder: Path) -> Iterator[dict[str, str]]:
    """Shows what ranks tell until the end of the block, after `part`. Gives what their environment needs for it."""
    path = folder / "progress"
    os.mkfifo(path)
    own = os.open(path, os.O_RDWR)  # with a writer of its own, the pipe does not end between two lines
    with open_progress_bar(sys.stderr) as bar:
        bar.update(part)
        thread = threading.Thread(target=_show, args=(own, part, bar), name="shoal-bench-progress", daemon=True)
        thread.start()
        try:
            yield {PIPE: str(path)}
        finally:
            os.write(own, b"\n")  # the end
            thread.join()
            os.close(own)


def _show(descriptor: int, part: str, bar: ProgressBar) -> None:
    with os.fdopen(os.dup(descriptor)) as lines:
        for line in lines:
            if line == "\n":
                return
            text, done, total = json.loads(line)
            bar.update(f"{part}: {text}", done=done, total=total)
