"""The shared-memory core between real processes: every collective against its definition, faults, what is left."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from shoal.comm.shm.group import share_core
from tests.comm.groups import STOPPED_S
from tests.held import held, none_more
from tests.waiting import HANG_S, NEVER_S

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
PLACE_BYTES = 256 << 10

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def shared(place, name: str = "group", *, members: tuple[int, ...] = (), timeout_s: float = HANG_S) -> Any:
    """The group of `members` (none: of all), behind no seam."""
    members = members or tuple(range(place.size))
    store, rank = dist.PrefixStore(name, place.store), members.index(place.rank)
    gloo = dist.ProcessGroupGloo(store, rank, len(members), timedelta(seconds=30))
    return share_core(gloo, store, timeout_s=timeout_s)


def options(kind: Any, *, op: str | None = None, root: int | None = None, sync: bool = False) -> Any:
    chosen = kind()
    chosen.asyncOp = not sync
    if op is not None:
        chosen.reduceOp = OPS[op]
    if root is not None:
        chosen.rootRank = root
    return chosen


def brought(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    whole = torch.randint(-9, 10, (numel,), generator=generator)
    return (whole.double() * 0.37).to(dtype) if dtype in FLOATS else whole.to(dtype)


def by_definition(tensors: list[Tensor], op: str) -> Tensor:
    """From left to right; 16-bit floats in float32, rounded once."""
    dtype = tensors[0].dtype
    wide = [t.float() for t in tensors] if dtype in (torch.float16, torch.bfloat16) else tensors
    step: Callable[[Tensor, Tensor], Tensor] = {
        "sum": torch.logical_or if dtype is torch.bool else torch.add,
        "product": torch.logical_and if dtype is torch.bool else torch.mul,
        "max": torch.maximum,
        "min": torch.minimum,
    }["sum" if op == "avg" else op]
    total = wide[0]
    for tensor in wide[1:]:
        total = step(total, tensor)
    return (total / len(tensors) if op == "avg" else total).to(dtype)


def wrong_reductions(
    place, numels: tuple[int, ...], dtypes: tuple[torch.dtype, ...], ops: tuple[str, ...] = tuple(OPS)
) -> list[str]:
    """What differs from the definition in a bit."""
    group, n, me, wrong = shared(place), place.size, place.rank, []
    for dtype in dtypes:
        for numel in numels:
            for op in ops:
                if op == "avg" and dtype not in FLOATS:
                    continue
                sources = [brought(rank, numel * n, dtype) for rank in range(n)]
                want, name = by_definition(sources, op), f"{op} of {numel} {dtype}"
                for sync in (False, True):
                    got = sources[me].clone()
                    group.allreduce([got], options(c10d.AllreduceOptions, op=op, sync=sync)).wait()
                    if not torch.equal(got, want):
                        wrong.append(f"all-reduce, {name}")
                root, got = numel % n, sources[me].clone()
                group.reduce([got], options(c10d.ReduceOptions, op=op, root=root)).wait()
                if me == root and not torch.equal(got, want):
                    wrong.append(f"reduce, {name}")
                got = torch.empty(numel, dtype=dtype)
                group._reduce_scatter_base(got, sources[me], options(c10d.ReduceScatterOptions, op=op)).wait()
                if not torch.equal(got, want[me * numel : (me + 1) * numel]):
                    wrong.append(f"reduce-scatter, {name}")
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_reduction_is_as_defined_bit_for_bit(ranks, size: int) -> None:
    """All dtypes and operations: nothing, one element, an odd number; that is one shot."""
    assert ranks(size, wrong_reductions, (0, 1, 333), DTYPES) == [[]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_large_reductions_are_as_defined_bit_for_bit(ranks, size: int) -> None:
    """Two shots, in more turns than there are places."""
    numels = (PLACE_BYTES // 4 + 1, 20 * PLACE_BYTES // 4 // size + 3)
    assert ranks(size, wrong_reductions, numels[:1], FLOATS, ("avg",)) == [[]] * size
    assert ranks(size, wrong_reductions, numels[1:], (torch.float32,), ("sum", "max")) == [[]] * size


def odd_floats(place) -> bool:
    """Infinities, NaN, subnormal and huge 16-bit floats: every bit pattern, added to zero, and to itself."""
    group, same = shared(place), []
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        for other in (torch.zeros_like(every), every):
            got = (every if place.rank == 0 else other).clone()
            group.allreduce([got]).wait()
            want = (every.float() + other.float()).to(dtype)
            same.append(torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num()))
    return all(same)


def test_sixteen_bit_floats_are_rounded_as_torch_rounds(ranks) -> None:
    """All 65,536 of each kind."""
    assert ranks(2, odd_floats) == [True, True]


def wrong_moves(place, numels: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> list[str]:
    group, n, me, wrong = shared(place), place.size, place.rank, []

    def expect(name: str, got: Tensor, want: Tensor) -> None:
        if not torch.equal(got, want):
            wrong.append(name)

    for dtype in dtypes:
        for numel in numels:
            root, name = numel % n, f"of {numel} {dtype}"
            blocks = [brought(rank, numel * n, dtype) for rank in range(n)]
            own, part = blocks[me], slice(me * numel, (me + 1) * numel)
            got = torch.zeros(n * n * numel, dtype=dtype)
            group._allgather_base(got, own).wait()
            expect(f"all-gather {name}", got, torch.cat(blocks))
            several = [torch.zeros_like(own) for _ in range(n)]
            group.allgather([several], [own]).wait()
            expect(f"all-gather of lists {name}", torch.cat(several), torch.cat(blocks))
            got = torch.zeros_like(own)
            group.alltoall_base(got, own, [], []).wait()
            expect(f"all-to-all {name}", got, torch.cat([block[part] for block in blocks]))
            got = own.clone()
            group.broadcast([got], options(c10d.BroadcastOptions, root=root)).wait()
            expect(f"broadcast {name}", got, blocks[root])
            several = [torch.zeros_like(own) for _ in range(n if me == root else 0)]
            group.gather([several] if me == root else [], [own], options(c10d.GatherOptions, root=root)).wait()
            if me == root:
                expect(f"gather {name}", torch.cat(several), torch.cat(blocks))
            got, sent = torch.zeros(numel, dtype=dtype), [list(own.split(numel))] if me == root and numel else []
            if numel:
                group.scatter([got], sent, options(c10d.ScatterOptions, root=root)).wait()
                expect(f"scatter {name}", got, blocks[root][part])
            group.barrier().wait()
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_move_is_as_defined(ranks, size: int) -> None:
    """Gathers, scatters, broadcasts, all-to-alls of any dtype, complex and 8-bit floats too, and of any length."""
    dtypes = (torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.uint8)
    assert ranks(size, wrong_moves, (0, 1, 7), dtypes) == [[]] * size
    assert ranks(size, wrong_moves, (PLACE_BYTES + 5,), (torch.int8, torch.float32)) == [[]] * size


def uneven(place) -> bool:
    """Rank r sends (r + 2 q) % 5 * scale rows to rank q: none, some, more than a place holds."""
    group, n, me = shared(place), place.size, place.rank
    for scale in (0, 1, 40_000):
        rows = [[(r + 2 * q) % 5 * scale for q in range(n)] for r in range(n)]
        sent = [torch.full((rows[me][q], 3), float(10 * me + q)) for q in range(n)]
        sizes = [rows[r][me] for r in range(n)]
        got = torch.zeros(sum(sizes), 3)
        group.alltoall_base(got, torch.cat(sent), sizes, rows[me]).wait()
        want = torch.cat([torch.full((rows[r][me], 3), float(10 * r + me)) for r in range(n)])
        if not torch.equal(got, want):
            return False
    return True


def test_blocks_of_all_to_all_may_differ(ranks) -> None:
    """Uneven, empty and large ones."""
    assert ranks(3, uneven) == [True] * 3


def in_random_order(place, seed: int) -> bool:
    """Many calls under way in three groups that overlap; made in one order, waited for in each rank's own."""
    rng, mine = random.Random(seed), random.Random(seed + place.rank)
    members = ((0, 1), (1, 2), (0, 1, 2))
    groups = {m: shared(place, str(m), members=m) for m in members if place.rank in m}
    under_way = []
    for call in range(60):
        who, numel, kind = rng.choice(members), rng.choice((1, 50, 3000, 90_000)), rng.randrange(3)
        if place.rank not in who:
            continue
        tensors = [brought(rank, numel, torch.int64, seed=call) for rank in who]
        own = tensors[who.index(place.rank)].clone()
        if kind == 0:
            work, want = groups[who].allreduce([own]), by_definition(tensors, "sum")
        elif kind == 1:
            work, want = groups[who].broadcast([own], options(c10d.BroadcastOptions, root=1)), tensors[1]
        else:
            gathered, source = torch.zeros(numel * len(who), dtype=torch.int64), own
            work, want, own = groups[who]._allgather_base(gathered, source), torch.cat(tensors), gathered
        under_way.append((work, own, want))
    mine.shuffle(under_way)
    return all(work.wait() and torch.equal(got, want) for work, got, want in under_way)


