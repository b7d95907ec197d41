"""`shoal bench comm` checks its options before ranks start, and its conventions are those of nccl-tests."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.bench.collective_times import bus_factor, collective_rows, fits_of, numels
from shoal.bench.comm import check_hosts, default_backends
from shoal.bench.options import OPERATIONS, Sweep
from shoal.errors import UsageError
from shoal.launcher.environment import Place
from shoal.topology.calibration import CollectiveFit

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
        assert bus_factor("gather", n) == bus_factor("scatter", n) == pytest.approx((n - 1) / n)
        assert bus_factor("broadcast", n) == 1


def test_sizes_that_are_moved_are_multiples_of_the_ranks_and_each_is_measured_once() -> None:
    """1, 4, 16 and 64 bytes of float32 among three ranks are three elements, three, three, and fifteen."""
    assert numels(_sweep(first_bytes=1, last_bytes=64), ranks=3) == [3, 15]
    assert numels(_sweep(first_bytes=64, last_bytes=64, dtype="bfloat16"), ranks=2) == [32]


ONE_HOST, APART, TWO_BY_TWO = (0, 0, 0, 0), (0, 1), (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("backend", "host_of", "lab", "said"),
    [
        ("hierarchical", ONE_HOST, False, "4 ranks on 1 host.*--lab"),
        ("hierarchical", APART, True, "2 ranks on 2 hosts.*several ranks"),
        ("shm", TWO_BY_TWO, True, "2 hosts.*hierarchical"),
        ("mpi", TWO_BY_TWO, True, "mpiexec"),
    ],
)
def test_a_backend_that_the_ranks_would_not_get_is_refused(
    backend: str, host_of: tuple[int, ...], lab: bool, said: str
) -> None:
    with pytest.raises(UsageError, match=f"--backends {backend}: .*{said}"):
        check_hosts((backend,), host_of, lab=lab)


def test_what_is_measured_by_default_can_be() -> None:
    for host_of in (ONE_HOST, APART, TWO_BY_TWO):
        check_hosts(default_backends(host_of), host_of, lab=len(set(host_of)) > 1)


def rows_of(place: Any, sweep: Sweep) -> list[dict[str, Any]]:
    return collective_rows(Place(place.rank, place.size, place.rank, place.size, 0, "shoal"), place.store, sweep)


def test_rows_bear_the_backend_that_was_opened_and_the_bytes_that_were_moved(ranks) -> None:
    """Two levels on one host are shared memory; 1,003 bytes are 1,000 in two parts of float32."""
    sweep = _sweep(operations=OPERATIONS, backends=("hierarchical",), first_bytes=1003, last_bytes=1003)
    for rows in ranks(2, rows_of, sweep):
        assert {row["operation"] for row in rows} == set(OPERATIONS)
        assert {row["backend"] for row in rows} == {"gloo", "shm"}
        assert {(row["bytes"], row["hosts"], row["dtype"]) for row in rows} == {(1000, 1, "float32")}


def test_fits_are_kept_apart_by_hosts_and_dtype() -> None:
    """Each is through its own rows, and is one of a calibration."""
    rows = [
        {"backend": "gloo", "operation": "send", "ranks": 2, "hosts": hosts, "dtype": dtype, "bytes": size,
         "time_us": 1e6 * size * beta_s}
        for hosts, dtype, beta_s in ((1, "float32", 1e-9), (1, "bfloat16", 2e-9), (2, "float32", 3e-9))
        for size in (1000, 2000)
    ]  # fmt: skip
    fits = [CollectiveFit(**fit) for fit in fits_of(rows)]
    assert [fit.beta_s for fit in fits] == pytest.approx([1e-9, 2e-9, 3e-9])
    assert len({fit.key for fit in fits}) == 3
