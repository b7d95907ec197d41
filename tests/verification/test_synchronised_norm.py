"""`model.batch_norm = "synchronised"`: batch norms over a microbatch of all ranks are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from torch import nn

from shoal.models.batch_norm import SynchronisedBatchNorm
from shoal.models.config import PythonModel
from shoal.runfile.rules import refusal
from tests.verification.foreign_models import PICTURES, foreign
from tests.verification.layouts import corpus, run_file_of, verified

SAMPLES = 16
"""So many that no microbatch of all ranks has two samples: normalised they are -1 and 1, and all gradients noise."""
HERE = {"batch_norm": "synchronised"}
TABLES: dict[str, Any] = {
    "model": foreign("conv_norm", HERE, biased=True),
    "data": PICTURES,
    "batch": {"global_samples": SAMPLES},
}
REPLICATE_2, REPLICATE_3, SHARD = (
    {"layout": {axis: n}} for axis, n in (("replicate", 2), ("replicate", 3), ("shard", 2))
)
# Two sums in another order: a rounding of each type, of numbers of order one.
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-12}


def micro(samples: int) -> dict[str, Any]:
    return {"batch": {"global_samples": SAMPLES, "micro_samples": samples}}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("counts", [(6,), (3, 3), (1, 3, 2), (0, 5, 1)], ids=str)
def test_all_ranks_together_are_pytorchs_batch_norm(ranks, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    """Outputs, the gradients of input, weight and bias, and running statistics of `nn.BatchNorm2d` on the whole batch,
    with as many samples on each rank as there happen to be, and samples that count for nothing beside them.
    """
    x = images(sum(counts), dtype)
    theirs = weighted(nn.BatchNorm2d(3, dtype=dtype))
    y = theirs(x)
    y.pow(3).sum().backward()
    gradient = x.grad
    assert gradient is not None
    outcomes = ranks(len(counts), normalised, counts, dtype)
    close: dict[str, Any] = {"rtol": CLOSE[dtype], "atol": CLOSE[dtype] * 100}
    for found, wanted in ((0, y), (1, gradient)):
        torch.testing.assert_close(torch.cat([outcome[found] for outcome in outcomes]), wanted.detach(), **close)
    for found, wanted in ((2, theirs.weight.grad), (3, theirs.bias.grad)):
        torch.testing.assert_close(sum(outcome[found] for outcome in outcomes), wanted, **close)
    for outcome in outcomes:
        torch.testing.assert_close(outcome[4], theirs.running_mean, **close)
        torch.testing.assert_close(outcome[5], theirs.running_var, **close)
        assert torch.equal(outcome[5], outcomes[0][5])


def normalised(place, counts: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """What this rank has of its samples, among which it puts one that does not count where ranks differ."""
    from shoal.engine.batch_statistics import StatisticsSync, connect_norms

    group, norm = world_of(place), weighted(SynchronisedBatchNorm(3).to(dtype))
    connect_norms(norm, group)
    before, own = sum(counts[: place.rank]), counts[place.rank]
    x = images(sum(counts), dtype).detach()[before : before + own]
    if len(set(counts)) > 1:
        x = torch.cat([torch.full_like(x[:1] if own else torch.zeros(1, 3, 5, 4, dtype=dtype), 1e3), x])
        norm.real = torch.arange(len(x)) > 0
    x.requires_grad_()
    y = norm(x)
    rows = slice(len(x) - own, None)
    y[rows].pow(3).sum().backward()
    StatisticsSync(norm, group).finish(committed=True)
    assert x.grad is not None
    parts = [y[rows], x.grad[rows], norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]
    return [part.detach() for part in parts]


def world_of(place) -> Any:
    from shoal.comm.mesh import build_mesh
    from shoal.topology.layout import Layout

    layout = Layout(replicate=place.size)
    return build_mesh(layout, place.rank, store=place.store, device=torch.device("cpu")).world


def images(samples: int, dtype: torch.dtype) -> torch.Tensor:
    x = 3 + 2 * torch.randn(samples, 3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x.to(dtype).requires_grad_()


def weighted(norm: Any) -> Any:
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, 1.0, 1.5]))
        norm.bias.copy_(torch.tensor([0.1, 0.0, -0.1]))
    return norm


def test_a_large_mean_leaves_the_variance() -> None:
    """In float32, E[x^2] - E[x]^2 of a channel around 10,000 is noise; distances from the mean are not."""
    x = 1e4 + torch.randn(8, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    y = SynchronisedBatchNorm(1)(x).detach()
    assert float((y.double() - nn.BatchNorm2d(1, dtype=torch.float64)(x.double()).detach()).abs().max()) < 1e-2


def test_gradients_of_gradients_pass_through_the_exchange(ranks) -> None:
    """As a gradient penalty needs them: those of one process, in float64."""
    x = images(4, torch.float64)
    (wanted,) = second_derivative(weighted(nn.BatchNorm2d(3, dtype=torch.float64)), x, range(4))
    found = torch.cat(ranks(2, penalised))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def second_derivative(norm: nn.Module, x: torch.Tensor, own: range) -> tuple[torch.Tensor, ...]:
    (first,) = torch.autograd.grad(norm(x).pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad(first.pow(2).sum(), x)


def penalised(place) -> torch.Tensor:
    from shoal.engine.batch_statistics import connect_norms

    norm = weighted(SynchronisedBatchNorm(3).double())
    connect_norms(norm, world_of(place))
    x = images(4, torch.float64).detach()[2 * place.rank :][:2].requires_grad_()
    return second_derivative(norm, x, range(2))[0]


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "two": (2, {**REPLICATE_2}),
    "one": (1, {}),
    "three, uneven": (3, {**REPLICATE_3}),
    "one, microbatches": (1, micro(6)),
    "two, microbatches": (2, {**REPLICATE_2, **micro(2)}),
    "three, uneven microbatches": (3, {**REPLICATE_3, **micro(2)}),
    "zero 3, recomputed": (2, {**SHARD, **micro(3), "memory": {"recompute": "full"}}),
    "zero 2": (2, {**SHARD, "memory": {"zero": 2}}),
    "bfloat16": (2, {**REPLICATE_2, "precision": {"kind": "bfloat16"}}),
}


@pytest.mark.matrix(every=1, often=2)
@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("exact", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("case", LAYOUTS)
def test_every_layout_is_the_same_model(ranks, tmp_path: Path, case: str, exact: bool) -> None:
    """`verify` holds for loss, gradients, weights and running statistics, in float32 and float64."""
    corpus(tmp_path)
    size, tables = LAYOUTS[case]
    verdict, *_ = ranks(size, verified, {**TABLES, **tables}, str(tmp_path), exact, 3)
    assert verdict["holds"], verdict["sentence"]


def test_statistics_of_the_rank_alone_are_found(ranks, tmp_path: Path) -> None:
    """Planted: ranks that do not exchange anything compute another model, and `verify` says so."""
    corpus(tmp_path)
    verdict, *_ = ranks(2, verified_unconnected, {**TABLES, **REPLICATE_2}, str(tmp_path))
    assert not verdict["holds"]


def verified_unconnected(place, tables: dict[str, Any], folder: str) -> dict[str, Any] | None:
    with patch("shoal.assembly.generation.connect_norms", lambda model, group: None):
        return verified(place, tables, folder, False, 1)


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"layout": {"tensor": 2}}, "layout.tensor = 2"),
        ({"layout": {"context": 2}}, "layout.context = 2"),
        ({"layout": {"pipeline": 2}}, "layout.pipeline = 2"),
        ({"sync": {"kind": "local"}}, 'sync.kind = "local"'),
        ({"sync": {"kind": "allreduce", "order": "canonical", "logical_shards": 4}}, 'sync.order = "canonical"'),
        ({"batch": {"division": "by_speed"}}, 'batch.division = "by_speed"'),
        ({"elastic": {}}, "[elastic]"),
        ({"run": {"compile": True}}, "run.compile = true"),
    ],
    ids=str,
)
def test_where_ranks_have_no_microbatch_in_common_it_is_refused(
    tmp_path: Path, tables: dict[str, Any], named: str
) -> None:
    said = refusal(run_file_of(tmp_path, **{**TABLES, **tables}))
    assert said is not None
    assert said.startswith(f'model.batch_norm = "synchronised" with {named}: ')


def test_groups_and_synchronised_norms_are_one_or_the_other() -> None:
    with pytest.raises(msgspec.ValidationError, match="leave group_samples out"):
        msgspec.convert({**foreign("conv_norm", HERE), "group_samples": 4}, PythonModel)
