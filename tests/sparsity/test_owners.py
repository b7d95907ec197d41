"""The largest of all ranks' scores, found by counts alone, beside a sort of all of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from shoal.sparsity.masks import Owners
from tests.comm.local import LocalCollective, local_group

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
