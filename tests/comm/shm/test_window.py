"""Memory that a group allocates: collectives in it give the bits of those in ordinary memory, and it is given back."""

from __future__ import annotations

import gc
import os
import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d

from shoal.comm.collective import GroupCollective
from shoal.comm.config import WireConfig
from shoal.comm.ledger import Ledger
from shoal.comm.mesh import connect
from shoal.errors import CollectiveError
from shoal.gradients.reducer import Reducer
from tests.comm.shm.test_group import DTYPES, FLOATS, OPS, brought, by_definition, options, shared
from tests.gradients.buckets import buckets_over
from tests.held import held, none_more
from tests.waiting import NEVER_S

CPU = torch.device("cpu")
SMALL, LARGE = 1, 140_001  # elements: below the size that is carried out in windows for every dtype, and above it
TINY_BYTES = 1 << 16


def allocated(group: Any, content: Tensor, *, before: int = 0) -> Tensor:
    """`content` in memory that the group has allocated, `before` elements into it."""
    whole = group.allocate(before + content.numel() + 5, dtype=content.dtype, device=CPU)
    return whole[before : before + content.numel()].copy_(content)


def wrong_reductions(place: Any, dtypes: tuple[torch.dtype, ...], numel: int) -> list[str]:
    """What differs in a bit from the same call in ordinary memory."""
    group, n, me, wrong = shared(place), place.size, place.rank, []
    for dtype in dtypes:
        source = brought(me, numel * n, dtype)
        memory = allocated(group, source, before=3)
        for op in OPS:
            if op == "avg" and dtype not in FLOATS:
                continue
            name = f"{op} of {numel} {dtype}"
            got, want = memory[1 : 1 + numel].copy_(source[:numel]), source[:numel].clone()
            for tensor in (got, want):
                group.allreduce([tensor], options(c10d.AllreduceOptions, op=op)).wait()
            if not torch.equal(got, want):
                wrong.append(f"all-reduce, {name}")
            mine, want = memory.copy_(source)[me * numel : (me + 1) * numel], torch.empty(numel, dtype=dtype)
            beside, chosen = torch.empty_like(want), options(c10d.ReduceScatterOptions, op=op)
            group._reduce_scatter_base(want, source, chosen).wait()
            group._reduce_scatter_base(beside, memory, chosen).wait()
            untouched = torch.equal(memory, source)
            group._reduce_scatter_base(mine, memory, chosen).wait()
            if not (untouched and torch.equal(beside, want) and torch.equal(mine, want)):
                wrong.append(f"reduce-scatter, {name}")
        gathered = torch.empty_like(source)
        for output, own in ((gathered, source[:numel]), (memory, memory[me * numel : (me + 1) * numel])):
            group._allgather_base(output, own.copy_(source[:numel])).wait()
        if not torch.equal(memory, gathered):
            wrong.append(f"all-gather of {numel} {dtype}")
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_calls_in_allocated_memory_give_the_same_bits(ranks: Any, size: int) -> None:
    """All dtypes and operations, at odd places, in place and beside; large and small."""
    assert ranks(size, wrong_reductions, DTYPES if size == 3 else FLOATS, LARGE) == [[]] * size
    assert ranks(size, wrong_reductions, (torch.float32, torch.bool), SMALL) == [[]] * size


def in_random_order(place: Any, seed: int) -> bool:
    """Many calls under way in three groups that overlap, in allocated memory and in other, waited for in any order."""
    rng, mine = random.Random(seed), random.Random(seed + place.rank)
    members = ((0, 1), (1, 2), (0, 1, 2))
    groups = {m: shared(place, str(m), members=m) for m in members if place.rank in m}
    if mine.random() < 0.5:
        time.sleep(0.1)  # a rank allocates when others are in calls already
    under_way = []
    for call in range(40):
        who, numel, kind = rng.choice(members), rng.choice((1, 3000, 90_000, 400_001)), rng.randrange(3)
        in_window, cut = rng.random() < 0.7, rng.randrange(numel + 1)
        if place.rank not in who:
            continue
        group, tensors = groups[who], [brought(rank, numel, torch.int64, seed=call) for rank in who]
        own = tensors[who.index(place.rank)].clone()
        own = allocated(group, own, before=cut % 7) if in_window else own
        if kind < 2:
            parts = (own[:cut], own[cut:]) if kind else (own,)
            works, want = [group.allreduce([part]) for part in parts], by_definition(tensors, "sum")
        else:
            whole = torch.cat([own] * len(who))
            whole = allocated(group, whole) if in_window else whole
            at = who.index(place.rank) * numel
            works, want = [group._allgather_base(whole, whole[at : at + numel])], torch.cat(tensors)
            own = whole
        under_way.append((works, own, want))
    mine.shuffle(under_way)
    for works, _, _ in under_way:
        for work in works:
            work.wait()
    return all(torch.equal(got, want) for _, got, want in under_way)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_many_calls_in_groups_that_overlap_come_out_right(ranks: Any, seed: int) -> None:
    assert ranks(3, in_random_order, seed) == [True] * 3


