"""Two levels: shared memory inside hosts and Gloo between their leaders give what one Gloo group of all ranks gives."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed._functional_collectives import all_gather_tensor
from torch.nn.parallel import DistributedDataParallel

import shoal.c10d  # noqa: F401  (the backend's name)
from shoal.comm.collective import Alone, Collective, Handle
from shoal.comm.conditions import Conditions, Fault
from shoal.comm.hierarchical import Hierarchical, share_hosts
from shoal.comm.ledger import Sent
from shoal.comm.two_levels import (
    PIECE_BYTES,
    TWO_LEVELS,
    TwoLevels,
    combine,
    division_of,
)
from shoal.comm.volume import Volume
from shoal.errors import CollectiveError
from tests.comm.groups import replicas
from tests.comm.hosts import on_host
from tests.comm.local import local_group
from tests.comm.test_collective import everything, expected
from tests.waiting import HANG_S, NEVER_S

DIVISIONS = ["abbb", "aabb", "abab", "aaabbbcc", "abcabcab"]
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8)
# Sums of a few numbers below 30 in another order: some units in the last place of the sum, 16-bit ones twice rounded.
RELATIVE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def on_two_levels(place, hosts: str, *, timeout_s: float = 60.0, conditions: Conditions | None = None) -> Collective:
    with on_host(hosts[place.rank]):
        world = replicas(place, timeout_s=timeout_s, conditions=conditions).world
    assert world.group.why.startswith("shared memory inside hosts, Gloo between")
    return world


def all_collectives(place, hosts: str) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in everything(on_two_levels(place, hosts)).items()}


@pytest.mark.parametrize("hosts", DIVISIONS)
def test_every_collective_is_what_it_is_defined_to_be(ranks, hosts: str) -> None:
    """Any division of ranks to hosts, in any order: the defined result of every collective, bit for bit."""
    size = len(hosts)
    for rank, got in enumerate(ranks(size, all_collectives, hosts)):
        for name, want in expected(rank, size).items():
            assert torch.equal(got[name], want), f"{name} on rank {rank}"


def brought(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.rand(numel, generator=generator, dtype=torch.float64) * 20).to(dtype)


def options(kind: Any, op: Any = None, root: int | None = None) -> Any:
    chosen = kind()
    if op is not None:
        chosen.reduceOp = op
    if root is not None:
        chosen.rootRank = root
    return chosen


def reductions(group: Any, dtype: torch.dtype, numel: int, op: Any) -> list[Tensor]:
    """What an all-reduce, a reduce-scatter and a reduce to the last rank give."""
    n, rank = group.size(), group.rank()
    whole, source, part = brought(rank, numel, dtype), brought(rank, numel * n, dtype), torch.empty(numel, dtype=dtype)
    group.allreduce([whole], options(c10d.AllreduceOptions, op)).wait()
    group._reduce_scatter_base(part, source, options(c10d.ReduceScatterOptions, op)).wait()
    assert torch.equal(source, brought(rank, numel * n, dtype)), "the input of a reduce-scatter is the caller's"
    at_root = brought(rank, numel, dtype)
    group.reduce([at_root], options(c10d.ReduceOptions, op, root=n - 1)).wait()
    return [whole, part, at_root if rank == n - 1 else torch.zeros(0)]


def counted(place, hosts: str) -> dict[str, tuple[Sent, Sent]]:
    """What the ledger has of calls that two levels make and leave to Gloo, and what Gloo's would be."""
    with on_host(hosts[place.rank]):
        mesh = replicas(place)
    group, gloo = mesh.world.group, Volume("gloo", place.rank, hosts)  # type: ignore[attr-defined]
    whole, rows = torch.ones(600, dtype=torch.int32), [torch.empty(600) for _ in range(place.size)]

    def reduced(op: Any, tensor: Tensor) -> Any:
        return group.allreduce([tensor], options(c10d.AllreduceOptions, op))

    calls = {
        "sum": (lambda: reduced(dist.ReduceOp.SUM, whole), "all_reduce", 2400),
        "product": (lambda: reduced(dist.ReduceOp.PRODUCT, whole), "all_reduce", 2400),
        "bool": (lambda: reduced(dist.ReduceOp.MAX, whole.bool()), "all_reduce", 600),
        "list": (lambda: group.allgather([rows], [torch.ones(600)], c10d.AllgatherOptions()), "all_gather", 2400),
    }
    found = {}
    for name, (call, operation, payload) in calls.items():
        call().wait()
        entry = mesh.ledger.take()[operation]
        found[name] = Sent(entry.inside_bytes, entry.between_bytes), gloo(operation, payload)
    return found


def test_the_ledger_knows_what_is_left_to_gloo(ranks) -> None:
    """Products, bools and lists of tensors go around Gloo's ring of all ranks, and are counted so; sums are not."""
    for found in ranks(4, counted, "aabb"):
        assert {name: ours == gloo for name, (ours, gloo) in found.items()} == {
            "sum": False, "product": True, "bool": True, "list": True,
        }  # fmt: skip


