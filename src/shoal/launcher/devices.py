"""What this host gives a process: its cores, its GPUs and its memory, found without importing torch."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """GPUs that this process may use: those that CUDA_VISIBLE_DEVICES lists, else those that the driver shows."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    there = sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    if visible is None:
        return there
    return min(there, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


ONE_RANK_DEVICES = ("xpu", "mps")
"""Values of `run.device` that one rank takes so far: there is no group for tensors that lie there."""


def too_few_gpus(ranks: int, there: int) -> str:
    """The sentence for a host on which `ranks` are to compute on `there` GPUs, of which each serves one."""
    return f"{ranks} ranks on this host, but {there} GPU{'s' * (there != 1)}; start one a GPU, or set run.device=cpu"


DRIVER = Path("/proc/driver/nvidia/gpus")
NAMELESS = "a GPU that the driver does not name"


def gpu_names(environ: Mapping[str, str], driver: Path = DRIVER) -> tuple[str, ...]:
    """A name for each GPU that this process may use, as "NVIDIA A100-SXM4-80GB"; `NAMELESS` where none is shown."""
    lines = [line for path in sorted(driver.glob("*/information")) for line in path.read_text().splitlines()]
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]
    count = gpus(environ)
    return (*names[:count], *[NAMELESS] * (count - len(names)))


ROOT = Path("/")
_MOST_DEPTH = 64


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes in all and bytes free, and what sets the limit."""

    total_bytes: int
    available_bytes: int
    limited_by: str


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """The tightest limit: of the machine, of a control group, of `ulimit -v`; None without `proc/meminfo`."""
    machine = _machine(root)
    if machine is None:
        return None
    return min([machine, *_groups(root), *_address_space(root)], key=lambda limit: limit.available_bytes)


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


def _address_space(root: Path) -> list[MemoryLimit]:
    """What `ulimit -v` leaves of this process's address space."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _read(root / "proc/self/statm").split()
    if limit == resource.RLIM_INFINITY or not pages:
        return []
    return [MemoryLimit(limit, max(0, limit - int(pages[0]) * resource.getpagesize()), "ulimit -v")]


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
