"""Whole parameters behind the parts that ranks step.

What an optimizer steps on a rank may be a part of a parameter: a run of its elements (ZeRO), a box of it (tensor
parallelism), or a run of a box. One that asks something of whole parameters is handed `Parts` when it is built, and
makes of them what it needs: sums over all numbers of each parameter (`PartSums`), or whole tensors on one rank each
(`shoal.optim.owners`). Without `Parts`, as in a script of one process, every parameter is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.comm.collective import Collective, exchanged, home_of
from shoal.state import Owned, is_counted, numbers_on


@dataclass(frozen=True)
class Parts:
    """`owned` is what this rank's optimizer steps. The parts of the ranks of `replica` make up the model; those of
    `equal` make the same updates, so that one of them may compute what all of them need.
    """

    owned: Sequence[Owned]
    replica: Collective
    equal: Collective

    @property
    def device(self) -> torch.device:
        """Where the parts are."""
        return home_of([each.parameter for each in self.owned[:1]], self.replica)

    def of(self, optimizer: torch.optim.Optimizer) -> Parts:
        """Those that `optimizer` steps, where there are several."""
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return Parts([one for one in self.owned if id(one.parameter) in own], self.replica, self.equal)


@runtime_checkable
class SeesParts(Protocol):
    """An optimizer that asks something of whole parameters."""

    def connect(self, parts: Parts) -> None:
        """Before the first step, on all ranks together."""
        ...


class PartSums:
    """Sums over all numbers of each parameter, of which every rank has added up its own: one all-reduce for all.

    Numbers that several ranks hold are counted at the first of them.
    """

    def __init__(self, parts: Parts) -> None:
        self._group, self._device = parts.replica, parts.device
        names = exchanged([own.name for own in parts.owned], parts.replica, parts.device)
        rows = {name: row for row, name in enumerate(sorted({name for each in names for name in each}))}
        self._rows = {id(own.parameter): rows[own.name] for own in parts.owned}
        self._counted = {id(own.parameter): is_counted(own) for own in parts.owned}
        self._length = len(rows)

    @property
    def alone(self) -> bool:
        """Whether no other rank has parts of these parameters, and nothing is sent."""
        return self._group.size == 1

    def __call__(self, parameters: Sequence[Parameter], own: Tensor) -> Tensor:
        """`own` `[parameters, n]` has what this rank adds up over each part; the same of the whole ones, in float64.

        All ranks of the replica call it together.
        """
        if self._group.size == 1:
            return own.double()
        own = own.to(self._device)  # a rank without a part has nothing that says where
        table = torch.zeros(self._length, own.shape[1], dtype=torch.float64, device=self._device)
        rows = numbers_on(self._device, [self._rows[id(p)] for p in parameters], dtype=torch.int64)
        counted = numbers_on(self._device, [self._counted[id(p)] for p in parameters])
        table.index_add_(0, rows, own.double() * counted[:, None])
        self._group.all_reduce(table).wait()
        return table[rows]
