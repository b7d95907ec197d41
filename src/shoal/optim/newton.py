"""Newton-CG and L-BFGS: directions from curvature, and a line search on which all ranks agree.

Both evaluate loss and gradient of the same samples at several weights in one step. The closure that `step` is given
does that: it leaves the agreed gradient in `.grad` and returns the loss, which all ranks have in the same bits. Inner
products are those of the whole model: each rank adds up its parts, one all-reduce sums them, and where several
replicas step the same numbers they take those of the first.

Newton-CG (Nocedal and Wright, Numerical Optimization, 2006, algorithm 7.1) solves H d = -g by conjugate gradients, till

    |H d + g| <= min(tolerance, sqrt(|g|)) |g|    or a direction has no positive curvature

H v is a difference of two gradients (equation 8.20; here the central one), which every layout can sum:

    H v = (g(x + h v) - g(x - h v)) / 2h,    h = u^(1/3) (1 + |x|) / |v|,    u the precision of a number

or exactly the gradient of g v (Pearlmutter, Neural Computation 6, 1994), where a closure can compute it (`Products`).

L-BFGS (algorithms 7.4 and 7.5) multiplies -g by an inverse Hessian made of the last steps s and changes y of the
gradient, both over the same samples, which is what a batch that changes from step to step needs (arXiv:1605.06049).

The decay of weights is a part of the loss: w/2 |x|^2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from shoal.optim.declared import Granularity, Slot
from shoal.optim.fused import FusedOptimizer
from shoal.optim.kinds import LBFGS, NewtonCG
from shoal.optim.line_search import Trial, Wolfe, search
from shoal.optim.parts import Parts
from shoal.state import is_counted

Vector = list[Tensor]
"""A number for each number of the parameters of this rank: a tensor for each of them."""
Closure = Callable[[], Any]


@runtime_checkable
class Products(Protocol):
    """A closure that also multiplies by the Hessian."""

    def __call__(self) -> Any: ...

    def product(self, direction: Callable[[], None], weights: Callable[[], None]) -> None:
        """Leaves H v in `.grad`, summed as a gradient is. `direction` writes v where the weights are, and `weights`
        writes these again; both are called once, in this order.
        """
        ...


_ROUNDING = 16
"""Losses that differ by so many units in their last place, of the parameters' precision, are taken for equal."""
_LEAST_CURVATURE = 1e-10
"""A pair whose s y is below this share of y y says nothing of the curvature."""


