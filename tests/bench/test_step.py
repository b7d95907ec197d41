"""`shoal bench step` with a module of the user's, and the page faults of its sides."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.bench.groups import WARM_UP_STEPS
from shoal.bench.step import CountedStep

PAGES = 512

OWN = """
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(128, 16), nn.Linear(16, 128))
"""


def touch_new_pages() -> None:
    """Each of them costs a minor fault, as activations do that the allocator gave back to the kernel."""
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as memory:
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(PAGES):
            memory[page * mmap.PAGESIZE] = 1


def test_page_faults_are_those_of_a_sides_own_steps() -> None:
    """After its first steps; what happens between them is not counted."""
    costly, idle = CountedStep(touch_new_pages), CountedStep(lambda: None)
    for _ in range(WARM_UP_STEPS + 20):
        costly()
        idle()
    assert costly.faults >= 20 * PAGES
    assert idle.faults < PAGES


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_a_module_of_the_users_is_measured_beside_ddp(tmp_path: Path) -> None:
    """It is found in the current folder; every side trains it, and the row has the page faults of both."""
    (tmp_path / "own.py").write_text(OWN)
    command = ["shoal", "bench", "step", "--model", "own:build", "--tokens", "256", "--pairs", "6", "--json"]
    done = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["model"] == "own:build"
    assert {"shoal_page_faults_per_s", "ddp_page_faults_per_s", "ratio_lower_95"} <= set(row)
    assert row["ddp_ms"] > 0
