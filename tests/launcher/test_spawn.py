"""A launcher and its ranks, as real processes: who fails, who is named, who survives."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from shoal.errors import EnvironmentFault
from shoal.launcher.allocator import GLIBC_BYTES
from shoal.launcher.failure import FAILURE_FOLDER
from shoal.launcher.rank_process import start
from shoal.launcher.signals import SAME_REQUEST_S
from shoal.launcher.spawn import _pass_on, conclude, listening, run_ranks
from shoal.launcher.supervision import Patience, StartOver, Supervision, Watch, has_arrived
from tests.waiting import HANG_S, NEVER_S, wait_until

WAIT = "ready(); wait_for_ever()"


def test_ranks_that_finish_make_a_launcher_that_succeeds(launch):
    """All ranks done: exit 0, nothing said, and every rank knew its place."""
    launched = launch("(here / f'place-{rank}').write_text(f'{place.rank} {place.world_size} {place.local_rank}')", 3)
    assert launched.end() == (0, "")
    assert [(launched.directory / f"place-{rank}").read_text() for rank in range(3)] == ["0 3 0", "1 3 1", "2 3 2"]


def test_an_error_is_shown_whole_and_peers_in_a_line(launch):
    """The failed rank's traceback comes first; a peer that waits in vain is ended, and is one line."""
    body = """
def inner():
    raise ValueError("the third weight is odd")
if rank == 1:
    inner()
wait_for_ever()
"""
    code, said = launch(body).end()
    assert code == 1
    assert said.startswith("rank 1 of 2 failed (host ")
    assert "in inner" in said
    assert "ValueError: the third weight is odd" in said
    assert said.splitlines()[-1].startswith("rank 0 (pid ")
    assert "ended by the launcher" in said.splitlines()[-1]


@pytest.mark.slow
def test_an_answer_has_no_traceback_and_its_own_code(launch):
    """What Shoal raises on purpose is shown as its sentence, and gives the launcher's exit code."""
    code, said = launch("if rank == 0: raise errors.Diverged('loss is nan')\nwait_for_ever()").end()
    assert code == 4
    assert "loss is nan" in said
    assert "Traceback" not in said


def test_a_secondary_error_that_came_first_is_not_the_cause(launch):
    """A rank that lost its peer may report before the peer does: the peer is still shown first, with its code."""
    body = """
if rank == 0:
    raise errors.CollectiveError("all_reduce lost rank 1")
until(lambda: any(Path(os.environ["SHOAL_FAILURE_FOLDER"]).glob("rank-0.json")))
raise errors.DataError("sample 7 is empty")
"""
    code, said = launch(body, failure_s=HANG_S).end()
    assert code == 2
    assert said.splitlines()[1] == "sample 7 is empty"
    assert said.splitlines()[2].endswith("lost another rank")


@pytest.mark.slow
def test_a_killed_rank_is_noticed_and_named(launch):
    """kill -9 of a rank whose peer would never end: the launcher ends with 128 + 9, naming rank and signal."""
    launched = launch(WAIT)
    pids = launched.rank_pids()
    os.kill(pids[1], signal.SIGKILL)
    code, said = launched.end()
    assert code == 137
    assert f"rank 1 of 2 failed (host {os.uname().nodename}, pid {pids[1]}, killed by SIGKILL)" in said


def test_a_rank_that_dies_without_a_record_shows_the_end_of_its_log(launch):
    """A death below Python leaves no record: the last lines of the rank's log stand in for it."""
    code, said = launch("print('about to fall'); os._exit(9) if rank == 1 else wait_for_ever()").end()
    assert code == 9
    assert "about to fall" in said


def test_a_stopped_rank_is_named_and_killed(launch):
    """Rank 0 is stopped, its peer gives up: the report leads with the stopped one, which does not survive."""
    launched = launch("ready(); until((here / 'go').exists)\nraise errors.CollectiveError('rank 0 is late')")
    pids = launched.rank_pids()
    os.kill(pids[0], signal.SIGSTOP)
    (launched.directory / "go").touch()
    code, said = launched.end()
    assert code == 3
    assert said.startswith(f"rank 0 (pid {pids[0]}) is stopped (SIGSTOP)")
    assert launched.survivors(pids) == []


def test_ranks_that_hang_while_they_start_are_ended_and_named(launch):
    """Nobody waits for them, as all hang: exit 3 with a sentence."""
    launched = launch("wait_for_ever()", start_s=0.2)
    code, said = launched.end()
    assert code == 3
    assert "had not started after 0.2 s (run.start_timeout_s): " in said


HANGS = """
import sys, time
from pathlib import Path
here = Path(sys.argv[1])
(here / "ready").touch()
time.sleep(3600)  # as an import that waits for a file system
"""
ARRIVES = """
import os, sys, time
from pathlib import Path
from shoal.launcher.supervision import say_arrived
say_arrived(os.environ)
time.sleep(3600)
"""