def gradients_of(place: Any, with_memory: bool) -> list[Tensor]:
    """Of two microbatches, through buckets of a few parameters."""
    group = shared(place, f"group-{with_memory}")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    summed = GroupCollective(group, group if with_memory else None)
    parameters = list(model.named_parameters())
    buckets = buckets_over(parameters, summed, bucket_bytes=800_000, first_bucket_bytes=400_000)
    reducer = Reducer(parameters, buckets)
    for _ in range(2):
        reducer.start()
        for last in (False, True):
            with reducer.backward(last=last):
                model(brought(place.rank, 600, torch.float32, seed=last).view(2, 300)).square().sum().backward()
        reducer.finish()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def same_gradients(place: Any) -> bool:
    pairs = zip(gradients_of(place, True), gradients_of(place, False), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_gradients_in_allocated_buckets_have_the_same_bits(ranks: Any) -> None:
    assert ranks(3, same_gradients) == [True] * 3


def read_in_place(place: Any) -> list[float]:
    """Each rank writes its own memory; then reads everybody's, and writes into the next rank's."""
    group = shared(place)
    collective = GroupCollective(group, group)
    rows = collective.shared(LARGE, dtype=torch.float64)
    rows[place.rank].fill_(place.rank + 1)
    collective.barrier().wait()
    found = [float(row.mean()) for row in rows]
    collective.barrier().wait()
    rows[(place.rank + 1) % place.size][:2] = torch.tensor([10.0 + place.rank, 0.0])
    collective.barrier().wait()
    mine = rows[place.rank]
    del rows
    group.close()
    return [*found, *mine[:3].tolist()]  # it outlives the group and the others' rows


def test_ranks_reach_each_others_memory(ranks: Any) -> None:
    """Where it lies, for as long as they hold any of it."""
    before = [1.0, 2.0, 3.0]
    assert ranks(3, read_in_place) == [[*before, 10.0 + (rank - 1) % 3, 0.0, rank + 1] for rank in range(3)]


def without_memory_of_peers(place: Any) -> str:
    """Why there is none."""
    group = shared(place)
    try:
        group.peer(torch.zeros(LARGE), 1 - place.rank)
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_ordinary_memory_has_no_peers(ranks: Any) -> None:
    """It is no part of a window."""
    assert ranks(2, without_memory_of_peers)[0] == (
        "these 560004 bytes are no memory that all ranks of the group have allocated"
    )


def rows_given_back(place: Any) -> None:
    """Peers' rows keep no map once nobody has them."""
    group = shared(place)
    collective = GroupCollective(group, group)
    collective.shared(LARGE, dtype=torch.float32)
    before = held()
    del before["threads"]
    for _ in range(40):
        rows = collective.shared(TINY_BYTES, dtype=torch.float32)
        rows[1 - place.rank][0] = 1
        collective.barrier().wait()
    del rows
    none_more(before)


def test_peers_memory_is_given_back(ranks: Any) -> None:
    ranks(2, rows_given_back)


def disagreement(place: Any, case: str) -> str:
    """Ranks that are not in the same memory."""
    group = shared(place)
    size = LARGE + 8 * (case == "sizes" and place.rank == 1)
    memory = group.allocate(size, dtype=torch.float32, device=CPU)
    other = group.allocate(LARGE, dtype=torch.float32, device=CPU)
    odd = place.rank == 1
    tensor = {
        "sizes": memory[: LARGE - 8],
        "places": memory[8:] if odd else memory[:-8],
        "memories": other if odd else memory,
        "plain": torch.zeros(LARGE) if odd else memory,
    }[case]
    try:
        group.allreduce([tensor]).wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("places", "1 of the group all_reduce of 559972 bytes (sum of float32) at byte 32 of shared allocation 1: all"),
        ("memories", "of the group all_reduce of 560004 bytes (sum of float32) at byte 0 of shared allocation 2: all"),
        ("plain", "of shared allocation 1, rank 1 of the group all_reduce of 560004 bytes (sum of float32): all"),
        ("sizes", "rank 1 of the group has not allocated the memory of this call, or another size"),
    ],
)
def test_ranks_in_different_memory_are_told(ranks: Any, case: str, named: str) -> None:
    """At once, and nobody gets garbage."""
    first, second = ranks(2, disagreement, case)
    assert named in first
    assert "no error" not in (first, second)


def survivors(place: Any) -> str:
    """The sentence of a survivor; rank 1 dies in a loop of calls that have no timeout."""
    group = shared(place, timeout_s=NEVER_S)
    tensor = group.allocate(2_000_000, dtype=torch.float32, device=CPU)
    group.allreduce([tensor]).wait()
    if place.rank == 1 and os.fork() == 0:
        time.sleep(0.03)
        os.kill(os.getppid(), 9)
        os._exit(0)
    try:
        while True:
            group.allreduce([tensor]).wait()
    except RuntimeError as error:
        return str(error)


def test_survivors_of_a_kill_are_told(ranks: Any) -> None:
    outcomes = ranks.outcomes(3, survivors)
    for rank in (0, 2):
        survived, told = outcomes[rank]
        assert survived, told
        assert "rank 1 of the group is gone" in told


