"""Coded sums of momenta, with the optimizers that take them: the rule of 1-bit Adam and 0/1 Adam."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.codec.config import SignConfig
from shoal.comm.collective import Collective
from shoal.comm.exchanges.exchange import Segment
from shoal.comm.exchanges.momentum import MomentumSum
from shoal.config.check import implementation_of
from shoal.optim.build import build_optimizer
from shoal.optim.config import AdamW, OneBit, OneBitAdam, OneBitLAMB, ZeroOneAdam
from tests.comm.local import local_group
from tests.waiting import HANG_S

NUMEL, BLOCK, STEPS, LR = 100, 16, 24, 0.01
KINDS: dict[str, OneBit] = {
    "1-bit Adam": OneBitAdam(exact_steps=6, block=BLOCK, weight_decay=0.1),
    "0/1 Adam": ZeroOneAdam(variance_updates=3, block=BLOCK, weight_decay=0.1),
    "1-bit LAMB": OneBitLAMB(exact_steps=6, block=BLOCK, weight_decay=0.1),
}
FLOAT64 = 1e-12
"""Relative, of 24 updates of float64 numbers; scales are float32 numbers on both sides."""
COEFFICIENTS = 1e-6
"""The same where a coefficient of the step is a float32 number."""

every_kind = pytest.mark.parametrize("kind", list(KINDS))


def on_ranks(size: int, work: Callable[[Collective], Any]) -> list[Any]:
    """What `work` returned on each of `size` threads."""
    found: list[Any] = [None] * size
    groups = local_group(size, timeout_s=HANG_S)

    def run(rank: int) -> None:
        found[rank] = work(groups[rank])

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert all(result is not None for result in found), "a rank failed"
    return found


def gradient(x: Tensor, rank: int, step: int) -> Tensor:
    """This rank's part of the gradient at `x`: of a quadratic whose minimum differs between ranks, with noise."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    curvature = torch.linspace(0.1, 3.0, NUMEL, dtype=torch.float64)
    noise = torch.randn(NUMEL, generator=generator).double()
    found = curvature * (x - 1 - 0.1 * rank) + 0.3 * noise
    found[40] = 0.0  # a number that no gradient ever reaches
    return found


def start() -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(9)).double()


