"""A verb that is done ends its process with its code, whatever threads are doing then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, sys, threading
import torch.distributed as dist
from shoal.__main__ import main

store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)

def ask():
    while True:
        store.check(["nothing"])  # in C++, without the interpreter's lock

for _ in range(4):
    threading.Thread(target=ask, daemon=True).start()
atexit.register(print, "registered for the end")
sys.argv = ["shoal", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
def test_threads_inside_cpp_do_not_take_the_process_along(tmp_path: Path) -> None:
    """The interpreter's teardown would: "terminate called without an active exception", and SIGABRT."""
    (tmp_path / "program.py").write_text(PROGRAM)
    for arguments, code in ((["--version"], 0), (["plan", "nowhere.toml"], 2)):
        command = [sys.executable, "program.py", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
        assert (done.returncode, "terminate" in done.stderr) == (code, False)
        assert "registered for the end" in done.stdout
