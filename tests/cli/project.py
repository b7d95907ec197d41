"""A user's folder with a model and data of his own, and `shoal` called in it as a person would."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from shoal.assembly.run import open_run
from shoal.cli.main import main
from shoal.errors import ShoalError
from shoal.launcher.environment import Place
from shoal.observe.events import Event, read_events
from shoal.runfile.load import load_run
from tests import programs
from tests.programs import Program
from tests.waiting import HANG_S, wait_until

OWN = '''
import json, os, time
import torch
from torch import nn

SAMPLES = 30
RANK = os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")
LAST_RANK = str(int(os.environ.get("WORLD_SIZE", "1")) - 1)


class Numbers:
    """Sample i is the number i; `slow` seconds to read, `broken` one of them is not a number, `hangs` never comes."""

    def __init__(self, slow=0.0, broken=-1, hangs=-1):
        self.slow, self.broken, self.hangs = slow, broken, hangs

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        time.sleep(self.slow if i != self.hangs else 3600)
        x = torch.tensor([float(i) / SAMPLES, 1.0])
        return (x * float("nan") if i == self.broken else x), torch.tensor(i % 3)


class Logging(nn.Module):
    """Learns the remainder by three, and writes down which numbers it was trained on in which step.

    The last rank does not get beyond step `hold_at` before there is a file `go`.
    """

    def __init__(self, width=8, pause=0.0, fail_at=-1, stop_at=-1, hold_at=-1):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 3))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.pause, self.fail_at, self.stop_at, self.hold_at = pause, fail_at, stop_at, hold_at

    def forward(self, x):
        if self.training:
            time.sleep(self.pause)
            self.step += 1
            ids = (x[:, 0] * SAMPLES).round().int().tolist()
            line = {"step": int(self.step), "rank": int(RANK), "ids": ids}
            with open("used.jsonl", "a") as file:
                file.write(json.dumps(line) + "\\n")
            if int(self.step) == self.fail_at and RANK == "1":
                raise ArithmeticError("a mistake in the user's own module")
            if int(self.step) == self.stop_at and RANK == "1":
                os.kill(os.getpid(), 19)
            while int(self.step) == self.hold_at and RANK == LAST_RANK and not os.path.exists("go"):
                time.sleep(0.01)
        return self.layers(x)


def model(**arguments):
    return Logging(**arguments)


def data(**arguments):
    return Numbers(**arguments), Numbers()


def not_a_model():
    return "hello"


def frozen():
    return Logging().requires_grad_(False)


def returns_class():
    return Logging


def scalar_loss():
    return nn.CrossEntropyLoss()
'''

RUN = """
[run]
name = "own"
steps = 9
[model]
kind = "python"
build = "own:model"
[data]
kind = "python"
build = "own:data"
[batch]
global_samples = 5
[optimizer]
kind = "adamw"
lr = 0.01
[checkpoint]
every_steps = 1
keep = 50
[observe]
report = false
"""


@dataclass(frozen=True)
class Project:
    """A folder with `own.py` and `run.toml`."""

    folder: Path

    def environ(self, **more: str) -> dict[str, str]:
        """The environment of a plain shell: nothing of a launcher in it."""
        launchers = ("SHOAL_", "SLURM_", "RANK", "WORLD_")
        kept = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not k.startswith(launchers)}
        return {**kept, "OMP_NUM_THREADS": "1", "SHOAL_CACHE": str(self.folder / "cache"), **more}

    def shoal(
        self, *arguments: str, timeout_s: float = HANG_S, address_space_bytes: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`shoal ...`, to its end, in an address space of that size."""
        if address_space_bytes is None:
            return self.python("-m", "shoal", *arguments, timeout_s=timeout_s)
        limit = ["prlimit", f"--as={address_space_bytes}"]
        return self._start_anew([*limit, sys.executable, "-m", "shoal", *arguments])

    def here(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`shoal ...` in this process: for commands that start no ranks."""
        out, err = io.StringIO(), io.StringIO()
        code: int | str | None = 0
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", ["shoal", *arguments])
            try:
                main()
            except SystemExit as end:
                code = end.code
        return subprocess.CompletedProcess(["shoal", *arguments], int(code or 0), out.getvalue(), err.getvalue())

    def refusal_of_a_rank(self, *overrides: str) -> ShoalError:
        """What `shoal train run.toml ...` raises in its one rank, played in this process, when it opens the run."""
        place = Place(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, launcher="shoal")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.syspath_prepend(self.folder)
            patch.delitem(sys.modules, "own", raising=False)
            try:
                with pytest.raises(ShoalError) as refusal:
                    open_run(load_run(Path("run.toml"), overrides), place, store=HashStore())
            finally:
                sys.modules.pop("own", None)
        return refusal.value

    def python(
        self, *arguments: str, text: str | None = None, timeout_s: float = HANG_S
    ) -> subprocess.CompletedProcess[str]:
        """`python ...`, to its end, with `text` on its standard input."""
        if text is not None or not programs.is_forked(arguments):
            return self._start_anew([sys.executable, *arguments], text)
        return programs.run(arguments, cwd=self.folder, env=self.environ(), timeout_s=timeout_s)

    def _start_anew(self, command: list[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environ(),
            input=text,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    def start(
        self, *arguments: str, output: str = "out.txt", module: tuple[str, ...] = ("-m", "shoal"), **environ: str
    ) -> Program:
        """`shoal ...`, or `python ...` without the module, in the background, its output in a file."""
        out = self.folder / output
        return programs.start(
            [*module, *arguments], cwd=self.folder, env=self.environ(**environ), stdout=out, stderr=out
        )

    def start_anew(self, *arguments: str) -> subprocess.Popen[bytes]:
        """`shoal ...` in the background in a new interpreter, which has all its imports before it."""
        command = [sys.executable, "-m", "shoal", *arguments]
        with open(self.folder / "out.txt", "wb") as out:
            return subprocess.Popen(command, cwd=self.folder, env=self.environ(), stdout=out, stderr=out)

    def start_rank(self, rank: int, *arguments: str, world_size: int = 2, port: int) -> Program:
        """`shoal ...` as one rank that was started by hand; its output in `rank-N.txt`."""
        place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ = {name: str(value) for name, value in (place | meeting).items()}
        return self.start(*arguments, output=f"rank-{rank}.txt", **environ)

    def said(self, output: str = "out.txt") -> str:
        """What a process in the background has written so far."""
        return (self.folder / output).read_text()

    def wait_for_text(self, pattern: str, output: str = "out.txt") -> None:
        """Until a process in the background has written what matches `pattern`."""
        wait_until(lambda: re.search(pattern, self.said(output)), lambda: f"not {pattern!r}, but: {self.said(output)}")

    def events(self, run: str = "runs/own", rank: int = 0) -> list[Event]:
        return read_events(self.folder / run, rank)

    def losses(self, run: str = "runs/own") -> dict[int, float]:
        """The last loss of each step."""
        found = {}
        for event in self.events(run):
            loss = event.get("loss/train")
            if loss is not None:
                found[event.step] = loss
        return found

    def manifest(self, run: str = "runs/own", step: int = 9) -> dict:
        return json.loads((self.folder / run / f"checkpoints/step-{step:08d}/manifest.json").read_text())

    def newest_checkpoint(self, run: str = "runs/own") -> int:
        """The step of the newest checkpoint that is committed; 0 where there is none."""
        found = (self.folder / run / "checkpoints").glob("step-*/manifest.json")
        return max((int(path.parent.name.removeprefix("step-")) for path in found), default=0)

    def wait_for_step(self, step: int, run: str = "runs/own") -> None:
        """Until the events hold `step`."""
        said = self.folder / "out.txt"
        wait_until(
            lambda: any(event.step >= step for event in self.events(run)),
            lambda: said.read_text() if said.exists() else f"step {step}",
        )


def project(folder: Path) -> Project:
    """The files of a user who has a model and data of his own."""
    (folder / "own.py").write_text(OWN)
    (folder / "run.toml").write_text(RUN)
    return Project(folder)


def ranks_of(launcher: Program | subprocess.Popen[str] | subprocess.Popen[bytes]) -> list[int]:
    """The pids of a launcher's children, in the order in which they were started."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(launcher.pid)], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in listed.stdout.split()]
