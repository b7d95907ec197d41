"""`JointCommit`: all batch norms of a model take the sums of a step together.

A model has dozens of them, and each would take twenty operators on a few numbers. Side by side they are one vector:

    running <- running + momentum [count > 0] (sum / max(count, 1) - running)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.models.batch_norm import StepBatchNorm, StepStatistics


class JointCommit:
    """`commit_sums` of all of `norms`, whose totals lie side by side, in a few operators for all of them."""

    def __init__(self, norms: Sequence[StepBatchNorm]) -> None:
        self._norms, self._widths = norms, [each for norm in norms for each in 2 * [norm.channels]]
        self._momenta: list[float] = []
        self._places: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, modules: Sequence[StepStatistics]) -> JointCommit | None:
        """None where one of them takes its sums in another way."""
        norms = [module for module in modules if isinstance(module, StepBatchNorm)]
        alike = all(type(norm).commit_sums is StepBatchNorm.commit_sums for norm in norms)
        return cls(norms) if norms and alike and len(norms) == len(modules) else None

    @torch.no_grad()
    def __call__(self, total: Tensor) -> None:
        """Takes `total`, the sum of all replicas' totals, and starts anew."""
        counts_at, sums_at, momenta = self._places_in(total)
        running = [each for norm in self._norms for each in (norm.running_mean, norm.running_var)]
        before, counts = torch.cat(running).to(total.dtype), total[counts_at]
        step = momenta * (counts > 0).to(total.dtype)
        after = before + step * (total[sums_at] / counts.clamp(min=1) - before)
        torch._foreach_copy_(running, after.split(self._widths))  # pyright: ignore[reportPrivateImportUsage]
        self.discard_sums()

    def gathered(self) -> Tensor:
        """The totals of all of them side by side."""
        return torch.cat([norm.totals for norm in self._norms])

    def discard_sums(self) -> None:
        """That of each."""
        torch._foreach_zero_([norm.totals for norm in self._norms])  # pyright: ignore[reportPrivateImportUsage]

    def _places_in(self, total: Tensor) -> tuple[Tensor, ...]:
        """For each running number, where its count and its sum stand in `total`, and its momentum; kept, as a GPU
        would wait for them.
        """
        momenta = [norm.momentum for norm in self._norms]
        if momenta != self._momenta or self._places[0].device != total.device:
            sizes = torch.tensor([2 * norm.channels for norm in self._norms])
            norm_of = torch.arange(len(sizes)).repeat_interleave(sizes)  # each begins with its count
            starts = torch.cat((sizes.new_zeros(1), (sizes + 1).cumsum(0)[:-1]))
            sums_at = torch.arange(len(norm_of)) + norm_of + 1
            found = (starts[norm_of], sums_at, torch.tensor(momenta, dtype=total.dtype)[norm_of])
            self._momenta, self._places = momenta, tuple(each.to(total.device) for each in found)
        return self._places
