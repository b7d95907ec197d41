"""Ranks that share a core while another is free: `core/cores.c` on a machine that the test plays, and on this one."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from shoal.comm.shm import core as shm_core
from tests.comm.shm.test_group import options, shared

HERE = Path(__file__).parent
CORE = HERE.parents[2] / "src/shoal/comm/shm/core"
BORNE = 3  # waits in a row
ALL = 0b1111


class Played:
    """Rank 0 of a group, on a machine whose cores are bits: `wait` gives the cores that it asked for, 0 for none."""

    def __init__(self, library: ctypes.CDLL, size: int, allowed: int) -> None:
        self._library, self._allowed = library, allowed
        self._group = ctypes.c_void_p(library.played_open(size, allowed))

    def tell(self, rank: int, core: int) -> None:
        self._library.played_tell(self._group, rank, core)

    def wait(self, rank: int = 1, *, on: int) -> int:
        after = ctypes.c_uint()
        asked = self._library.played_wait(self._group, rank, on, ctypes.byref(after))
        assert after.value == self._allowed, "what the rank may use is as it was"
        return asked

    def close(self) -> None:
        self._library.played_close(self._group)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core, with the played file instead of its own."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    built = tmp_path_factory.mktemp("cores") / "played.so"
    flags = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Werror", "-DSHOAL_ONE_TARGET"]
    sources = [
        HERE / "cores_played.c",
        *(path for path in CORE.glob("*.c") if path.name not in ("cores.c", "python.c")),
    ]
    subprocess.run([compiler, *flags, f"-I{CORE}", *map(str, sources), "-o", str(built), "-pthread"], check=True)
    return built


@pytest.fixture(scope="module")
def library(whole: Path) -> ctypes.CDLL:
    played = ctypes.CDLL(str(whole))
    played.played_open.restype = ctypes.c_void_p
    played.played_wait.restype = ctypes.c_uint
    return played


@pytest.fixture
def pair(library: ctypes.CDLL) -> Iterator[Played]:
    """Rank 1 has said that it is on core 2."""
    played = Played(library, 2, ALL)
    played.tell(1, 2)
    yield played
    played.close()


def test_who_waits_on_the_others_core_again_and_again_asks_for_the_rest(pair: Played) -> None:
    assert [pair.wait(on=2) for _ in range(BORNE)] == [0] * (BORNE - 1) + [ALL & ~(1 << 2)]


def test_one_wait_elsewhere_begins_anew(pair: Played) -> None:
    for _ in range(5):
        assert [pair.wait(on=2) for _ in range(BORNE - 1)] == [0] * (BORNE - 1)
        assert pair.wait(on=0) == 0


def test_where_it_does_not_help_it_is_tried_ever_less_often(pair: Played) -> None:
    """The kernel takes it back each time: of 10,000 waits few are spent on it, and it is never given up."""
    asked = [n for n in range(10_000) if pair.wait(on=2)]
    assert [b - a for a, b in itertools.pairwise(asked)][:4] == [6, 12, 24, 48]
    assert 10 <= len(asked) <= 20
    assert asked[-1] > 8_000


def test_where_it_helps_it_is_soon_tried_as_readily_as_before(pair: Played) -> None:
    for _ in range(BORNE + 2 * BORNE):
        pair.wait(on=2)
    for _ in range(20):
        pair.wait(on=1)
    assert [pair.wait(on=2) for _ in range(BORNE)][-1] != 0


def test_cores_of_all_ranks_are_left_to_them(library: ctypes.CDLL) -> None:
    played = Played(library, 4, ALL)
    for rank, core in ((1, 0), (2, 3), (3, 0)):
        played.tell(rank, core)
    assert [played.wait(1, on=0) for _ in range(BORNE)][-1] == 0b0110
    played.close()


@pytest.mark.parametrize(("allowed", "cores"), [(0b1, (0, 0)), (0b11, (0, 1))])
def test_where_no_core_is_free_nothing_is_asked_for(library: ctypes.CDLL, allowed: int, cores: tuple[int, int]) -> None:
    """A launcher bound the ranks to one core, or there are as many ranks as cores."""
    played = Played(library, 3, allowed)
    for rank, core in enumerate(cores, 1):
        played.tell(rank, core)
    assert not any(played.wait(1, on=0) for _ in range(100))
    played.close()


def test_a_rank_that_has_not_called_is_on_no_core(library: ctypes.CDLL) -> None:
    played = Played(library, 2, ALL)
    assert not any(played.wait(on=0) for _ in range(100))
    played.close()


def forget_core() -> None:
    """The library that was loaded, and what it is called: a later test of this process has the built one again."""
    shm_core.load_core.cache_clear()
    shm_core.core_identity.cache_clear()


def times_asked(place, built: str, sync: bool) -> int:
    """By a rank whose core plays `cores.c`: both are on core 0, rank 0 until it asks for another; rank 1 comes late."""
    forget_core()
    try:
        with mock.patch.object(shm_core, "_library", return_value=Path(built)):
            group = shared(place)
        played = ctypes.CDLL(built)
        played.played_allow(ALL if place.rank == 0 else 1)
        before = played.played_askings()
        for _ in range(4 * BORNE):
            tensor = torch.ones(16)
            time.sleep(0.002 * place.rank)
            group.allreduce([tensor], options(c10d.AllreduceOptions, sync=sync)).wait()
            assert tensor[0] == place.size
        return played.played_askings() - before
    finally:
        forget_core()


@pytest.mark.parametrize("sync", [True, False])
def test_callers_say_where_they_are_and_look_when_they_wait(ranks, whole: Path, sync: bool) -> None:
    """Once: asked for and given, as one call to the kernel and one back."""
    assert ranks(2, times_asked, str(whole), sync)[0] == 2


def cores_after_calls(place) -> tuple[set[int], set[int]]:
    group, before = shared(place), os.sched_getaffinity(0)
    core = {min(before)}
    for begun_on in (core, before):
        os.sched_setaffinity(0, begun_on)
        for _ in range(200):
            tensor = torch.ones(16)
            group.allreduce([tensor], options(c10d.AllreduceOptions, sync=True)).wait()
            assert tensor[0] == place.size
    return before, os.sched_getaffinity(0)


def test_ranks_may_use_the_cores_that_they_might_before(ranks) -> None:
    """They begin on one core."""
    for before, after in ranks(2, cores_after_calls):
        assert before == after
