"""Deep Gradient Compression: what is sent of velocities, and what is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shoal.codec.config import DGCConfig
from shoal.codec.top_k import DGC
from shoal.comm.collective import Collective
from shoal.comm.exchanges.momentum import MomentumCorrected
from tests.comm.exchanges.test_coded import NUMEL, SEGMENTS, STEPS, on_ranks, residual_of, summed, term

MOMENTUM = 0.9
FLOAT64 = 1e-11


def corrected(
    group: Collective, *, clip_norm: float | None = None, dtype: torch.dtype = torch.float64
) -> MomentumCorrected:
    codec = DGC(DGCConfig(fraction=0.05, selection="exact"))
    buffer = torch.zeros(NUMEL, dtype=dtype)
    return MomentumCorrected(
        codec, group, buffer, SEGMENTS, momentum=MOMENTUM, clip_norm=clip_norm, feedback=True, key=3
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_the_algorithm_of_the_paper(dtype: torch.dtype) -> None:
    """Beside a plain loop over numbers: velocities, residuals and the sum, on both ranks, step by step."""

    def work(group: Collective) -> list[tuple[Tensor, Tensor, Tensor]]:
        exchange = corrected(group, dtype=dtype)
        return [
            (summed(exchange, term(group.rank, step, dtype)), exchange.velocity.clone(), residual_of(exchange))
            for step in range(STEPS)
        ]

    found = on_ranks(2, work)
    velocity, residual = ([torch.zeros(NUMEL, dtype=dtype) for _ in range(2)] for _ in range(2))
    kept = DGC(DGCConfig(fraction=0.05)).kept(NUMEL)
    for step in range(STEPS):
        total = torch.zeros(NUMEL, dtype=dtype)
        for rank in range(2):
            velocity[rank] = MOMENTUM * velocity[rank] + term(rank, step, dtype)
            whole = velocity[rank] + residual[rank]
            places = whole.abs().topk(kept).indices
            sent = torch.zeros_like(whole)
            sent[places] = whole[places].float().to(dtype)
            total += sent
            residual[rank] = whole - sent
            velocity[rank][places] = 0
        for rank in range(2):
            result, ours, left = found[rank][step]
            for a, b in ((result, total), (ours, velocity[rank]), (left, residual[rank])):
                assert torch.allclose(a, b, rtol=0, atol=FLOAT64 if dtype == torch.float64 else 1e-5)


def test_a_step_that_led_to_no_update_is_forgotten() -> None:
    """Velocities and residuals are those before the step."""

    def work(group: Collective) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exchange = corrected(group)
        summed(exchange, term(group.rank, 0))
        velocity, residual = exchange.velocity.clone(), residual_of(exchange)
        bad = term(group.rank, 1)
        bad[3] = math.nan
        assert not summed(exchange, bad, commit=False).isfinite().all()
        exchange.start()
        return velocity, exchange.velocity.clone(), residual, residual_of(exchange)

    for velocity, velocity_after, residual, residual_after in on_ranks(2, work):
        assert velocity.any()
        assert torch.equal(velocity, velocity_after)
        assert torch.equal(residual, residual_after)


def test_gradients_are_clipped_to_a_share_of_the_norm() -> None:
    """Each of n ranks' to c / sqrt(n), before momentum; smaller ones stay."""

    def work(group: Collective) -> tuple[Tensor, Tensor]:
        large, small = corrected(group, clip_norm=1.0), corrected(group, clip_norm=1e6)
        for exchange in (large, small):
            summed(exchange, term(group.rank, 0))
        return residual_of(large), residual_of(small)

    for rank, (large, small) in enumerate(on_ranks(2, work)):
        own = term(rank, 0)
        unsent = (small == own) & (own != 0)  # where the first velocity is the gradient itself
        assert unsent.any()
        assert torch.allclose(large[unsent], own[unsent] / (math.sqrt(2) * own.norm()), rtol=1e-6, atol=0)


def test_velocities_go_where_numbers_were_sent_and_nowhere_else() -> None:
    """On four ranks, where the sum takes two rounds: what the second round could not send touches no velocity."""

    def work(group: Collective) -> tuple[Tensor, Tensor]:
        exchange = corrected(group)
        summed(exchange, term(group.rank, 0))
        return exchange.velocity.clone(), term(group.rank, 0)

    kept = DGC(DGCConfig(fraction=0.05)).kept(-(-NUMEL // 4))
    for velocity, own in on_ranks(4, work):
        masked = (velocity == 0) & (own != 0)
        assert 0 < masked.sum() <= 4 * kept
        assert torch.equal(velocity[~masked], own[~masked])


def test_a_rank_alone_has_plain_momentum() -> None:
    """It sends all to itself, and forgets no velocity by it."""

    def work(group: Collective) -> list[Tensor]:
        exchange = corrected(group)
        return [summed(exchange, term(0, step)).clone() for step in range(3)]

    (found,) = on_ranks(1, work)
    velocity = torch.zeros(NUMEL, dtype=torch.float64)
    for step, result in enumerate(found):
        velocity = MOMENTUM * velocity + term(0, step)
        assert torch.allclose(result, velocity, rtol=0, atol=FLOAT64)
