"""Tables on live ranks against the collectives of the group itself; probing and choosing on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import permutations

import pytest
import torch

from shoal.collectives.algorithms import tables
from shoal.collectives.table import CollectiveTable, Kind, relabelled
from shoal.comm.algorithms import execute
from shoal.comm.algorithms import group as probes
from shoal.comm.algorithms.choose import choose, ranking
from shoal.comm.algorithms.group import ChosenCollective, probe
from shoal.comm.collective import Collective, Handle, Reduction
from shoal.errors import CollectiveError, LayoutError
from shoal.topology.links import Links, clustered, slow_links, uniform
from tests.comm.groups import replicas
from tests.comm.local import local_group
from tests.comm.test_collective import everything, expected
from tests.waiting import HANG_S

TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 5e-2, torch.float16: 5e-3}
"""Sums of up to eight numbers in another order: a few units in the last place."""
LENGTHS = (0, 1, 5, 48, 1003)
CPU = torch.device("cpu")


def over_threads(size: int, function: Callable[[Collective], object], groups: list | None = None) -> list:
    """`function` on every rank of a local group; raises what a rank raised."""
    results: list = [None] * size

    def run(group: Collective) -> None:
        try:
            results[group.rank] = function(group)
        except BaseException as error:
            results[group.rank] = error

    threads = [threading.Thread(target=run, args=(group,)) for group in groups or local_group(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def drawn(length: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * length + rank)
    if dtype.is_floating_point:
        return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 15, (length,), generator=generator).to(dtype)


def all_tables(kind: Kind, ranks: int) -> tuple[CollectiveTable, ...]:
    return tables(kind, ranks, local=2 if ranks % 2 == 0 else 1, blocks=2)


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Bitwise for integers, within the order of sums for others."""
    tolerance = TOLERANCE.get(got.dtype, 0.0)
    scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    assert torch.allclose(got.double(), want.double(), rtol=0, atol=tolerance * scale), what


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_all_reduce_is_that_of_the_group(ranks: int, dtype: torch.dtype) -> None:
    """Any length, empty and shorter than the ranks too; the same bits on all ranks, and in a second run."""

    def job(group: Collective) -> list[torch.Tensor]:
        results = []
        for length in LENGTHS:
            own = drawn(length, group.rank, dtype)
            want = own.clone()
            group.all_reduce(want).wait()
            for table in all_tables("all_reduce", group.size):
                got, again = own.clone(), own.clone()
                execute.all_reduce(got, table, group)
                execute.all_reduce(again, table, group)
                assert torch.equal(got, again), table.name
                assert_close(got, want, f"{table.name}, {length}")
                results.append(got)
        return results

    for results in zip(*over_threads(ranks, job), strict=True):
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("op", ["max", "min"])
def test_max_and_min_are_exact(op: Reduction) -> None:
    """There is no rounding in them, and zeros of both signs come out alike on all ranks."""

    def job(group: Collective) -> None:
        own = drawn(37, group.rank, torch.float32)
        want = own.clone()
        group.all_reduce(want, op).wait()
        for table in all_tables("all_reduce", group.size):
            got = own.clone()
            execute.all_reduce(got, table, group, op=op)
            assert torch.equal(got, want), table.name

    def signs(group: Collective) -> list[list[float]]:
        results = []
        for table in all_tables("all_reduce", group.size):
            zeros = torch.full((9,), 0.0 if group.rank % 3 else -0.0)
            execute.all_reduce(zeros, table, group, op=op)
            results.append(torch.signbit(zeros).tolist())
        return results

    over_threads(6, job)
    first, *others = over_threads(6, signs)
    assert all(other == first for other in others)


