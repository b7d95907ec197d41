"""A rough alpha and beta of each collective between the CPU ranks of this host, where nobody has measured better.

    t = alpha + beta S        from the shortest and the longest of a few sizes; S as `topology.calibration` counts it

`shoal bench comm` measures more sizes, with their spread, and replaces these.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm.collective import Collective
from shoal.comm.mesh import build_mesh
from shoal.launch.environment import Place
from shoal.topology.layout import Layout

SHORT_BYTES, LONG_BYTES = 4 << 10, 4 << 20
REPEATS, CALLS = 9, {SHORT_BYTES: 20, LONG_BYTES: 3}
TIMEOUT_S = 120.0
TRANSPORTS: dict[str, Literal["auto", "gloo"]] = {"shm": "auto", "gloo": "gloo"}


def fits(store: Store, place: Place) -> Iterator[dict[str, Any]]:
    """A fit of each collective over each backend."""
    layout = Layout(replicate=place.world_size)
    for backend, transport in TRANSPORTS.items():
        mesh = build_mesh(
            layout, place.rank, store=PrefixStore(f"links/{backend}", store), device=torch.device("cpu"),
            timeout_s=TIMEOUT_S, transport=transport,
        )  # fmt: skip
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
            short, long = (_seconds(mesh.world, operation, size) for size in (SHORT_BYTES, LONG_BYTES))
            beta_s = max(0.0, (long - short) / (LONG_BYTES - SHORT_BYTES))
            yield {
                "backend": backend, "operation": operation, "ranks": place.world_size,
                "alpha_s": max(0.0, short - beta_s * SHORT_BYTES), "beta_s": beta_s,
            }  # fmt: skip


def _seconds(world: Collective, operation: str, size_bytes: int) -> float:
    """Of one call, on the slowest rank."""
    call = _calls(world, size_bytes)[operation]
    times = []
    for _ in range(REPEATS):
        world.barrier().wait()
        begin_s = time.perf_counter()
        for _ in range(CALLS[size_bytes]):
            call()
        spent = torch.tensor([(time.perf_counter() - begin_s) / CALLS[size_bytes]], dtype=torch.float64)
        world.all_reduce(spent, "max").wait()
        times.append(float(spent))
    return statistics.median(times[2:])


def _calls(world: Collective, size_bytes: int) -> dict[str, Callable[[], Any]]:
    whole, other = torch.zeros(size_bytes // 4), torch.zeros(size_bytes // 4)
    part = torch.zeros(size_bytes // 4 // world.size)
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def ring() -> None:
        sent, received = world.send(whole, to=after), world.recv(other, source=before)
        sent.wait()
        received.wait()

    return {
        "all_reduce": lambda: world.all_reduce(whole).wait(),
        "all_gather": lambda: world.all_gather(whole, part).wait(),
        "reduce_scatter": lambda: world.reduce_scatter(part, whole).wait(),
        "all_to_all": lambda: world.all_to_all(other, whole).wait(),
        "send": ring,
    }
