"""Updates that look for a step: the optimizer evaluates the loss of a step's samples at several weights.

    forward, backward, vote   ->   step(closure)   ->   gather
                                     gather, forward, backward, reduce   as often as the search asks

Every evaluation is a whole forward and backward of the same microbatches, with the same random numbers and the same
buffers, agreed as a step's gradient is. Loss and gradient have the same bits on all ranks, so that a search which
decides by them alone decides alike everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shoal.engine.rank_context import GlobalSum, RankContext
from shoal.engine.updates import Outcome, UpdateClock, Work, check_repeatable
from shoal.gradients.gradients import Gradients
from shoal.optim.build import set_rate
from shoal.optim.newton import SearchingOptimizer


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
        loss, norm = self._evaluated(context, work, work.loss)
        clock, tally = UpdateClock(context), work.tally.wait()
        finite = math.isfinite(loss) and math.isfinite(norm)
        if work.on_gradients is not None:
            work.on_gradients(norm)
        if finite:
            context.agree_on_buffers(tally)
            set_rate(self._optimizer, work.lr)
            self._optimizer.step(self._closure(context, work, first=loss))
            self.gradients.gather()
        return Outcome(loss, norm, finite, clock.seconds(), keeps_buffers=finite)

    def _closure(self, context: RankContext, work: Work, *, first: float) -> Callable[[], float]:
        """The loss at the weights as they are, with its gradient in every owned `.grad`; `first` is there already."""
        known = [first]

        def closure() -> float:
            if known:
                return known.pop()
            self.gradients.gather()
            return self._evaluated(context, work, GlobalSum(context.lockstep))[0]

        return closure

    def _evaluated(self, context: RankContext, work: Work, total: GlobalSum) -> tuple[float, float]:
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
