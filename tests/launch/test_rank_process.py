"""What a rank is given by the launcher."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.allocator import GLIBC_BYTES
from shoal.launch.environment import master_from, place_from
from shoal.launch.rank_process import log_path, rank_environment


@given(st.integers(1, 64), st.integers(1, 256), st.data())
def test_a_rank_reads_back_the_place_it_was_given(processes, cores, data):
    """The launcher's variables are those that `place_from` and `master_from` understand; cores are never oversold."""
    rank = data.draw(st.integers(0, processes - 1))
    environ = rank_environment({"HOME": "/h"}, rank, processes=processes, port=1234, cores=cores)
    place = place_from(environ)
    assert place is not None
    assert (place.rank, place.world_size, place.one_host, place.launcher) == (rank, processes, True, "shoal")
    assert master_from(environ) == ("127.0.0.1", 1234)
    assert 1 <= int(environ["OMP_NUM_THREADS"]) <= max(1, cores // processes)
    assert environ["HOME"] == "/h"


def test_what_the_user_chose_stays():
    """Thread counts and malloc's thresholds in the launcher's own environment are the ranks', too."""
    chosen = {"OMP_NUM_THREADS": "7", "MALLOC_TRIM_THRESHOLD_": "131072"}
    environ = rank_environment(chosen, 0, processes=2, port=1, cores=2)
    assert environ.items() >= chosen.items()
    assert int(environ["MALLOC_MMAP_THRESHOLD_"]) >= GLIBC_BYTES


def test_logs_are_where_scripts_look_for_them():
    """The run directory's published layout."""
    assert log_path(Path("runs/x"), 12) == Path("runs/x/logs/rank-00012.log")