def against_gloo(place, hosts: str) -> list[str]:
    """What differs from Gloo over all ranks, from run to run, or from rank to rank."""
    gloo = dist.ProcessGroupGloo(place.store, place.rank, place.size, timedelta(seconds=HANG_S))
    ours, wrong = share_hosts(gloo, place.store, hosts=hosts, timeout_s=180), []
    cases = [(dtype, 37, op) for dtype in DTYPES for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)]
    cases += [(torch.float32, PIECE_BYTES // 4 * 2 + 5, dist.ReduceOp.SUM), (torch.float32, 1, dist.ReduceOp.SUM)]
    cases += [(torch.float32, 0, dist.ReduceOp.SUM)]
    for dtype, numel, op in cases:
        got, again, want = (reductions(group, dtype, numel, op) for group in (ours, ours, gloo))
        for name, one, two, reference in zip(("all_reduce", "reduce_scatter", "reduce"), got, again, want, strict=True):
            tolerance = RELATIVE.get(dtype, 0.0)
            if not torch.allclose(one.double(), reference.double(), rtol=tolerance, atol=0):
                wrong.append(f"{name} of {numel} {dtype} {op}")
            if not torch.equal(one, two):
                wrong.append(f"{name} of {numel} {dtype} {op} from run to run")
        everyone = [torch.empty_like(got[0]) for _ in range(place.size)]
        gloo.allgather([everyone], [got[0]], c10d.AllgatherOptions()).wait()
        if not all(torch.equal(other, got[0]) for other in everyone):
            wrong.append(f"all_reduce of {numel} {dtype} {op} from rank to rank")
    mean = torch.full((5, 3), float(place.rank)).t()
    ours.allreduce([mean], options(c10d.AllreduceOptions, dist.ReduceOp.AVG)).wait()
    if not torch.equal(mean, torch.full((3, 5), (place.size - 1) / 2)):
        wrong.append("a mean of a transposed tensor")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["abb", "abab"])
def test_reductions_are_those_of_gloo_and_the_same_bits_everywhere(ranks, hosts: str) -> None:
    """Dtypes, operations, nothing, one element, several pieces: Gloo's result up to rounding, and always the same."""
    assert ranks(len(hosts), against_gloo, hosts) == [[]] * len(hosts)


def many_at_once(place, hosts: str) -> list[float]:
    """Collectives and messages under way together, waited for from the last to the first."""
    world, n = on_two_levels(place, hosts), place.size
    tensors = [torch.full((1000 * (i + 1),), float(place.rank + i)) for i in range(8)]
    got = [torch.empty(7) for _ in range(n)]
    handles: list[Handle] = [world.all_reduce(tensor) for tensor in tensors[:4]]
    others = [other for other in range(n) if other != place.rank]
    handles += [world.recv(got[other], source=other, tag=other) for other in others]
    handles += [world.send(torch.full((7,), float(place.rank)), to=other, tag=place.rank) for other in others]
    handles += [world.all_reduce(tensor, "max") for tensor in tensors[4:]]
    for handle in reversed(handles):
        handle.wait()
    assert all(torch.equal(got[other], torch.full((7,), float(other))) for other in others)
    return [float(tensor.mean()) for tensor in tensors]


def test_calls_under_way_may_be_waited_for_in_any_order(ranks) -> None:
    """Messages pass collectives, inside a host and between hosts, and nobody waits for the order of the waits."""
    want = [sum(r + i for r in range(4)) for i in range(4)] + [3 + i for i in range(4, 8)]
    assert ranks(4, many_at_once, "abab") == [want] * 4


def plain_program(place, backend: str, hosts: str) -> list[Tensor]:
    """A PyTorch program that knows nothing of Shoal but the name: gradients by DDP, and functional collectives."""
    torch.manual_seed(0)
    store = dist.PrefixStore(backend, place.store)
    with on_host(hosts[place.rank]):
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.size, timeout=timedelta(seconds=HANG_S)
        )  # fmt: skip
        try:
            assert isinstance(dist.group.WORLD, Hierarchical) == (backend == "shoal")
            model = DistributedDataParallel(torch.nn.Linear(5, 3, dtype=torch.float64))
            model(torch.full((2, 5), float(place.rank + 1), dtype=torch.float64)).sum().backward()
            world = dist.group.WORLD
            rows = all_gather_tensor(torch.full((2,), float(place.rank)), gather_dim=0, group=world)
            parts = [torch.zeros(2) for _ in range(place.size)]
            dist.all_gather(parts, torch.full((2,), float(place.rank)))
            split = torch.empty(1)
            dist.reduce_scatter_tensor(split, torch.arange(float(place.size)))
            return [p.grad for p in model.parameters() if p.grad is not None] + [rows.clone(), *parts, split]
        finally:
            dist.destroy_process_group()


def test_plain_programs_on_several_hosts_gain_by_one_line(ranks) -> None:
    """`init_process_group("shoal")` gives two levels, and the results of Gloo."""
    ours, gloo = (ranks(3, plain_program, backend, "aba") for backend in ("shoal", "gloo"))
    for got, want in zip(ours, gloo, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(got, want, strict=True))


