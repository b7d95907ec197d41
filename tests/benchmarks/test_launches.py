"""A step on a simulated GPU: what it launches, copies and waits for, and that it computes what a CPU does.

The simulated device is compiled and loaded before PyTorch, so that every check is a program of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import HANG_S

ROOT = Path(__file__).parents[2]
ONE_RANK = ("train", "float32", "float16", "masters", "recompute", "loss in chunks", "dropout", "averages")
SEVERAL = ("replicated", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, masters", "tensor", "low-rank gradients")
SEVERAL += ("alternating gradients", "frequencies of gradients", "ZeRO-3, tensor", "eight ranks")
IN_PARTS = ("context", "ZeRO-2, context")
HOME_MOVES = 4
"""Of the optimizer's state of two parts: a lane waits for its own copies."""
WAITS = {
    "own loop": 2,
    "Muon": 1,
    "SOAP": 1,
    "Shampoo": 1,
    "Adafactor": 2,
    "LAMB": 2,
    "LAMB, ZeRO-1": 2,
    "Adafactor, ZeRO-1": 2,
    "pipeline of four": 1,
    "optimizer on the host": HOME_MOVES,
    "schedule-free": 1,
    "1-bit Adam": 1,
    "1-bit LAMB": 1,
}
"""How often the host waits in a step whose optimizer does not take the vote on the device: for the vote, and for the
norm that a loop's clip returns, or those of the parameters; in a pipeline for the form of what comes."""
MOST_COPIES, MORE_OF_RANKS, MORE_IN_PARTS = 4, 2, 2
"""Inputs, targets and positions to the device; norm and loss back. Ranks also send what they count, and read the sum;
a part of each sample leaves the whole ones' pinned memory."""
EXTRA_LAUNCHES = 12
"""Of `shoal train` beside a plain loop: the weights and their sum, the vote, a group of parameters without decay."""
ROUNDING = {"float32": 1e-5, "other": 2e-3}
"""Of losses: sums in another order; in bfloat16, operators that autocast takes in another type on GPUs than on CPUs."""

STEPS = 3
"""That a row counts."""

Row = dict[str, Any]
pytestmark = pytest.mark.slow


def program(module: str, *given: str, paths: Sequence[Path] = ()) -> str:
    """What a module prints that runs as a program with a simulated GPU."""
    command = [sys.executable, "-m", "benchmarks.simulated_cuda", module, *given]
    places = ":".join(map(str, (ROOT, *paths)))
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def rows_of(cases: Sequence[str], *, module: str = "benchmarks.launches", paths: Sequence[Path] = ()) -> list[Row]:
    """The rows of `cases`, with a small model."""
    return json.loads(program(module, "--json", "--layers", "2", "--cases", ";".join(cases), paths=paths))


class Rows:
    """Those of each case, one a rank; the cases of a program are measured when one of them is asked for."""

    PROGRAMS = (("plain", *ONE_RANK), (*SEVERAL, *IN_PARTS), tuple(WAITS))

    def __init__(self) -> None:
        self._found: dict[str, list[Row]] = defaultdict(list)

    def __getitem__(self, case: str) -> list[Row]:
        if case not in self._found:
            (cases,) = [each for each in self.PROGRAMS if case in each]
            for row in rows_of(cases):
                assert row["failed"] == "", row["case"]
                self._found[row["case"]].append(row)
        return self._found[case]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows()


def planted(folder: Path, text: str) -> str:
    """The name of a module with `text`, which is run before the benchmark's command."""
    end = "\nfrom benchmarks.command import run\nfrom benchmarks.launches import launches\nrun(launches)\n"
    (folder / "planted_fault.py").write_text(text + end)
    return "planted_fault"


@pytest.mark.parametrize("case", [*ONE_RANK, *SEVERAL, *IN_PARTS])
def test_a_step_never_waits_and_copies_next_to_nothing(case: str, rows: Rows) -> None:
    """And streams are in order, and losses are those of a CPU."""
    most = MOST_COPIES + MORE_OF_RANKS * (case not in ONE_RANK) + MORE_IN_PARTS * (case in IN_PARTS)
    for row in rows[case]:
        assert row["waits"] == {}
        assert row["races"] == {}
        assert row["copies"] <= most, row["copied"]
        assert row["off"] <= ROUNDING.get(case, ROUNDING["other"])


@pytest.mark.parametrize("case", WAITS)
def test_a_step_waits_for_the_vote_and_not_for_each_matrix(case: str, rows: Rows) -> None:
    for row in rows[case]:
        assert sum(row["waits"].values()) <= STEPS * WAITS[case], row["waits"]
        assert row["races"] == {}
        assert row["off"] <= ROUNDING["other"]


