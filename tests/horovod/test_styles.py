"""Scripts of other styles: calls in a loss, sparse gradients, NumPy arrays beside tensors, batch normalisation."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoal.horovod as hvd
from shoal.errors import UsageError
from shoal.horovod.engine import Handle
from shoal.horovod.negotiation import Begun, Word, missing
from shoal.horovod.process import Process
from tests.horovod.test_horovod import on_ranks
from tests.waiting import wait_until


def differentiates(rank: int) -> dict[str, list[float]]:
    """Gradients of x, one or two rows of it, through calls whose results count three, five and seven times as much."""
    import shoal.horovod as hvd

    hvd.init()
    found, factor = {}, [3.0, 5.0, 7.0][rank]

    def gradient_of(name: str, rows: int, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = torch.ones(rows, requires_grad=True)
        came = call(x)
        (factor * came * torch.arange(1.0, len(came) + 1)).sum().backward()
        assert x.grad is not None
        found[name] = x.grad.tolist()

    gradient_of("allgather", 1 + (rank == 1), lambda x: hvd.allgather(x, name="all"))
    gradient_of("broadcast", 2, lambda x: hvd.broadcast(x, 1))
    gradient_of("alltoall", 3, lambda x: hvd.alltoall(x))
    gradient_of("splits", 3, lambda x: hvd.alltoall(x, splits=[1, 2, 0])[0])
    hvd.shutdown()
    return found


def test_calls_have_horovods_gradients() -> None:
    """Means over ranks of what came to a row; and of an all-to-all what came to it where it went. Numbers have none."""
    first, second, third = on_ranks(3, differentiates)
    mean = (3.0 + 5.0 + 7.0) / 3
    assert [first["allgather"], second["allgather"], third["allgather"]] == [[mean], [2 * mean, 3 * mean], [4 * mean]]
    assert [first["broadcast"], second["broadcast"], third["broadcast"]] == [[0, 0], [mean, 2 * mean], [0, 0]]
    assert [first["alltoall"], second["alltoall"], third["alltoall"]] == [
        [3, 5, 7], [6, 10, 14], [9, 15, 21],
    ]  # fmt: skip
    assert [first["splits"], second["splits"], third["splits"]] == [
        [3, 5, 10], [6, 15, 20], [9, 25, 30],
    ]  # fmt: skip


def beside_arrays(rank: int) -> list[list[float]]:
    """A sum of tensors, one of arrays, both again after each has ended and begun anew."""
    import shoal.horovod as hvd
    from shoal import wire

    hvd.init()
    group = wire.init()
    assert wire.init() is group is wire.world()
    found = [hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist(), group.all_reduce(np.ones(1)).tolist()]
    hvd.shutdown()
    group.close()
    hvd.init()
    found += [hvd.allreduce(torch.ones(1)).tolist(), wire.init().all_reduce(np.full(1, rank)).tolist()]
    hvd.shutdown()
    return found


def test_arrays_and_tensors_go_side_by_side() -> None:
    """Ranks meet once, whoever asks, and again after an end."""
    assert on_ranks(2, beside_arrays) == [[[2.0], [2.0], [1.0], [1]]] * 2


def by_closure(rank: int, kind: str) -> tuple[list[float], float]:
    """Weights and the last loss of steps that compute their loss themselves; ranks have other data."""
    import shoal.horovod as hvd

    hvd.init()
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    made = {"SGD": partial(torch.optim.SGD, lr=0.1), "LBFGS": partial(torch.optim.LBFGS, line_search_fn="strong_wolfe")}
    optimizer = hvd.DistributedOptimizer(made[kind]([weight]), [("weight", weight)])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((weight - 1 - rank) ** 2).sum() * (1 + rank)
        loss.backward()
        return loss

    loss = [float(optimizer.step(closure)) for _ in range(2)][-1]
    hvd.shutdown()
    return weight.tolist(), loss


def by_odd_closure(rank: int) -> list[Any]:
    import shoal.horovod as hvd

    hvd.init()
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1), [("weight", weight)])

    def closure(returned: Any) -> Any:
        optimizer.zero_grad()
        (weight - rank).square().sum().backward()
        return returned

    found = [optimizer.step(partial(closure, value)) for value in (None, {"rank": rank}, "done", rank, float(rank))]
    hvd.shutdown()
    return [*found, weight.tolist()]


def test_a_closure_may_return_what_is_no_loss() -> None:
    """It comes back as it is; gradients are reduced all the same."""
    first, second = on_ranks(2, by_odd_closure)
    assert first[:5] == [None, {"rank": 0}, "done", 0.5, 0.5]
    assert second[:5] == [None, {"rank": 1}, "done", 0.5, 0.5]
    assert first[5] == second[5] != [0.0, 0.0]


@pytest.mark.slow
def test_a_step_that_computes_its_own_loss_is_one_over_all_ranks() -> None:
    """SGD: two steps along the mean of 2 (w - 1) and 4 (w - 2). L-BFGS, which decides by the loss: their minimum."""
    for weight, loss in on_ranks(2, by_closure, "SGD"):
        assert weight == pytest.approx([0.5 + 0.7 * 0.5] * 2)
        assert loss == pytest.approx(0.5 * (2 * 0.5**2 + 4 * 1.5**2))
    for weight, _ in on_ranks(2, by_closure, "LBFGS"):
        assert weight == pytest.approx([5 / 3] * 2)


def embeds(rank: int, **options: Any) -> list[float]:
    """A table and a dense layer after three steps; in the second one rank 0 uses no row."""
    import shoal.horovod as hvd

    hvd.init()
    torch.manual_seed(0)
    sparse = options.pop("sparse", True)
    table, layer = nn.Embedding(6, 2, sparse=sparse).double(), nn.Linear(2, 1).double()
    named = [("table", table.weight), *layer.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], 0.1), named, **options)
    for step in range(3):
        optimizer.zero_grad()
        rows = torch.tensor([step, step, 5 - rank])
        inner = table(rows) if step != 1 or rank else torch.ones(3, 2, dtype=torch.float64)
        layer(inner).square().sum().backward()
        optimizer.step()
    one = hvd.synchronize(hvd.sparse_allreduce_async(torch.eye(2).to_sparse() * (rank + 1), name="eye", op=hvd.Sum))
    assert torch.equal(one.to_dense(), 3 * torch.eye(2))
    hvd.shutdown()
    return [float(x) for _, p in named for x in p.detach().flatten()]


def begins_without(rank: int, options: dict[str, Any]) -> list[Any]:
    """The gradients of a table that rank 1 does not use in its first two steps, and nobody in the first one."""
    import shoal.horovod as hvd

    hvd.init()
    torch.manual_seed(0)
    table, layer = nn.Embedding(6, 2, sparse=True).double(), nn.Linear(2, 1).double()
    named = [("table", table.weight), *layer.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], 0.1), named, **options)
    found = []
    for step in range(3):
        uses = step == 2 or (step == 1 and rank == 0)
        x = table(torch.tensor([0, 1, 2])) if uses else torch.ones(3, 2).double()
        layer(x).sum().backward()
        optimizer.step()
        assert table.weight.grad is not None
        found.append(table.weight.grad.to_dense().tolist())
        optimizer.zero_grad()
    hvd.shutdown()
    return found


@pytest.mark.parametrize("options", [{}, {"num_groups": 1}, {"sparse_as_dense": True}], ids=str)
def test_a_rank_may_begin_without_a_sparse_gradient(options: dict[str, Any]) -> None:
    """It hears from the others that it is sparse, and sends none of its rows."""
    first, second = on_ranks(2, begins_without, options)
    assert first == second
    assert [any(row != [0.0, 0.0] for row in rows) for rows in first] == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_groups": 1}, {"sparse_as_dense": True}], ids=str)
def test_sparse_gradients_train_as_dense_ones(options: dict[str, Any]) -> None:
    """By indices and values, beside dense ones of their group, or made dense; also where a rank has none."""
    dense = on_ranks(2, partial(embeds, sparse=False))
    sparse = on_ranks(2, partial(embeds, **options))
    assert sparse[0] == sparse[1]
    assert sparse[0] == pytest.approx(dense[0], rel=1e-12)


def as_documented(rank: int) -> dict[str, Any]:
    """Calls with their arguments in Horovod's order, and by Horovod's names of them."""
    hvd.init()
    x, fp16 = torch.full((2, 3), float(rank + 1)), hvd.Compression.fp16
    lists = [torch.nn.Parameter(torch.full((2,), float(rank))), torch.nn.Parameter(torch.full((3,), float(rank)))]
    hvd.broadcast_parameters(lists, 1)  # of a list, whose first has two rows
    rows = torch.full((4,), float(rank + 1), requires_grad=True)
    found = hvd.reducescatter(rows, "rows", hvd.Compression.none, hvd.Sum)
    (found * torch.tensor([1.0, 10.0]) * (rank + 1)).sum().backward()
    assert rows.grad is not None
    handle = hvd.allreduce_async(x, name=f"of {rank}")
    wait_until(lambda: "waits in" in handle.missing(handle.begun.name))
    said = [handle.missing(handle.begun.name)]
    os.environ |= {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.01", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0.01"}
    with pytest.raises(hvd.HorovodInternalError) as raised:
        hvd.synchronize(handle)
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = ""
    said.append(str(raised.value))
    return {
        "sum": hvd.allreduce(x, None, "s", fp16, hvd.Sum, 2.0).tolist(),
        "group": [each.tolist() for each in hvd.grouped_allreduce([x, x], None, "g", fp16, hvd.Sum, 1.0, 0.5)],
        "async": hvd.synchronize(hvd.allreduce_async(x, None, "a", hvd.Max)).tolist(),
        "gather": [len(each) for each in hvd.synchronize(hvd.grouped_allgather_async([x, x[:1]], "t"))],
        "objects": [hvd.broadcast_object(obj=rank, root_rank=1), hvd.allgather_object(obj=rank)],
        "parameters": [each.tolist() for each in lists], "rows": found.tolist(), "gradient": rows.grad.tolist(),
        "stalled": said,
    }  # fmt: skip


def test_arguments_are_horovods() -> None:
    """In its order and by its names; and a call that one rank alone has begun names who has not."""
    for rank, found in enumerate(on_ranks(2, as_documented)):
        assert found["sum"] == [[6.0] * 3] * 2
        assert found["group"] == [[[1.5] * 3] * 2] * 2
        assert found["async"] == [[2.0] * 3] * 2
        assert found["gather"] == [4, 2]
        assert found["objects"] == [1, [0, 1]]
        assert found["parameters"] == [[1.0] * 2, [1.0] * 3]
        assert found["rows"] == [3.0, 3.0]
        assert found["gradient"] == [2.0, 20.0, 4.0, 40.0]
        missing, raised = found["stalled"]
        assert f"rank {1 - rank} has not begun it, and waits in " in missing
        assert raised.startswith(f"allreduce.of {rank} has waited for 0.01 s: ")
        assert raised.endswith("; HOROVOD_STALL_SHUTDOWN_TIME_SECONDS is 0.01")


@pytest.mark.parametrize("given", ["a minute", "-1", "nan", "inf"])
def test_seconds_that_are_none_are_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", given)
    with pytest.raises(
        UsageError, match=f"HOROVOD_STALL_CHECK_TIME_SECONDS is '{given}': give seconds, a number from 0 on"
    ):
        Handle(Begun("a", "allreduce"), []).wait()


def test_variables_are_read_or_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad number is refused in a sentence; what has no effect here is said once, by rank 0."""
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "64MB")
    with pytest.raises(UsageError, match="HOROVOD_FUSION_THRESHOLD is '64MB': give bytes, a number from 0 on"):
        Process().init()
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    process = Process()
    process.init()
    process.init()
    process.shutdown()
    assert capsys.readouterr().err == "HOROVOD_AUTOTUNE, HOROVOD_CYCLE_TIME: set, and without effect in shoal.horovod\n"