def trained(group: Collective, config: OneBit, *, steps: int = STEPS, lost: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """The weights after some steps, what was not sent, and the share of the momentum.

    Before step `lost` comes one whose gradient is not finite on one rank, so that there is no update.
    """
    buffer, weights = torch.zeros(NUMEL, dtype=torch.float64), Parameter(start())
    sign = SignConfig(block=config.block)
    exchange = MomentumSum(
        implementation_of(sign)(sign), group, buffer, [Segment("x", 0, (NUMEL,))], beta=config.beta1,
        exact=config.exact, feedback=True, key=3,
    )  # fmt: skip
    optimizer = build_optimizer(config, [("x", weights, True)], lr=LR)
    for step in range(steps):
        for finite in (False, True) if step == lost else (True,):
            exchange.start()
            buffer.copy_(gradient(weights.detach(), group.rank, step))
            if not finite and group.rank == 0:
                buffer[3] = torch.nan
            exchange.send(buffer)
            exchange.settle()
            exchange.wait()
            assert bool(buffer.isfinite().all()) is finite
            if finite:
                weights.grad = buffer.clone()
                optimizer.step()
                exchange.commit()
    assert exchange.residual is not None
    return weights.detach(), exchange.residual, exchange.velocity


def one_process(config: OneBit, ranks: int) -> Tensor:
    """The rule as the papers have it, with the gradients of all ranks at hand."""
    sign = SignConfig(block=config.block)
    codec = implementation_of(sign)(sign)
    x, m, v = start(), torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    errors, moved = [torch.zeros(NUMEL).double() for _ in range(ranks)], 0
    fresh, m_before, factor, mean_ratio = torch.zeros(NUMEL).double(), m, 1.0, 0.0
    for step in range(STEPS):
        parts = [gradient(x, rank, step) for rank in range(ranks)]
        if config.exact(step + 1):
            g = sum(parts, torch.zeros(NUMEL).double())
            m = config.beta1 * m + (1 - config.beta1) * g
            v, moved = config.beta2 * v + (1 - config.beta2) * g * g, moved + 1
        else:
            wanted = [config.beta1 * m / ranks + (1 - config.beta1) * g + e for g, e in zip(parts, errors, strict=True)]
            sent = [codec.decode(codec.encode(each), NUMEL, dtype=torch.float64) for each in wanted]
            errors = [a - b for a, b in zip(wanted, sent, strict=True)]
            m = sum(sent, torch.zeros(NUMEL).double())
        update = (m / (1 - config.beta1 ** (step + 1))) / ((v / (1 - config.beta2**moved)).sqrt() + config.eps)
        if isinstance(config, OneBitLAMB):
            g = (
                sum(parts, torch.zeros(NUMEL).double())
                if config.exact(step + 1)
                else (m - config.beta1 * m_before) / (1 - config.beta1)
            )
            fresh = config.beta2 * fresh + (1 - config.beta2) * g * g
            update = torch.where(v == 0, 0, update) + config.weight_decay * x
            if config.exact(step + 1):
                ratio = min(max(float(x.norm() / update.norm()), 0.01), 10.0)
                mean_ratio = 0.9 * mean_ratio + 0.1 * ratio
            else:
                wanted_factor = float(((v.sqrt() + config.eps) / (fresh.sqrt() + config.eps)).max())
                factor = min(max(wanted_factor, 0.5, 0.9 * factor), 4.0, 1.1 * factor)
                ratio = mean_ratio * factor
            m_before, x = m, x - LR * ratio * update
            continue
        x = x * (1 - LR * config.weight_decay) - LR * torch.where(v == 0, 0, update)
    return x


@every_kind
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_train_like_one_process_that_plays_the_rule(kind: str, size: int) -> None:
    """All ranks have the same bits, and those are the rule's, warm-up and coded updates together."""
    found = on_ranks(size, lambda group: trained(group, KINDS[kind]))
    assert all(torch.equal(found[0][0], weights) for weights, _, _ in found)
    if size > 1:
        wanted = one_process(KINDS[kind], size)
        tolerance = COEFFICIENTS if isinstance(KINDS[kind], OneBitLAMB) else FLOAT64
        assert float((found[0][0] - wanted).norm() / wanted.norm()) < tolerance
        assert all(bool(residual.any()) for _, residual, _ in found)


@pytest.mark.parametrize("kind", ["1-bit Adam", "0/1 Adam"])
def test_the_first_updates_are_those_of_adamw(kind: str) -> None:
    """With gradients as they are: until the first update that is not exact."""
    config = KINDS[kind]
    steps = next(update for update in range(1, STEPS) if not config.exact(update)) - 1
    assert steps >= 3
    ours = on_ranks(2, lambda group: trained(group, config, steps=steps))[0][0]
    weights = Parameter(start())
    same = AdamW(beta1=config.beta1, beta2=config.beta2, eps=config.eps, weight_decay=config.weight_decay)
    optimizer = build_optimizer(same, [("x", weights, True)], lr=LR)
    for step in range(steps):
        weights.grad = gradient(weights.detach(), 0, step) + gradient(weights.detach(), 1, step)
        optimizer.step()
    assert torch.allclose(ours, weights.detach(), rtol=0, atol=FLOAT64)


@every_kind
@pytest.mark.parametrize("lost", [2, 20])
def test_a_step_without_an_update_leaves_nothing_behind(kind: str, lost: int) -> None:
    """Exact or coded: the run goes on as if that step had not been: weights, momentum, residuals, and which updates
    are exact.
    """
    straight = on_ranks(2, lambda group: trained(group, KINDS[kind]))
    through = on_ranks(2, lambda group: trained(group, KINDS[kind], lost=lost))
    for before, after in zip(straight, through, strict=True):
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one, other)


def test_the_variance_of_zero_one_adam_moves_at_doubling_intervals() -> None:
    """Three updates at each interval: 1, 2, 3, then every second, every fourth."""
    config = ZeroOneAdam(variance_updates=3)
    assert [update for update in range(1, 34) if config.exact(update)] == [1, 2, 3, 5, 7, 9, 13, 17, 21, 29]
