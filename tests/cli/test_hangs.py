"""Planted hangs in real runs of two ranks: each verdict names the rank to blame and the line of the user's code."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from shoal.experiments.rehearsal.faults import relay, why_no_relay
from shoal.experiments.rehearsal.two_hosts import on_two_hosts
from shoal.resilience.hang_verdict import HangVerdict
from tests.cli.project import OWN, RUN, Project
from tests.programs import ended
from tests.waiting import HANG_S

HANGS = '''

import ctypes, signal, threading
import shoal

STUCK = threading.Lock()
SEIZE, INTERRUPT = 0x4206, 0x4207  # of ptrace(2)


class Hanging(Logging):
    """Rank 1 hangs in its fourth step, in one of several ways."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        strikes = self.training and RANK == "1" and int(self.step) == 3
        if self.how == "skips" and self.training and not strikes:
            shoal.gather_samples(x)  # here: skips
        elif self.how == "gathers_less" and self.training:
            shoal.gather_samples(x[:, :1] if strikes else x)  # here: gathers_less
        elif strikes and self.how != "skips":
            getattr(self, self.how)()
        return super().forward(x)

    def writes_to_a_disk_that_hangs(self):
        open(open("disk").read(), "wb").write(b"x")  # here: writes_to_a_disk_that_hangs

    def stops_the_backends_threads(self):
        threads = [t.native_id for t in threading.enumerate() if t.name == "shoal-check"]
        assert threads, [t.name for t in threading.enumerate()]
        time.sleep(1)  # what the step has begun already is over
        rank, (seized, end) = os.getpid(), os.pipe()
        if os.fork() == 0:  # one that is traced and interrupted stands still, alone of its process
            libc = ctypes.CDLL(None)
            for thread in threads:
                assert libc.ptrace(SEIZE, thread, None, None) == 0
                assert libc.ptrace(INTERRUPT, thread, None, None) == 0
            os.write(end, b"x")
            while os.getppid() == rank:
                time.sleep(0.1)
            os._exit(0)
        os.read(seized, 1)

    def sleeps(self):
        time.sleep(600)  # here: sleeps

    def locks(self):
        STUCK.acquire()
        STUCK.acquire()  # here: locks

    def waits_for_a_thread(self):
        threading.Event().wait()  # here: waits_for_a_thread

    def spins(self):
        while True:
            time.monotonic()  # here: spins

    def reads_a_pipe(self):
        end, self.other = os.pipe()
        os.read(end, 1)  # here: reads_a_pipe

    def waits_for_a_child(self):
        import subprocess
        subprocess.run(["sleep", "600"])  # here: waits_for_a_child

    def stops(self):
        os.kill(os.getpid(), signal.SIGSTOP)


class Starving(Numbers):
    """The sample that rank 1 reads tenth, to train on it, never comes."""

    def __getitem__(self, i):
        if threading.current_thread().name != "shoal-samples":  # which compares the data of ranks before the first step
            self.read = getattr(self, "read", 0) + 1
            if RANK == "1" and self.read == 10:
                time.sleep(600)
        return super().__getitem__(i)


def hanging(how):
    return Hanging(how)


def starving():
    return Starving(), Numbers()
