"""`shoal watch` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import HANG_S


@contextmanager
def watching(*directories: Path, options: tuple[str, ...] = ()) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address that it printed, token included, and the process, which ends with the context."""
    command = [sys.executable, "-m", "shoal", "watch", *map(str, directories), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://"), process.communicate()
        yield address, process
    finally:
        process.terminate()
        process.communicate(timeout=HANG_S)