@pytest.mark.parametrize("ranks", [2, 3, 6, 8])
def test_the_other_collectives_are_those_of_the_group(ranks: int) -> None:
    """Reduce-scatter, all-gather, all-to-all, broadcast and reduce; inputs keep their content; any order of ranks."""
    order = [(rank * 5 + 1) % ranks for rank in range(ranks)] if ranks % 5 else list(range(ranks))

    def placed(kind: Kind) -> list[CollectiveTable]:
        return [t for table in all_tables(kind, ranks) for t in (table, relabelled(table, order))]

    def job(group: Collective) -> None:
        rank = group.rank
        for part in (0, 1, 7):
            whole, own = drawn(part * ranks, rank, torch.float32), drawn(part, rank, torch.float32)
            kept = whole.clone()
            scattered, gathered, exchanged = own.clone(), whole.clone(), whole.clone()
            group.reduce_scatter(scattered, whole).wait()
            group.all_gather(gathered, own).wait()
            group.all_to_all(exchanged, whole).wait()
            for table in placed("reduce_scatter"):
                got = torch.full_like(own, -1)
                execute.reduce_scatter(got, whole, table, group)
                assert_close(got, scattered, table.name)
            for table in placed("all_gather"):
                got = torch.full_like(whole, -1)
                execute.all_gather(got, own, table, group)
                assert torch.equal(got, gathered), table.name
            for table in placed("all_to_all"):
                got = torch.full_like(whole, -1)
                execute.all_to_all(got, whole, table, group)
                assert torch.equal(got, exchanged), table.name
            assert torch.equal(whole, kept)
            for table in placed("broadcast"):
                got = own.clone()
                execute.broadcast(got, table, group)
                assert torch.equal(got, drawn(part, table.root, torch.float32)), table.name
            for table in placed("reduce"):
                got = own.clone()
                execute.reduce(got, table, group)
                summed = own.clone()
                group.all_reduce(summed).wait()
                if rank == table.root:
                    assert_close(got, summed, table.name)

    over_threads(ranks, job)


def test_tensors_of_any_shape_and_stride() -> None:
    """A transposed matrix is reduced in place."""

    def job(group: Collective) -> None:
        base = torch.arange(12.0).view(3, 4) * (group.rank + 1)
        turned = base.t()
        for table in all_tables("all_reduce", group.size):
            tensor = base.clone().t()
            execute.all_reduce(tensor, table, group)
            assert torch.equal(tensor, turned / (group.rank + 1) * 6), table.name

    over_threads(3, job)


class Watched:
    """`Collective` of a rank that refuses a message out of memory into which another one is on its way, and the other
    way around."""

    def __init__(self, inner: Collective) -> None:
        self._inner, self.rank, self.size = inner, inner.rank, inner.size
        self._leaving: list[tuple[int, int]] = []
        self._arriving: list[tuple[int, int]] = []

    def send(self, tensor: torch.Tensor, *, to: int, tag: int = 0) -> Handle:
        handle = self._inner.send(tensor, to=to, tag=tag)
        return self._under_way(handle, tensor, self._leaving, self._arriving)

    def recv(self, tensor: torch.Tensor, *, source: int, tag: int = 0) -> Handle:
        handle = self._inner.recv(tensor, source=source, tag=tag)
        return self._under_way(handle, tensor, self._arriving, self._leaving)

    @staticmethod
    def _under_way(
        handle: Handle, tensor: torch.Tensor, own: list[tuple[int, int]], others: list[tuple[int, int]]
    ) -> Handle:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        assert all(end <= first or last <= begin for first, last in others)
        own.append((begin, end))

        class UnderWay:
            def wait(self) -> None:
                handle.wait()
                own.remove((begin, end))

        return UnderWay()