def test_the_rank_that_hangs_while_it_starts_is_named_with_its_line(tmp_path: Path) -> None:
    """The other one has started: it is ended, and not to blame."""
    (tmp_path / "arrives.py").write_text(ARRIVES)
    (tmp_path / "hangs.py").write_text(HANGS)
    watch = Watch(Supervision({0, 1}, Patience(failure_s=0.1, terminate_s=0.1, start_s=NEVER_S)), tmp_path)
    for rank, name in enumerate(("arrives.py", "hangs.py")):
        environ = {**os.environ, "RANK": str(rank), "PYTHONFAULTHANDLER": "1", FAILURE_FOLDER: str(tmp_path)}
        command = [sys.executable, str(tmp_path / name), str(tmp_path)]
        watch.ranks.append(start(command, rank, environ=environ, run_directory=tmp_path, pass_fds=()))
    wait_until(lambda: has_arrived(tmp_path, watch.ranks[0]) and (tmp_path / "ready").exists())
    watch.events.put(StartOver())
    watch.until_all_left()
    code = conclude(watch, tmp_path, 2)
    assert (code, code.rank) == (3, 1)
    assert f"rank 1 had not started after {NEVER_S:g} s (run.start_timeout_s): it was at " in code.sentence
    assert f"{tmp_path}/hangs.py:6; look what it waits for there" in code.sentence


def test_no_rank_outlives_a_killed_launcher(launch):
    """kill -9 of the launcher ends every rank, even one that is stopped."""
    launched = launch(WAIT)
    pids = launched.rank_pids()
    os.kill(pids[1], signal.SIGSTOP)
    launched.process.send_signal(signal.SIGKILL)
    launched.wait_for_ends(pids)


def test_what_a_rank_started_is_ended_with_it(launch):
    """A failed rank's own children (a data loader, say) do not outlive the run."""
    body = """
import subprocess
child = subprocess.Popen(["sleep", "infinity"])
(here / f"child-{rank}").write_text(str(child.pid))
ready()
until(lambda: len(list(here.glob("child-*"))) == 2)  # a failed rank ends the other
os._exit(1)
"""
    launched = launch(body)
    assert launched.end()[0] == 1
    pids = [int((launched.directory / f"child-{rank}").read_text()) for rank in range(2)]
    launched.wait_for_ends(pids)


STOPPING = """
with StopRequest() as stop:
    ready()
    until(lambda: stop.requested)
    time.sleep(0.5)
raise errors.Stopped("saved step 3")
"""


def test_ctrl_c_lets_the_ranks_save(launch):
    """One request to the launcher, even delivered as two signals at once: ranks finish, the launcher exits 75."""
    launched = launch(STOPPING)
    launched.rank_pids()
    launched.send_at_once(signal.SIGTERM, signal.SIGINT)
    code, said = launched.end()
    assert code == 75
    assert "a second one stops at once" in said
    assert "stopped after a good checkpoint" in said


def test_a_signal_that_another_thread_is_given_is_an_event():
    """As the kernel may do where two come at once: it interrupts no wait of the main thread."""
    events, over = queue.SimpleQueue(), threading.Event()
    other = threading.Thread(target=over.wait, daemon=True)
    other.start()
    with listening(events):
        assert other.ident is not None
        threading.Timer(0.2, signal.pthread_kill, (other.ident, signal.SIGTERM)).start()
        assert events.get(timeout=HANG_S) is signal.SIGTERM
    over.set()
    other.join()


def test_signals_that_come_at_once_are_one_request_however_late_each_is_heard_of():
    """Of a launcher that hears of the second a second later, it would be another request: to end at once."""
    events, (read_end, write_end) = queue.SimpleQueue(), os.pipe()
    os.write(write_end, bytes((signal.SIGTERM, signal.SIGINT)))
    os.close(write_end)
    _pass_on(read_end, frozenset((signal.SIGTERM, signal.SIGINT)), events)
    os.close(read_end)
    assert events.get_nowait() is signal.SIGTERM
    assert events.empty()


def test_two_requests_are_two_though_a_busy_launcher_hears_of_both_at_once():
    """Half a second apart when they came."""
    events, (read_end, write_end) = queue.SimpleQueue(), os.pipe()
    passing = threading.Thread(target=_pass_on, args=(read_end, frozenset((signal.SIGINT,)), events))
    passing.start()
    for heard in range(2):
        os.write(write_end, bytes((signal.SIGINT,)))
        wait_until(lambda heard=heard: events.qsize() > heard)
        time.sleep(1.5 * SAME_REQUEST_S)
    os.close(write_end)
    passing.join()
    os.close(read_end)
    run = Supervision({0})
    assert [run.on_signal(events.get_nowait()) for _ in range(2)] == [[(0, signal.SIGTERM)], [(0, signal.SIGKILL)]]


