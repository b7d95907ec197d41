"""Shared memory on torch's kernels, between real processes: results, order, faults, what is left behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from shoal.comm.collective import GroupCollective
from shoal.comm.conditions import Conditions, Fault
from shoal.comm.config import WireConfig
from shoal.comm.ledger import Ledger
from shoal.comm.mesh import connect
from shoal.comm.seam import Seam
from shoal.comm.shm import group as shm_group
from shoal.comm.shm import host
from shoal.comm.shm.group import MINIMUM_BYTES, ShmGroup, share_memory
from shoal.comm.shm.two_shot import PLACES, SEGMENT_BYTES
from shoal.errors import CollectiveError
from tests.comm.groups import replicas

PIECE_BYTES = SEGMENT_BYTES // PLACES
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8]
OPS = ("sum", "max", "min")


def shared(place, name: str = "group", *, size: int | None = None, timeout_s: float = 20.0) -> ShmGroup:
    """The group, without a seam before it."""
    store, size = dist.PrefixStore(name, place.store), size or place.size
    gloo = dist.ProcessGroupGloo(store, place.rank, size, timedelta(seconds=timeout_s))
    group, why = share_memory(gloo, store, timeout_s=timeout_s, with_core=False)
    assert why.endswith(f"(it was not asked for): {size} ranks on one host")
    return group


def options(op: Any = dist.ReduceOp.SUM) -> c10d.AllreduceOptions:
    chosen = c10d.AllreduceOptions()
    chosen.reduceOp = op
    return chosen


def brought(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.rand(numel, generator=generator, dtype=torch.float64) * 60 - 30).to(dtype)


def by_definition(size: int, numel: int, dtype: torch.dtype, op: str, seed: int = 0) -> Tensor:
    """From left to right in rank order; sums of 16-bit floats in float32, rounded once."""
    tensors = [brought(rank, numel, dtype, seed) for rank in range(size)]
    if op != "sum":
        stacked = torch.stack(tensors)
        return (stacked.amax if op == "max" else stacked.amin)(0)
    total = tensors[0].float() if dtype in (torch.float16, torch.bfloat16) else tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total.to(dtype)


def wrong_results(place, numels: list[int], dtypes: list[torch.dtype], ops: tuple[str, ...] = OPS) -> list[str]:
    """What differs from the definition, of all reductions, each made twice."""
    group, wrong = GroupCollective(Seam(shared(place), backend="shm", label="t", ledger=Ledger())), []
    for dtype in dtypes:
        for numel in numels:
            for op in ops:
                want = by_definition(place.size, numel, dtype, op)
                for _ in range(2):
                    got = brought(place.rank, numel, dtype)
                    group.all_reduce(got, op).wait()
                    if not torch.equal(got, want):
                        wrong.append(f"{op} of {numel} {dtype}")
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_and_reduction_is_as_defined(ranks, size: int) -> None:
    """Bit for bit on each rank, and again: just above the threshold, at a length that no size divides."""
    assert ranks(size, wrong_results, [MINIMUM_BYTES + 1], DTYPES) == [[]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_every_length_is_as_defined(ranks, size: int) -> None:
    """None, one, around the threshold and around one and two pieces; integers, whose order of sums is free."""
    edges = [MINIMUM_BYTES // 8, *(PIECE_BYTES // 8 * pieces for pieces in (1, 2))]
    numels = [0, 1] + [edge + off for edge in edges for off in (-1, 0, 1)]
    assert ranks(size, wrong_results, numels, [torch.int64], ("sum",)) == [[]] * size


def many_in_flight(place) -> bool:
    """Twenty calls of both ways, waited for in an order of this rank's own, other operations between them."""
    group = GroupCollective(Seam(shared(place), backend="shm", label="t", ledger=Ledger()))
    numels = [(1 + 7919 * call) % 60_000 for call in range(20)]
    tensors = [brought(place.rank, n, torch.float64, seed=n) for n in numels]
    handles = []
    for call, tensor in enumerate(tensors):
        handles.append(group.all_reduce(tensor))
        if call % 5 == 0:
            group.broadcast(torch.ones(3), root=call % place.size).wait()
            group.barrier().wait()
    for call in sorted(range(20), key=lambda c: (c * 7 + place.rank * 5) % 20):
        handles[call].wait()
    return all(
        torch.allclose(t, by_definition(place.size, n, torch.float64, "sum", seed=n), rtol=0, atol=1e-10)
        for t, n in zip(tensors, numels, strict=True)
    )


def test_calls_under_way_may_be_waited_for_in_any_order(ranks) -> None:
    """Results belong to their calls, whatever is waited for first, with Gloo's operations in between."""
    assert ranks(3, many_in_flight) == [True] * 3


