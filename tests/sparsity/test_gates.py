"""Hard-concrete gates: their distribution, their gradient, and that they find which weights matter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.comm.collective import Alone
from shoal.sparsity.config import L0
from shoal.sparsity.gates import BETA, GAMMA, ZETA, Gates
from shoal.state import Owned, Region
from shoal.topology.holding import Box, Holding, Placement

SHAPE = (20, 30)
ONE = (0,)


def part_of(parameter: Tensor, box: Box) -> Owned:
    holding = Holding("w", SHAPE, (box,), Placement((), (), ()), 0, ONE, ONE, ONE, ONE)
    return Owned("w", Parameter(parameter), holding, (Region(box, 0),))


def gates_of(own: Owned) -> Gates:
    config = L0(density=0.1)
    slots: list[dict[int, Tensor]] = [{} for _ in range(4)]
    return Gates(config, [own], slots, seed=5, replica=Alone(), device=torch.device("cpu"))


@pytest.fixture
def whole() -> Owned:
    return part_of(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).double(), Box((0, 0), SHAPE))


@pytest.mark.parametrize("location", [-2.0, 0.0, 1.5])
def test_gates_are_open_as_often_as_their_locations_say(whole: Owned, location: float) -> None:
    """Equation 12 beside 12,000 draws: within four standard deviations."""
    gates = gates_of(whole)
    gates.close(1)
    gates.locations[id(whole)].fill_(location)
    drawn = torch.stack([gates._drawn(whole, step)[0] for step in range(1, 21)])
    wanted = 1 / (1 + math.exp(-(location - BETA * math.log(-GAMMA / ZETA))))
    spread = math.sqrt(wanted * (1 - wanted) / drawn.numel())
    assert float((drawn > 0).double().mean()) == pytest.approx(wanted, abs=4 * spread)
    assert ((drawn >= 0) & (drawn <= 1)).all()
    assert (drawn == 0).any()


def test_slopes_are_those_of_autograd(whole: Owned) -> None:
    """Of the gates as equations 10 and 11 have them, from the noise that a shifted location shows."""
    gates = gates_of(whole)
    gates.close(1)
    locations = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).double()
    gates.locations[id(whole)] = locations
    before, slope = gates._drawn(whole, 3)
    gates.locations[id(whole)] = locations + 1e-6
    after, _ = gates._drawn(whole, 3)
    inner = (before > 1e-4) & (before < 1 - 1e-4)
    assert inner.sum() > 50
    assert torch.allclose((after - before)[inner] / 1e-6, slope[inner], rtol=1e-4)
    assert slope[(before == 0) | (before == 1)].count_nonzero() == 0


def test_a_part_of_a_layer_has_the_gates_of_the_whole(whole: Owned) -> None:
    box = Box((4, 0), (7, 30))
    part = part_of(whole.parameter.detach()[box.slices].clone(), box)
    for own in (whole, part):
        gates_of(own).close(2)
    assert torch.equal(part.parameter, whole.parameter[box.slices])


def test_gates_find_the_weights_that_a_task_needs() -> None:
    """Least squares of which 30 of 600 weights are not zero: their gates are the ones that stay open."""
    generator = torch.Generator().manual_seed(2)
    true = torch.zeros(SHAPE).double()
    places = torch.randperm(600, generator=generator)[:30]
    true.view(-1)[places] = 1 + torch.rand(30, generator=generator).double()
    own = part_of(torch.randn(SHAPE, generator=generator).double() / 10, Box((0, 0), SHAPE))
    gates, rate, steps = gates_of(own), 0.05, 400
    with torch.no_grad():
        for step in range(1, steps + 1):
            inputs = torch.randn(64, 30, generator=generator).double()
            gates.close(step)
            error = inputs @ (own.parameter - true).T
            own.parameter.grad = error.T @ inputs / len(inputs)
            gates.learn(step, density=max(0.05, 1 - step / 200), since=step)
            own.parameter.sub_(own.parameter.grad, alpha=rate)
            gates.settle()
    found = gates.locations[id(own)].flatten().topk(30).indices
    assert len({*found.tolist()} & {*places.tolist()}) >= 28
    assert gates.expected == pytest.approx(0.05, abs=0.03)
