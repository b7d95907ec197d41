"""Collectives made of messages, asked for by name or chosen from measured links, behind the seam."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from shoal.comm.algorithms.config import Algorithm
from shoal.comm.mesh import build_mesh
from shoal.topology.layout import Layout
from tests.comm.test_collective import everything, expected

NAMED = [name for name in get_args(Algorithm) if name not in ("backend", "auto")]


def made(place, algorithm: Algorithm, check: bool) -> tuple[dict[str, torch.Tensor], str, int]:
    mesh = build_mesh(
        Layout(replicate=place.size), place.rank, store=torch.distributed.PrefixStore(algorithm, place.store),
        device=torch.device("cpu"), timeout_s=20, transport="gloo", algorithm=algorithm, check_collectives=check,
    )  # fmt: skip
    results = {name: tensor.clone() for name, tensor in everything(mesh.world).items()}
    return results, mesh.world.group.why, mesh.ledger.take()["all_reduce"].calls


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_by_measured_links_are_what_they_are_defined_to_be(ranks, size: int) -> None:
    """`auto` probes the links and takes a table for every collective; the check stands before it."""
    for rank, (got, why, calls) in enumerate(ranks(size, made, "auto", True)):
        assert why == "gloo: asked for; algorithm: auto"
        assert calls == 3  # the ledger counts collectives, not their messages
        for name, want in expected(rank, size).items():
            assert torch.equal(got[name], want), f"{name} on rank {rank}"


def all_named(place) -> list[str]:
    wrong = []
    for algorithm in NAMED:
        got, _, _ = made(place, algorithm, False)
        want = expected(place.rank, place.size)
        wrong += [f"{algorithm}: {name}" for name in want if not torch.equal(got[name], want[name])]
    return wrong


def test_each_name_is_an_all_reduce_that_adds_up(ranks) -> None:
    """Every algorithm that a run file can name, on three ranks; the other collectives stay Gloo's."""
    assert ranks(3, all_named) == [[]] * 3
