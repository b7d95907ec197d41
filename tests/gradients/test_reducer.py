"""The bucketed reducer against its oracle: every gradient alone, summed over the ranks after the backward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from shoal.comm.collective import Alone, Collective
from shoal.comm.conditions import Conditions, Fault
from shoal.errors import UserCodeError
from shoal.gradients.bucket import Member, fill_buckets
from shoal.gradients.reducer import Reducer, all_at_the_end
from tests.comm.groups import replicas
from tests.gradients.buckets import buckets_over

SUM_ORDER = 1e-12  # float64; only the order of sums differs


class Net(nn.Module):
    """Layers of different sizes; `skip` leaves one out of the graph, as a conditional branch would."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((5, 40), (40, 40), (40, 7), (7, 1)))
        self.branch = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor, *, branch: bool) -> torch.Tensor:
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        x = x + self.branch(x) if branch else x
        return self.layers[3](torch.tanh(self.layers[2](x))).sum()


def reducer_of(
    net: nn.Module, group: Collective, *, bucket_bytes: int = 2000, first_bucket_bytes: int = 256
) -> Reducer:
    """Every gradient summed over one group."""
    parameters = list(net.named_parameters())
    return Reducer(
        parameters, buckets_over(parameters, group, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes)
    )


def naive(net: nn.Module, batches, branch, group) -> list[torch.Tensor]:
    """All microbatches backward, then one all-reduce a parameter."""
    for x in batches:
        net(x, branch=branch).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
    for gradient in gradients:
        group.all_reduce(gradient).wait()
    return gradients


def bucketed_against_naive(place, bucket_bytes: int, microbatches: int, branches: list[bool]) -> float:
    """The largest difference between both, over two steps."""
    mesh = replicas(place)
    fast, slow = Net().double(), Net().double()
    reducer = reducer_of(fast, mesh.world, bucket_bytes=bucket_bytes, first_bucket_bytes=min(bucket_bytes, 256))
    torch.manual_seed(place.rank)
    worst = 0.0
    for _ in range(2):
        batches = [torch.randn(3, 5, dtype=torch.float64) for _ in range(microbatches)]
        slow.zero_grad()
        want = naive(slow, batches, branches[place.rank], mesh.world)
        reducer.start()
        for index, x in enumerate(batches):
            with reducer.backward(last=index == microbatches - 1):
                fast(x, branch=branches[place.rank]).backward()
        norm = reducer.finish()
        worst = max([worst] + [float((p.grad - w).abs().max()) for p, w in zip(fast.parameters(), want, strict=True)])
        whole = torch.cat([w.flatten() for w in want]).norm()
        worst = max(worst, float((norm - whole).abs()))
    return worst


@pytest.mark.parametrize("bucket_bytes", [1, 2000, 1 << 30])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_buckets_change_nothing(ranks, bucket_bytes: int, microbatches: int) -> None:
    """One gradient a bucket, several, or all: the sums and the norm equal those of the naive reduction."""
    assert max(ranks(2, bucketed_against_naive, bucket_bytes, microbatches, [True, True])) < SUM_ORDER


def test_unused_parameters_are_zero_and_pair_rightly(ranks) -> None:
    """A branch that only one rank takes, or none, neither hangs nor mixes buckets up."""
    assert max(ranks(2, bucketed_against_naive, 2000, 2, [True, False])) < SUM_ORDER
    assert max(ranks(2, bucketed_against_naive, 1, 1, [False, False])) < SUM_ORDER


