"""Updates that look for a step: the optimizer evaluates the loss of a step's samples at several weights.

    forward, backward, vote   ->   step(closure)   ->   gather
                                     gather, forward, backward, reduce   as often as the search asks

Every evaluation is a whole forward and backward of the same microbatches, with the same random numbers and the same
buffers, agreed as a step's gradient is. Loss and gradient have the same bits on all ranks, so that a search which
decides by them alone decides alike everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.engine.forward_backward import SequentialForwardBackward
from shoal.engine.rank_context import GlobalSum, RankContext, UpdateClock
from shoal.engine.updates import Outcome, Work, check_repeatable
from shoal.gradients.gradients import Gradients
from shoal.optim.build import set_rate
from shoal.optim.newton import SearchingOptimizer


class StepClosure:
    """The loss at the weights as they are, with its gradient in every owned `.grad`; `first` is there already. It
    multiplies by the Hessian, too (`shoal.optim.newton.Products`).
    """

    def __init__(self, policy: ByClosure, context: RankContext, work: Work, *, first: float) -> None:
        self._policy, self._context, self._work, self._known = policy, context, work, [first]

    def __call__(self) -> float:
        if self._known:
            return self._known.pop()
        self._policy.gradients.gather()
        return self._policy.evaluated(self._context, self._work, GlobalSum(self._context.lockstep))[0]

    def product(self, direction: Callable[[], None], weights: Callable[[], None]) -> None:
        """H v of the same samples."""
        gradients, compute = self._policy.gradients, cast(SequentialForwardBackward, self._context.forward_backward)
        trained = [p for p in self._context.model.parameters() if p.requires_grad]
        direction()
        gradients.gather()
        vectors = [p.detach().clone() for p in trained]
        weights()
        gradients.gather()
        gradients.start()
        compute.hessian_product(
            self._work.batches, list(zip(trained, vectors, strict=True)), gradients=gradients,
            factor=lambda: 1.0 / self._work.tally.wait().denominator,
        )  # fmt: skip
        gradients.reduce()


class ByClosure:
    """One update of a `SearchingOptimizer`, by closures. The loss and norm of a step are those of its first evaluation.

    An update after a loss that is not finite is left out, as by `AtOnce`; what is not finite farther along a search
    makes its steps shorter.
    """

    overlaps_steps = False

    def __init__(self, gradients: Gradients, optimizer: SearchingOptimizer) -> None:
        self.gradients, self._optimizer = gradients, optimizer
        self.evaluations = 0

    def __call__(self, context: RankContext, work: Work) -> Outcome:
        """Raises `ConfigError` for a model that counts the batches it has seen."""
        check_repeatable(context)
        loss, norm = self.evaluated(context, work, work.loss)
        clock, tally = UpdateClock(context), work.tally.wait()
        finite = math.isfinite(loss) and math.isfinite(norm)
        if work.on_gradients is not None:
            work.on_gradients(norm)
        if finite:
            context.agree_on_buffers(tally)
            set_rate(self._optimizer, work.lr)
            self._optimizer.step(StepClosure(self, context, work, first=loss))
            self.gradients.gather()
        return Outcome(loss, norm, finite, clock.seconds(), keeps_buffers=finite)

    def evaluated(self, context: RankContext, work: Work, total: GlobalSum) -> tuple[float, float]:
        """Loss and norm of the gradient, over the global batch."""
        self.evaluations += 1
        self.gradients.start()
        context.forward_backward(
            work.batches,
            gradients=self.gradients,
            factor=lambda: 1.0 / work.tally.wait().denominator,
            on_loss=total.start,
        )
        norm = float(self.gradients.reduce())
        return total.wait() / work.tally.wait().denominator, norm


class PlainClosure:
    """What a search of one process evaluates, beside which layouts are proved: `backward` leaves the gradient of
    `weights` in `.grad` and returns the loss, of which `parts` computes one after the other. `first` is there already.
    """

    def __init__(
        self, backward: Callable[[], float], parts: Callable[[], Iterable[Tensor]], weights: Sequence[Tensor], *,
        first: float,
    ) -> None:  # fmt: skip
        self._backward, self._parts, self._weights, self._known = backward, parts, weights, [first]

    def __call__(self) -> float:
        return self._known.pop() if self._known else self._backward()

    def product(self, direction: Callable[[], None], weights: Callable[[], None]) -> None:
        """As `shoal.optim.newton.Products`: v is what the backward of the gradient begins with."""
        direction()
        vectors = [parameter.detach().clone() for parameter in self._weights]
        weights()
        for parameter, vector in zip(self._weights, vectors, strict=True):
            parameter.grad = torch.zeros_like(vector)
        with sdpa_kernel(SDPBackend.MATH):
            for loss in self._parts():
                gradient = torch.autograd.grad(loss, self._weights, create_graph=True, materialize_grads=True)
                curved = [(g, v) for g, v in zip(gradient, vectors, strict=True) if g.requires_grad]
                torch.autograd.backward([g for g, _ in curved], [v for _, v in curved], inputs=self._weights)