def in_children(place: Any) -> tuple[int, float]:
    """A child that was forked lets go of its parent's memory and group, and may not allocate. Its wait status."""
    group = shared(place)
    memory = group.allocate(LARGE, dtype=torch.float32, device=CPU).fill_(1)
    group.allreduce([memory]).wait()
    gc.collect()
    gc.freeze()  # what earlier tests left has threads, which a child cannot join: it must not collect it
    if (child := os.fork()) == 0:
        refused = False
        try:
            group.allocate(LARGE, dtype=torch.float32, device=CPU)
        except CollectiveError:
            refused = True
        del memory
        gc.collect()
        group.close()
        os._exit(0 if refused else 1)
    gc.unfreeze()
    _, status = os.waitpid(child, 0)
    group.allreduce([memory]).wait()
    return status, float(memory[-1])


def test_a_forked_child_does_no_harm(ranks: Any) -> None:
    assert ranks(2, in_children) == [(0, 4.0)] * 2


def left_behind(place: Any) -> float:
    """Many allocations, used or not, leave nothing; a number of memory that outlives its group."""
    group = shared(place)
    group.allreduce([group.allocate(LARGE, dtype=torch.float32, device=CPU)]).wait()
    before = held()
    del before["threads"]  # the group has one of its own from the first call that rests
    for number in range(300):
        memory = group.allocate(TINY_BYTES, dtype=torch.float32, device=CPU)
        if number % 3 == 0:
            group.allreduce([memory]).wait()
    del memory
    group.allreduce([group.allocate(LARGE, dtype=torch.float32, device=CPU)]).wait()
    none_more(before)
    memory = group.allocate(LARGE, dtype=torch.float32, device=CPU).fill_(1)
    group.allreduce([memory]).wait()
    group.close()
    return float(memory.sum())


@pytest.mark.slow
def test_memory_is_given_back_and_may_outlive_its_group(ranks: Any) -> None:
    """300 allocations leave no descriptor and no map."""
    assert ranks(2, left_behind) == [2.0 * LARGE] * 2


def after_leaving(place: Any) -> str:
    """Rank 1 allocates and leaves; rank 0 allocates after that, and calls."""
    group = shared(place)
    if place.rank == 0:
        place.store.wait(["left"])
    memory = group.allocate(LARGE, dtype=torch.float32, device=CPU)
    if place.rank == 1:
        group.close()
        place.store.set("left", "")
        return ""
    try:
        group.allreduce([memory.fill_(1)]).wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_has_left_is_named_by_the_call_and_not_by_the_allocation(ranks: Any) -> None:
    assert ranks(2, after_leaving) == ["rank 1 of the group has closed it", ""]


def over_gloo(place: Any) -> bool:
    """A group that has no memory of its own, asked for some."""
    group = connect(
        place.store,
        place.rank,
        place.size,
        device=CPU,
        label="t",
        ledger=Ledger(),
        wire=WireConfig(timeout_s=180, transport="gloo"),
    )
    before = {"segments": held()["segments"]}
    memory = group.allocate(LARGE, dtype=torch.bfloat16, device=CPU)
    group.all_reduce(memory).wait()
    none_more(before)
    return bool((memory == 0).all()) and memory.dtype is torch.bfloat16


@pytest.mark.slow
def test_elsewhere_it_is_ordinary_memory(ranks: Any) -> None:
    assert ranks(2, over_gloo) == [True] * 2


def resting(place: Any, operation: str, turns: int) -> bool:
    """Whether the results are right. Rank 1 makes a call and then neither waits nor calls again before rank 0, which
    waits at once, has its own."""
    torch.set_num_threads(64)  # no core to spare: the call rests
    group = shared(place, timeout_s=NEVER_S)
    memory = group.allocate(2 * LARGE, dtype=torch.float32, device=CPU)
    half = torch.empty(LARGE)
    calls = {
        "all-reduce": lambda: group.allreduce([memory]),
        "reduce-scatter": lambda: group.reduce_scatter_single(half, memory),
        "all-gather": lambda: group.all_gather_single(memory, memory.chunk(2)[place.rank]),
    }
    right = []
    for turn in range(turns):
        memory.fill_(1)
        group.barrier().wait()
        if place.rank == 0:
            time.sleep(0.005)
        work = calls[operation]()
        if place.rank == 0:
            work.wait()
            place.store.set(f"done {turn}", "")
        place.store.wait([f"done {turn}"])
        work.wait()
        result = half if operation == "reduce-scatter" else memory
        right.append(bool((result == (1 if operation == "all-gather" else place.size)).all()))
        group.barrier().wait()
    torch.set_num_threads(1)
    return all(right)


@pytest.mark.parametrize(("operation", "turns"), [("all-reduce", 50), ("reduce-scatter", 1), ("all-gather", 1)])
def test_a_call_that_rests_does_not_hold_up_a_peer(ranks: Any, operation: str, turns: int) -> None:
    """Its rank's thread goes on with it when the peer has waited for a moment, and not when the rank waits; nor when
    the thread looks by itself, every ten seconds: 50 turns would not end within `HANG_S`."""
    assert ranks(2, resting, operation, turns) == [True] * 2
