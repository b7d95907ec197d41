"""Files behind URLs, through fsspec (`https://`, `s3://`, `gs://`, `memory://`, ...): opened, and asked more than once.

A request that fails (503, a lost connection, a slow answer that is given up) is made again after a pause that doubles,
up to a limit, and is drawn from its upper half: ranks that failed together do not come back together. Some exceptions
are answers, such as that a file does not exist, and another attempt would not change them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar

from shoal.errors import ConfigError, EnvironmentFault, MissingExtra, ShoalError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
EXTRA = "data"
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
"""The package in the extra `data` that brings a protocol."""

T = TypeVar("T")


def open_url(url: str, *, purpose: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The fsspec file system of `url`, made with the keywords `options`, and the path in it.

    Raises `ConfigError` for an unknown protocol, `EnvironmentFault` where the protocol's package is not installed; both
    begin with `purpose`, such as "reading s3://bucket/a.tar".
    """
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtra("fsspec", extra=EXTRA, purpose=purpose) from error
    try:
        return fsspec.core.url_to_fs(url, **options)
    except ValueError as error:
        raise ConfigError(f"{purpose}: {error}. Correct the protocol.") from error
    except ImportError as error:
        raise missing(url, error, purpose=purpose) from error


def missing(url: str, error: ImportError, *, purpose: str) -> EnvironmentFault:
    """What to raise where a package that `url` needs cannot be imported."""
    package = PACKAGES.get(url.partition("://")[0])
    if package is None:
        return EnvironmentFault(f"{purpose} needs a package that is not installed ({error}): install it.")
    return MissingExtra(package, extra=EXTRA, purpose=purpose)


def at_once(requests: Sequence[Callable[[], T]], *, threads: int) -> list[T]:
    """What the `requests` return, in their order; up to `threads` of them are made at a time.

    The first that fails ends it: its exception is raised, and requests that have not begun are not made. One that is
    under way ends by itself, in a daemon thread, so that it must not write where something else may lie by then.
    """
    if threads == 1 or len(requests) < 2:
        return [request() for request in requests]
    waiting: SimpleQueue[int] = SimpleQueue()
    ended: SimpleQueue[tuple[int, T | None, BaseException | None]] = SimpleQueue()
    over = Event()
    for number in range(len(requests)):
        waiting.put(number)

    def work() -> None:
        while not over.is_set():
            try:
                number = waiting.get_nowait()
            except Empty:
                return
            try:
                ended.put((number, requests[number](), None))
            except BaseException as error:  # it has to reach the caller, who would wait for ever
                over.set()
                ended.put((number, None, error))

    for _ in range(min(threads, len(requests))):
        Thread(target=work, name="shoal-request", daemon=True).start()
    results: dict[int, Any] = {}
    try:
        while len(results) < len(requests):
            number, result, error = ended.get()
            if error is not None:
                raise error
            results[number] = result
    finally:
        over.set()
    return [results[number] for number in range(len(requests))]


@dataclass(frozen=True)
class Attempts:
    """Makes a request up to `limit` times; `key` is what a user raises to have it made more often. `sleep` waits so
    many seconds.
    """

    limit: int
    key: str
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, request: Callable[[], T], name: str, *, answers: tuple[type[Exception], ...] = ()) -> T:
        """What `request` returns. Passes on one of `answers`, and each of `ShoalError`, at once.

        Raises `EnvironmentFault`, which names the file by `name`, after the last attempt.
        """
        for attempt in range(1, self.limit + 1):
            try:
                return request()
            except (ShoalError, ImportError, *answers):
                raise
            except Exception as error:  # each file system has errors of its own
                if attempt == self.limit:
                    raise EnvironmentFault(
                        f"{name}: {attempt} attempts failed, the last with {type(error).__name__}: {error}. See that "
                        f"the store can be reached, or raise {self.key}."
                    ) from error
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1))
            self.sleep(pause_s * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable: the last attempt returns or raises")
