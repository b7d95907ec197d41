"""The outer optimizer: what one step makes of what replicas changed."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch.nn import Parameter

from shoal.comm.collective import Alone
from shoal.state import Owned
from shoal.sync.config import LocalConfig
from shoal.sync.outer import OuterStep
from shoal.sync.strategy import Replica

EXACT = 1e-15


def played(config: LocalConfig, moves: list[float], units: list[float]) -> float:
    """Where x comes from 1 if the inner steps of round r move it by `-moves[r]`."""
    parameter = Parameter(torch.ones(1, dtype=torch.float64))
    owned = [Owned("x", parameter, cast(Any, None), ())]
    outer = OuterStep(config, Replica(owned, lambda: None, [], [], 100), Alone(), owned)
    for move, unit in zip(moves, units, strict=True):
        outer.start.read()
        with torch.no_grad():
            parameter -= move
        outer.send()
        outer.arrive()
        outer.apply(unit=unit)
        outer.start.write()
    return float(parameter.detach())


@pytest.mark.parametrize("nesterov", [True, False])
def test_it_is_sgd_of_pytorch(nesterov: bool) -> None:
    """With what was changed as the gradient."""
    moves = [0.3, -0.1, 0.25, 0.05]
    peer = Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([peer], lr=0.7, momentum=0.9, nesterov=nesterov)
    for move in moves:
        peer.grad = torch.full_like(peer, move)
        optimizer.step()
    assert played(LocalConfig(nesterov=nesterov), moves, [1.0] * 4) == pytest.approx(float(peer.detach()), abs=EXACT)


def test_slow_momentum_is_in_units_of_the_learning_rate() -> None:
    """SlowMo, algorithm 1: u <- beta u + (x - x') / gamma,  x <- x - alpha gamma u, under a gamma that falls."""
    moves, gammas, alpha, beta = [0.3, 0.2, 0.05], [0.1, 0.05, 0.01], 0.8, 0.6
    x, u = 1.0, 0.0
    for move, gamma in zip(moves, gammas, strict=True):
        u = beta * u + move / gamma
        x -= alpha * gamma * u
    config = LocalConfig(outer_lr=alpha, outer_momentum=beta, nesterov=False, per_lr=True)
    assert played(config, moves, gammas) == pytest.approx(x, abs=EXACT)