def test_nothing_arrives_where_something_is_still_being_sent_from() -> None:
    """In every algorithm; a Bruck exchange sends and replaces the same rows in one step."""

    def job(group: Collective) -> None:
        whole = torch.arange(48.0)
        for table in all_tables("all_to_all", group.size):
            execute.all_to_all(whole.clone(), whole, table, group)
        for table in all_tables("all_gather", group.size):
            execute.all_gather(whole.clone(), whole[: 48 // group.size], table, group)
        for table in all_tables("all_reduce", group.size):
            execute.all_reduce(whole.clone(), table, group)

    for ranks in (2, 6, 8):
        over_threads(ranks, job, [Watched(group) for group in local_group(ranks)])


def test_what_does_not_fit_is_refused() -> None:
    """A table of another collective or world, and lengths that the ranks do not divide."""
    (group,) = local_group(1)
    one, two = torch.ones(1), torch.ones(2)
    with pytest.raises(LayoutError, match="all_reduce of 2 ranks, and was given to all_reduce of 1"):
        execute.all_reduce(one, tables("all_reduce", 2)[0], group)
    with pytest.raises(LayoutError, match="given to all_gather"):
        execute.all_gather(one, one, tables("reduce_scatter", 1)[0], group)
    with pytest.raises(CollectiveError, match="1 ranks need 1 times"):
        execute.all_gather(two, one, tables("all_gather", 1)[0], group)
    with pytest.raises(CollectiveError, match="pad them"):
        execute.all_to_all(two, one, tables("all_to_all", 1)[0], group)


def test_a_collective_of_chosen_algorithms_is_a_collective() -> None:
    """Every call gives what it is defined to be, many in flight, and errors come with `wait`."""

    def job(group: Collective) -> dict[str, torch.Tensor]:
        chosen = ChosenCollective(group, clustered([0, 0, 1, 1], inner=(1e-6, 1e10), outer=(1e-4, 1e8)))
        flying = [torch.full((n,), float(group.rank)) for n in range(1, 40, 7)]
        for handle in [chosen.all_reduce(tensor) for tensor in flying]:
            handle.wait()
        assert all(torch.equal(tensor, torch.full_like(tensor, 6.0)) for tensor in flying)
        with pytest.raises(CollectiveError, match="pad them"):
            chosen.all_to_all(torch.ones(3), torch.ones(3)).wait()
        results = everything(chosen)
        chosen.close()
        return results

    for rank, got in enumerate(over_threads(4, job)):
        for name, want in expected(rank, 4).items():
            assert torch.equal(got[name], want), f"{name} on rank {rank}"


def test_short_vectors_take_few_steps_and_long_ones_few_bytes() -> None:
    """On uniform links; and where hosts are far apart, the hierarchy with its ranks put together by host."""
    links = uniform(8, latency_s=1e-5, bytes_s=1e9)
    assert choose("all_reduce", 64, links).table.name == "one-shot"
    assert choose("all_to_all", 64, links).table.name == "bruck"
    assert choose("all_to_all", 1e9, links).table.name == "direct"
    far = clustered([0, 1, 0, 1, 0, 1], inner=(1e-6, 1e10), outer=(1e-5, 1e8))
    best = choose("all_reduce", 1e8, far)
    assert (best.table.name, best.order) == ("hierarchical", (0, 2, 4, 1, 3, 5))
    assert all(best.seconds <= other.seconds for other in ranking("all_reduce", 1e8, far))
    assert choose("broadcast", 1e3, far, root=3).table.root == 3
    assert choose("all_reduce", 1e3, uniform(1, latency_s=1e-5, bytes_s=1e9)).seconds == 0


class Clock:
    """The time of all ranks: a pair sends one message at a time while the others wait, and only messages take time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Delayed:
    """`Collective` of a rank whose messages take a planted latency and rate to arrive."""

    def __init__(self, inner: Collective, links: Links, clock: Clock) -> None:
        self._inner, self._links, self._clock, self.rank, self.size = inner, links, clock, inner.rank, inner.size
        self.all_gather, self.barrier, self.recv = inner.all_gather, inner.barrier, inner.recv

    def send(self, tensor: torch.Tensor, *, to: int, tag: int = 0) -> Handle:
        self._clock.now_s += self._links.seconds(self.rank, to, tensor.nbytes)
        return self._inner.send(tensor, to=to, tag=tag)


def test_the_probe_finds_planted_hosts_and_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 3 and ranks 1 and 4 share hosts; the link between host 0 and host 2 is slow. All ranks agree."""
    placement = [0, 1, 2, 0, 1]
    inner, outer, slow = (0.0, 1e9), (2e-4, 2e7), 4e6
    planted = clustered(placement, inner=inner, outer=outer)
    rates = [list(row) for row in planted.bytes_s]
    for i, j in permutations(range(5), 2):
        if {placement[i], placement[j]} == {0, 2}:
            rates[i][j] = slow
    links = Links(planted.latency_s, tuple(map(tuple, rates)), planted.hosts)
    monkeypatch.setattr(probes, "time", clock := Clock())
    groups = [Delayed(group, links, clock) for group in local_group(5)]
    found = over_threads(5, lambda group: probe(group, device=CPU, size_bytes=1 << 16, repeats=9), groups)
    assert all(links == found[0] for links in found)
    assert found[0].hosts == tuple(placement)
    assert slow_links(found[0]) == [(0, 2)]


def on_gloo(place) -> str:
    """Every all-reduce, the probe, and a chosen collective on the group of a mesh."""
    group = replicas(place).world
    own = drawn(1003, group.rank, torch.float32)
    want = own.clone()
    group.all_reduce(want).wait()
    for table in all_tables("all_reduce", group.size):
        got, again = own.clone(), own.clone()
        execute.all_reduce(got, table, group)
        execute.all_reduce(again, table, group)
        assert torch.equal(got, again), table.name
        assert_close(got, want, table.name)
    links = probe(group, device=CPU, size_bytes=1 << 16, repeats=2)
    chosen = ChosenCollective(group, links)
    done = everything(chosen)
    for name, value in expected(group.rank, group.size).items():
        assert torch.equal(done[name], value), name
    chosen.close()
    return f"{links}"


def test_tables_run_on_processes(ranks) -> None:
    """Three ranks over the group of a mesh; what the probe found is the same on all of them."""
    assert len(set(ranks(3, on_gloo))) == 1
