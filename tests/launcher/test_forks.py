"""Ranks that are forks of a script at its call: each is what a rank is that was started anew, or there is no fork."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shoal.launcher.forks import FORK
from tests.cli.warm_scripts import run_script
from tests.waiting import HANG_S, NEVER_S, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux")

HEAD = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from shoal.launcher.environment import place_from
from shoal.launcher.forks import forked_ranks, why_not
from shoal.launcher.spawn import run_ranks
here = Path(__file__).parent
"""
START = """
with forked_ranks(2) as forks:
    if place_from(os.environ) is None:
        code = run_ranks(["/bin/false"], processes=2, run_directory=here, environ={**os.environ, **forks})
        print("launcher", int(code), bool(forks), flush=True)
        sys.exit(int(code))
from shoal.launcher.orphans import die_with_parent
die_with_parent(os.environ)
place = place_from(os.environ)
rank = place.rank
"""


def launched(body: str, folder: Path, *, head: str = "") -> subprocess.Popen[str]:
    """A script that forks two ranks, each of which runs `body`; `head` comes before the forks."""
    (folder / "script.py").write_text(HEAD + head + START + body)
    environ = {name: value for name, value in os.environ.items() if name not in (FORK, "OMP_NUM_THREADS")}
    command = [sys.executable, str(folder / "script.py")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


FACTS = """
facts = {name: os.environ.get(name) for name in ("SHOAL_FORKS", "MALLOC_TRIM_THRESHOLD_")}
facts["place"] = [place.rank, place.world_size, place.local_rank]
facts["threads"] = torch.get_num_threads()
facts["leads its session"] = os.getsid(0) == int(os.readlink("/proc/self"))
facts["input"] = os.readlink("/proc/self/fd/0")
facts["descriptors"] = sorted(int(name) for name in os.listdir("/proc/self/fd"))[3:]
facts["store"] = os.environ.get("SHOAL_STORE_FD")
print("said by", rank)
(here / f"facts-{rank}.json").write_text(json.dumps(facts))
torch.set_num_threads(2)
assert (product @ product).isfinite().all()  # a fork of a process with OpenMP's threads would wait for them for ever
if rank == 1:
    print("rank 1 goes", flush=True)
    raise ValueError("the third weight is odd")
time.sleep(3600)
"""


def facts_of(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"facts-{rank}.json").read_text())


@pytest.mark.slow
def test_a_fork_has_the_place_streams_session_and_threads_of_a_rank(tmp_path: Path) -> None:
    """And its exit code and traceback, where it fails: the launcher ends the other one, and shows them."""
    head = "product = torch.ones(800, 800)\nproduct @ product\nsys.stdout.write('said before\\n')\n"
    process = launched(FACTS, tmp_path, head=head)
    said, error = process.communicate(timeout=HANG_S)
    assert process.returncode == 1, error
    assert said.splitlines() == ["said before", "said by 0", "launcher 1 True"]
    log = (tmp_path / "logs" / "rank-00001.log").read_text()
    assert log.splitlines()[:2] == ["said by 1", "rank 1 goes"], "in the log, and at once"
    assert 'raise ValueError("the third weight is odd")' in log
    assert "rank 1 of 2 failed" in error
    assert "ValueError: the third weight is odd" in error
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        facts = facts_of(tmp_path, rank)
        assert (facts["place"], facts["SHOAL_FORKS"]) == ([rank, 2, rank], None)
        assert (facts["threads"], facts["leads its session"], facts["input"]) == (threads, True, "/dev/null")
        assert int(facts["MALLOC_TRIM_THRESHOLD_"]) > 0
    # The launcher's pipe and the directory that is listed; rank 0 alone holds the store's socket too.
    assert facts_of(tmp_path, 1)["store"] is None
    assert int(facts_of(tmp_path, 0)["store"]) in facts_of(tmp_path, 0)["descriptors"]
    assert len(facts_of(tmp_path, 0)["descriptors"]) == 1 + len(facts_of(tmp_path, 1)["descriptors"]) == 3


WAITS = """
(here / f"partial-{rank}").write_text(os.readlink("/proc/self"))
(here / f"partial-{rank}").rename(here / f"pid-{rank}")
time.sleep(3600)
"""


def pids_in(folder: Path) -> list[int]:
    wait_until(lambda: all((folder / f"pid-{rank}").exists() for rank in range(2)))
    return [int((folder / f"pid-{rank}").read_text()) for rank in range(2)]


def runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def test_no_fork_outlives_a_killed_launcher(tmp_path: Path) -> None:
    """`kill -9` of the launcher, while a rank is stopped."""
    process = launched(WAITS, tmp_path)
    pids = pids_in(tmp_path)
    os.kill(pids[1], signal.SIGSTOP)
    process.kill()
    process.communicate(timeout=HANG_S)
    wait_until(lambda: not any(map(runs, pids)))


