"""Newton-CG, L-BFGS and their line search beside dense linear algebra, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product

import msgspec
import pytest
import torch
from torch import Tensor, nn

from shoal.optim.kinds import LBFGS, NewtonCG
from shoal.optim.line_search import Trial, Wolfe, _interpolated, search
from shoal.optim.newton import SearchedLBFGS, SearchedNewtonCG, SearchingOptimizer

SAME = 1e-10
DIFFERENCED = 1e-7
"""Hessians by differences of gradients, relative."""
DECAY = 0.1


class Problem:
    """A convex loss that is no quadratic, with a vector, a matrix and a number."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        draw = torch.Generator().manual_seed(3)
        self.x = torch.randn(40, 12, generator=draw, dtype=torch.float64).to(dtype)
        self.y = (torch.rand(40, generator=draw) < 0.5).to(dtype)
        self.parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3,), (3, 3), ())]
        self.evaluations = 0

    def of(self, flat: Tensor) -> Tensor:
        """The loss at 13 numbers, decay included."""
        logits = self.x @ flat[:12] + flat[12]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, self.y)
        return loss + DECAY / 2 * flat.square().sum()

    @property
    def flat(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])

    def closure(self) -> Tensor:
        for p in self.parameters:
            p.grad = None
        flat = torch.cat([p.reshape(-1) for p in self.parameters])
        loss = self.of(flat) - DECAY / 2 * flat.square().sum()
        loss.backward()
        self.evaluations += 1
        return loss

    def gradient(self) -> Tensor:
        return torch.func.grad(self.of)(self.flat)


def bfgs(pairs: Sequence[tuple[Tensor, Tensor]], numbers: int) -> Tensor:
    """The inverse Hessian as the dense update has it (Nocedal and Wright, equation 6.17), from the newest scale."""
    one = torch.eye(numbers, dtype=torch.float64)
    s, y = pairs[-1]
    inverse = one * (s @ y) / (y @ y)
    for s, y in pairs:
        rho = 1 / (s @ y)
        left = one - rho * torch.outer(s, y)
        inverse = left @ inverse @ left.T + rho * torch.outer(s, s)
    return inverse


def test_directions_of_lbfgs_are_those_of_the_dense_update() -> None:
    """Over a ring of three pairs that goes round, from the points that it went through."""
    problem = Problem()
    optimizer = SearchedLBFGS(problem.parameters, history=3, weight_decay=DECAY)
    points, gradients = [problem.flat], [problem.gradient()]
    for count in range(7):
        optimizer.step(problem.closure)
        points.append(problem.flat)
        gradients.append(problem.gradient())
        if count == 0:
            continue
        places = range(max(0, count - 3), count)
        pairs = [(points[i + 1] - points[i], gradients[i + 1] - gradients[i]) for i in places]
        wanted = -bfgs(pairs, 13) @ gradients[count]
        moved = points[-1] - points[-2]
        assert torch.allclose(moved / moved.norm(), wanted / wanted.norm(), atol=SAME)


def test_directions_of_newton_cg_solve_the_linear_system() -> None:
    """Asked for everything, they are those of the dense Hessian, damped."""
    problem = Problem()
    optimizer = SearchedNewtonCG(problem.parameters, cg_tolerance=1e-12, damping=0.3, weight_decay=DECAY)
    before, gradient = problem.flat, problem.gradient()
    hessian = torch.func.hessian(problem.of)(before)
    optimizer.step(problem.closure)  # |g| above 1 would not ask for less than cg_tolerance
    wanted = torch.linalg.solve(hessian + 0.3 * torch.eye(13, dtype=torch.float64), -gradient)
    assert torch.allclose(problem.flat - before, wanted, atol=DIFFERENCED * float(wanted.norm()))


def test_a_direction_without_curvature_is_that_of_the_gradient() -> None:
    """On a saddle that bends down everywhere, nothing is solved."""
    x = nn.Parameter(torch.tensor([0.2, -0.1], dtype=torch.float64))

    def closure() -> Tensor:
        x.grad = None
        loss = x.square().square().sum() - x.square().sum()
        loss.backward()
        return loss

    optimizer, before = SearchedNewtonCG([x]), x.detach().clone()
    gradient = torch.func.grad(lambda v: v.pow(4).sum() - v.square().sum())(before)
    optimizer.step(closure)
    moved = x.detach() - before
    assert torch.allclose(moved / moved.norm(), -gradient / gradient.norm(), atol=SAME)


Make = Callable[[list[nn.Parameter]], SearchingOptimizer]
BOTH: dict[str, Make] = {
    "newton_cg": lambda parameters: SearchedNewtonCG(parameters),
    "lbfgs": lambda parameters: SearchedLBFGS(parameters),
}


