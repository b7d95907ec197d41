"""How long tests wait. No test asserts how long anything took: that depends on what else the machine does.

`HANG_S` only turns a hang into a failure, and is far above what a busy machine needs. Where the product must not wait
for a timeout of its own, the test sets that timeout to `NEVER_S`: whatever waits for it does not end within `HANG_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_S = 180.0
NEVER_S = 3600.0


def wait_until(condition: Callable[[], object], said: Callable[[], str] = str) -> None:
    """Looks again and again until the condition holds. Raises `AssertionError` with `said()` where it never does."""
    end_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end_s, f"this did not come in {HANG_S:.0f} s; what was said:\n{said()}"
        time.sleep(0.01)
