"""What may stand in a run's way on this machine; each finding has its repair.

Facts are read in `findings` and handed to small pure functions, one a finding, so that tests can try each without a
machine that is broken. Nothing is imported that a run would import, nothing is changed.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.errors import EnvironmentFault
from shoal.files import cache_folder
from shoal.installation import install_command
from shoal.launcher import sockets, versions
from shoal.launcher.devices import MemoryLimit, cores, memory_limit
from shoal.launcher.lab import network
from shoal.launcher.lab.network import leftovers, namespaces

Status = Literal["ok", "warning", "problem"]
GIB = 1 << 30
LITTLE_MEMORY_BYTES = 2 * GIB
LITTLE_SHARED_MEMORY_BYTES = GIB // 4
FEW_OPEN_FILES = 1024
SLOW_NAME_S = 1.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `repair` is None where there is nothing to do."""

    name: str
    status: Status
    found: str
    repair: str | None = None


def findings(environ: Mapping[str, str]) -> list[Finding]:
    """All findings, in the order in which a run would meet them."""
    return [
        python_finding(sys.version_info[:2]),
        torch_finding(versions.installed("torch")),
        *(extra_finding(extra, package, versions.installed(package)) for extra, package in versions.EXTRAS.items()),
        gpu_finding(_gpus(), environ.get("CUDA_VISIBLE_DEVICES")),
        cores_finding(cores(), environ.get("OMP_NUM_THREADS")),
        memory_finding(memory_limit()),
        shared_memory_finding(_free_bytes(Path("/dev/shm"))),
        core_finding(built=importlib.util.find_spec("shoal.comm.shm._core") is not None),
        open_files_finding(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        host_name_finding(socket.gethostname(), *_resolve(socket.gethostname())),
        port_finding(),
        interface_finding(environ.get("GLOO_SOCKET_IFNAME"), [name for _, name in socket.if_nameindex()]),
        cache_finding(cache_folder(environ)),
        lab_finding(leftovers(namespaces()), why_not=network.why_not()),
    ]


def python_finding(version: tuple[int, int]) -> Finding:
    """Is Python new enough?"""
    found, needed = ".".join(map(str, version)), ".".join(map(str, versions.PYTHON_FROM))
    if version < versions.PYTHON_FROM:
        return Finding("python", "problem", f"{found}, older than {needed}", f"install Python {needed} or newer")
    return Finding("python", "ok", found)


def torch_finding(version: str | None) -> Finding:
    """Is torch in the tested range?"""
    try:
        return Finding("torch", "ok", versions.require_tested_torch(version))
    except EnvironmentFault as fault:
        found, _, repair = str(fault).rpartition("; ")
        return Finding("torch", "problem", found, repair)


def extra_finding(extra: str, package: str, version: str | None) -> Finding:
    """Is an optional part installed? Its absence is no problem."""
    if version is None:
        return Finding(f"extra {extra}", "ok", f"not installed ({install_command(extra)} brings {package})")
    return Finding(f"extra {extra}", "ok", f"{package} {version}")


def gpu_finding(gpus: int, visible: str | None) -> Finding:
    """How many GPUs are there, and are they hidden?"""
    if gpus and visible is not None and visible.strip() in ("", "-1"):
        return Finding("gpus", "warning", f"{gpus}, all hidden by CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES")
    return Finding("gpus", "ok", str(gpus) if gpus else "none; ranks compute on the CPU")


def attention_finding(device: str, kernels: Mapping[str, str]) -> Finding:
    """Which of PyTorch's kernels causal attention takes on `device`, "cuda" or "cpu", by type; {}: none was tried."""
    if not kernels:
        return Finding("attention", "warning", "no kernel could be tried", 'python -c "import torch" shows why')
    by_kernel: dict[str, list[str]] = {}
    for dtype, kernel in kernels.items():
        by_kernel.setdefault(kernel, []).append(dtype)
    said = "; ".join(f"{kernel} in {', '.join(dtypes)}" for kernel, dtypes in by_kernel.items())
    found = f"{said} (on {device}, causal, heads of 64 features)"
    if device == "cuda" and kernels.get("bfloat16") == "math":
        return Finding(
            "attention", "warning", found, "install a PyTorch that is built for this GPU: pytorch.org names it"
        )
    return Finding("attention", "ok", found)


def cores_finding(cores: int, omp_threads: str | None) -> Finding:
    """How many cores may this process use, and does the thread setting exceed them?"""
    if omp_threads and omp_threads.isdigit() and int(omp_threads) > cores:
        found = f"{cores}, but OMP_NUM_THREADS is {omp_threads}"
        return Finding("cores", "warning", found, "unset OMP_NUM_THREADS: Shoal divides the cores among the ranks")
    return Finding("cores", "ok", str(cores))


def memory_finding(limit: MemoryLimit | None) -> Finding:
    """Is there memory for a few ranks?"""
    if limit is None:
        return Finding("memory", "ok", "this system does not tell")
    found = f"{_gib(limit.available_bytes)} free of {_gib(limit.total_bytes)}, limited by {limit.limited_by}"
    if limit.available_bytes < LITTLE_MEMORY_BYTES:
        return Finding("memory", "warning", found, "end other processes, raise the limit, or use fewer ranks")
    return Finding("memory", "ok", found)


def shared_memory_finding(free_bytes: int | None) -> Finding:
    """Is there room in /dev/shm, where ranks of one host exchange buffers?"""
    if free_bytes is None:
        return Finding("/dev/shm", "warning", "missing", "mount it: mount -t tmpfs tmpfs /dev/shm")
    if free_bytes < LITTLE_SHARED_MEMORY_BYTES:
        repair = "enlarge it: mount -o remount,size=2G /dev/shm (containers: --shm-size=2g)"
        return Finding("/dev/shm", "warning", f"{_gib(free_bytes)} free", repair)
    return Finding("/dev/shm", "ok", f"{_gib(free_bytes)} free")


def core_finding(*, built: bool) -> Finding:
    """Was the core in C built, by which CPU ranks of one host exchange what they reduce?"""
    if not built:
        repair = (
            "install a C compiler (apt-get install gcc), then Shoal again: pip install --force-reinstall --no-deps -e ."
        )
        return Finding("shared-memory core", "warning", "not built: ranks of one host use Gloo, more slowly", repair)
    return Finding("shared-memory core", "ok", "built")


def open_files_finding(soft: int, hard: int) -> Finding:
    """Each pair of ranks holds sockets, each chunk of data a file."""
    if soft != resource.RLIM_INFINITY and soft < FEW_OPEN_FILES:
        return Finding("open files", "warning", f"at most {soft}", f"ulimit -n {hard if hard > 0 else 65536}")
    return Finding("open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")


def host_name_finding(name: str, address: str | None, took_s: float) -> Finding:
    """Libraries resolve the host's own name at start-up; where that fails or is slow, so is every run."""
    repair = f"add the line '127.0.1.1 {name}' to /etc/hosts"
    if address is None:
        return Finding("host name", "warning", f"{name} does not resolve ({took_s:.1f} s)", repair)
    if took_s > SLOW_NAME_S:
        return Finding("host name", "warning", f"{name} resolves to {address}, in {took_s:.1f} s", repair)
    return Finding("host name", "ok", f"{name} resolves to {address}")


def port_finding() -> Finding:
    """Can the launcher listen on loopback?"""
    try:
        with sockets.listen_on_loopback() as listener:
            return Finding("loopback port", "ok", f"{listener.getsockname()[1]} could be bound")
    except EnvironmentFault as fault:
        found, _, repair = str(fault).rpartition("; ")
        return Finding("loopback port", "problem", found, repair)


def interface_finding(chosen: str | None, interfaces: Collection[str]) -> Finding:
    """Does the interface that Gloo is told to use exist?"""
    wanted = [name.strip() for name in chosen.split(",")] if chosen else []
    missing = [name for name in wanted if name not in interfaces]
    if missing:
        found = f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, of which this host has none"
        return Finding("interface", "problem", found, f"unset it, or choose among {', '.join(sorted(interfaces))}")
    if not wanted and not {"lo", "lo0"} & set(interfaces):
        return Finding("interface", "problem", "no loopback interface", "enable it: ip link set lo up")
    return Finding("interface", "ok", ", ".join(wanted) or "loopback while all ranks share this host")


def cache_finding(folder: Path) -> Finding:
    """Can what is prepared once (tokenised corpora, compiled kernels) be kept?"""
    nearest = next(parent for parent in [folder, *folder.parents] if parent.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        return Finding("cache folder", "warning", f"{folder} cannot be written", "set SHOAL_CACHE to a folder that can")
    return Finding("cache folder", "ok", f"{folder}, {_gib(shutil.disk_usage(nearest).free)} free")


def lab_finding(left: Collection[str], *, why_not: str | None) -> Finding:
    """Are there network namespaces of labs that were killed? Can there be labs, and if not, why? That is no problem."""
    if left:
        repair = f"sudo sh -c '{'; '.join(f'ip netns del {name}' for name in left)}' (the next lab does it, too)"
        return Finding("labs", "warning", f"{len(left)} namespaces of labs that are dead: {', '.join(left)}", repair)
    return Finding("labs", "ok", why_not or "slow links can be rehearsed; no namespace of a dead lab")


def _gpus() -> int:
    return sum(path.name[len("nvidia") :].isdigit() for path in Path("/dev").glob("nvidia*"))


def _free_bytes(folder: Path) -> int | None:
    return shutil.disk_usage(folder).free if folder.is_dir() else None


def _resolve(name: str) -> tuple[str | None, float]:
    start_s = time.monotonic()
    try:
        return socket.gethostbyname(name), time.monotonic() - start_s
    except OSError:
        return None, time.monotonic() - start_s


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