@pytest.mark.parametrize("kind", BOTH)
def test_rosenbrocks_valley_is_followed_to_its_end(kind: str) -> None:
    """From where it is usually begun, in at most 40 steps."""
    x = nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
    optimizer = BOTH[kind]([x])

    def closure() -> Tensor:
        x.grad = None
        loss = 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(40)]
    assert all(after <= before for before, after in pairwise(losses))
    assert torch.allclose(x.detach(), torch.ones(2, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("kind", BOTH)
def test_float32_ends_at_its_last_bits(kind: str) -> None:
    """Where the loss cannot fall any more, weights stay finite and steps end."""
    problem = Problem(torch.float32)
    optimizer = BOTH[kind](problem.parameters)
    for _ in range(60):
        optimizer.step(problem.closure)
    problem.closure()
    gradient = torch.cat([p.grad.reshape(-1) for p in problem.parameters if p.grad is not None])
    assert float(gradient.norm()) < 1e-4
    assert problem.evaluations < 60 * 120


@pytest.mark.parametrize("kind", BOTH)
def test_a_step_without_a_closure_is_refused(kind: str) -> None:
    """With what it needs one for."""
    with pytest.raises(TypeError, match="evaluates the loss several times in a step; give step"):
        BOTH[kind](Problem().parameters).step()


@pytest.mark.parametrize("kind", BOTH)
def test_a_loss_that_is_not_finite_farther_out_shortens_the_step(kind: str) -> None:
    """A logarithm whose first trial is outside of its domain."""
    x = nn.Parameter(torch.tensor([0.9], dtype=torch.float64))

    def closure() -> Tensor:
        x.grad = None
        loss = (-torch.log(1 - x * x) - 3 * x).sum()
        loss.backward()
        return loss

    optimizer = BOTH[kind]([x])
    for _ in range(20):
        optimizer.step(closure)
    assert float(x.detach()) == pytest.approx((math.sqrt(10) - 1) / 3)


@pytest.mark.parametrize("kind", BOTH)
def test_a_gradient_that_is_not_finite_farther_out_shortens_the_step(kind: str) -> None:
    """|x| as a root of a square: its derivative at 0, where the first trial leads, is not a number."""
    x = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))

    def closure() -> Tensor:
        x.grad = None
        loss = (x * x).sqrt().sum()
        loss.backward()
        return loss

    optimizer = BOTH[kind]([x])
    losses = [float(optimizer.step(closure).detach()) for _ in range(5)]
    closure()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    assert all(after < before for before, after in pairwise(losses))


@pytest.mark.parametrize("beyond", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["value", "slope"])
def test_no_step_ends_where_loss_or_slope_is_not_finite(what: str, beyond: float) -> None:
    """From a length of 0.4 on, from first trials before it and behind it. All lengths that are tried are numbers."""
    tried: list[float] = []

    def phi(length: float) -> tuple[float, float]:
        tried.append(length)
        if length < 0.4:
            return (length - 1) ** 2, 2 * (length - 1)
        return (beyond, 0.0) if what == "value" else (0.0, beyond)

    for first in (1e-3, 1.0, 1e200):
        taken = search(phi, Trial(0.0, 1.0, -2.0), first, Wolfe(curvature=0.1, evaluations=40))
        assert (taken.length > 0) == (first < 1e200), "so far out that no evaluation is left for what is near"
        assert taken.length < 0.4
    assert all(map(math.isfinite, tried))


def test_interpolation_stays_inside_of_its_interval() -> None:
    """The next trial, of values so large that products overflow, of slopes that are infinite, and of 0."""
    numbers = [-math.inf, -1e308, -1e160, -1.0, 0.0, 1.0, 1e160, 1e308, math.inf, math.nan]
    for value, slope, other, low, high in product(numbers, numbers[:4], numbers, (0.0, 0.5), (1.0, 1e300)):
        for one, two in ((low, high), (high, low)):
            found = _interpolated(Trial(one, 1.0, slope), Trial(two, value, other))
            assert low < found < high


def test_searched_steps_satisfy_wolfe() -> None:
    """Along curves that fall, rise and waver, from first trials far too short and far too long."""
    wolfe = Wolfe(1e-4, 0.1, evaluations=60)
    curves: list[tuple[Callable[[float], float], Callable[[float], float]]] = [
        (lambda a: (a - 3) ** 2, lambda a: 2 * (a - 3)),
        (lambda a: -a / (a * a + 2), lambda a: (a * a - 2) / (a * a + 2) ** 2),  # Moré and Thuente, function 1
        (lambda a: (a + 0.004) ** 5 - 2 * (a + 0.004) ** 4, lambda a: 5 * (a + 0.004) ** 4 - 8 * (a + 0.004) ** 3),
        (lambda a: math.cos(a) + 0.1 * (a - 9) ** 2, lambda a: -math.sin(a) + 0.2 * (a - 9)),
    ]
    for value, slope in curves:
        start = Trial(0.0, value(0.0), slope(0.0))
        for first in (1e-3, 0.1, 1.0, 10.0, 1e3):
            taken = search(lambda a, v=value, s=slope: (v(a), s(a)), start, first, wolfe)
            assert taken.length > 0
            assert taken.value <= start.value + wolfe.decrease * taken.length * start.slope
            assert abs(taken.slope) <= wolfe.curvature * abs(start.slope)


def test_the_search_gives_up_where_nothing_is_better() -> None:
    """A slope that lies: length 0, after no more evaluations than it may."""
    tried: list[float] = []

    def phi(length: float) -> tuple[float, float]:
        tried.append(length)
        return 1 + length, 1.0

    assert search(phi, Trial(0.0, 1.0, -1.0), 1.0, Wolfe(evaluations=7)).length == 0
    assert len(tried) == 7


@pytest.mark.parametrize("config", [NewtonCG, LBFGS])
def test_keys_that_change_the_gradient_are_refused(config: type) -> None:
    """The line search compares losses, of which it would not be the gradient any more."""
    for keys in ({"clip_norm": 1.0}, {"transforms": [{"kind": "centralise"}]}, {"groups": {"*": {"rate": 2.0}}}):
        with pytest.raises(msgspec.ValidationError, match=f"{next(iter(keys))} = .*leave {next(iter(keys))} out"):
            msgspec.convert({"kind": config.__struct_config__.tag, **keys}, config)
