"""Programs that tests fork begin as they would from a shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import programs

INNER = """
mask = next(line for line in open("/proc/self/status") if line.startswith("SigIgn"))
open("ignored", "w").write(mask)
"""
OUTER = """
import subprocess, sys
subprocess.run([sys.executable, "inner.py"], check=True)
"""


def test_a_forked_child_ignores_the_signals_that_a_started_one_ignores(tmp_path: Path) -> None:
    """A rank's store writes to sockets whose other end is dead: SIGPIPE must not end it."""
    (tmp_path / "inner.py").write_text(INNER)
    (tmp_path / "outer.py").write_text(OUTER)
    subprocess.run([sys.executable, "inner.py"], cwd=tmp_path, check=True)
    started = (tmp_path / "ignored").read_text()
    assert programs.run(["inner.py"], cwd=tmp_path).returncode == 0
    assert (tmp_path / "ignored").read_text() == started
    assert programs.run(["outer.py"], cwd=tmp_path).returncode == 0
    assert (tmp_path / "ignored").read_text() == started