@pytest.mark.parametrize("seed", [1, 2])
def test_many_calls_in_overlapping_groups_keep_their_results(ranks, seed: int) -> None:
    """Whatever is waited for first."""
    assert ranks(3, in_random_order, seed) == [True] * 3


def messages(place) -> bool:
    """Both ways at once, large and small, asked for in another order than sent; and one from whoever sends."""
    group, other = shared(place), 1 - place.rank
    numels = (5, 0, 1_000_000, 300, 400_000)
    sent = [group.send([brought(place.rank, n, torch.float32, seed=t)], other, t) for t, n in enumerate(numels)]
    tags = [2, 0, 4, 3, 1]
    got = {tag: torch.zeros(numels[tag]) for tag in tags}
    asked = [group.recv([got[tag]], other, tag) for tag in tags]
    group.barrier().wait()  # a collective does not wait for messages
    finished = all(work.wait() for work in [*asked, *sent])
    last = torch.zeros(3)
    work = group.recv_anysource([last], 9)
    group.send([torch.ones(3)], other, 9).wait()
    finished &= work.wait() and work._source_rank() == other
    return finished and all(torch.equal(got[t], brought(other, numels[t], torch.float32, seed=t)) for t in tags)


def test_messages_find_their_receivers(ranks) -> None:
    """By tag, in any order, while both ranks only send at first, more than a ring holds."""
    assert ranks(2, messages) == [True, True]


