"""Threads that are in C++ when the interpreter ends are waited for, and for so long at most."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

PROGRAM = """
import time, torch
from shoal.comm import at_work
from shoal.comm.worker import Worker
at_work.PATIENCE_S = 1.0
done = torch.futures.Future()
done.then(lambda _: [time.sleep({nap}) for _ in range({naps})])
worker = Worker(lambda: done.set_result(None), name="test")
del worker
time.sleep(0.1)
print("end", flush=True)
"""


@pytest.mark.parametrize(("nap", "naps"), [(0.001, 500), (30.0, 1)], ids=["at work", "stuck"])
def test_the_end_waits_for_a_thread_in_cpp(nap: float, naps: int) -> None:
    """It would be unwound there, which aborts the process; one that is stuck keeps nobody for long."""
    program = PROGRAM.format(nap=nap, naps=naps)
    done = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    assert done.stdout.readline() == "end\n"
    begin_s = time.monotonic()
    assert done.wait(20) == 0
    assert time.monotonic() - begin_s < 6.0


def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    program = "import os, time\nfrom shoal.comm.at_work import AT_WORK\nAT_WORK.__enter__()\n"
    program += "pid = os.fork()\nbegin_s = time.monotonic()\nif pid == 0: raise SystemExit(0)\n"
    program += "os.waitpid(pid, 0)\nprint(time.monotonic() - begin_s < 1.0)\nAT_WORK.__exit__()\n"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "True\n"


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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "this group is closed\n")
