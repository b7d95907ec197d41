"""Faults that a rehearsal injects: what strikes a rank, at which label, in which step.

A rank passes labels as it trains. A fault strikes when its rank passes its label for the `passing`-th time in its step;
in a save, for the first time in or after its step, as saves go on behind the steps:

    recovery/before  recovery/in  recovery/after      a start looks for a checkpoint, has found it, has loaded it
    step/before  step/data  step/state  step/after    a step, its samples, the state that it leaves
    collective/before  collective/in                  a collective: not handed over yet, handed over and not waited for
    gradients/reduced                                 every rank has the sum of the gradients
    optimizer/before  optimizer/after                 the update
    save/ACTION.before  save/ACTION.after             the actions of a save (`shoal.checkpoint.objects.ACTIONS`)
    coordinator/journal                               the launcher's coordinator writes decisions down

Faults of one scenario strike in their order, each once in the whole run, however often its processes start again: a
fault leaves a file beside the scenario (`struck-0.json`, ...) before it strikes. Imports no torch.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

import msgspec

from shoal.errors import EnvironmentFault
from shoal.files import read_json

MOST_BYTES = 1 << 20
"""A scenario has some faults."""
REHEARSAL = "SHOAL_REHEARSAL"
"""The variable that names the folder of a scenario to the ranks of a rehearsed run; unset in any other."""
FILE, ACTED = "scenario.json", "acted"
JOURNAL = "coordinator/journal"
ACT_S, POLL_S = 10.0, 0.01

Action = Literal[
    "kill",
    "stop",
    "hang",
    "stop_run",
    "kill_launcher",
    "wait",
    "fail_disk",
    "nan",
    "flip_gradient",
    "flip_parameter",
    "flip_moment",
    "outside",
]
"""`hang` waits for a lock that nobody gives back; `stop_run` sends SIGTERM to the launcher, `kill_launcher` SIGKILL;
`wait` blocks the thread for `seconds`; `fail_disk` raises ENOSPC where a save passes the label. `nan` strikes the
inputs, or the gradient where these are integers. A flip changes one bit of the mantissa of one element. `outside` holds
the rank until whoever plays the scenario has acted (`say_acted`), for 10 s at most."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Strikes rank `rank` (of an elastic run: the process in that slot). `step` 0: in any step.

    `every_passing`: not once but at every passing of the label, as long as the run lasts.
    """

    action: Action
    label: str
    rank: int = 0
    step: int = 0
    passing: int = 1
    seconds: float = 0.0
    every_passing: bool = False


class Strike(msgspec.Struct, frozen=True):
    """When a fault struck, by the clock of the host (Unix seconds), and in which process."""

    time_s: float
    step: int
    rank: int
    pid: int
    label: str


def write_faults(faults: list[Fault], folder: Path) -> None:
    """Makes `folder` that of a scenario."""
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(msgspec.json.encode(faults))


def read_faults(folder: Path) -> list[Fault]:
    """The faults of the scenario in `folder`. Raises `EnvironmentFault` where there is none."""
    repair = (
        f"{REHEARSAL} names {folder}, which holds no scenario of a rehearsal: unset the variable; `shoal rehearse` "
        "sets it for the runs that it starts"
    )
    return read_json(folder / FILE, list[Fault], limit_bytes=MOST_BYTES, error=EnvironmentFault, repair=repair)


def strikes(folder: Path) -> list[Strike]:
    """The faults of the scenario that have struck, in order."""
    found = sorted(folder.glob("struck-*.json"), key=lambda path: int(path.stem.removeprefix("struck-")))
    return [msgspec.json.decode(path.read_bytes(), type=Strike) for path in found]


def has_struck(folder: Path, number: int) -> bool:
    """Whether fault `number` (from 0) of the scenario has struck."""
    return _record(folder, number).exists()


def claim(folder: Path, number: int, strike: Strike) -> bool:
    """Records that fault `number` strikes now; False where it has struck before."""
    draft = folder / f".struck-{number}-{strike.pid}"
    draft.write_bytes(msgspec.json.encode(strike))
    try:
        os.link(draft, _record(folder, number))
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def say_acted(folder: Path) -> None:
    """Lets the rank go on that an `outside` fault holds."""
    (folder / ACTED).touch()


def wait_until_acted(folder: Path) -> None:
    """Until somebody has called `say_acted`, for `ACT_S` at most."""
    deadline_s = time.monotonic() + ACT_S
    while not (folder / ACTED).exists() and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


def _record(folder: Path, number: int) -> Path:
    return folder / f"struck-{number}.json"