def crossing(place) -> bool:
    """Rank 0 makes a collective and then sends; rank 1 receives first, and makes the collective later."""
    group, tensor, word = shared(place), torch.ones(200_000), torch.zeros(2)
    if place.rank == 0:
        work = group.allreduce([tensor])
        group.send([torch.ones(2)], 1, 0).wait()
        work.wait()
    else:
        group.recv([word], 0, 0).wait()
        group.allreduce([tensor]).wait()
    return bool((tensor == 2).all())


def test_a_collective_under_way_does_not_hold_up_messages(ranks) -> None:
    """A call returns before its peers have come."""
    assert ranks(2, crossing) == [True, True]


def strides(place) -> bool:
    """A transposed tensor, a slice of a larger one, a leaf of autograd, a column."""
    group, ones = shared(place), torch.ones(40, 20)
    transposed, whole, columns = ones.clone().t(), torch.ones(90, 20), torch.ones(30, 4)
    leaf = torch.ones(40, 20, requires_grad=True)
    version = leaf._version
    for tensor in (transposed, whole[30:70], leaf, columns[:, 1]):
        group.allreduce([tensor]).get_future().wait()
    group.broadcast([columns[:, 2]]).wait()
    kept = float(whole.sum()) == 90 * 20 + 40 * 20 and float(columns.sum()) == 30 * 5 and leaf._version == version
    return kept and bool((transposed == 2).all()) and bool((leaf == 2).all())


def test_strides_neighbours_and_autograd_are_respected(ranks) -> None:
    """The elements of the tensor change, nothing beside them, and autograd sees no change, as with Gloo."""
    assert ranks(2, strides) == [True, True]


