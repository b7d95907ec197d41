"""What owners see of layers, and the largest of all ranks' scores, found by counts alone, beside a sort of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.assembly.sparse import left_out_in
from shoal.comm.collective import gather_named
from shoal.sparsity.owners import Owners
from shoal.sparsity.training import SparseTraining
from tests.assembly.journey import whole_state
from tests.comm.local import LocalCollective, local_group
from tests.ranks import TestPlace
from tests.sparsity.test_training import LAYOUTS, masked
from tests.sync.steps import opened
from tests.verification.layouts import corpus

SHAPES = {"a": (5, 8), "b": (40, 3), "c": (2, 2), "d": (7, 9)}


def drawn(name: str, kind: str) -> Tensor:
    numel = torch.Size(SHAPES[name]).numel()
    numbers = torch.randn(numel, generator=torch.Generator().manual_seed(len(name) + numel), dtype=torch.float64)
    return (numbers * 2).round() if kind == "ties" else numbers.masked_fill(numbers < -1, -torch.inf)


def by_sorting(kind: str, count: int) -> dict[str, list[bool]]:
    """Of equal scores that of the first layer, and in a layer the first."""
    every = [(-float(score), n, i) for n, name in enumerate(SHAPES) for i, score in enumerate(drawn(name, kind))]
    kept = {(n, i) for _, n, i in sorted(every)[:count]}
    return {name: [(n, i) in kept for i in range(drawn(name, kind).numel())] for n, name in enumerate(SHAPES)}


@pytest.mark.parametrize("kind", ["numbers", "ties"])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 60, 200])
def test_a_radix_search_finds_what_sorting_does(kind: str, world: int, count: int) -> None:
    def search(group: LocalCollective) -> dict[str, Tensor]:
        owners = Owners((), SHAPES, group, torch.device("cpu"), torch.float64)
        return owners.largest({name: drawn(name, kind) for name in SHAPES if owners.owns(name)}, count)

    with ThreadPoolExecutor(world) as pool:
        found: dict[str, Tensor] = {}
        for part in pool.map(search, local_group(world)):
            found |= part
    assert {name: found[name].tolist() for name in SHAPES} == by_sorting(kind, count)


def gathered(place: TestPlace, tables: dict[str, Any], folder: str) -> list[str]:
    """The layers that owners see otherwise than a checkpoint does."""
    run = opened(place, tables, folder, Path(folder) / "gathered")
    (sparse,), whole = left_out_in(run.state), whole_state(run)
    assert isinstance(sparse, SparseTraining)
    found = {n: sparse.owners.whole(n, lambda own: own.parameter.detach()) for n in sparse.owners.shapes}
    mine = {name: each for name, each in found.items() if sparse.owners.owns(name)}
    everyone = gather_named(list(mine.items()), run.mesh.world, device=run.device)
    return [name for named in everyone for name, each in named if not torch.equal(each, whole[f"model/{name}"])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_owners_see_every_weight_once(ranks, tmp_path: Path, layout: str) -> None:
    corpus(tmp_path)
    world, tables = LAYOUTS[layout]
    assert ranks(world, gathered, masked("magnitude", **tables), str(tmp_path))[0] == []
