"""PyTorch's own tests of a backend (`DistributedTest`), run on Gloo or, under Gloo's name, on Shoal's.

    OPENED=shoal BACKEND=gloo WORLD_SIZE=2 TEMP_DIR=/tmp/x python -m tests.distributed_suite NAMES.json OUT.json

NAMES.json lists the tests; OUT.json gets {name: "passed" | "skipped" | the last line of what went wrong}. With --list
for NAMES.json, OUT.json gets the names of all tests. Tests ask for BACKEND by name and skip where they do not know it:
they hear of "gloo", and OPENED says which backend their groups are. A process of its own, as the tests read the
environment when they are imported. Each test's ranks are forked from a server that has imported torch: a test takes 1
to 2 s instead of 10.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
import unittest
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed import distributed_test as suite

import shoal.c10d  # noqa: F401  (the backend's name)

OPENED = os.environ["OPENED"]
MEETING_S = 120
"""How long a rank waits for the others before and behind each test: PyTorch's 10 s are too few on a busy machine."""


class Rank(ForkServerProcess):
    """A rank of a test, in the environment of the process that made it instead of the server's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._environ = dict(os.environ)

    def run(self) -> None:
        os.environ.update(self._environ)
        super().run()


class OnBackend(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """Every test in processes of its own."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(Rank)

    @classmethod
    def _run(cls, *args: Any, **options: Any) -> None:
        """The main of a test's rank: all groups are of the backend OPENED."""
        dist.init_process_group = functools.partial(_opened, dist.init_process_group)
        suite.Barrier.sync = functools.partial(suite.Barrier.sync, timeout=MEETING_S)
        super()._run(*args, **options)


def _opened(init_process_group: Callable[..., None], *args: Any, **options: Any) -> None:
    init_process_group(*args, **{**options, "backend": OPENED})


class Recorded(unittest.TestResult):
    """What became of each test, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def addSuccess(self, test: Any) -> None:
        self.found[test._testMethodName] = "passed"

    def addSkip(self, test: Any, reason: str) -> None:
        self.found[test._testMethodName] = "skipped"

    def addError(self, test: Any, err: Any) -> None:
        self.found[test._testMethodName] = str(err[1]).strip().splitlines()[-1] if str(err[1]).strip() else repr(err[1])

    def addFailure(self, test: Any, err: Any) -> None:
        self.addError(test, err)


def main() -> None:
    """See above."""
    multiprocessing.set_forkserver_preload([__spec__.name])
    out = Path(sys.argv[2])
    if sys.argv[1] == "--list":
        out.write_text(json.dumps(unittest.defaultTestLoader.getTestCaseNames(OnBackend)))
        return
    result = Recorded()
    for name in json.loads(Path(sys.argv[1]).read_text()):
        OnBackend(name).run(result)
        out.write_text(json.dumps(result.found))
        print(name, result.found.get(name), flush=True)


if __name__ == "__main__":
    main()
