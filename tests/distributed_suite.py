"""PyTorch's own tests of a backend (`DistributedTest`), run on the backend that BACKEND names.

    BACKEND=shoal WORLD_SIZE=2 TEMP_DIR=/tmp/x python -m tests.distributed_suite NAMES.json OUT.json

NAMES.json lists the tests, an empty list meaning all; OUT.json gets {name: "passed" | "skipped" | the last line of what
went wrong}. A process of its own, as the tests read the environment when they are imported.
"""

from __future__ import annotations

import json
import sys
import unittest
from pathlib import Path
from typing import Any

from torch.testing._internal.common_distributed import DistTestCases

import shoal.c10d

for feature in ("ddp", "subgroup", "gpu"):  # what tests ask before they run; "gpu" stands for features such as buckets
    DistTestCases.backend_feature[feature].add(shoal.c10d.BACKEND)

from torch.testing._internal.distributed import distributed_test as suite  # noqa: E402  (it reads what was just added)


class OnBackend(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """Every test in processes of its own."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


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
    names, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    result = Recorded()
    for name in names or unittest.defaultTestLoader.getTestCaseNames(OnBackend):
        OnBackend(name).run(result)
        out.write_text(json.dumps(result.found))
        print(name, result.found.get(name), flush=True)


if __name__ == "__main__":
    main()
