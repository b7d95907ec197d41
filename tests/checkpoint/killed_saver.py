"""Processes that kill themselves in the middle of saves, for every point of `deaths()`.

A forked child saves step 100 in a run directory of its own, and step 200 (keeping one, so that retention is passed too)
until SIGKILL strikes at that point.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch

from shoal.checkpoint.objects import POINTS
from tests.checkpoint.states import save, saver_for

ENDS = "ends.json"
HALVES = ("object/write.half", "manifest/write.half", "latest/write.half")
"""Deaths that leave half a file behind."""

_HALF_OF = {HALVES[0]: ".safetensors", HALVES[1]: "manifest.json", HALVES[2]: "latest"}


def deaths() -> list[str]:
    """All points of a save, in order, the middle of a write after its beginning."""
    found = list(POINTS)
    for half in HALVES:
        found.insert(found.index(half.replace("half", "before")) + 1, half)
    return found


def folder_of(root: Path, death: str) -> Path:
    """The run directory in which `death` took place."""
    return root / death.replace("/", "-")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_half_of(suffix: str) -> None:
    """From now on the first write to a file whose name ends so is cut in the middle, by death."""
    write = os.write

    def dying(descriptor: int, data: memoryview) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(suffix):
            write(descriptor, data[: len(data) // 2])
            die()
        return write(descriptor, data)

    os.write = dying  # pyright: ignore[reportAttributeAccessIssue] this process ends here anyway


def save_and_die(directory: Path, death: str, way: str = "none") -> None:
    """`way`: of `checkpoint.compress`, or "disk" of `checkpoint.staging`."""
    fatal = [""]
    options = {"staging": "disk"} if way == "disk" else {"compress": way}
    saver = saver_for(directory, keep=1, on_point=lambda label: die() if label == fatal[0] else None, **options)
    save(saver, 100)
    if death == HALVES[0] and way == "disk":
        os.posix_fallocate = lambda *_: die()  # an empty file is left
    elif death in HALVES:
        write_half_of(_HALF_OF[death])
    fatal[0] = death
    save(saver, 200)


def bury_all(root: Path, way: str) -> None:
    """Writes how the child of each point ended, by its name, to `root / ENDS`. This process and its children are one
    process group.
    """
    os.setpgid(0, 0)
    ends: dict[str, int] = {}
    torch.set_num_threads(1)
    for death in deaths():
        child = os.fork()
        if child == 0:
            save_and_die(folder_of(root, death), death, way)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        ends[death] = os.waitstatus_to_exitcode(status)
    (root / ENDS).write_text(json.dumps(ends))