def test_who_is_waited_for_is_named() -> None:
    """Calls of other names wait for each other for ever: who misses which is said."""
    words = [Word((Begun("a", "allreduce"),)), Word((Begun("b", "allreduce"),)), Word(joined=True), *[Word()] * 5]
    assert missing(words, "a") == (
        "rank 1 has not begun it, and waits in b; rank 3 has not begun it; rank 4 has not begun it; rank 5 has not "
        "begun it; nor have 2 others"
    )
    assert missing((), "a") == "other ranks have not begun it"


@pytest.mark.parametrize(("name", "instead"), [("run", "shoal launch"), ("colour", "docs/horovod.md")])
def test_what_is_not_there_is_refused_in_a_sentence(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"shoal.horovod has no '{name}': .*{instead}"):
        getattr(hvd, name)


def normalises(rank: int) -> tuple[list[list[float]], dict[str, list[Any]], str]:
    """Outputs, running statistics and gradients of a layer whose batches are of 2, 3 and 4 samples; the same in 16
    bits; and what is said of a single value.
    """
    import shoal.horovod as hvd

    hvd.init()
    x, weights = batches()
    layer = hvd.SyncBatchNorm(3).double()
    own = x.split([2, 3, 4])[rank].clone().requires_grad_()
    outputs = layer(own)
    (outputs * weights.split([2, 3, 4])[rank]).sum().backward()
    gradients = [hvd.allreduce(p.grad, op=hvd.Sum) for p in layer.parameters()]
    layer.eval()
    narrow = {}
    for case, (batch, parameters, autocast) in NARROW.items():
        small, part = hvd.SyncBatchNorm(3).to(parameters), (x - 100).split([2, 3, 4])[rank].to(batch).requires_grad_()
        with torch.autocast("cpu", enabled=autocast):
            normal = small(part)
        (normal * weights.split([2, 3, 4])[rank]).sum().backward()
        assert part.grad is not None
        narrow[case] = [normal.dtype == batch, *(t.flatten().tolist() for t in (normal, part.grad, small.running_var))]
    try:
        hvd.SyncBatchNorm(3)(torch.ones(int(rank == 1), 3))
        said = "nothing"
    except ValueError as error:
        said = str(error)
    hvd.shutdown()
    tensors = [outputs, own.grad, *gradients, layer.running_mean, layer.running_var, layer(own[:1])]
    return [tensor.flatten().tolist() for tensor in tensors], narrow, said


