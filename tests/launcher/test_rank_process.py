"""What a rank is given by the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.launcher.allocator import GLIBC_BYTES, MMAP, TRIM, Thresholds, described
from shoal.launcher.environment import master_from, place_from
from shoal.launcher.rank_process import ALLOC_CONF, log_path, rank_environment


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


@pytest.mark.parametrize(
    "how", [{TRIM: "131072"}, {MMAP: "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}], ids=str
)
def test_what_the_user_chose_stays(how):
    """Thread counts and how malloc allocates: ranks find what the launcher found, and no other threshold beside it,
    which could overrule it."""
    environ = rank_environment({"OMP_NUM_THREADS": "7", **how}, 0, processes=2, port=1, cores=2)
    assert environ["OMP_NUM_THREADS"] == "7"
    assert {name: environ[name] for name in (TRIM, MMAP, "GLIBC_TUNABLES") if name in environ} == how


def test_ranks_keep_freed_memory_where_nobody_chose():
    """Both thresholds, from glibc's own value on."""
    environ = rank_environment({}, 0, processes=2, port=1, cores=2)
    assert int(environ[TRIM]) >= int(environ[MMAP]) >= GLIBC_BYTES


@pytest.mark.parametrize("name", sorted(ALLOC_CONF))
def test_a_word_to_pytorchs_allocator_stays(name):
    """And without one, segments grow."""
    assert rank_environment({}, 0, processes=1, port=1, cores=1)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    found = rank_environment({name: "max_split_size_mb:64"}, 0, processes=1, port=1, cores=1)
    assert {key: found[key] for key in ALLOC_CONF & found.keys()} == {name: "max_split_size_mb:64"}


def test_the_allocator_is_described_as_it_is_set():
    """As chosen here, as the user set one threshold, and as tunables say, which are not read."""
    own = Thresholds(1 << 30, 32 << 20)
    assert described(own, {}) == "glibc keeps 1 GiB of freed memory, blocks below 32 MiB in the heap"
    assert "keeps 64 KiB of freed memory, blocks below 128 KiB" in described(own, {TRIM: "65536"})
    assert described(own, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}).endswith("glibc.malloc.arena_max=1")


def test_logs_are_where_scripts_look_for_them():
    """The run directory's published layout."""
    assert log_path(Path("runs/x"), 12) == Path("runs/x/logs/rank-00012.log")
