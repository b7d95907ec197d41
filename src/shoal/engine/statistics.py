"""Batch statistics that a model keeps for evaluation, summed over the replicas once a step."""

from __future__ import annotations

import torch
from torch import nn

from shoal.comm.collective import Collective
from shoal.models.statistics import StepStatistics


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
