"""`python -m benchmarks.new_group`: seconds of `torch.distributed.new_group` over Shoal's backend, beside Gloo.

The same ranks make groups of all of them over both backends in turn, each after a barrier, and then end them. The
figure of a group is its slowest rank's. What ending a group takes is measured apart: a group of Gloo ends when its last
reference goes, which takes longer than making it, and must not be counted where the next group is made.
"""

from __future__ import annotations

import socket
import statistics
import time
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import typer
from torch._C._distributed_c10d import TCPStore

import shoal.c10d  # noqa: F401  (the backend's name)
from benchmarks.command import run
from shoal.bench.options import AsJson
from shoal.bench.report import Result, check, print_report

BACKENDS = ("gloo", "shoal")
RATIO = 2.0
"""The most that a group of Shoal's backend may take, in groups of Gloo."""


def new_group(
    processes: Annotated[int, typer.Option(help="Ranks of each group.", min=2, max=64)] = 2,
    repeats: Annotated[int, typer.Option(help="Groups over each backend.", min=5)] = 40,
    as_json: AsJson = False,
) -> None:
    """How long making a process group takes, beside Gloo.

    Example: python -m benchmarks.new_group --processes 4
    """
    print_report("new_group", measure(processes, repeats), as_json=as_json)


def measure(processes: int, repeats: int) -> Result:
    """A row for each backend, and the ratio of the medians."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_rank, (processes, repeats, store.port, results), processes)  # pyright: ignore[reportPrivateImportUsage]
    times, ends = results.get()
    medians = {backend: statistics.median(each) for backend, each in times.items()}
    rows = [
        {
            "backend": backend,
            "processes": processes,
            "median_ms": round(medians[backend] * 1e3, 3),
            "p10_ms": round(statistics.quantiles(times[backend], n=10)[0] * 1e3, 3),
            "p90_ms": round(statistics.quantiles(times[backend], n=10)[-1] * 1e3, 3),
            "end_median_ms": round(statistics.median(ends[backend]) * 1e3, 3),
        }
        for backend in BACKENDS
    ]
    ratio = medians["shoal"] / medians["gloo"]
    name = f"new_group of {processes} ranks, in Gloo's time"
    return {"rows": rows, "checks": [check(name, ratio, RATIO, at_most=True)]}


def _rank(rank: int, size: int, repeats: int, port: int, results: torch.multiprocessing.SimpleQueue) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    ends: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for repeat in range(repeats + 1):
        for backend in BACKENDS:
            made_s, ended_s = _made_and_ended(backend)
            if repeat > 0:  # the first loads the core
                times[backend].append(made_s)
                ends[backend].append(ended_s)
    if rank == 0:
        results.put((times, ends))
    dist.destroy_process_group()


def _made_and_ended(backend: str) -> tuple[float, float]:
    """Seconds on the slowest rank of making a group of all ranks, and of its end, the last reference included."""
    dist.barrier()
    begin_s = time.perf_counter()
    group: Any = dist.new_group(backend=backend)
    made_s = _slowest(time.perf_counter() - begin_s)
    dist.barrier()
    begin_s = time.perf_counter()
    dist.destroy_process_group(group)
    del group
    return made_s, _slowest(time.perf_counter() - begin_s)


def _slowest(seconds: float) -> float:
    spent = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


if __name__ == "__main__":
    run(new_group)