class Counted:
    """A `Collective` that adds up what its rank sends."""

    def __init__(self, inner: Collective, sent: list[int]) -> None:
        self._inner, self._sent = inner, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, tensor: Tensor, *, to: int, tag: int = 0) -> Handle:
        self._sent.append(tensor.nbytes)
        return self._inner.send(tensor, to=to, tag=tag)

    def broadcast(self, tensor: Tensor, *, root: int = 0) -> Handle:
        if self._inner.rank == root:  # whatever the tree, each of the others gets it once
            self._sent.append(tensor.nbytes * (self._inner.size - 1))
        return self._inner.broadcast(tensor, root=root)


def sent_between_hosts(hosts: str, operation: str, numel: int) -> int:
    """Bytes that leaders send, counted."""
    division, n, sent = division_of(hosts), len(hosts), []
    leaders = local_group(len(division.hosts))
    mates = [local_group(len(ranks)) if len(ranks) > 1 else [Alone()] for ranks in division.hosts]

    def run(rank: int) -> None:
        host, place = division.places[rank]
        outside = Counted(leaders[host], sent) if place == 0 else None
        levels = TwoLevels(rank, division, mates[host][place], outside)
        flat = torch.ones(numel)
        calls = {
            "all_reduce": lambda: levels.all_reduce(flat, "sum"),
            "reduce": lambda: levels.reduce(flat, "sum", root=n - 1),
            "reduce_scatter": lambda: levels.reduce_scatter(flat.new_empty(numel // n), flat, "sum"),
            "all_gather": lambda: levels.all_gather(flat.new_empty(numel * n), flat),
            "broadcast": lambda: levels.broadcast(flat, root=n - 1),
            "barrier": levels.barrier,
        }
        calls[operation]()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    return sum(sent)


def between_hosts(operation: str, payload: int, *, ranks: int, hosts: int) -> int:
    """Bytes that `operation`, one of `TWO_LEVELS`, sends between hosts, over all of them."""
    factor = {"all_reduce": 2, "all_gather": ranks, "barrier": 0}.get(operation, 1)
    return factor * (hosts - 1) * payload


def ring_between_hosts(operation: str, payload: int, *, ranks: int, hosts: int) -> float:
    """The same of Gloo's rings over all ranks, numbered host by host."""
    if operation == "all_gather":
        return hosts * (ranks - 1) * payload
    steps = {"all_reduce": 2, "reduce_scatter": 2, "reduce": 1}[operation]
    return steps * hosts * (ranks - 1) / ranks * payload


@pytest.mark.parametrize("hosts", ["abbb", "abab", "aaabbbcc"])
@pytest.mark.parametrize("operation", TWO_LEVELS)
def test_what_goes_between_hosts_is_the_closed_form(hosts: str, operation: str) -> None:
    """Counted message by message, for equal and unequal hosts."""
    numel, m = 240, len(set(hosts))
    want = between_hosts(operation, numel * 4, ranks=len(hosts), hosts=m)
    assert sent_between_hosts(hosts, operation, numel) == want


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "reduce"])
def test_two_levels_never_send_more_between_hosts_than_a_ring(operation: str) -> None:
    """For all numbers of hosts up to 6 and ranks on them up to 8; less wherever a host has two ranks."""
    for hosts in range(2, 7):
        for local in range(1, 9):
            n = hosts * local
            ours = between_hosts(operation, 1000, ranks=n, hosts=hosts)
            ring = ring_between_hosts(operation, 1000, ranks=n, hosts=hosts)
            assert ours <= ring * (1 + 1e-12)
            assert local == 1 or ours < ring


def losing_one(place, hosts: str, loser: int) -> str:
    faults = [Fault("all_reduce", 1, "kill")] if place.rank == loser else []
    world = on_two_levels(place, hosts, timeout_s=NEVER_S, conditions=Conditions(faults=faults))
    world.all_reduce(torch.ones(3)).wait()
    try:
        world.all_reduce(torch.ones(3)).wait()
    except CollectiveError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_a_rank_that_dies_is_named_on_every_host(ranks) -> None:
    """Whether it shares the dead rank's host or not, a survivor knows who it was, not by a timeout."""
    outcomes = ranks.outcomes(4, losing_one, "aabb", 3)
    for survived, sentence in outcomes[:3]:
        assert survived, sentence
        assert "rank 3 (host" in sentence
        assert "did not come" in sentence


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_short_floats_are_rounded_once(dtype: torch.dtype) -> None:
    """A large number, then small ones that each vanish beside it but not together; added in 16 bits they are lost."""
    large, one = torch.tensor([2.0 / torch.finfo(dtype).eps], dtype=dtype), torch.ones(1, dtype=dtype)
    assert large + one + one == large
    out = torch.empty(1, dtype=dtype)
    combine([large, one, one], "sum", out=out)
    assert out == large + 2


def test_not_a_number_is_never_lost() -> None:
    """A maximum over ranks of which one brings NaN is NaN, whoever brings it."""
    nan, one = torch.tensor([float("nan")]), torch.ones(1)
    for tensors in ([nan, one], [one, nan]):
        out = torch.empty(1)
        combine(tensors, "max", out=out)
        assert out.isnan()
