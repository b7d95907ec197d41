"""Ranks of one machine that take themselves for ranks of several hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.comm.shm.host import HOST_NAME


@contextmanager
def on_host(name: str) -> Iterator[None]:
    """Groups that are opened inside see this process on a host of that name."""
    before = os.environ.get(HOST_NAME)
    os.environ[HOST_NAME] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[HOST_NAME]
        else:
            os.environ[HOST_NAME] = before