def overlapping(place) -> list[float]:
    """Sums in the groups {0, 1}, {1, 2} and {0, 1, 2}, begun together by whoever is in them."""
    groups = {}
    for members in ((0, 1), (1, 2), (0, 1, 2)):
        if place.rank in members:
            named = dist.PrefixStore(str(members), place.store)
            groups[members] = connect(
                named,
                members.index(place.rank),
                len(members),
                device=torch.device("cpu"),
                label=str(members),
                ledger=Ledger(),
                wire=WireConfig(timeout_s=20.0),
            )
    tensors = {members: torch.full((100_000,), 10.0**place.rank) for members in groups}
    handles = [group.all_reduce(tensors[members]) for members, group in groups.items()]
    for handle in reversed(handles):
        handle.wait()
    assert all(bool((tensor == tensor[0]).all()) for tensor in tensors.values())
    return [float(tensor[0]) for tensor in tensors.values()]


def test_overlapping_groups_do_not_mix(ranks) -> None:
    """A rank in several groups at once gets each group's own sum."""
    assert ranks(3, overlapping) == [[11.0, 111.0], [11.0, 110.0, 111.0], [110.0, 111.0]]


def of_any_shape(place) -> bool:
    """A transposed tensor, a slice of a larger one, and a leaf of autograd."""
    group, ones = shared(place), torch.ones(400, 200)
    transposed, sliced = ones.clone().t(), torch.ones(900, 200)[300:700]
    leaf = torch.ones(400, 200, requires_grad=True)
    version = leaf._version
    for tensor in (transposed, sliced, leaf):
        group.allreduce([tensor], options()).wait()
    whole = sliced._base
    assert whole is not None
    untouched = float(whole.sum()) == 900 * 200 + (place.size - 1) * 400 * 200
    return untouched and leaf._version == version and all(bool((t == place.size).all()) for t in (transposed, leaf))


def test_strides_neighbours_and_autograd_are_respected(ranks) -> None:
    """The elements of the tensor change, nothing beside them, and autograd sees no change, as with Gloo."""
    assert ranks(2, of_any_shape) == [True, True]


def errors_of(place, fault: Fault, timeout_s: float) -> tuple[str, str]:
    """The sentence of a survivor, and that of its next call, through the seam; rank 1 has the fault."""
    conditions = Conditions(faults=[fault]) if place.rank == 1 else None
    mesh = replicas(place, timeout_s=timeout_s, conditions=conditions)
    assert mesh.world.group.backend == "shm"  # type: ignore[attr-defined]
    sentences = []
    mesh.world.all_reduce(torch.ones(1 << 20)).wait()
    for _ in range(2):
        try:
            mesh.world.all_reduce(torch.ones(1 << 20)).wait()
        except CollectiveError as error:
            sentences.append(str(error))
    return sentences[0], sentences[1]


@pytest.mark.parametrize("size", [2, 3])
def test_a_killed_rank_is_named_at_once(ranks, size: int) -> None:
    """After kill -9 the survivors fail long before the timeout of a minute, name the dead, and stay failed."""
    begin_s = time.monotonic()
    outcomes = ranks.outcomes(size, errors_of, Fault("all_reduce", 1, "kill"), 60.0)
    assert time.monotonic() - begin_s < 20
    for rank in set(range(size)) - {1}:
        survived, sentences = outcomes[rank]
        assert survived, sentences
        assert all("rank 1 (host" in sentence and "did not come" in sentence for sentence in sentences)
        assert "all_reduce number 1" in sentences[0]


def test_a_stopped_rank_is_named_after_the_timeout(ranks) -> None:
    """A rank that stands still (SIGSTOP) keeps its streams open; the timeout ends the wait and names it."""
    (survived, sentences), _ = ranks.outcomes(2, errors_of, Fault("all_reduce", 1, "stop"), 1.0, timeout_s=8.0)
    assert survived, sentences
    assert "rank 1 (host" in sentences[0]
    assert "did not come" in sentences[0]