def newton_cg(config: NewtonCG, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return SearchedNewtonCG(
        groups, lr=lr, hessian=config.hessian, cg_iterations=config.cg_iterations, cg_tolerance=config.cg_tolerance,
        damping=config.damping, decrease=config.decrease, curvature=config.curvature, evaluations=config.evaluations,
    )  # fmt: skip


def lbfgs(config: LBFGS, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimizer of the run file."""
    return SearchedLBFGS(
        groups, lr=lr, history=config.history,
        decrease=config.decrease, curvature=config.curvature, evaluations=config.evaluations,
    )  # fmt: skip


@dataclass(frozen=True)
class Point:
    """The loss somewhere, its gradient there, and the slope along some direction."""

    value: float
    gradient: Vector
    slope: float


class SearchingOptimizer(FusedOptimizer):
    """What both have in common; a subclass says which direction is searched, and what it remembers of it."""

    works_on: Granularity = "elements"
    slots: tuple[Slot, ...] = ()
    _parts: Parts | None = None
    _unit = 0.0
    """The precision of the coarsest parameter anywhere: all ranks decide by the same."""

    def connect(self, parts: Parts) -> None:
        """Inner products become those of the whole model."""
        self._parts = parts

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """One step, over the samples of `closure`, which computes gradients anew and returns the loss. Returns what it
        first returned. Raises `TypeError` without one.
        """
        if closure is None:
            raise TypeError(f"{type(self).__name__} evaluates the loss several times in a step; give step() a closure")
        here, loss = self._evaluated(closure, None)
        if here.slope > 0:
            self._advance(closure, here)
        return loss

    def direction(self, closure: Closure, here: Point) -> Vector:
        """Where the loss falls from `here`, whose slope is that along its gradient."""
        raise NotImplementedError

    def first_length(self, here: Point) -> float:
        """The length that is tried first."""
        return float(self.param_groups[0]["lr"])

    def remember(self, moved: Vector, here: Point, there: Point) -> None:
        """After a step by `moved`, from `here` to `there`."""

    def forget(self) -> None:
        """No step along the direction was better than none."""

    def _advance(self, closure: Closure, here: Point) -> None:
        self._unit = self.greatest(max((torch.finfo(p.dtype).eps for p in self.held), default=0.0))
        start, first = [p.clone() for p in self.held], self.first_length(here)
        direction = self.direction(closure, here)
        (slope,) = self.dots((here.gradient, direction))
        if not slope < 0:
            direction, slope = [-g for g in here.gradient], -here.slope
        points: dict[float, Point] = {}

        def phi(length: float) -> tuple[float, float]:
            self._move(start, direction, length)
            points.clear()
            points[length], _ = self._evaluated(closure, direction)
            return points[length].value, points[length].slope

        taken = search(phi, Trial(0.0, here.value, slope), first, self._wolfe())
        if taken.length == 0:
            self._move(start, direction, 0.0)
            self.forget()
            return
        if taken.length not in points:
            phi(taken.length)
        self.remember([d * taken.length for d in direction], here, points[taken.length])

    def _wolfe(self) -> Wolfe:
        options = self.defaults
        return Wolfe(options["decrease"], options["curvature"], _ROUNDING * self._unit, options["evaluations"])

    @property
    def held(self) -> list[Tensor]:
        """The parameters of this rank, without their history."""
        return [p.detach() for group in self.param_groups for p in group["params"]]

    def greatest(self, own: float) -> float:
        """The largest of what the ranks of the replica pass: some of them may hold nothing."""
        if self._parts is None:
            return own
        found = torch.tensor(own, dtype=torch.float64, device=self._parts.device)
        self._parts.replica.all_reduce(found, "max").wait()
        return float(found)

    def dots(self, *pairs: tuple[Vector, Vector]) -> list[float]:
        """The inner product of each pair over the whole model, in float64, the same bits on every rank: one message."""
        counted = self._counted()
        own = [[_dot(a, b) for a, b, counts in zip(*pair, counted, strict=True) if counts] for pair in pairs]
        device = torch.device("cpu") if self._parts is None else self._parts.device
        sums = [
            torch.stack(each).sum() if each else torch.zeros((), dtype=torch.float64, device=device) for each in own
        ]
        totals = torch.stack(sums)
        if self._parts is not None:
            replica, equal = self._parts.replica, self._parts.equal
            replica.all_reduce(totals).wait()
            if equal.size > replica.size:
                equal.broadcast(totals, root=0).wait()
        return totals.tolist()

    def _counted(self) -> list[bool]:
        if self._parts is None:
            return [True] * len(self.held)
        by_parameter = {id(own.parameter): is_counted(own) for own in self._parts.owned}
        return [by_parameter[id(p)] for group in self.param_groups for p in group["params"]]

    def _evaluated(self, closure: Closure, direction: Vector | None) -> tuple[Point, Any]:
        """The point at the weights as they are, and what `closure` returned; `direction` None: its gradient."""
        with torch.enable_grad():
            loss = closure()
        held, gradient, decayed = self.held, list[Tensor](), list[Tensor]()
        for group in self.param_groups:
            for p in group["params"]:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                decayed.append(p.detach() * group["weight_decay"])
                gradient.append(grad + decayed[-1])
        slope, decay = self.dots((gradient, gradient if direction is None else direction), (held, decayed))
        value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        return Point(value + decay / 2, gradient, slope), loss

    def _move(self, start: Vector, direction: Vector, length: float) -> None:
        for p, x, d in zip(self.held, start, direction, strict=True):
            p.copy_(x if length == 0 else x.add(d, alpha=length))


class SearchedNewtonCG(SearchingOptimizer):
    """Newton-CG.

    Args:
        params: Parameters, or dictionaries with `params` and their `weight_decay`.
        lr: The length of a step that is tried first.
        hessian: "differences" or "exact", which asks for a closure with `Products`.
        cg_iterations: Most Hessian-vector products in a step.
        cg_tolerance: What may be left of the linear system, relative.
        damping: Added to every eigenvalue of the Hessian.
        weight_decay: w above.
        decrease: Wolfe's first constant.
        curvature: Wolfe's second constant.
        evaluations: Most evaluations in a line search.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        *,
        hessian: str = "differences",
        cg_iterations: int = 50,
        cg_tolerance: float = 0.01,
        damping: float = 0.0,
        weight_decay: float = 0.0,
        **search: float,
    ) -> None:
        super().__init__(
            params, lr=lr, hessian=hessian, cg_iterations=cg_iterations, cg_tolerance=cg_tolerance, damping=damping,
            weight_decay=weight_decay, **_search_options(**search),
        )  # fmt: skip

    def direction(self, closure: Closure, here: Point) -> Vector:
        """By conjugate gradients; minus the gradient where it has no positive curvature."""
        if self.defaults["hessian"] == "differences":
            with self._hessian(closure) as hessian:
                return self._solved(hessian, here)
        if not isinstance(closure, Products):
            raise TypeError('hessian = "exact" needs a closure that multiplies by the Hessian (`Products`)')
        return self._solved(self._exact_hessian(closure), here)

    def _solved(self, hessian: Callable[[Vector, float], Vector], here: Point) -> Vector:
        """Algorithm 7.1, in its names: z the solution so far, r what is left, d the direction."""
        z, r = [torch.zeros_like(g) for g in here.gradient], [g.clone() for g in here.gradient]
        d, square = [-g for g in r], here.slope
        limit = min(self.defaults["cg_tolerance"], here.slope**0.25) ** 2 * here.slope
        length = square
        for count in range(self.defaults["cg_iterations"]):
            product = hessian(d, length**0.5)
            (bend,) = self.dots((d, product))
            if not bend > self._unit * length:
                return d if count == 0 else z
            share = square / bend
            for own, along, change, left in zip(z, d, product, r, strict=True):
                own.add_(along, alpha=share)
                left.add_(change, alpha=share)
            before, (square,) = square, self.dots((r, r))
            if square <= limit:
                break
            d = [along * (square / before) - left for along, left in zip(d, r, strict=True)]
            (length,) = self.dots((d, d))
        return z

    @contextmanager
    def _hessian(self, closure: Closure) -> Iterator[Callable[[Vector, float], Vector]]:
        """From a vector and its length to its product with the Hessian; the weights are as before afterwards."""
        start = [p.clone() for p in self.held]
        (square,) = self.dots((start, start))
        reach = self._unit ** (1 / 3) * (1 + square**0.5)

        def product(vector: Vector, length: float) -> Vector:
            step, gradients = reach / length, list[Vector]()
            for sign in (1, -1):
                self._move(start, vector, sign * step)
                point, _ = self._evaluated(closure, None)
                gradients.append(point.gradient)
            damping = self.defaults["damping"]
            rows = zip(*gradients, vector, strict=True)
            return [((ahead - behind) / (2 * step)).add_(v, alpha=damping) for ahead, behind, v in rows]

        yield product
        self._move(start, start, 0.0)

    def _exact_hessian(self, closure: Products) -> Callable[[Vector, float], Vector]:
        """The same, by the gradient of g v."""
        start = [p.clone() for p in self.held]
        zero = [torch.zeros_like(p) for p in start]

        def product(vector: Vector, length: float) -> Vector:
            with torch.enable_grad():
                closure.product(
                    torch.no_grad()(lambda: self._move(zero, vector, 1.0)),
                    torch.no_grad()(lambda: self._move(start, vector, 0.0)),
                )
            added = [
                group["weight_decay"] + self.defaults["damping"] for group in self.param_groups for _ in group["params"]
            ]
            grads = [p.grad for group in self.param_groups for p in group["params"]]
            return [
                v * share if grad is None else grad.add(v, alpha=share)
                for grad, v, share in zip(grads, vector, added, strict=True)
            ]

        return product


class SearchedLBFGS(SearchingOptimizer):
    """L-BFGS.

    Args:
        params: Parameters, or dictionaries with `params` and their `weight_decay`.
        lr: The length of a step that is tried first; the first of all is no longer than this.
        history: Pairs that are kept.
        weight_decay: w above.
        decrease: Wolfe's first constant.
        curvature: Wolfe's second constant.
        evaluations: Most evaluations in a line search.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1.0, *, history: int = 10, weight_decay: float = 0.0, **search: float
    ) -> None:
        super().__init__(params, lr=lr, history=history, weight_decay=weight_decay, **_search_options(**search))
        self.slots = LBFGS(history=history).slots

    def first_length(self, here: Point) -> float:
        """A gradient says nothing of how far to go: without pairs, its length at most 1."""
        first = super().first_length(here)
        return first if self._pairs() else first * min(1.0, here.slope**-0.5)

    def direction(self, closure: Closure, here: Point) -> Vector:
        """The two-loop recursion, algorithm 7.4."""
        q, pairs = [g.clone() for g in here.gradient], self._newest_first()
        if not pairs:
            return [own.neg_() for own in q]
        products = self.dots(*((s, y) for s, y in pairs), *((y, y) for _, y in pairs[:1]))
        shares = list[float]()
        for (s, y), product in zip(pairs, products, strict=False):
            (share,) = (found / product for found in self.dots((s, q)))
            shares.append(share)
            _add(q, y, -share)
        for own in q:
            own.mul_(products[0] / products[-1])
        for (s, y), product, share in reversed(list(zip(pairs, products, shares, strict=False))):
            (found,) = self.dots((y, q))
            _add(q, s, share - found / product)
        return [own.neg_() for own in q]

    def remember(self, moved: Vector, here: Point, there: Point) -> None:
        """The pair of this step takes the place of the oldest, if it has any curvature."""
        changed = [after - before for after, before in zip(there.gradient, here.gradient, strict=True)]
        product, square = self.dots((moved, changed), (changed, changed))
        if not product > _LEAST_CURVATURE * square:
            return
        pairs = self._pairs()
        for state, s, y in zip(self._states(), moved, changed, strict=True):
            state[f"moved_{pairs % self.defaults['history']}"].copy_(s)
            state[f"changed_{pairs % self.defaults['history']}"].copy_(y)
            state["pairs"].fill_(pairs + 1)

    def forget(self) -> None:
        """All pairs: the next direction is that of the gradient."""
        for state in self._states():
            state["pairs"].zero_()

    def _pairs(self) -> int:
        """How many there have been, which a rank that holds nothing is told by others."""
        return int(self.greatest(max((float(state["pairs"]) for state in self._states()), default=0.0)))

    def _newest_first(self) -> list[tuple[Vector, Vector]]:
        pairs, history, states = self._pairs(), self.defaults["history"], self._states()
        slots = [number % history for number in range(pairs - 1, max(0, pairs - history) - 1, -1)]
        return [([s[f"moved_{n}"] for s in states], [s[f"changed_{n}"] for s in states]) for n in slots]

    def _states(self) -> list[dict[str, Tensor]]:
        """The state of each parameter, which begins without pairs."""
        for p in (p for group in self.param_groups for p in group["params"]):
            if not self.state[p]:
                of = ("moved", "changed")
                rings = {f"{name}_{n}": torch.zeros_like(p) for name in of for n in range(self.defaults["history"])}
                self.state[p] = rings | {"pairs": torch.zeros((), device=p.device)}
        return [self.state[p] for group in self.param_groups for p in group["params"]]


def _search_options(*, decrease: float = 1e-4, curvature: float = 0.9, evaluations: float = 25) -> dict[str, Any]:
    return {"decrease": decrease, "curvature": curvature, "evaluations": int(evaluations)}


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.flatten().double(), b.flatten().double())


def _add(vector: Vector, other: Vector, share: float) -> None:
    for own, each in zip(vector, other, strict=True):
        own.add_(each, alpha=share)