def test_a_step_launches_little_more_than_a_plain_loop(rows: Rows) -> None:
    """Each operator more is time that a small model does not hide."""
    ((plain,), (train,), (own,)) = (rows[case] for case in ("plain", "train", "own loop"))
    assert train["launched"] <= plain["launched"] + EXTRA_LAUNCHES, train["launches"]
    assert own["launched"] <= plain["launched"] + EXTRA_LAUNCHES, own["launches"]


def test_a_read_that_was_planted_shows_with_its_line(tmp_path: Path) -> None:
    fault = planted(
        tmp_path,
        "from shoal.engine.tally import DeviceVote\n"
        "divisor = DeviceVote.divisor\n"
        "def read(self, scale, limits):\n"
        "    self._norm.item()\n"
        "    return divisor(self, scale, limits)\n"
        "DeviceVote.divisor = read\n",
    )
    (row,) = rows_of(["train"], module=fault, paths=[tmp_path])
    assert sum(row["waits"].values()) == STEPS
    assert "planted_fault.py:4" in next(iter(row["waits"]))


def test_a_collective_that_nobody_waits_for_shows_as_a_race(tmp_path: Path) -> None:
    fault = planted(
        tmp_path,
        "from benchmarks.launches import SimulatedWork\n"
        "def wait(self, *_):\n"
        "    self._work.result()\n"
        "    return True\n"
        "SimulatedWork.wait = wait\n",
    )
    rows = rows_of(["replicated"], module=fault, paths=[tmp_path])
    assert len(rows) == 2
    assert all("reads what was written by allreduce" in " ".join(row["races"]) for row in rows)


DEVICE = """
import faulthandler, os
from threading import Thread

import torch
from benchmarks.simulated_cuda import Watch

def seen(work):
    with Watch() as watch:
        work()
    return watch

x, side = torch.ones(4, device="cuda"), torch.Stream("cuda")
pinned = torch.empty(4, pin_memory=True)

def unordered():
    x.mul_(2)
    with side:
        x + 1

def ordered():
    x.mul_(2)
    side.wait_event(torch.accelerator.current_stream().record_event())
    with side:
        x + 1
    torch.accelerator.current_stream().wait_event(side.record_event())
    x.mul_(2)

def by_value():
    x * number
    with side:
        number.copy_(one, non_blocking=True)

number, one = torch.ones(()), torch.ones((), device="cuda")
torch.accelerator.synchronize()
assert not seen(by_value).races
assert seen(unordered).races
torch.accelerator.synchronize()
assert not seen(ordered).races
assert seen(lambda: torch.tensor([1.0], device="cuda")).waits
event = torch.accelerator.current_stream().record_event()
x.mul_(2)
assert not seen(event.synchronize).waits
assert seen(torch.accelerator.current_stream().record_event().synchronize).waits
assert seen(lambda: x.to("cpu")).waits and seen(lambda: bool(x.any())).waits and seen(lambda: x.nonzero()).waits
assert not seen(lambda: pinned.copy_(x, non_blocking=True)).waits
assert seen(lambda: torch.empty(4).copy_(x, non_blocking=True)).waits
assert seen(lambda: x.view(2, 2).t()).launched == 0 and seen(lambda: x + x).launched == 1
assert seen(lambda: torch._foreach_add_([x, x.clone()], 1)).launches["_foreach_add_"] == 1
for mixed in (lambda: x + torch.ones(4), lambda: torch.cat([x, torch.ones(4)])):
    try:
        mixed()
    except RuntimeError as error:
        assert "cpu" in str(error).lower()
    else:
        raise AssertionError("a tensor of the CPU in an operator of the device")
w = torch.ones(4, device="cuda", requires_grad=True)
with torch.autocast("cuda", dtype=torch.bfloat16):
    product = w.view(2, 2) @ x.view(2, 2)
product.sum().backward()
assert product.dtype == torch.bfloat16 and w.grad.is_cuda

def frees():
    torch.empty(4, pin_memory=True).untyped_storage(), torch.empty(4, device="cuda").untyped_storage()

class Listens(Watch):
    def _note(self, *told):
        (thread := Thread(target=frees)).start()
        thread.join()
        super()._note(*told)

faulthandler.dump_traceback_later(60, exit=True)
with Listens() as watch:
    torch.accelerator.synchronize()
assert watch.waits  # told while another thread frees memory
os._exit(0)  # a thread of autograd's may still hold something of Python's, and would abort the end of the interpreter
"""


def test_the_device_tells_what_a_gpu_would_do(tmp_path: Path) -> None:
    """Orders of streams, waits, launches, mixed devices and threads; autocast and autograd are PyTorch's."""
    (tmp_path / "simulated_device.py").write_text(DEVICE)
    program("simulated_device", paths=[tmp_path])
