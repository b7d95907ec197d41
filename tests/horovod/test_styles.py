"""Scripts of other styles: calls in a loss, sparse gradients, NumPy arrays beside tensors, batch normalisation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.horovod.test_horovod import on_ranks


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
