"""`python -m benchmarks.server`: pushes and pulls of a parameter server, and updates of shared memory without locks.

push, pull   every rank is a worker and serves an even part; the peer does the same through torch.distributed.rpc,
             whose call takes a gradient to the server and brings parameters back. Both make plain SGD's update, in
             the same processes and in turn
hogwild      logistic regression on generated sparse samples by `sync.kind = "hogwild"`, seconds to a held-out loss; the
             peer takes a lock around each update (`benchmarks.sparse_regression`)
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed.rpc as rpc
import typer
from torch import Tensor

from benchmarks.command import run
from benchmarks.sparse_regression import LOSS, Found, regression
from shoal.bench.groups import gathered, join_group, join_store
from shoal.bench.options import AsJson, Processes
from shoal.bench.ranks import is_rank, on_ranks, result_folder, run_as_rank
from shoal.bench.report import Result, Row, check, print_report
from shoal.comm.collective import Collective
from shoal.comm.ledger import Ledger
from shoal.launcher.environment import Place
from shoal.sync.admission import Asynchronous
from shoal.sync.server_part import Merge, ServedPart
from shoal.sync.server_partition import partition
from shoal.sync.server_wire import FlatParts, Lanes, Push, Serving, Worker, share_rows

LR = 1e-3
PROMISED = 3.0
"""Times the peer's bytes a second, in the median of the turns."""
TURNS, REGRESSIONS = 9, 3
"""Of each side of pushes and pulls, and of each kind of regression, one after the other."""


def server(
    megabytes: Annotated[int, typer.Option(help="Size of the parameters.", min=1)] = 128,
    rounds: Annotated[int, typer.Option(help="Pushes and pulls of each worker.", min=2)] = 20,
    processes: Processes = 2,
    as_json: AsJson = False,
) -> None:
    """Bytes a second of pushes and pulls beside torch.distributed.rpc, and Hogwild beside locks.

    Example: python -m benchmarks.server --megabytes 512
    """
    if is_rank():
        run_as_rank(lambda place: measure(place, numel=megabytes * 2**18, rounds=rounds))
        return
    command = ["benchmarks.server", "--megabytes", str(megabytes), "--rounds", str(rounds)]
    print_report("server", on_ranks(command, processes=processes), as_json=as_json)


def measure(place: Place, *, numel: int, rounds: int) -> Result | None:
    """All rows and checks at rank 0, None elsewhere."""
    store = join_store(place)
    groups = [join_group(name, place, store) for name in ("clock", "push", "pull")]
    clock, folder = groups[0], result_folder()
    with (
        _served(Lanes(groups[1], groups[2], Ledger()), clock, numel) as push_pull,
        _by_rpc(place, folder / "rpc", numel) as call,
    ):
        seconds = [tuple(_slowest(clock, one, rounds) for one in (push_pull, call)) for _ in range(TURNS)]
    turns = [
        regression(place, store, folder, locked=locked, name=f"regression-{number}")
        for number, locked in enumerate((True, False) * REGRESSIONS)
    ]
    locked, free = _middle(turns[::2]), _middle(turns[1::2])
    if place.rank != 0:
        return None
    remote = 2 * 4 * numel * (place.world_size - 1) / place.world_size * rounds * place.world_size  # pushes and pulls
    sides = zip(("shoal", "torch.distributed.rpc"), zip(*seconds, strict=True), strict=True)
    rows: list[Row] = [_rates(by, [remote / one / 1e9 for one in own]) for by, own in sides]
    rows += [
        {"what": f"sparse regression to a loss of {LOSS}", "by": by, **found}
        for by, found in (("hogwild", free), ("a lock", locked))
    ]
    checks = [
        check("throughput beside rpc", statistics.median(b / a for a, b in seconds), PROMISED, at_most=False),
        check("hogwild's seconds to the loss beside a lock's", free["seconds"] / locked["seconds"], 1.0, at_most=True),
    ]
    return {"rows": rows, "checks": checks}


def _rates(by: str, rates: Sequence[float]) -> Row:
    """GB/s of pushes and pulls: median, least and most of the turns."""
    found = {"GB_a_second": statistics.median(rates), "least": min(rates), "most": max(rates)}
    return {"what": "push + pull", "by": by, **{name: round(rate, 3) for name, rate in found.items()}}


def _slowest(clock: Collective, work: Callable[[], None], rounds: int) -> float:
    """Seconds until all ranks have done `work` so often, which they begin together, after one that does not count."""
    work()
    clock.barrier().wait()
    begin_s = time.perf_counter()
    for _ in range(rounds):
        work()
    return max(seconds for (seconds,) in gathered(clock, [time.perf_counter() - begin_s]))


@contextmanager
def _served(lanes: Lanes, clock: Collective, numel: int) -> Iterator[Callable[[], None]]:
    """One push and pull of this worker, which makes an update."""
    rank, size, numbers = clock.rank, clock.size, count()
    parts = FlatParts(partition([numel], size))
    own, lanes = parts.spans[rank], share_rows(lanes, parts, dtype=torch.float32)
    assert lanes.shared is not None, "ranks of one host share memory"
    values = torch.zeros(own.stop - own.start)
    part = ServedPart(values, merge=Merge(adds=True), rows=[row[own] for row in lanes.shared.parameters])
    part.step = lambda lr, gradient: values.sub_(gradient, alpha=lr)  # pyright: ignore[reportAttributeAccessIssue]
    worker, gradient = Worker(parts, lanes, part, dtype=torch.float32), lanes.shared.gradients[rank].fill_(1.0)
    part.begin(Asynchronous(range(size)), worker.row[own])
    worker.begin()
    serving = Serving(part, parts, lanes, range(size))
    yield lambda: worker.push_pull(Push(next(numbers), gradient, LR))
    worker.leave()
    serving.wait()


class RpcServer:
    """A part of the parameters that calls from other processes update."""

    def __init__(self, numel: int) -> None:
        self.values = torch.zeros(numel)

    def push_pull(self, gradient: Tensor) -> Tensor:
        """Plain SGD's update; the parameters in return."""
        self.values.sub_(gradient, alpha=LR)
        return self.values


def _call(server: rpc.RRef, gradient: Tensor) -> Tensor:
    return server.local_value().push_pull(gradient)


@contextmanager
def _by_rpc(place: Place, meeting: Path, numel: int) -> Iterator[Callable[[], None]]:
    """The same through remote calls: one object on every rank, which all other ranks call."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}", rpc_timeout=300.0)
    rpc.init_rpc(f"rank-{place.rank}", rank=place.rank, world_size=place.world_size, rpc_backend_options=options)
    others = [rank for rank in range(place.world_size) if rank != place.rank]
    share = numel // place.world_size
    servers = {rank: rpc.remote(f"rank-{rank}", RpcServer, args=(share,)) for rank in others}
    own, gradient = RpcServer(share), torch.ones(share)

    def work() -> None:
        calls = [rpc.rpc_async(f"rank-{rank}", _call, args=(servers[rank], gradient)) for rank in others]
        own.push_pull(gradient).clone()
        for call in calls:
            call.wait()

    yield work
    servers.clear()
    rpc.shutdown()


def _middle(turns: Sequence[Found]) -> dict[str, float]:
    """The median of some turns; infinite seconds where the loss was not reached."""
    seconds = [math.inf if found is None else found for found, _, _ in turns]
    return {
        "seconds": round(statistics.median(seconds), 3),
        "least": round(min(seconds), 3),
        "most": round(max(seconds), 3),
        "updates": statistics.median(updates for _, updates, _ in turns),
    }


if __name__ == "__main__":
    run(server)
