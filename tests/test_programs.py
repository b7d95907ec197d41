"""Programs that tests fork are what a shell would start."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests import programs

SAYS_IGNORED = 'print(*(line for line in open("/proc/self/status") if line.startswith("SigIgn")))\n'
"""What the kernel knows; Python's own record misses what `subprocess` sets back."""
STARTS_ANOTHER = 'import subprocess, sys; subprocess.run([sys.executable, "says.py"], check=True)\n'


def test_a_forked_program_and_those_that_it_starts_ignore_the_signals_of_a_started_one(tmp_path: Path) -> None:
    """SIGPIPE among them: a rank that writes to a peer which was just killed gets an error, and lives."""
    (tmp_path / "says.py").write_text(SAYS_IGNORED)
    (tmp_path / "starts.py").write_text(STARTS_ANOTHER)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it
    started = subprocess.run([sys.executable, "-c", SAYS_IGNORED], capture_output=True, text=True, check=True)
    signal.signal(signal.SIGHUP, hangup)
    for script in ("says.py", "starts.py"):
        forked = programs.run([script], cwd=tmp_path)
        assert forked.returncode == 0, forked.stderr
        assert forked.stdout == started.stdout, script