def test_ctrl_c_twice_stops_at_once(launch):
    """A second SIGINT, later: every rank is killed, whatever it does, and the exit code is 128 + 2."""
    launched = launch("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT)
    pids = launched.rank_pids()
    launched.interrupt()
    time.sleep(2 * SAME_REQUEST_S)  # the next signal is another request
    assert launched.survivors(pids) == pids, "the first request must not kill"
    launched.process.send_signal(signal.SIGINT)
    code, said = launched.end()
    assert code == 130
    assert "failed" not in said
    assert launched.survivors(pids) == []


@pytest.mark.slow
def test_a_rank_that_leaves_with_75_waits_for_the_others_to_save(launch):
    """Exit 75 gives peers the long patience, not the short one of a failure; a peer's own 0 or 75 keeps it 75."""
    body = """
ready()
if rank == 0:
    raise errors.Stopped("saved")
until((here / "ready-0").exists)
first = (here / "ready-0").read_text()
until(lambda: not Path(f"/proc/{first}").exists())
time.sleep(1.2)
(here / "saved-too").touch()
"""
    launched = launch(body)  # which has a rank of less patience ended after 0.8 s
    assert launched.end()[0] == 75
    assert (launched.directory / "saved-too").exists()


def test_a_rank_that_loses_one_that_a_signal_ended_is_no_failure(launch):
    """Ctrl-C while ranks start: rank 1 is ended by it, rank 0 loses it in a collective; still 130, and one sentence."""
    body = """
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    WAIT
with StopRequest() as stop:
    ready()
    until(lambda: stop.requested)
    raise errors.CollectiveError("all_reduce lost rank 1")
"""
    launched = launch(body.replace("WAIT", WAIT), failure_s=HANG_S)
    launched.rank_pids()
    launched.interrupt()
    code, said = launched.end()
    assert code == 130
    assert said.splitlines()[1:] == ["SIGINT: stopped at once; the next start resumes from the newest checkpoint"]


def test_every_rank_keeps_the_pages_it_frees(launch):
    """The ranks have glibc's thresholds in their environment, before their first allocation."""
    launched = launch("(here / f'malloc-{rank}').write_text(os.environ['MALLOC_TRIM_THRESHOLD_'])")
    assert launched.end()[0] == 0
    assert min(int((launched.directory / f"malloc-{rank}").read_text()) for rank in range(2)) > GLIBC_BYTES


def test_a_killed_launcher_leaves_a_folder_that_the_next_start_removes(launch, tmp_path, monkeypatch):
    """kill -9 of the launcher leaves its temporary folder; a start beside a living launcher removes that one alone."""
    folders = tmp_path / "tmp"
    folders.mkdir()
    monkeypatch.setenv("TMPDIR", str(folders))
    killed = launch(WAIT)
    killed.rank_pids()
    (left,) = folders.iterdir()
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    assert list(folders.iterdir()) == [left]
    for ready in tmp_path.glob("ready-*"):
        ready.unlink()
    living = launch(WAIT)
    living.rank_pids()
    (own,) = folders.iterdir()
    assert own != left
    assert launch("pass").end()[0] == 0
    assert list(folders.iterdir()) == [own]


def test_a_failure_while_others_save_is_a_failure(launch):
    """75 needs every rank to leave well: one that fails while saving gives its own code."""
    body = "raise errors.Stopped('saved') if rank == 0 else OSError('disk full')"
    code, said = launch(body, failure_s=HANG_S).end()
    assert code == 1
    assert "disk full" in said


def test_the_store_socket_is_on_loopback_and_in_rank_zero_only(launch):
    """Rank 0 gets a socket that listens on 127.0.0.1 at MASTER_PORT; no other rank holds it."""
    body = """
import socket
fd = os.environ.get("SHOAL_STORE_FD")
name = socket.socket(fileno=os.dup(int(fd))).getsockname() if fd else None
(here / f"name-{rank}").write_text(repr((name, os.environ["MASTER_PORT"])))
"""
    launched = launch(body)
    assert launched.end() == (0, "")
    (first, port), (second, _) = (eval((launched.directory / f"name-{rank}").read_text()) for rank in range(2))
    assert first == ("127.0.0.1", int(port))
    assert second is None


def test_a_command_that_cannot_start_is_a_fault_of_the_environment(tmp_path):
    """A program that is not there is one sentence, not a hang with half the ranks."""
    with pytest.raises(EnvironmentFault, match="rank 0 could not be started"):
        run_ranks([str(tmp_path / "absent")], processes=2, run_directory=tmp_path, environ=os.environ)