'''
WAYS = ("sleeps", "locks", "waits_for_a_thread", "spins", "reads_a_pipe", "waits_for_a_child", "stops")
OUTPUTS = ("out.txt", "other.txt")
"""Of the two hosts of a run."""
NO_DISK = "a file system of its own needs root, loop devices and fsfreeze"


def hung(folder: Path, *overrides: str) -> tuple[HangVerdict, str]:
    """The verdict on a run that hangs, and what the launcher said at its end."""
    (folder / "own.py").write_text(OWN + HANGS)
    (folder / "run.toml").write_text(RUN)
    keys = ("wire.report_hang_s=1.5", "wire.timeout_s=12", "checkpoint.every_steps=0")
    done = Project(folder).shoal("train", "run.toml", *keys, *overrides, timeout_s=180)
    assert done.returncode != 0
    return msgspec.json.decode((folder / "runs/own/hang.json").read_bytes(), type=HangVerdict), done.stderr


def line_of(how: str) -> int:
    """The number of the line at which a way hangs."""
    return next(n for n, line in enumerate((OWN + HANGS).splitlines(), start=1) if line.endswith(f"# here: {how}"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleeps", *(pytest.param(way, marks=pytest.mark.stress) for way in WAYS[1:])])
def test_a_rank_that_hangs_in_user_code_is_named_with_its_line(tmp_path: Path, how: str) -> None:
    """The rank, the file and the line; a rank that is stopped cannot say its line, and is named as silent."""
    verdict, said = hung(tmp_path, 'model.build="own:hanging"', f'model.arguments.how="{how}"')
    assert verdict.ranks == (1,)
    assert f"why it hung: {verdict.sentence}" in said
    if how == "stops":
        assert verdict.place is None
        assert "rank 1 did not report: killed, stopped, or cut off" in verdict.sentence
    else:
        assert verdict.place is not None
        assert (Path(verdict.place.file).name, verdict.place.line) == ("own.py", line_of(how))
        assert re.search(r"for it wait rank 0 in call \d+ \(all_reduce", verdict.sentence)


@pytest.mark.stress
def test_a_rank_whose_data_does_not_come_is_named(tmp_path: Path) -> None:
    """Its thread that trains waits for the feed."""
    verdict, _ = hung(tmp_path, 'data.build="own:starving"')
    assert verdict.ranks == (1,)
    assert "waits for data" in verdict.sentence


@pytest.mark.stress
@pytest.mark.skipif(why_no_relay() is not None, reason="needs root, iproute2 and /dev/net/tun")
def test_a_host_that_is_cut_off_is_named(tmp_path: Path) -> None:
    """Two hosts between which no packet passes any more, in silence: the side with the store names the other's rank,
    and the call in which it is waited for; both end with a sentence."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "run.toml").write_text(RUN)
    own = Project(tmp_path)
    train = ["-m", "shoal", "train", "run.toml", "wire.report_hang_s=1.5", "wire.timeout_s=12", "run.steps=1000",
             "checkpoint.every_steps=0", "model.arguments.pause=0.1"]  # fmt: skip
    processes: list[subprocess.Popen[bytes]] = []
    with (
        relay() as joined,
        on_two_hosts(
            joined, train, ranks=2, elastic=None, folder=tmp_path / "hosts", environ=own.environ()
        ) as commands,
        ended(processes),
    ):
        for number, one in enumerate(commands):
            with (tmp_path / OUTPUTS[number]).open("wb") as out:
                processes.append(
                    subprocess.Popen(one.command, cwd=tmp_path, env=dict(one.environ), stdout=out, stderr=out)
                )
        own.wait_for_step(3)
        joined.begin("partition")
        codes = [process.wait(HANG_S) for process in processes]
    assert codes == [3, 3]
    verdict = msgspec.json.decode((tmp_path / "runs/own/hang.json").read_bytes(), type=HangVerdict)
    assert verdict.ranks == (1,)
    assert "rank 1 did not report: killed, stopped, or cut off" in verdict.sentence


@pytest.mark.stress
def test_ranks_that_gather_other_shapes_are_named_with_their_lines(tmp_path: Path) -> None:
    """They are told at once, before anybody hangs."""
    (tmp_path / "own.py").write_text(OWN + HANGS)
    (tmp_path / "run.toml").write_text(RUN)
    keys = ('model.build="own:hanging"', 'model.arguments.how="gathers_less"', "checkpoint.every_steps=0")
    done = Project(tmp_path).shoal("train", "run.toml", *keys)
    assert done.returncode == 3
    line = f"own.py:{line_of('gathers_less')}"
    assert re.search(rf"rank 1 \(.*\) called all_gather of float32 \[\d+, 1\] at .*{line}", done.stderr)


@pytest.mark.stress
def test_a_rank_that_skips_a_collective_is_named(tmp_path: Path) -> None:
    """One of three goes on to a collective of another group."""
    keys = ('model.build="own:hanging"', 'model.arguments.how="skips"', "run.processes=3", "batch.global_samples=6")
    verdict, _ = hung(tmp_path, *keys)
    assert verdict.ranks == (1,)
    assert "rank 1 left out call" in verdict.sentence
    assert f"own.py:{line_of('skips')}" in verdict.sentence, "where the others wait for it"


@pytest.mark.stress
def test_a_thread_of_the_backend_that_stands_still_is_named(tmp_path: Path) -> None:
    """The thread that compares and makes collectives is stopped by ptrace; the rank itself goes on to its next call."""
    keys = ('model.arguments.how="stops_the_backends_threads"', "wire.check_collectives=true")
    verdict, _ = hung(tmp_path, 'model.build="own:hanging"', *keys)
    assert verdict.ranks == (1,)
    assert "the backend's thread of rank 1 has not taken call" in verdict.sentence


@pytest.mark.stress
def test_a_disk_that_hangs_is_named_with_the_line_that_writes(tmp_path: Path) -> None:
    """A frozen file system: no write to it returns, and no signal ends who waits for one."""
    with frozen_disk(tmp_path) as folder:
        (tmp_path / "disk").write_text(str(folder / "file"))
        verdict, _ = hung(tmp_path, 'model.build="own:hanging"', 'model.arguments.how="writes_to_a_disk_that_hangs"')
    assert verdict.ranks == (1,)
    assert verdict.place is not None
    assert verdict.place.line == line_of("writes_to_a_disk_that_hangs")


@contextmanager
def frozen_disk(folder: Path) -> Iterator[Path]:
    """A small ext4 that is frozen until the launcher has told of the hang: then the rank that waits can be ended."""
    image, mount = folder / "disk.img", folder / "mount"
    image.write_bytes(bytes(32 << 20))
    mount.mkdir()
    made = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, check=False).returncode == 0
    if not made or subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=False).returncode:
        pytest.skip(NO_DISK)
    try:
        subprocess.run(["fsfreeze", "-f", str(mount)], check=True)
        thaw = threading.Thread(target=_thaw_when, args=(folder / "runs/own/hang.json", mount))
        thaw.start()
        yield mount
        thaw.join()
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def _thaw_when(told: Path, mount: Path) -> None:
    deadline_s = time.monotonic() + 100
    while not told.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    time.sleep(15.0)  # until the rank that waits for it has given up, or the writer would go on
    subprocess.run(["fsfreeze", "-u", str(mount)], check=True)
