"""Threads that are in C++ when the interpreter ends are waited for, and for so long at most."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.waiting import HANG_S, NEVER_S

PROGRAM = """
import threading, time, torch
from shoal.comm import board as at_work
from shoal.comm.worker import Worker
at_work.PATIENCE_S = {patience}
begun, done = threading.Event(), torch.futures.Future()
done.then(lambda _: [begun.set(), *(time.sleep({nap}) for _ in range({naps}))])
worker = Worker(lambda: done.set_result(None), name="test")
del worker
begun.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patience", "nap", "naps"), [(NEVER_S, 0.001, 500), (0.5, NEVER_S, 1)], ids=["at work", "stuck"]
)
def test_the_end_waits_for_a_thread_in_cpp(patience: float, nap: float, naps: int) -> None:
    """It would be unwound there, which aborts the process; one that is stuck keeps nobody beyond the patience."""
    program = PROGRAM.format(patience=patience, nap=nap, naps=naps)
    assert subprocess.run([sys.executable, "-c", program], timeout=HANG_S, check=False).returncode == 0


@pytest.mark.slow
def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    program = f"import os\nfrom shoal.comm import board as at_work\nat_work.PATIENCE_S = {NEVER_S}\n"
    program += "at_work.AT_WORK.__enter__()\npid = os.fork()\nif pid == 0: raise SystemExit(0)\n"
    program += "print(os.waitpid(pid, 0)[1])\nat_work.AT_WORK.__exit__()\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout == "0\n"


@pytest.mark.slow
def test_what_comes_after_the_end_is_refused_and_holds_up_nobody() -> None:
    """Exit handlers that were there before Shoal run after its own."""
    program = """
import atexit
def late():
    try:
        worker.do(lambda: None, what="a call")
    except RuntimeError as error:
        print(error)
    worker.close()
atexit.register(late)
from shoal.comm.worker import Worker
worker = Worker(lambda: None, name="test")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (0, "this group is closed\n")