def killed_amid_a_tensor(place) -> str:
    """Rank 1 dies at its tenth meeting, in the middle of a large tensor."""
    group = shared(place, timeout_s=60.0)
    if place.rank == 1:
        meet, met = group._two_shot._meet, []

        def dies() -> None:
            met.append(1)
            if len(met) == 10:
                os.kill(os.getpid(), 9)
            meet()

        group._two_shot._meet = dies
    try:
        group.allreduce([torch.ones(12 * PIECE_BYTES // 4)], options()).wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_death_in_the_middle_of_a_tensor_is_an_error(ranks) -> None:
    """Between two pieces too, the end of a peer is seen, not waited for."""
    (survived, sentence), (lived, _) = ranks.outcomes(2, killed_amid_a_tensor)
    assert survived, sentence
    assert not lived
    assert sentence == "Connection closed by peer: rank 1 of the group is gone"


def left_behind(place) -> list[int]:
    """Descriptors, maps of segments, threads and folders that 40 groups leave, dropped in use or closed."""

    def held() -> list[int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:shoal")
        return [len(os.listdir("/proc/self/fd")), maps, threading.active_count()]

    for number in range(2):
        _made_and_dropped(place, f"warm-up-{number}")
    before = held()
    for number in range(40):
        _made_and_dropped(place, f"group-{number}")
    deadline_s = time.monotonic() + 10
    while any(left := _more(held(), before)) and time.monotonic() < deadline_s:
        time.sleep(0.02)  # threads end on their own
    return left


def _more(now: list[int], then: list[int]) -> list[int]:
    """By how much each count grew. It may have fallen: threads of what ran in this process earlier end meanwhile."""
    return [max(0, one - other) for one, other in zip(now, then, strict=True)]


def _made_and_dropped(place, name: str) -> None:
    group = shared(place, name)
    work = group.allreduce([torch.ones(100_000)], options())
    if name.endswith("3"):
        group.close()
    if not name.endswith("7"):  # a call that nobody waits for is carried out all the same
        work.wait()


def test_groups_leave_nothing_behind(ranks) -> None:
    """Made, used and dropped, waited for or not: no descriptor, map or thread is left."""
    assert ranks(2, left_behind) == [[0, 0, 0]] * 2


def after_close(place) -> str:
    group = shared(place)
    group.close()
    group.close()
    try:
        group.allreduce([torch.ones(100_000)], options())
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_closed_group_says_so(ranks) -> None:
    """Closing twice is closing; a call afterwards is refused, not left waiting."""
    assert ranks(2, after_close) == ["this group is closed"] * 2


def refused(place, break_it: Callable[[int], None]) -> tuple[str, float, list[str]]:
    """Why the ranks fall back, and what Gloo then sums."""
    break_it(place.rank)
    try:
        mesh = replicas(place)
    finally:
        mend()
    tensor = torch.ones(100_000)
    mesh.world.all_reduce(tensor).wait()
    return mesh.world.group.why, float(tensor[-1]), [mesh.world.group.backend]  # type: ignore[attr-defined]


_honest = (host._host, host.Handshake.knock, host.Handshake.enter, host.Handshake.open)


def mend() -> None:
    """The workers of the pool are used again."""
    host._host, host.Handshake.knock, host.Handshake.enter, host.Handshake.open = _honest


def other_host(rank: int) -> None:
    host._host = lambda: f"boot-{rank}/0"


def other_user(rank: int) -> None:
    host._host = lambda: f"boot/{rank}"


def no_door(rank: int) -> None:
    def broken(*_: object) -> str:
        raise OSError("no folder")

    if rank == 0:
        host.Handshake.open = broken  # type: ignore[method-assign]


def closed_door(rank: int) -> None:
    def broken(self, doors) -> str:
        return _honest[1](self, [door + "-elsewhere" for door in doors])

    host.Handshake.knock = broken  # type: ignore[method-assign]


def lost_on_the_way(rank: int) -> None:
    def broken(self) -> str:
        self._hang_up()
        raise OSError("no descriptors left")

    if rank == 1:
        host.Handshake.enter = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (other_host, "gloo: ranks on 3 hosts"),
        (other_user, "gloo: ranks of 3 users"),
        (no_door, "gloo: rank 0: no folder"),
        (closed_door, "gloo: rank 1: [Errno 2] No such file or directory"),
        (lost_on_the_way, "gloo: rank 1: no descriptors left"),
    ],
)
def test_ranks_that_cannot_share_memory_agree_on_gloo_and_say_why(ranks, break_it, why: str) -> None:
    """Whatever step of the handshake fails on whichever rank, all ranks fall back together, with one reason."""
    assert ranks(3, refused, break_it) == [(why, 3.0, ["gloo"])] * 3


def asked_for_gloo(place) -> tuple[str, str]:
    group = connect(
        place.store,
        place.rank,
        place.size,
        device=torch.device("cpu"),
        label="t",
        ledger=Ledger(),
        wire=WireConfig(timeout_s=20.0, transport="gloo"),
    ).group
    return group.backend, group.why  # type: ignore[attr-defined]


def test_gloo_is_used_where_it_is_asked_for(ranks) -> None:
    """`transport="gloo"` opens no segment."""
    assert ranks(2, asked_for_gloo) == [("gloo", "gloo: asked for")] * 2


def of_an_odd_call(place) -> list[bool]:
    """Whether calls that are not for shared memory go to Gloo."""
    large, small = torch.ones(MINIMUM_BYTES), torch.ones(MINIMUM_BYTES // 4 - 1)
    cases = [([large], dist.ReduceOp.PRODUCT), ([small], dist.ReduceOp.SUM), ([large, large], dist.ReduceOp.SUM)]
    cases += [([large.bool()], dist.ReduceOp.SUM), ([large.to(torch.complex64)], dist.ReduceOp.SUM)]
    return [shm_group._through_memory(tensors, options(op)) is None for tensors, op in cases]


def test_what_memory_cannot_do_goes_to_gloo(ranks) -> None:
    """Products, small tensors, lists, truth values and complex numbers."""
    assert all(of_an_odd_call(None))
