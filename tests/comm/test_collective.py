"""Every collective, over processes and over threads, against what it is defined to be."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from shoal.comm.collective import Collective
from shoal.errors import CollectiveError
from tests.comm.groups import replicas
from tests.comm.local import local_group
from tests.waiting import HANG_S


def everything(group: Collective) -> dict[str, torch.Tensor]:
    """Calls each collective once, with data that follows from the rank."""
    rank, size = group.rank, group.size
    own = torch.arange(size * 2, dtype=torch.float64) + 100 * rank
    done: dict[str, torch.Tensor] = {}

    def out(name: str, shape: int) -> torch.Tensor:
        done[name] = torch.full((shape,), -1.0, dtype=torch.float64)
        return done[name]

    for op in ("sum", "max", "min"):
        done[f"all_reduce {op}"] = own.clone()
        group.all_reduce(done[f"all_reduce {op}"], op).wait()
    group.reduce_scatter(out("reduce_scatter", 2), own).wait()
    group.all_gather(out("all_gather", 2 * size * size), own).wait()
    group.all_to_all(out("all_to_all", 2 * size), own).wait()
    sizes_in, sizes_out = _uneven(rank, size)
    uneven = torch.full((sum(sizes_in),), float(rank), dtype=torch.float64)
    group.all_to_all(out("uneven", sum(sizes_out)), uneven, output_sizes=sizes_out, input_sizes=sizes_in).wait()
    done["broadcast"] = own.clone()
    group.broadcast(done["broadcast"], root=size - 1).wait()
    reduced = own.clone()
    group.reduce(reduced, root=0).wait()
    done["reduce"] = reduced if rank == 0 else torch.zeros(0)
    parts = [torch.zeros(2 * size, dtype=torch.float64) for _ in range(size)] if rank == 0 else []
    group.gather(parts, own, root=0).wait()
    done["gather"] = torch.cat(parts) if parts else torch.zeros(0)
    pieces = [torch.full((3,), float(r), dtype=torch.float64) for r in range(size)] if rank == 0 else []
    group.scatter(out("scatter", 3), pieces, root=0).wait()
    sent = group.send(own, to=(rank + 1) % size, tag=3)
    group.recv(out("ring", 2 * size), source=(rank - 1) % size, tag=3).wait()
    sent.wait()
    group.barrier().wait()
    return done


def _uneven(rank: int, size: int) -> tuple[list[int], list[int]]:
    return [rank + other for other in range(size)], [other + rank for other in range(size)]


def expected(rank: int, size: int) -> dict[str, torch.Tensor]:
    """The same by definition."""
    base = torch.arange(size * 2, dtype=torch.float64)
    all_ = [base + 100 * r for r in range(size)]
    stacked = torch.stack(all_)
    return {
        "all_reduce sum": stacked.sum(0),
        "all_reduce max": stacked.max(0).values,
        "all_reduce min": stacked.min(0).values,
        "reduce_scatter": stacked.sum(0)[2 * rank : 2 * rank + 2],
        "all_gather": torch.cat(all_),
        "all_to_all": torch.cat([a[2 * rank : 2 * rank + 2] for a in all_]),
        "uneven": torch.cat([torch.full((r + rank,), float(r), dtype=torch.float64) for r in range(size)]),
        "broadcast": all_[-1],
        "reduce": stacked.sum(0) if rank == 0 else torch.zeros(0),
        "gather": torch.cat(all_) if rank == 0 else torch.zeros(0),
        "scatter": torch.full((3,), float(rank), dtype=torch.float64),
        "ring": all_[(rank - 1) % size],
    }


def over_processes(place) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in everything(replicas(place).world).items()}


def over_threads(size: int, function: Callable[[Collective], object]) -> list[object]:
    """`function` on every rank of a local group, each in its thread."""
    results: list[object] = [None] * size

    def run(group: Collective) -> None:
        results[group.rank] = function(group)

    threads = [threading.Thread(target=run, args=(group,)) for group in local_group(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    return results


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_every_collective_is_what_it_is_defined_to_be(ranks, size: int, kind: str) -> None:
    """Gloo behind the seam and the local twin give the defined result of every collective, bit for bit."""
    results = ranks(size, over_processes) if kind == "processes" else over_threads(size, everything)
    for rank, got in enumerate(results):
        for name, want in expected(rank, size).items():
            assert torch.equal(got[name], want), f"{name} on rank {rank}"


def test_a_thread_that_never_comes_is_named() -> None:
    """A local collective that a rank leaves out ends in a timeout that says who came."""
    first, _ = local_group(2, timeout_s=0.2)
    with pytest.raises(CollectiveError, match=r"only ranks \[0\] came"):
        first.all_reduce(torch.ones(3)).wait()
