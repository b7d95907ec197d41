"""MPI between ranks of a real mpiexec: collectives, checks and choice, and a run that gives the losses of Gloo."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.comm.mpi_world import why_no_mpi
from shoal.installation import install_command
from shoal.observe.events import read_events
from tests import programs

CHECKS = {"collectives", "reduced", "many_groups", "dropped_handles", "disagreeing", "refused", "chosen"}
ROOT = Path(__file__).parents[2]
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
LOSS_RELATIVE = 1e-5  # as between layouts; with two ranks a + b = b + a, and the losses come out the same
SMALL = ["model.layers=1", "model.width=32", "model.feed_forward_width=64", "batch.sequence=32", "run.steps=4",
         "observe.evaluate_samples=8", "observe.report=false", "observe.sample_bytes=0"]  # fmt: skip

needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="mpi4py or mpiexec is missing: pip install mpi4py mpich",
)


def called(*command: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)


@needs_mpi
@pytest.mark.stress  # three ranks that never sleep, on whatever cores there are
def test_mpi_keeps_what_the_seam_promises(tmp_path: Path) -> None:
    """On three ranks: collectives as defined, in a subgroup too; reductions as Gloo's; mismatches named; choice. Groups
    give their communicators back, and calls keep their memory."""
    assert MPIEXEC is not None
    done = called(MPIEXEC, "-n", "3", sys.executable, "-m", "tests.comm.mpi_ranks", str(tmp_path))
    found: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert len(found) == 3, done.stderr
    for rank, checks in enumerate(found):
        assert set(checks) == CHECKS
        for name, wrong in checks.items():
            assert not wrong, f"{name} on rank {rank}"


@pytest.mark.slow
@needs_mpi
def test_a_run_over_mpi_has_the_losses_of_gloo(tmp_path: Path) -> None:
    """The stdlib GPT, cut to some steps, under `mpiexec -n 2` and under Shoal's own launcher."""
    assert MPIEXEC is not None
    losses = []
    for transport in ("mpi", "gloo"):
        keys = [f'run.directory="{tmp_path / transport}"', f'wire.transport="{transport}"', "run.processes=2"]
        arguments = ["-m", "shoal", "train", "recipes/stdlib-gpt.toml", *SMALL, *keys]
        if transport == "mpi":
            done = called(MPIEXEC, "-n", "2", sys.executable, *arguments)
        else:
            done = programs.run(arguments, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        rows = read_events(tmp_path / transport)
        losses.append([row.values["loss/train"] for row in rows if "loss/train" in row.values])
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=LOSS_RELATIVE)


def test_what_stands_in_the_way_of_mpi_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, or without a launcher, one sentence says what to do; MPI is not started for it."""
    assert "mpiexec -n 2 shoal train" in why_no_mpi({}) or "pip install" in why_no_mpi({})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_no_mpi({"PMI_RANK": "0"}) == f"the package 'mpi4py' is missing: {install_command('mpi')}"
