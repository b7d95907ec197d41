"""Planted hangs in real runs of two ranks: each verdict names the rank to blame and the line of the user's code."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from shoal.resilience.hang_verdict import HangVerdict
from tests.cli.project import OWN, RUN, Project

HANGS = '''

import signal, threading
import torch.distributed as dist

STUCK = threading.Lock()


class Hanging(Logging):
    """Rank 1 hangs in its fourth step, in one of several ways."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        if self.training and RANK == "1" and int(self.step) == 3:
            getattr(self, self.how)()
        return super().forward(x)

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
    """The sample that is read tenth on rank 1 never comes."""

    def __getitem__(self, i):
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


def hung(folder: Path, *overrides: str) -> tuple[HangVerdict, str]:
    """The verdict on a run that hangs, and what the launcher said at its end."""
    (folder / "own.py").write_text(OWN + HANGS)
    (folder / "run.toml").write_text(RUN)
    keys = ("wire.report_hang_s=1.5", "wire.timeout_s=12", "checkpoint.every_steps=0")
    done = Project(folder).shoal("train", "run.toml", *keys, *overrides, timeout_s=110.0)
    assert done.returncode != 0
    return msgspec.json.decode((folder / "runs/own/hang.json").read_bytes(), type=HangVerdict), done.stderr


def line_of(how: str) -> int:
    """The number of the line at which a way hangs."""
    return next(n for n, line in enumerate((OWN + HANGS).splitlines(), start=1) if line.endswith(f"# here: {how}"))


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