@pytest.mark.slow
def test_ctrl_c_reaches_forks_through_the_launcher(tmp_path: Path) -> None:
    """They lead sessions of their own, and one that a signal has killed is reported as such."""
    process = launched(WAITS, tmp_path)
    pids = pids_in(tmp_path)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert "SIGINT: stopped at once" in error
    assert not any(map(runs, pids))


NOBODY_BEGINS = """
with forked_ranks(2) as forks:
    assert forks and place_from(os.environ) is None
    waiting = [int(one.split(":")[0]) for one in forks["SHOAL_FORKS"].split()[1:]]
    if "die" in sys.argv:
        print(*waiting, flush=True)
        time.sleep(3600)
assert not any(os.path.exists(f"/proc/{pid}") for pid in waiting)
print("ended", flush=True)
"""


@pytest.mark.slow
def test_forks_that_nobody_needs_end(tmp_path: Path) -> None:
    """A run that was refused before its ranks started; a launcher that was killed before."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + NOBODY_BEGINS)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout == "ended\n", done.stderr
    with subprocess.Popen([sys.executable, str(script), "die"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        waiting = list(map(int, process.stdout.readline().split()))
        assert len(waiting) == 2
        process.kill()
    wait_until(lambda: not any(map(runs, waiting)))


REASONS = """
import mmap, socket, threading
assert why_not(os.environ) is None, why_not(os.environ)
said = {"never": why_not({"SHOAL_FORK": "never"})}
with open(__file__) as said_file:
    said["file"] = why_not(os.environ)
with open(__file__, "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
assert why_not(os.environ) is None, "a mapped file is read by address"
with socket.socket() as peer:
    said["socket"] = why_not(os.environ)
over = threading.Event()
thread = threading.Thread(target=over.wait)
thread.start()
said["thread"] = why_not(os.environ)
over.set()
thread.join()
(here / "beside.py").write_text("import os\\nplace = os.environ.get('LOCAL_RA" + "NK')\\n")
import beside
said["named"] = why_not(os.environ)
(here / "beside.py").write_text("first = accelerator.is_main_pro" + "cess\\n")
said["asked"] = why_not(os.environ)
print(json.dumps(said))
"""


@pytest.mark.slow
def test_nothing_is_forked_where_a_fork_could_differ(tmp_path: Path) -> None:
    """A file's place that forks would share, a connection, a thread, a script that asks which rank it is."""
    (tmp_path / "script.py").write_text(HEAD + REASONS)
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["never"] == "SHOAL_FORK is never"
    assert said["file"] == f"{tmp_path / 'script.py'} is open"
    assert said["socket"].startswith("socket:")
    assert said["thread"] == "other threads run"
    assert said["named"] == f"{tmp_path / 'beside.py'} names LOCAL_RANK"
    assert said["asked"] == f"{tmp_path / 'beside.py'} names is_main_process"


HIDDEN_THREAD = """
import ctypes
import numpy as np
np.ones((600, 600)) @ np.ones((600, 600))  # OpenBLAS ends its threads before a fork
library = ctypes.CDLL(None)
waiting = ctypes.c_ulong()
pause = ctypes.cast(library.pause, ctypes.c_void_p)
with forked_ranks(1) as forks:
    print(bool(forks), flush=True)
library.pthread_create(ctypes.byref(waiting), None, pause, None)
with forked_ranks(1) as forks:
    print(bool(forks), flush=True)
os._exit(0)
"""


def test_nothing_is_forked_where_a_library_has_a_thread(tmp_path: Path) -> None:
    """Of which Python does not know."""
    (tmp_path / "script.py").write_text(HEAD + HIDDEN_THREAD)
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout.splitlines() == ["True", "False"], done.stderr


OWN_LOOP = """
import shoal, torch
from torch import nn
torch.manual_seed(3)
x = torch.randn(400, 20)
train = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run = shoal.start({"run": {"name": "own"}}, model=model, optimizer=optimizer, data=train, batch_samples=40, epochs=1)
for x, y in run.batches():
    run.backward(nn.functional.cross_entropy(run.model(x), y))
    optimizer.step()
    optimizer.zero_grad()
print("epilogue of rank", run.rank)
"""


@pytest.mark.slow
def test_forked_ranks_train_to_the_same_bits(tmp_path: Path) -> None:
    """As two that run the script each from its beginning; what follows the loop runs in each of them, once."""
    script = tmp_path / "own.py"
    script.write_text(OWN_LOOP)
    environ = {name: value for name, value in os.environ.items() if name != FORK}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=NEVER_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epilogue of rank 0") == 1
    assert (tmp_path / "runs/own/logs/rank-00001.log").read_text().count("epilogue of rank 1") == 1
    anew = tmp_path / "anew"
    anew.mkdir()
    assert run_script(script, anew, world=2) == [0, 0]
    objects = [sorted(p.name for p in (at / "runs/own/checkpoints/objects").rglob("*") if p.is_file())
               for at in (tmp_path, anew)]  # fmt: skip
    assert objects[0]
    assert objects[0] == objects[1]
