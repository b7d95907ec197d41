"""Sums inside hosts as they are, and between hosts with a codec."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm.exchanges.coded import CodedExchanges
from shoal.comm.exchanges.exchange import Exchange, Segment
from shoal.comm.mesh import Mesh
from tests.codec.every import codec_of
from tests.comm.groups import replicas
from tests.comm.hosts import on_host

SHAPE, BUFFERS, STEPS = (40, 30), 3, 3
NUMEL = SHAPE[0] * SHAPE[1]
ROUNDING = 1e-4
"""Float32 sums of a few numbers of about 10."""


def mesh_on(place: Any, hosts: str) -> Mesh:
    with on_host(hosts[place.rank]):
        mesh = replicas(place)
        mesh.levels(mesh.world)  # opened while this rank is on its host
    return mesh


def exchanges_on(mesh: Mesh, codec: str, *, feedback: bool = True) -> tuple[CodedExchanges, list[Exchange]]:
    new = CodedExchanges(codec_of(codec), feedback=feedback, seed=0, levels=mesh.levels)
    made = [new(mesh.world, torch.zeros(NUMEL), [Segment(f"m{i}", 0, SHAPE)]) for i in range(BUFFERS)]
    return new, made


def term(rank: int, step: int, buffer: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + buffer)
    return torch.randn(NUMEL, generator=generator)


def summed(exchanges: list[Exchange], rank: int, step: int) -> list[Tensor]:
    """One step of all buffers, as a reducer takes it."""
    for number, exchange in enumerate(exchanges):
        exchange.start()
        exchange.result.copy_(term(rank, step, number))
        exchange.send(exchange.result)
    for exchange in exchanges:
        exchange.settle()
    results = []
    for exchange in exchanges:
        exchange.wait()
        results.append(exchange.result.clone())
    for exchange in exchanges:
        exchange.commit()
    return results


def trained(place: Any, hosts: str, codec: str) -> tuple[list[list[Tensor]], dict[str, list[Tensor]], int]:
    """The results of every step, this rank's residuals after it by buffer, and bytes between hosts of a step."""
    mesh = mesh_on(place, hosts)
    new, exchanges = exchanges_on(mesh, codec)
    results, residuals = [], {}
    for step in range(STEPS):
        mesh.ledger.take()
        results.append(summed(exchanges, place.rank, step))
        for coded in new.made:
            assert coded.residual is not None
            residuals.setdefault(coded.segments[0].name, []).append(coded.residual.clone())
    sent = sum(entry.between_bytes for entry in mesh.ledger.take().values())
    return results, residuals, sent


@pytest.mark.parametrize(("hosts", "codec"), [("aabb", "power_sgd"), ("abab", "top_k"), ("abb", "int8")])
def test_nothing_is_lost_between_hosts(ranks, hosts: str, codec: str) -> None:
    """Result + new residuals of the leaders == terms of all ranks + old residuals; every rank has the same bits."""
    size = len(hosts)
    every = ranks(size, trained, hosts, codec)
    for number in range(BUFFERS):
        holders = [residuals[f"m{number}"] for _, residuals, _ in every if f"m{number}" in residuals]
        assert len(holders) == len(set(hosts))
        before = torch.zeros(NUMEL)
        for step in range(STEPS):
            results = [results[step][number] for results, _, _ in every]
            assert all(torch.equal(results[0], result) for result in results)
            after = sum((held[step] for held in holders), torch.zeros(NUMEL))
            wanted = sum((term(rank, step, number) for rank in range(size)), torch.zeros(NUMEL)) + before
            assert torch.allclose(results[0] + after, wanted, rtol=0, atol=ROUNDING)
            before = after


@pytest.mark.parametrize("codec", ["power_sgd"])
def test_two_ranks_on_each_host_send_the_bytes_of_one(ranks, codec: str) -> None:
    """Between hosts, over all ranks; and the ranks of a host share the buffers that they code."""
    alone = [sent for _, _, sent in ranks(2, trained, "ab", codec)]
    every = ranks(4, trained, "aabb", codec)
    assert sum(sent for _, _, sent in every) == sum(alone) > 0
    assert sorted(len(residuals) for _, residuals, _ in every) == [1, 1, 2, 2]


def nan_on_one(place: Any, hosts: str) -> tuple[bool, bool]:
    mesh = mesh_on(place, hosts)
    new, exchanges = exchanges_on(mesh, "top_k")
    (exchange, *_) = exchanges
    exchange.start()
    exchange.result.fill_(1.0)
    if place.rank == 3:
        exchange.result[5] = torch.nan
    exchange.send(exchange.result)
    exchange.settle()
    exchange.wait()
    exchange.start()
    kept = all(coded.residual is not None and not coded.residual.any() for coded in new.made)
    return bool(exchange.result.isfinite().all()), kept


def test_what_is_not_finite_on_one_rank_shows_on_all(ranks) -> None:
    """And leaves no trace in the residuals of a step that led to no update."""
    assert ranks(4, nan_on_one, "aabb") == [(False, True)] * 4


def levels_of(place: Any, hosts: str) -> bool:
    with on_host(hosts[place.rank]):
        mesh = replicas(place)
        return mesh.levels(mesh.world) is None


@pytest.mark.parametrize("hosts", ["aaa", "abc"])
def test_one_host_or_one_rank_on_each_has_one_level(ranks, hosts: str) -> None:
    assert all(ranks(3, levels_of, hosts))
