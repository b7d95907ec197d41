"""Elastic runs for tests: a small GPT at a pace that leaves time for what happens to it, and what became of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.cli.project import Project, ranks_of
from tests.programs import Program, environ_of
from tests.waiting import HANG_S

OWN = '''
import time
from pathlib import Path


def pace(record):
    """Steps take as long as the file `pace` says, in seconds."""
    time.sleep(float(Path("pace").read_text()))
'''

RUN = """
[run]
name = "own"
steps = 200
[model]
kind = "gpt"
layers = 4
width = 32
heads = 2
[data]
kind = "text"
files = ["corpus.txt"]
held_out_fraction = 0
[batch]
global_samples = 12
sequence = 32
[optimizer]
kind = "sgd"
lr = 0.1
momentum = 0.9
[precision]
kind = "float64"
[checkpoint]
every_steps = 50
[observe]
report = false
sample_bytes = 0
[hooks]
after_step = ["own:pace"]
"""

ELASTIC = """
[elastic]
min = 1
max = 2
silence_s = 10
accept_s = 40
wait_s = 60
fingerprint_every_steps = 3
"""


def gpt_project(folder: Path, more: str = "", elastic: str = ELASTIC) -> Project:
    """`run.toml` has the tables of `more` and of `elastic`; `fixed.toml` neither, and so trains one process alone."""
    (folder / "own.py").write_text(OWN)
    (folder / "pace").write_text("0")
    (folder / "corpus.txt").write_text(
        "\n".join(f"{n} and {n * n % 1009} make {n + n * n % 1009}" for n in range(9000))
    )
    (folder / "fixed.toml").write_text(RUN)
    (folder / "run.toml").write_text(RUN + more + elastic)
    return Project(folder)


def set_pace(own: Project, pause_s: float) -> None:
    """From the next step on, every one pauses for so long; a reader finds a whole number at any time."""
    (own.folder / "next-pace").write_text(str(pause_s))
    (own.folder / "next-pace").replace(own.folder / "pace")


def start(own: Project, *overrides: str, step: int = 3) -> Program:
    """The run, at a pace that leaves time for what happens to it, once it has taken `step`."""
    set_pace(own, 0.2)
    running = own.start("train", "run.toml", *overrides)
    own.wait_for_step(step)
    return running


def to_the_end(own: Project, running: Program) -> int:
    """The exit code of the run, which needs to wait for nothing any more."""
    set_pace(own, 0.0)
    return running.wait(HANG_S)


def wait_for_join(own: Project, pattern: str, *, output: str = "out.txt") -> None:
    """Until a replica has joined, as `pattern` says; the others hardly get on meanwhile, so that the run lasts."""
    set_pace(own, 1.0)
    own.wait_for_text(pattern, output)
    set_pace(own, 0.2)


def replicas_of(launcher: Program | subprocess.Popen[str]) -> dict[int, list[int]]:
    """The pids of a launcher's replicas, in the order of their ranks, by slot."""
    found: dict[int, dict[int, int]] = {}
    for pid in ranks_of(launcher):
        environ = environ_of(pid)
        if "SHOAL_REPLICA" in environ:
            slot = int(environ["SHOAL_REPLICA"].split("-")[1])
            found.setdefault(slot, {})[int(environ["SHOAL_REPLICA_RANK"])] = pid
    return {slot: [pids[rank] for rank in sorted(pids)] for slot, pids in found.items()}


def rank_zero(pids: Iterable[int]) -> int:
    """The process of rank 0."""
    return pid_of_rank(pids, 0)


def pid_of_rank(pids: Iterable[int], rank: int) -> int:
    """The process that writes the events of `rank`; slots come in any order, so slot 0 may have other ranks."""
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if Path(os.readlink(fd)).name == f"rank-{rank:05}.jsonl":
                    return pid
    raise AssertionError(f"no replica writes the events of rank {rank}")


def undisturbed(own: Project, *overrides: str) -> dict[int, float]:
    """The losses of the same run that nothing happens to; by default on one process."""
    done = own.shoal("train", "fixed.toml", "run.directory=plain", *(overrides or ("run.processes=1",)))
    assert done.returncode == 0, done.stderr
    return own.losses("plain")


def memberships(own: Project) -> list[int]:
    """How many replicas trained, generation after generation."""
    facts = json.loads((own.folder / "runs/own/facts.json").read_text())
    return [change["replicas"] for change in facts["membership"]]
