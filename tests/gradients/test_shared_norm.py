"""The norm that ranks share, each taking that of its part of every bucket, is the norm of the whole gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shoal.comm.collective import Alone
from shoal.gradients.bucket import share_of
from shoal.gradients.config import GradientsConfig
from shoal.gradients.replicated import ReplicatedGradients
from shoal.state import Trained
from shoal.topology.holding import held
from shoal.topology.layout import Layout
from tests.comm.groups import replicas

NOISE = 1e-7  # rows of 512 squares are added in float32, and otherwise in each bucket


def norms(place: Any, counted: bool) -> tuple[float, float]:
    """What the sync says, and the norm of what it left in the gradients."""
    mesh = replicas(place)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 301), nn.Linear(301, 3))
    model.register_parameter("without numbers", nn.Parameter(torch.zeros(0)))
    found = []
    for name, p in model.named_parameters():
        holding = held(Layout(replicate=place.size), place.rank, name, tuple(p.shape))
        counts = counted or not name.startswith("0")
        found.append(Trained(holding if counts else replace(holding, holders=(-1,)), p))
    sync = ReplicatedGradients(
        GradientsConfig(bucket_bytes=1 << 12, first_bucket_bytes=64), found, ranks=lambda holding: holding.sums,
        groups=mesh.ranks, replica=Alone(),
    )  # fmt: skip
    sync.start()
    torch.manual_seed(place.rank)
    with sync.backward(last=True):
        model(torch.randn(4, 7)).square().sum().backward()
    norm = float(sync.reduce())
    gradients = [t.parameter.grad for t in found if t.holding.counts and t.parameter.grad is not None]
    sync.close()
    return norm, float(torch.cat([g.double().flatten() for g in gradients]).norm())


def test_shared_norm_is_that_of_the_whole_gradient(ranks: Any) -> None:
    """The same bits on every rank; the last parts of small buckets are empty."""
    found = ranks(3, norms, True)
    assert len({norm for norm, _ in found}) == 1
    assert all(abs(norm / want - 1) < NOISE for norm, want in found)


def test_where_a_rank_does_not_count_all_nobody_shares(ranks: Any) -> None:
    assert all(abs(norm / want - 1) < NOISE for norm, want in ranks(2, norms, False))


def test_shares_cover_a_buffer_once() -> None:
    """Of any length, over any number of ranks, each beginning on a cache line."""
    for length in (0, 1, 16, 17, 100, 4096):
        for size in (1, 2, 3, 7):
            covered = [i for rank in range(size) for i in range(length)[share_of(length, rank, size)]]
            assert covered == list(range(length))
