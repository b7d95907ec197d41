"""`EvaluationOfRank`: what a script's own loop computes without training, between two steps or behind an update; and
whether ranks that compute together call the model alike (`AlikeRanks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shoal.assembly.run import Run
from shoal.comm.collective import Collective, Handle, gather_lines
from shoal.data.feed import evaluation_batches
from shoal.data.sample import Batch, Source
from shoal.engine.forward_backward import evaluating
from shoal.errors import UserCodeError
from shoal.gradients.split_shells import COPIED, SplitGradients, Written
from shoal.gradients.units import tensors_in
from shoal.maths.fingerprint import fingerprint
from shoal.own_loop.open_step import Evaluation

WATCHED_STEPS = 2
"""In so many first steps, ranks that compute together tell each other of every forward and backward."""


class AlikeRanks:
    """Whether the ranks of a group of `layout.tensor`, which compute every forward of `model` together, call it alike.

    A forward that one of them makes alone, or with other inputs, waits for the others for ever, or gives nonsense. In
    evaluation, and in the first steps, each therefore says what it is about to do. In all steps they compare the loss:
    one that a script computes of a rank's own parts of something is another on each. `replica` are all ranks that leave
    `full_parameters` together.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Collective,
        device: torch.device,
        training: Callable[[], bool],
        *,
        replica: Collective,
    ) -> None:
        self._group, self._device, self._training, self._steps = group, device, training, 0
        self._replica = replica
        self._losses: list[Tensor] = []
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UserCodeError(COPIED)

    def meet(self, what: str, *, group: Collective | None = None, differing: str | None = None) -> None:
        """All ranks of the `group` (default: that of `layout.tensor`) say `what` they are about to do. Raises
        `UserCodeError` where it is not the same: `differing`, or a sentence about inputs, where it is but for what
        stands behind " on ".
        """
        said = [lines[0] for lines in gather_lines([what], group or self._group, self._device)]
        if len(set(said)) == 1:
            return
        other = next(rank for rank, text in enumerate(said) if text != said[0])
        calls = [text.split(" on ")[0] for text in (said[0], said[other])]
        if calls[0] == calls[1]:
            raise UserCodeError(
                differing
                or f"ranks of one group of layout.tensor begin {calls[0]} with other inputs, and they compute it "
                "together: give all of them the same (run.share, not run.rank, says which part of samples is theirs)"
            )
        raise UserCodeError(
            f"of the ranks of one group of layout.tensor, one begins {calls[0]} and another one {calls[1]}: they "
            "compute together, so let no `if` that is true on one of them alone decide on a forward"
        )

    def leave_whole(self, weights: Mapping[str, Tensor], written: Written) -> None:
        """All ranks of the replica leave `full_parameters`. Raises `UserCodeError` where their `weights` differ, or the
        names of others that were `written`, or what was written into one that had the same bits on all of them.
        """
        what = f"the end of run.full_parameters() on {fingerprint(weights)}, {' '.join(written)}"
        differing = (
            "ranks that have parts of one model leave run.full_parameters() with other numbers in the parameters, of "
            "which each would keep its own part: write the same on every rank"
        )
        for group in {id(group): group for group in (self._group, self._replica)}.values():
            self.meet(what, group=group, differing=differing)
        if not written:
            return
        lines = [f"{before} {now}" for before, now in written.values()]
        for said in zip(*gather_lines(lines, self._replica, self._device), strict=True):
            before, now = (set(each) for each in zip(*(line.split() for line in said), strict=True))
            if len(before) == 1 < len(now):
                raise UserCodeError(differing)

    def compare(self, loss: Tensor, *, last: bool) -> Callable[[], None]:
        """Before the backward of `loss`, as it is weighed, of a microbatch or the `last` of a step; behind it call what
        is returned, which raises `UserCodeError` where ranks had other losses.
        """
        self._losses.append(loss.detach().double().reshape(1))
        watched = self._steps < WATCHED_STEPS
        if watched:
            self.meet("backward()")
        if not (last or watched):
            return _nothing
        own = torch.cat(self._losses).sum()
        extremes = torch.stack([own, -own])
        handle = self._group.all_reduce(extremes, "max")
        if last:
            self._losses, self._steps = [], self._steps + 1
        if watched:
            _check_equal(extremes, handle)
            return _nothing
        return partial(_check_equal, extremes, handle)

    def close(self) -> None:
        """Takes the hook off the model."""
        self._hook.remove()

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._training() and self._steps >= WATCHED_STEPS:
            return
        inputs = {str(number): each for number, each in enumerate(tensors_in((args, kwargs)))}
        self.meet(f"a forward on {fingerprint(inputs)}")


