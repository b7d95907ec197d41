"""How much host memory this process may use: the machine's, or its control group's where that allows less."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_MOST_DEPTH = 64


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes in all and bytes free, and what sets the limit."""

    total_bytes: int
    available_bytes: int
    limited_by: str


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """The tightest limit, from `proc/meminfo` and `sys/fs/cgroup` below `root`; None where there are no such files."""
    machine = _machine(root)
    if machine is None:
        return None
    return min([machine, *_groups(root)], key=lambda limit: limit.available_bytes)


def _machine(root: Path) -> MemoryLimit | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kibibytes = {
        name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()
    }
    return MemoryLimit(kibibytes["MemTotal"] << 10, kibibytes["MemAvailable"] << 10, "the machine")


def _groups(root: Path) -> list[MemoryLimit]:
    """The limits of this process's control group and of those around it (version 2, then version 1)."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = (
                root / "sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        folder = base / inside.lstrip("/")
        for group in [folder, *folder.parents][:_MOST_DEPTH]:
            limits += _group(group, *names)
            if group == base:
                break
    return limits


def _group(group: Path, limit_name: str, usage_name: str, cache_key: str) -> list[MemoryLimit]:
    limit, usage = _read(group / limit_name).strip(), _read(group / usage_name).strip()
    # "max", or no file: this group sets no limit.
    if not limit.isdigit() or not usage.isdigit():
        return []
    # Usage counts cached file pages, which the kernel gives back when asked.
    cached = re.search(rf"^{cache_key} (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
    used = int(usage) - (int(cached[1]) if cached else 0)
    return [MemoryLimit(int(limit), max(0, int(limit) - used), "its control group")]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