def survivors(place, act: str, numel: int) -> str:
    """The sentence of a survivor; rank 1 dies in a loop of calls that have no timeout."""
    group, tensor, word = shared(place, timeout_s=NEVER_S), torch.ones(numel), torch.zeros(4)
    group.allreduce([tensor]).wait()
    if place.rank == 1 and os.fork() == 0:
        time.sleep(random.Random(numel).random() * 0.05)
        os.kill(os.getppid(), 9)
        os._exit(0)
    try:
        while True:
            if act == "message":
                group.recv([word], 1, 0).wait() if place.rank == 0 else time.sleep(1)
            group.allreduce([tensor]).wait()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(("size", "act", "numel"), [(2, "sum", 10), (3, "sum", 2_000_000), (2, "message", 10)])
def test_survivors_of_a_kill_are_told(ranks, size: int, act: str, numel: int) -> None:
    """kill -9 at some moment of a stream of calls, small or large: an error that names the dead, no hang."""
    outcomes = ranks.outcomes(size, survivors, act, numel)
    for rank in set(range(size)) - {1}:
        survived, told = outcomes[rank]
        assert survived, told
        assert "rank 1 of the group is gone" in told


def late(place) -> str:
    group = shared(place, timeout_s=STOPPED_S)
    if place.rank == 1:
        place.store.wait(["told"])
        return ""
    try:
        group.barrier().wait()
    except RuntimeError as error:
        return str(error)
    finally:
        place.store.set("told", "")
    return "no error"


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_after_the_timeout(ranks) -> None:
    assert (
        ranks(2, late)[0] == "shared memory: Timed out after 3 s waiting for rank 1 of the group, in barrier of 0 bytes"
    )


def in_children(place) -> tuple[str, float]:
    """A child that was forked may not use its parent's group, and does it no harm when it ends."""
    group, tensor = shared(place), torch.ones(3)
    here, there = multiprocessing.Pipe()
    if (child := os.fork()) == 0:
        try:
            group.allreduce([tensor]).wait()
            there.send("no error")
        except RuntimeError as error:
            there.send(str(error))
        group.close()
        os._exit(0)
    os.waitpid(child, 0)
    group.allreduce([tensor]).wait()
    return here.recv(), float(tensor[0])


def test_a_forked_child_is_refused(ranks) -> None:
    """And its parent's group goes on."""
    sentence = "a group can be used by the process that made it only, and while there is memory"
    assert ranks(2, in_children) == [(sentence, 2.0)] * 2


def left_behind(place) -> None:
    """Many groups, dropped in use or closed, leave nothing."""
    gloo = dist.ProcessGroupGloo(place.store, place.rank, place.size, timedelta(seconds=30))
    for number in range(3):
        _made_and_dropped(place, gloo, f"warm-up-{number}")
    before = held()
    for number in range(200):
        _made_and_dropped(place, gloo, f"group-{number}")
    none_more(before)


def _made_and_dropped(place, gloo: Any, name: str) -> None:
    group = share_core(gloo, dist.PrefixStore(name, place.store), timeout_s=HANG_S)
    work = group.allreduce([torch.ones(100_000)])
    message = group.send([torch.ones(2)], 1 - place.rank, 3)
    if name.endswith("3"):
        work.get_future().wait()
        group.close()
    elif not name.endswith("7"):  # a call that nobody waits for is carried out all the same
        work.wait()
        message.wait()


@pytest.mark.slow
def test_groups_leave_nothing_behind(ranks) -> None:
    """200 of them, waited for or not: no descriptor, map or thread."""
    ranks(2, left_behind)


def faults_of_small_calls(place) -> int:
    """Page faults of this rank in the 15 calls of 64 KB that take the other places than the first did."""
    group, tensor, faults = shared(place), torch.ones(16 << 10), []
    for calls in (1, 15):
        for _ in range(calls):
            group.allreduce([tensor], options(c10d.AllreduceOptions, sync=True)).wait()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return faults[1] - faults[0]


KERNEL = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])


@pytest.mark.slow
@pytest.mark.skipif(KERNEL < (5, 14), reason="this kernel cannot give memory ahead of its use (Linux 5.14)")
def test_the_first_small_calls_are_not_spent_on_page_faults(ranks) -> None:
    """A place takes 16 pages of this rank, and 16 of the other's, which the kernel maps around one fault."""
    ranks(2, faults_of_small_calls)  # what else comes with a first call
    tries = [max(ranks(2, faults_of_small_calls)) for _ in range(5)]  # other work of the process may fault as well
    assert min(tries) < 15 * 8, tries
