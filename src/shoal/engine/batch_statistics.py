"""Buffers that a module changes in its forward, such as running statistics.

They are not gradients, so nothing sums them. Two things could go wrong in silence: ranks see other samples, so the
buffers drift apart, and what is evaluated and saved depends on the layout; and a step that is skipped for a NaN has
already written it.

So the first step shows which buffers change. On several ranks they must have changed alike, or the run is refused by
name; and a skipped step puts them back. Modules that follow `StepStatistics` bring their own agreement, and buffers
that are not saved are their module's business.

Batch statistics that a model keeps for evaluation, summed over the replicas once a step.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from shoal.comm.collective import Collective
from shoal.errors import UserCodeError
from shoal.models.grouped_norm import StepStatistics


class BufferGuard:
    """Watches the persistent buffers of `model` over the ranks of `group`."""

    def __init__(self, model: nn.Module, group: Collective) -> None:
        self._group = group
        agreeing = [module for module in model.modules() if isinstance(module, StepStatistics)]
        agreed = {id(buffer) for module in agreeing for buffer in cast(nn.Module, module).buffers()}
        saved = set(model.state_dict(keep_vars=True))
        self._watched = {n: b for n, b in model.named_buffers() if n in saved and id(b) not in agreed}
        self._before: dict[str, Tensor] = {}
        self._known = not self._watched

    def start(self) -> None:
        """Before a step."""
        self._before = {name: buffer.clone() for name, buffer in self._watched.items()}

    def finish(self, *, committed: bool) -> None:
        """After a step. Raises `UserCodeError`, on every rank alike, for buffers that follow a rank's own samples."""
        if not self._known:
            self._require_alike()
            self._watched = {n: b for n, b in self._watched.items() if not torch.equal(b, self._before[n])}
            self._known = True
        if not committed:
            for name, buffer in self._watched.items():
                buffer.copy_(self._before[name])

    def _require_alike(self) -> None:
        if self._group.size == 1:
            return
        for name in self._unlike():
            raise UserCodeError(
                f"the module changes its buffer {name} in forward, and ranks that see other samples change it "
                "otherwise; what is evaluated and saved would depend on the layout. Compute it without the samples, or "
                "follow shoal.models.grouped_norm.StepStatistics, which sums over ranks once a step"
            )

    def _unlike(self) -> list[str]:
        """The watched buffers that are not the same on every rank."""
        names = sorted(self._watched)
        largest = torch.stack([_checksum(self._watched[name]) for name in names])
        smallest = largest.clone()
        self._group.all_reduce(largest, "max").wait()
        self._group.all_reduce(smallest, "min").wait()
        return [name for name, high, low in zip(names, largest.tolist(), smallest.tolist(), strict=True) if high != low]


def _checksum(buffer: Tensor) -> Tensor:
    flat = torch.view_as_real(buffer).flatten() if buffer.is_complex() else buffer.flatten()
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device)
    return (flat.double().nan_to_num() * weights.sin()).sum()


class StatisticsSync:
    """Brings the modules that follow the `StepStatistics` protocol to agreement. Costs nothing where there are none."""

    def __init__(self, model: nn.Module, group: Collective) -> None:
        self._modules = [module for module in model.modules() if isinstance(module, StepStatistics)]
        self._group = group

    def finish(self, *, committed: bool) -> None:
        """After a step: its sums go into the running statistics, or are dropped where the step was skipped."""
        if not self._modules:
            return
        if not committed:
            for module in self._modules:
                module.discard_sums()
            return
        sums = [module.step_sums() for module in self._modules]
        flat = torch.cat(sums)
        if self._group.size > 1:
            self._group.all_reduce(flat).wait()
        for module, part in zip(self._modules, flat.split([s.numel() for s in sums]), strict=True):
            module.commit_sums(part)
