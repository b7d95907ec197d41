"""What a process holds of the kernel: a test that something leaves nothing behind compares it before and after.

Only what has come counts. What earlier tests of the process left goes when it likes, also between the two looks, and
threads and descriptors go a little after the call that ends them, so `none_more` waits.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

from tests.waiting import wait_until


def held() -> dict[str, int]:
    """How many open descriptors, mapped segments of shared memory and threads the process has."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "segments": Path("/proc/self/maps").read_text().count("memfd:shoal"),
        "threads": len(os.listdir("/proc/self/task")),
    }


def none_more(before: dict[str, int]) -> None:
    """Waits until the process holds no more of what is named in `before`. Raises `AssertionError` with what stays."""

    def more() -> dict[str, int]:
        now = held()
        return {name: now[name] - count for name, count in before.items() if now[name] > count}

    wait_until(lambda: not more(), lambda: str(more()))
