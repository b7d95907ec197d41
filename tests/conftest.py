"""Fixtures that every room uses."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # PyTorch reads it when it is imported
_STATE = tempfile.TemporaryDirectory(prefix="shoal-tests-")  # ranks without a launcher of Shoal's keep a token there
os.environ["XDG_STATE_HOME"] = _STATE.name
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background has them ignore SIGINT; the programs that they start would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A deadline and the check for slow draws are timing assertions in disguise; and `make test` gives one answer, on any
# machine and at any time. `make stress` draws other examples in every run.
_UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("same", **_UNTIMED, derandomize=True)
hypothesis.settings.register_profile("other", **_UNTIMED)
hypothesis.settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported."""
    if config.getoption("markexpr") == "stress":
        hypothesis.settings.load_profile("other")
    if config.getoption("markexpr") != "gpu":
        # Tests of ranks fork, which a process that has once asked CUDA for its GPUs cannot; and a test says the same
        # with a GPU in the machine as without.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the rows of a `matrix` as stress, but for its `first` ones, every so many or those in `rows`, which CI
    runs. Of these `make test` runs one of `often`, or all; the others are slow.
    """
    rows: dict[str, int] = {}
    kept: dict[str, int] = {}
    for item in items:
        matrix = item.get_closest_marker("matrix")
        if matrix is None:
            continue
        test = item.nodeid.partition("[")[0]
        row = rows.setdefault(test, 0)
        rows[test] += 1
        first, every = matrix.kwargs.get("first", 0), matrix.kwargs.get("every", 0)
        if row >= first and not (every and row % every == 0) and row not in matrix.kwargs.get("rows", ()):
            item.add_marker(pytest.mark.stress)
        if item.get_closest_marker("stress") is None:
            turn = kept[test] = kept.get(test, -1) + 1
            if turn % matrix.kwargs.get("often", 1):
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def ranks() -> Iterator:
    """`ranks(world, function, *args)` runs `function(place, *args)` on that many processes: see tests/ranks.py."""
    from tests.ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()
