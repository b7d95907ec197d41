"""Slurm's two compressed notations: host lists, and tasks a node.

    n[01-03,7],m2      n01 n02 n03 n7 m2       zeros are kept; a name may have several brackets: r[1-2]n[1-2]
    2(x3),1            2 2 2 1

Slurm's own expander is a program (`scontrol show hostnames`), which containers often lack; hence these few lines.
"""

from __future__ import annotations

import itertools
import re

from shoal.errors import EnvironmentFault

MOST_ENTRIES = 1 << 16
_NAME = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_SPAN = re.compile(r"(\d+)(?:-(\d+))?")
_REPEAT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hosts(nodelist: str) -> list[str]:
    """The host names of a Slurm host list, in its order. Raises `EnvironmentFault` where it cannot be read."""
    names = _NAME.findall(nodelist)
    if not names or ",".join(names) != nodelist:
        raise EnvironmentFault(_unreadable("host list", nodelist, "names like n[01-03,7],m2"))
    return [host for name in names for host in _expand(name, nodelist)]


def tasks_per_node(counts: str) -> list[int]:
    """The number of tasks on each node, from `SLURM_TASKS_PER_NODE`. Raises `EnvironmentFault`."""
    tasks: list[int] = []
    for part in counts.split(","):
        found = _REPEAT.fullmatch(part)
        times = int(found[2] or 1) if found else 0
        if found is None or len(tasks) + times > MOST_ENTRIES:
            raise EnvironmentFault(_unreadable("task count", counts, "counts like 2(x3),1"))
        tasks += [int(found[1])] * times
    return tasks


def _expand(name: str, nodelist: str) -> list[str]:
    pieces = [[text] if text else _numbers(bracket, nodelist) for bracket, text in _PIECE.findall(name)]
    total = 1
    for piece in pieces:
        total *= len(piece)
    if total > MOST_ENTRIES:
        raise EnvironmentFault(_unreadable("host list", nodelist, f"at most {MOST_ENTRIES} hosts"))
    return ["".join(chosen) for chosen in itertools.product(*pieces)]


def _numbers(bracket: str, nodelist: str) -> list[str]:
    numbers: list[str] = []
    for part in bracket.split(","):
        found = _SPAN.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if found is None or last < first or last - first + len(numbers) >= MOST_ENTRIES:
            raise EnvironmentFault(_unreadable("host list", nodelist, "brackets like [01-03,7]"))
        numbers += [f"{number:0{len(found[1])}d}" for number in range(first, last + 1)]
    return numbers


def _unreadable(what: str, text: str, rule: str) -> str:
    return (
        f"Slurm's {what} {text[:200]!r} cannot be read: it should hold {rule}; "
        "set MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE to do without it"
    )
