"""What a rank frees it keeps, within its share of the host's memory."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.launcher import allocator
from shoal.launcher.allocator import (
    GLIBC_BYTES,
    MMAP,
    MOST_TRIM_BYTES,
    TRIM,
    described,
    keep_freed_memory,
    keep_memory,
    thresholds,
    variables,
)

SOURCE = Path(__file__).parents[2] / "src"
BLOCK_BYTES, BLOCKS, ROUNDS = 20 << 20, 4, 10
PR_SET_THP_DISABLE = 41
PAGES = BLOCKS * BLOCK_BYTES // os.sysconf("SC_PAGE_SIZE")

PROGRAM = f"""
import ctypes, os, resource, sys
import numpy as np
from shoal.launcher.allocator import keep_freed_memory, thresholds
if sys.argv[1] == "keep":
    assert keep_freed_memory(thresholds(None, ranks=1), os.environ)

ctypes.CDLL(None).prctl({PR_SET_THP_DISABLE}, 1, 0, 0, 0)  # each page of its own counts

def step():
    blocks = [np.ones({BLOCK_BYTES}, np.uint8) for _ in range({BLOCKS})]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

step()
before = faults()
for _ in range({ROUNDS}):
    step()
print(faults() - before)
"""


def faults(how: str, **more: str) -> int:
    """The page faults of steps that free what they allocate, in a process of its own."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    environ = {**plain, "PYTHONPATH": str(SOURCE), **more}
    command = [sys.executable, "-c", PROGRAM, how]
    return int(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's")
def test_a_step_that_frees_its_memory_faults_no_more() -> None:
    """Freed blocks are zeroed by the kernel again in every step; with the thresholds, set either way, in none."""
    assert faults("plain") > ROUNDS * PAGES / 2
    assert faults("keep") < PAGES
    assert faults("plain", **variables(thresholds(None, ranks=1))) < PAGES


@pytest.mark.parametrize("name", [TRIM, MMAP, "GLIBC_TUNABLES"])
def test_what_the_user_chose_stays(name: str) -> None:
    """A variable that glibc has read is not overruled; this process keeps what it has."""
    assert not keep_freed_memory(thresholds(None, ranks=1), {name: "glibc.malloc.trim_threshold=1"})


HEXADECIMAL = {TRIM: "0x100000"}


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "glibc keeps 1 GiB of freed memory, blocks below 32 MiB in the heap"),
        ({TRIM: "1048576"}, "glibc keeps 1 MiB of freed memory, blocks below 128 KiB in the heap"),
        (HEXADECIMAL, "MALLOC_TRIM_THRESHOLD_=0x100000"),
        ({MMAP: "", TRIM: "1"}, "MALLOC_TRIM_THRESHOLD_=1 MALLOC_MMAP_THRESHOLD_="),
    ],
)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's")
def test_what_the_user_chose_is_said(environ: dict[str, str], said: str) -> None:
    """A number that is not decimal as it stands."""
    assert described(thresholds(None, ranks=1), environ) == said
    keep_memory(environ)


def test_another_c_library_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is said of glibc, whatever its variables say."""
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory(thresholds(None, ranks=1), {})
    assert described(thresholds(None, ranks=1), HEXADECIMAL) == "as the C library has it"


@given(st.integers(1 << 20, 1 << 44), st.integers(1, 256))
def test_all_ranks_together_keep_an_eighth_of_the_memory(memory_bytes: int, ranks: int) -> None:
    """Never less than glibc's own value, never more than 1 GiB a rank."""
    trim, mmap = thresholds(memory_bytes, ranks=ranks)
    assert trim * ranks * 8 <= memory_bytes or trim == GLIBC_BYTES
    assert GLIBC_BYTES <= mmap <= trim <= MOST_TRIM_BYTES


def test_a_large_machine_has_the_largest_thresholds() -> None:
    """64 GiB and 4 ranks: 1 GiB and 32 MiB each; a host whose memory is not known counts as large."""
    assert thresholds(64 << 30, ranks=4) == thresholds(None, ranks=4) == (1 << 30, 32 << 20)
    assert thresholds(2 << 30, ranks=2) == (128 << 20, 16 << 20)
