"""`OpenStep`: the step that a script's own loop is at, what a microbatch of it counts, and the `Update` that ends it.

A loss reaches autograd times what its microbatch counts and times the `factor` of its step (see `losses`); optimizers
make their updates one after the other, and the last of them ends the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from shoal.data.sample import Batch
from shoal.engine.compute import Microbatch
from shoal.engine.updates import Outcome, Work
from shoal.errors import UserCodeError
from shoal.gradients.reducer import all_at_the_end
from shoal.own_loop.losses import LossKind

if TYPE_CHECKING:
    from shoal.own_loop.update import Player


class OpenStep:
    """One step while the loop is at it, with so many `optimizers`: which microbatch, and what its samples weigh."""

    updates = 0
    """How many optimizers have made their update in this step."""
    begun = False
    """Whether a microbatch was given."""
    refusal: UserCodeError | None = None
    """What a call of the loop's has failed for in this step: see `stands`."""
    versions: Sequence[int] = ()
    """How often each weight was written when a microbatch's gradient was there, and another one follows."""

    def __init__(self, work: Work, batches: Sequence[Batch], *, scale: float, optimizers: int) -> None:
        self.work, self.batches = work, batches
        self._scale, self._index, self._optimizers, self._gradients = scale, -1, optimizers, 0
        self._committed = True
        self._microbatch: Microbatch | None = None

    @property
    def microbatch(self) -> Microbatch:
        """The one that was given last."""
        assert self._microbatch is not None, "a microbatch has been entered"
        return self._microbatch

    @property
    def is_last(self) -> bool:
        """Whether no other microbatch follows."""
        return self._index == len(self.batches) - 1

    @property
    def place(self) -> str:
        """Which microbatch it is, in words."""
        return f"microbatch {self._index + 1} of {len(self.batches)}"

    def factor(self, kind: LossKind = "mean") -> float:
        """What a loss of weight 1 is multiplied by before the backward, as far as it is known."""
        return self._scale / self.work.tally.wait().denominator if kind == "mean" else self._scale

    def has_gradient(self) -> bool:
        """The gradient of an optimizer is there: whether those of all are."""
        self._gradients += 1
        return self._gradients == self._optimizers

    def updated(self, *, committed: bool) -> bool:
        """An optimizer has made its update: whether it was the last, and all of them are `committed`."""
        self.updates, self._committed = self.updates + 1, self._committed and committed
        return self._committed and self.updates == self._optimizers

    def enter(self, index: int, microbatch: Microbatch) -> None:
        """The loop is given this microbatch."""
        self._index, self._microbatch, self.begun, self.versions = index, microbatch, True, ()

    def stands(self, error: Exception) -> None:
        """A call has failed for `error`. A loop that catches it, as where it leaves out a batch for lack of memory, is
        told of it again where it goes on (`check`): a part of the gradient may be summed, or sent, already.
        """
        if isinstance(error, UserCodeError):
            self.refusal = error
            return
        self.refusal = UserCodeError(
            f"step {self.work.step}: backward() failed for {self.place}, and the loop has caught the error: "
            f"{type(error).__name__}: {error}. A part of its gradient may be in the sum of all ranks, so the batch "
            "cannot be left out: let the error end the run; a smaller batch.micro_samples needs less memory"
        )

    def check(self) -> None:
        """Raises what a call has failed for, where the loop goes on behind it."""
        if self.refusal is not None:
            raise self.refusal


class Evaluation:
    """The loops over `held_out()` that are under way, in which the model is evaluated and no gradient is recorded."""

    def __init__(self) -> None:
        self._loops = 0

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Around one of them."""
        self._loops += 1
        try:
            yield
        finally:
            self._loops -= 1

    def check(self) -> None:
        """Raises `UserCodeError` for a backward within one, as where a loop goes on with both by `zip` or `next`."""
        if self._loops:
            raise UserCodeError(
                "backward() was called inside a loop over held_out(), where the model is in evaluation mode and "
                "records no gradient: end that loop first, or take its batches beforehand, list(run.held_out())"
            )


class Update(NamedTuple):
    """What an update did: the loss over the global batch, the 2-norm of its gradient, and whether both were finite. One
    that was not has changed nothing, and is false.
    """

    loss: float
    grad_norm: float
    committed: bool

    def __bool__(self) -> bool:
        return self.committed


def counted(loss: Tensor, counts: float) -> float | Tensor:
    """`loss` x `counts` in float64: a number, where that is no wait for a device."""
    return float(loss) * counts if loss.is_cpu else loss.double().reshape(()) * counts


def counts_of(microbatch: Microbatch, weight: float | None, kind: LossKind) -> float:
    """What the loss of a microbatch is multiplied by, beside the factor of its step: 0 for a copy of samples."""
    batch = microbatch.batch
    if kind == "mean":  # the sum of ones is known without a look at the device
        return float(batch.weights.numel()) if microbatch.ones else batch.weights.sum().item()
    return (1.0 if weight is None else float(weight)) if batch.real_samples else 0.0


def left_epoch(epoch: float, samples: int) -> UserCodeError:
    """The refusal of a loop that leaves an epoch of so many `samples`, and asks for the next."""
    return UserCodeError(
        f"the loop left epoch {int(epoch)} after {epoch % 1 * samples:.0f} of its {samples} samples and asked for the "
        "next, which would be the rest of it: each sample of an epoch is used. Take all batches that epochs() gives "
        "with an epoch; for shorter ones hand over fewer samples, such as a torch.utils.data.Subset"
    )


def joint_outcome(players: Sequence[Player]) -> Outcome:
    """What the updates of a step did together: the sum of the losses, one of several optimizers counted once, and the
    norm over all gradients.
    """
    done = [player.outcome for player in players if player.outcome is not None]
    if len(done) == 1:
        return done[0]
    return Outcome(
        sum(player.outcome.loss for player in players if player.outcome is not None and not player.loss_is_counted),
        math.hypot(*(outcome.norm for outcome in done)),
        all(outcome.committed for outcome in done),
        sum(outcome.update_s for outcome in done),
        scale=done[0].scale,
        keeps_buffers=all(outcome.keeps_buffers for outcome in done),
    )


@contextmanager
def around_all(players: Sequence[Player], *, last: bool) -> Iterator[None]:
    """Around a backward of all of `players`."""
    with ExitStack() as around:
        around.enter_context(all_at_the_end())
        for player in players:
            around.enter_context(player.backward(last=last))
        yield