def _nothing() -> None:
    """There is nothing to wait for."""


def _check_equal(extremes: Tensor, handle: Handle) -> None:
    handle.wait()
    high, low = extremes.tolist()[0], -extremes.tolist()[1]
    allowed = 0.0 if extremes.device.type == "cpu" else ROUNDING
    if high - low > allowed * max(abs(high), abs(low)):
        raise UserCodeError(
            f"ranks of one group of layout.tensor have losses from {low} to {high} for the same samples: compute the "
            "loss of the model's outputs alone, and not of a rank's number, or of what a layer inside gives (such as "
            "attention weights, of which each rank has those of its own heads)"
        )


ROUNDING = 1e-6
"""Relative: what ranks compute alike has the same bits on a CPU. A GPU need not repeat the sums of a script's loss."""


class EvaluationOfRank(Evaluation):
    """The same on one rank of `run`. `given_of`: what the script gets of a batch; `training`: whether the loop is at a
    step.
    """

    def __init__(self, run: Run, given_of: Callable[[Batch], Any], training: Callable[[], bool]) -> None:
        super().__init__()
        self._run, self._given_of, self._compute, self._depth = run, given_of, run.step.compute, 0
        gradients, self._alike = run.generation.gradients, None
        self._split = gradients if isinstance(gradients, SplitGradients) else None
        if self._split is not None:
            self._split.allow(lambda: training() or self._depth > 0)
            mesh = run.mesh
            self._alike = AlikeRanks(
                run.model, mesh.axis("tensor"), run.device, training, replica=mesh.axis("shard", "tensor")
            )
            self._split.meet = self._alike.leave_whole

    def held_out(self, source: Source) -> Iterator[Any]:
        """This rank's batches of the samples of `source`, as the script gets them."""
        run_file, (share, shares) = self._run.run_file, self._run.mesh.batch_share
        batches = evaluation_batches(
            source,
            replicas=shares,
            replica=share,
            micro_samples=self._run.generation.microbatching.samples or max(1, run_file.batch.global_samples // shares),
            denominator="samples",
            limit=run_file.observe.evaluate_samples,
        )
        with self.evaluating(together=False), self.under_way():
            for batch in batches:
                yield self._given_of(self._compute.prepared(batch).batch)

    @contextmanager
    def evaluating(self, *, together: bool = True) -> Iterator[None]:
        """Inside, every rank has all parameters, the model is in evaluation mode, and nothing has a gradient. Where
        ranks do not leave `together`, as one may `break` where another is at its end, they do not compare what was
        written, and of a split model each has its own part.
        """
        gradients = self._run.generation.gradients
        whole = self._split.parts if self._split is not None and not together else gradients.full_parameters
        self._depth += 1
        try:
            with whole(compares=together), torch.no_grad(), evaluating(self._run.model):
                yield
        finally:
            self._depth -= 1
        self._compute.buffers.refresh()

    def compare(self, loss: Tensor, *, last: bool) -> Callable[[], None]:
        """See `AlikeRanks`; nothing where every rank computes for itself."""
        return _nothing if self._alike is None else self._alike.compare(loss, last=last)

    def close(self) -> None:
        """The script's model is its own again."""
        if self._alike is not None:
            self._alike.close()
