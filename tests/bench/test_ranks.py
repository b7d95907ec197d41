"""How the ranks of a benchmark are started by mpiexec, and what is said where that cannot be."""

from __future__ import annotations

import importlib.util
import re
import shutil

import pytest

from shoal.bench.options import Sweep
from shoal.bench.ranks import mpiexec, on_ranks
from shoal.errors import EnvironmentFault
from shoal.installation import install_command
from tests.comm.test_mpi import needs_mpi

SWEEP = Sweep(("all_reduce",), ("mpi",), first_bytes=1024, last_bytes=4096, factor=4, turns=3, dtype="float32")


def test_without_mpi_a_sentence_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """First the package, then the launcher."""
    with monkeypatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(EnvironmentFault, match=re.escape(f"'mpi4py' is missing: {install_command('mpi')}")):
            mpiexec()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(EnvironmentFault, match=r"no mpiexec.*pip install mpich"):
        mpiexec()


@pytest.mark.stress
@needs_mpi
def test_mpi_is_measured_by_ranks_of_mpiexec() -> None:
    """`shoal bench comm --backends mpi` has rows of MPI beside Gloo's."""
    result = on_ranks(["shoal", "bench", "comm", *SWEEP.arguments()], processes=2, mpi=True)
    assert {(row["backend"], row["bytes"]) for row in result["rows"]} == {
        (backend, size) for backend in ("gloo", "mpi") for size in (1024, 4096)
    }
