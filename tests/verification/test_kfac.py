"""K-FAC in every layout: its proof, its checkpoints from layout to layout, and both ends of KAISA's trade-off."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from shoal.comm.collective import Alone
from shoal.errors import UserCodeError
from shoal.optim.layer_statistics import LayerStatistics
from shoal.runfile.rules import refusal
from tests.assembly.journey import Leg, travel
from tests.ranks import TestPlace
from tests.verification.layouts import corpus, run_file_of, verified

FLOAT64 = {"precision": {"kind": "float64"}}
SAME_MATH = 1e-12
"""Losses in float64, relative."""
KFAC: dict[str, Any] = {"kind": "kfac", "every": 2, "adamw": ["*head*"], "weight_decay": 0.1}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "microbatches": (1, {"batch": {"global_samples": 8, "micro_samples": 3}}),
    "recomputed": (1, {"memory": {"recompute": "full"}}),
    "replicate": (2, {"layout": {"replicate": 2}}),
    "uneven": (3, {"layout": {"replicate": 3}}),
    "ZeRO-1": (2, {"layout": {"shard": 2}, "memory": {"zero": 1}}),
    "ZeRO-2": (2, {"layout": {"shard": 2}, "memory": {"zero": 2}}),
    "ZeRO-3": (2, {"layout": {"shard": 2}, "memory": {"zero": 3}}),
    "context": (2, {"layout": {"context": 2}}),
    "pipeline": (2, {"layout": {"pipeline": 2}}),
    "replicate 4": (4, {"layout": {"replicate": 4}}),
    "ZeRO-1 on 4": (4, {"layout": {"shard": 4}, "memory": {"zero": 1}}),
    "ZeRO-2 on 4": (4, {"layout": {"shard": 4}, "memory": {"zero": 2}}),
    "ZeRO-3 on 4": (4, {"layout": {"shard": 4}, "memory": {"zero": 3}}),
    "pipeline x replicate": (4, {"layout": {"pipeline": 2, "replicate": 2}}),
    "replicate x ZeRO-3": (4, {"layout": {"replicate": 2, "shard": 2}, "memory": {"zero": 3}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kfac")
    corpus(folder)
    return folder


EXPAND, ALL, REDUCE = {}, {"decompositions": "all"}, {"weight_sharing": "reduce"}
CHOLESKY = {"inverse": "cholesky"}
SAMPLED = {"fisher": "sampled"}
FEW = [
    ("uneven", SAMPLED),
    ("ZeRO-2", SAMPLED),
    ("microbatches", SAMPLED),
    ("uneven", EXPAND),
    ("microbatches", REDUCE),
    ("recomputed", EXPAND),
    ("replicate", ALL),
    ("ZeRO-3", EXPAND),
    ("context", EXPAND),
    ("pipeline x replicate", EXPAND),
    ("replicate x ZeRO-3", ALL),
    ("uneven", CHOLESKY | ALL),
]
"""What every test run proves."""
FEW_STEPS, STEPS = 3, 20


def is_refused(layout: str, keys: dict[str, Any]) -> bool:
    """A layout that K-FAC of these keys cannot have."""
    not_sampled = ("ZeRO-3", "context", "pipeline", "recomputed")
    return (layout, keys) == ("context", REDUCE) or (keys == SAMPLED and any(word in layout for word in not_sampled))


ROWS = [
    *((layout, keys, FEW_STEPS) for layout, keys in FEW),
    *(
        pytest.param(layout, keys, STEPS, marks=pytest.mark.stress)
        for layout in LAYOUTS
        for keys in (EXPAND, ALL, REDUCE, CHOLESKY, CHOLESKY | ALL, SAMPLED)
        if not is_refused(layout, keys)
    ),
]


@pytest.mark.matrix(every=1, often=2)
@pytest.mark.parametrize(("layout", "keys", "steps"), ROWS, ids=str)
def test_it_is_proved_in_every_layout(ranks, folder: Path, layout: str, keys: dict[str, Any], steps: int) -> None:
    """`shoal verify` holds in float64: factors, owners and updates are those of one process."""
    world, tables = LAYOUTS[layout]
    tables = {"run": {"steps": STEPS}, "optimizer": KFAC | keys} | tables
    verdict, *_ = ranks(world, verified, tables, str(folder), True, steps)
    assert verdict["holds"], verdict["sentence"]


def verified_with_own_factors(place: TestPlace, tables: dict[str, Any], folder: str) -> dict[str, Any] | None:
    """The verdict on ranks that take the factors of their own samples for those of all."""
    summed = LayerStatistics._sum_over_ranks
    LayerStatistics._sum_over_ranks = lambda self, tensors: None
    try:
        return verified(place, tables, folder, True, 2)
    finally:
        LayerStatistics._sum_over_ranks = summed


@pytest.mark.parametrize("layout", ["replicate", pytest.param("ZeRO-3", marks=pytest.mark.stress)])
def test_factors_of_some_samples_would_be_found(ranks, folder: Path, layout: str) -> None:
    """The proof has teeth."""
    world, tables = LAYOUTS[layout]
    verdict, *_ = ranks(world, verified_with_own_factors, {"optimizer": KFAC} | tables, str(folder))
    assert not verdict["holds"]
    assert any(row["quantity"] == "weight" and not row["holds"] for row in verdict["rows"])


TOKENS = torch.arange(8)


@pytest.mark.parametrize(("module", "inputs"), [(nn.Embedding(8, 3), TOKENS), (nn.Embedding(8, 3), TOKENS[None]),
                                                (nn.Linear(2, 3), torch.ones(1, 4, 2))], ids=str)  # fmt: skip
def test_rows_that_samples_share_are_refused(module: nn.Module, inputs: Tensor) -> None:
    """As those of learned positions: the square of a sum over samples is another in every division of the batch."""
    statistics = LayerStatistics({"positions": module}, Alone(), "expand", 100)
    statistics.begin()
    for samples, shared in ((1, False), (6, True)):
        statistics.microbatch(torch.ones(samples))
        with pytest.raises(UserCodeError, match=r"of positions gives .* share them") if shared else nullcontext():
            module(inputs).sum().backward()


JOURNEY = [("ZeRO-3", EXPAND), ("one", EXPAND), ("replicate", ALL), ("pipeline", EXPAND), ("ZeRO-1", EXPAND)]


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_other_layouts(ranks, folder: Path) -> None:
    """Every bit of the state comes over, between two measurements, and the losses are those of one process."""
    optimizer, legs = KFAC | {"every": 3}, list[Leg]()
    for layout, keys in JOURNEY:
        world, tables = LAYOUTS[layout]
        tables = {"optimizer": optimizer | keys} | tables | FLOAT64
        legs.append(ranks(world, travel, tables, str(folder), "journey", 2)[0])
    tables = {"optimizer": optimizer} | FLOAT64
    straight = ranks(1, travel, tables, str(folder), "straight", 2 * len(JOURNEY))[0]
    for here, there in pairwise(legs):
        assert here.left.keys() == there.came.keys()
        assert any("/basis_rows/" in name for name in there.came)
        assert any("/mean_tokens/" in name for name in there.came)
        assert all(torch.equal(there.came[name], tensor) for name, tensor in here.left.items())
    found = [loss for leg in legs for loss in leg.losses]
    assert found == pytest.approx(straight.losses, rel=SAME_MATH)
    assert straight.left.keys() == legs[-1].left.keys()


REFUSED = [
    ({"layout": {"tensor": 2}}, "split the model by shard"),
    ({"layout": {"pipeline": 2}, "pipeline": {"schedule": "ZBVZeroBubble", "microbatches": 4}}, "use 1F1B"),
    ({"layout": {"context": 2}, "optimizer": KFAC | REDUCE}, 'weight_sharing = "expand"'),
    ({"sync": {"kind": "local"}}, 'use "allreduce"'),
    ({"gradients": {"schedule": "priority"}, "wire": {"check_collectives": False}}, 'use "order"'),
    ({"run": {"compile": True}}, "leave run.compile out"),
    ({"layout": {"shard": 2}, "optimizer": KFAC | SAMPLED}, "use 1 or 2, or set"),
    ({"layout": {"pipeline": 2}, "optimizer": KFAC | SAMPLED}, 'or set it to "empirical"'),
    ({"memory": {"recompute": "full"}, "optimizer": KFAC | SAMPLED}, "a block is computed again for one backward"),
]


@pytest.mark.parametrize(("tables", "repair"), REFUSED)
def test_it_is_refused_where_layers_are_not_whole(folder: Path, tables: dict[str, Any], repair: str) -> None:
    """With what to do."""
    run_file = run_file_of(folder, **{"optimizer": KFAC, **tables})
    run_file = msgspec.structs.replace(run_file, run=msgspec.structs.replace(run_file.run, processes=2))
    sentence = refusal(run_file)
    assert sentence is not None
    assert repair in sentence