NARROW = {
    "bfloat16": (torch.bfloat16, torch.bfloat16, False),
    "float16": (torch.float16, torch.float16, False),
    "autocast": (torch.bfloat16, torch.float32, True),
    "float32, autocast": (torch.float32, torch.float32, True),
}
"""Types of the batch and of the layer, and whether it is called under autocast."""


def batches() -> tuple[torch.Tensor, torch.Tensor]:
    """Nine samples of 3 channels and 2 x 2 points far from zero, and what their outputs weigh."""
    draws = torch.Generator().manual_seed(5)
    x, weights = (torch.randn(9, 3, 2, 2, generator=draws, dtype=torch.float64) for _ in range(2))
    return 100 + x, weights


def test_batches_are_normalised_as_one() -> None:
    """Of three ranks, as by torch's layer in one process: outputs, gradients and what evaluation uses."""
    answers = on_ranks(3, normalises)
    found = [each for each, _, _ in answers]
    x, weights = batches()
    assert all("more than 1 value per channel" in said for _, _, said in answers)
    for case, (batch, parameters, _) in NARROW.items():
        rows = [narrow[case] for _, narrow, _ in answers]
        narrow, given = nn.BatchNorm2d(3), (x - 100).to(batch).float().requires_grad_()
        normal = narrow(given)
        (normal * weights).sum().backward()
        assert given.grad is not None
        assert narrow.running_var is not None
        assert all(row[0] for row in rows)
        near = {"abs": 4 * torch.finfo(batch).eps}
        assert [v for row in rows for v in row[1]] == pytest.approx(normal.flatten().tolist(), **near)
        assert [v for row in rows for v in row[2]] == pytest.approx(given.grad.flatten().tolist(), **near)
        assert rows[0][3] == pytest.approx(narrow.running_var.tolist(), rel=torch.finfo(parameters).eps)
    layer, whole = nn.BatchNorm2d(3).double(), x.clone().requires_grad_()
    outputs = layer(whole)
    (outputs * weights).sum().backward()
    assert whole.grad is not None
    for at, tensor in enumerate((outputs, whole.grad)):
        assert [v for each in found for v in each[at]] == pytest.approx(tensor.flatten().tolist(), abs=1e-9)
    shared = [*(p.grad for p in layer.parameters()), layer.running_mean, layer.running_var]
    for at, tensor in enumerate(shared, 2):
        assert tensor is not None
        for each in found:
            assert each[at] == pytest.approx(tensor.flatten().tolist(), rel=1e-9)