def taken(together_bytes: int, microbatches: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list]:
    """Bytes of each copy of gradients into buckets, and the gradients, where so many bytes wait for others."""
    monkeypatch.setattr("shoal.gradients.reducer.TOGETHER_BYTES", together_bytes)
    net, copies, copy_all = Net(), [], torch._foreach_copy_

    def counted(places: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        copies.append(sum(gradient.nbytes for gradient in gradients))
        copy_all(places, gradients)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    reducer = reducer_of(net, Alone(), bucket_bytes=1 << 30, first_bucket_bytes=1 << 30)
    reducer.start()
    for index in range(microbatches):
        with reducer.backward(last=index == microbatches - 1):
            net(torch.full((1, 5), 0.1 * (index + 1)), branch=index != 1).backward()
    reducer.finish()
    monkeypatch.undo()
    return copies, [parameter.grad for parameter in net.parameters()]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_short_gradients_are_taken_together_as_one_by_one(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits in fewer copies, of which none is long."""
    every, one_by_one = taken(0, microbatches, monkeypatch)
    some, in_parts = taken(2000, microbatches, monkeypatch)
    whole, together = taken(1 << 20, microbatches, monkeypatch)
    assert (len(every), len(whole)) == (10, 1)
    assert len(whole) < len(some) < len(every)
    assert sum(every) == sum(some) == sum(whole)
    assert max(some) < 2000 + max(every)
    for gradients in (in_parts, together):
        assert all(map(torch.equal, gradients, one_by_one))


def sent_calls(place, microbatches: int) -> int:
    mesh = replicas(place)
    net = Net()
    reducer = reducer_of(net, mesh.world)
    reducer.start()
    for index in range(microbatches):
        with reducer.backward(last=index == microbatches - 1):
            net(torch.ones(1, 5), branch=True).backward()
    reducer.finish()
    assert all(
        p.grad.untyped_storage().data_ptr() in {b.exchange.result.untyped_storage().data_ptr() for b in reducer.buckets}
        for p in net.parameters()
    )
    return mesh.ledger.take()["all_reduce"].calls - len(reducer.buckets)


def test_only_the_last_microbatch_sends(ranks) -> None:
    """Accumulation adds no traffic: as many all-reduces as buckets; gradients end as views of the buckets."""
    assert ranks(2, sent_calls, 3) == [0, 0]


def two_in_one_backward(place) -> tuple[float, list[int]]:
    """Each rank uses one of two nets, each with a reducer: the largest difference, and the calls of the group before
    and after the backward.
    """
    mesh = replicas(place)
    nets, alone = [Net().double() for _ in range(2)], Net().double()
    x = torch.ones(1, 5, dtype=torch.float64)
    alone(x, branch=True).backward()
    reducers = [reducer_of(net, mesh.world) for net in nets]
    for reducer in reducers:
        reducer.start()
    sent = []
    with all_at_the_end(), reducers[0].backward(last=True), reducers[1].backward(last=True):
        nets[place.rank](x, branch=True).backward()
        sent.append(sum(entry.calls for entry in mesh.ledger.take().values()))
    for reducer in reducers:
        reducer.finish()
    sent.append(mesh.ledger.take()["all_reduce"].calls - sum(len(reducer.buckets) for reducer in reducers))
    both = [pair for net in nets for pair in zip(net.parameters(), alone.parameters(), strict=True)]
    return max(float((p.grad - q.grad).abs().max()) for p, q in both), sent


def test_reducers_of_one_backward_send_when_it_is_over(ranks) -> None:
    """One after the other, whichever parameters a rank has used first."""
    for difference, sent in ranks(2, two_in_one_backward):
        assert difference < SUM_ORDER
        assert sent == [0, 0]


def with_a_dropped_bucket(place) -> float:
    mesh = replicas(place, conditions=Conditions(faults=[Fault("all_reduce", 1, "drop")]))
    net = Net().double()
    reducer = reducer_of(net, mesh.world)
    alone = copy.deepcopy(net)
    alone(torch.ones(1, 5, dtype=torch.float64), branch=True).backward()
    reducer.start()
    with reducer.backward(last=True):
        net(torch.ones(1, 5, dtype=torch.float64), branch=True).backward()
    reducer.finish()
    return max(
        float((p.grad - 2 * q.grad).abs().max()) for p, q in zip(net.parameters(), alone.parameters(), strict=True)
    )


def test_a_bucket_that_is_not_reduced_shows(ranks) -> None:
    """The comparison has teeth: an all-reduce that is left out gives other gradients."""
    assert min(ranks(2, with_a_dropped_bucket)) > 1e-3


def test_the_cut_is_reversed_bounded_and_whole() -> None:
    """Every gradient is in one bucket, in reverse order, and only a single large one exceeds its limit."""
    members = [Member(i, n, n * 4, "float32") for i, n in enumerate((10, 500, 3, 3, 90, 1000, 7, 20))]
    buckets = fill_buckets(members, first_bytes=200, bytes_limit=1000)
    assert [m.index for bucket in buckets for m in bucket] == list(range(7, -1, -1))
    for index, bucket in enumerate(buckets):
        assert len(bucket) == 1 or sum(m.bytes for m in bucket) <= (200 if index == 0 else 1000)
    assert len(buckets) > 2


def test_a_gradient_that_is_ready_twice_is_refused() -> None:
    """Reentrant checkpoints fire a shared parameter's hook before its gradient is whole: named, not sent."""
    net = nn.Module()
    net.weight = weight = nn.Parameter(torch.ones(3))
    reducer = reducer_of(net, Alone())

    def part(x: torch.Tensor) -> torch.Tensor:
        return x * weight

    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=True)
    reducer.start()
    with pytest.raises(UserCodeError, match="weight was ready twice"), reducer.backward(last=True):
        x.sum().backward()


class InWorkspace(torch.autograd.Function):
    """x * weight, whose gradient of the weight is a view of one buffer that the next backward writes into."""

    buffer = torch.zeros(8, dtype=torch.float64)

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, *gradients):
        x, weight = ctx.saved_tensors
        own = InWorkspace.buffer[: len(weight)]
        return gradients[0] * weight, own.copy_((gradients[0] * x).sum(0))


@pytest.mark.parametrize("numbers", [8, 3], ids=["the whole buffer", "a part of it"])
def test_a_gradient_in_memory_that_is_used_again_is_copied_at_once(numbers: int) -> None:
    """The gradients of three layers, as of the same layers by PyTorch's own functions."""
    torch.manual_seed(0)
    net = nn.ParameterList(torch.randn(numbers, dtype=torch.float64) for _ in range(3))
    x = torch.randn(5, numbers, dtype=torch.float64)

    def squares(multiply) -> torch.Tensor:
        y = x
        for weight in net:
            y = torch.tanh(multiply(y, weight))
        return y.square().sum()

    wanted = torch.autograd.grad(squares(torch.mul), list(net))
    reducer = reducer_of(net, Alone(), bucket_bytes=1 << 20, first_bucket_bytes=1 << 20)
    reducer.start()
    for last in (False, True):
        with reducer.backward(last=last):
            squares(InWorkspace.apply).backward()
    reducer.finish()
    for weight, each in zip(net, wanted, strict=True):
        torch.testing.assert_close(weight.grad, 2 * each, rtol=SUM_ORDER, atol=SUM_ORDER)
