"""What `shoal bench comm` is asked for is checked before ranks start, and its conventions are nccl-tests'."""

from __future__ import annotations

import pytest

from shoal.errors import UsageError
from shoal.recipes.benchmarks.comm import bus_factor
from shoal.recipes.benchmarks.comm_options import Sweep

LAST = 1 << 20


def _sweep(**changed: object) -> Sweep:
    options: dict = {
        "operations": ("all_reduce",), "backends": ("shm",), "first_bytes": 1024, "last_bytes": LAST, "factor": 4,
        "turns": 3, "dtype": "float32",
    }  # fmt: skip
    return Sweep(**options | changed)


def test_sizes_are_a_geometric_series_up_to_the_last() -> None:
    assert _sweep().sizes == (1024, 4096, 16384, 65536, 262144, LAST)
    assert _sweep(last_bytes=LAST - 1).sizes[-1] == LAST // 4


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"operations": ("allreduce",)}, "allreduce.*all_reduce"),
        ({"backends": ("ucx",)}, "ucx.*shm"),
        ({"dtype": "float8"}, "float8.*bfloat16"),
        ({"first_bytes": 8, "last_bytes": 4}, "first <= last"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(changed: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _sweep(**changed)


def test_the_bus_factor_makes_bandwidth_independent_of_ranks() -> None:
    """A ring at rate w takes 2 (n-1)/n S/w for an all-reduce and (n-1)/n S/w for its halves: busbw is w for any n."""
    w, size = 3.0, 24.0
    for n in (2, 3, 8):
        assert bus_factor("all_reduce", n) * size / (2 * (n - 1) / n * size / w) == pytest.approx(w)
        assert bus_factor("all_gather", n) * size / ((n - 1) / n * size / w) == pytest.approx(w)
        assert bus_factor("broadcast", n) == 1
