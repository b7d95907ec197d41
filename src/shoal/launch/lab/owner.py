"""Names of a lab's namespaces, and what dead labs have left behind.

A name holds the id and the start time of the process that made it: `shoal-lab-<pid>-<ticks>-<lab>-<host>`. Ids are used
again, both together are not. A namespace whose owner is gone belongs to a lab that was killed: it can be removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from shoal.errors import EnvironmentFault
from shoal.launch.lab.iproute import ip

NAMESPACES = Path("/run/netns")
_NAME = re.compile(r"shoal-lab-(?P<pid>\d+)-(?P<ticks>\d+)-(?P<lab>\d+)-[a-z0-9]+")


def prefix(existing: Iterable[str], *, pid: int | None = None) -> str:
    """What the names of a new lab of this process begin with, beside the `existing` names of others."""
    pid = os.getpid() if pid is None else pid
    ticks, taken = start_ticks(pid), list(existing)
    if ticks is None:
        raise EnvironmentFault(f"process {pid} has no start time in /proc: a lab's names hold it; mount /proc")
    names = (f"shoal-lab-{pid}-{ticks}-{number}-" for number in count())
    return next(name for name in names if not any(other.startswith(name) for other in taken))


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where there is no such process, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def namespaces(folder: Path = NAMESPACES) -> list[str]:
    """The named network namespaces of this machine."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def leftovers(names: Iterable[str]) -> list[str]:
    """Those of `names` that dead labs have left."""
    found = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None and start_ticks(int(match["pid"])) != int(match["ticks"]):
            found.append(name)
    return found


def remove(names: Iterable[str]) -> None:
    """Removes namespaces, with the links and bridges in them. Processes in them keep theirs until they end.

    One that another process has just removed is gone, too, which is all that is wanted.
    """
    for name in names:
        with contextlib.suppress(EnvironmentFault, subprocess.TimeoutExpired):
            ip([f"netns del {name}"])
    still = set(names) & set(namespaces())
    if still:
        raise EnvironmentFault(f"the namespaces {', '.join(sorted(still))} cannot be removed; try ip netns del NAME")
