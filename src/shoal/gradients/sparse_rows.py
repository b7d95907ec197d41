"""Gradients of embedding tables beside the dense ones: of each table only the rows that a step has touched.

A table's gradient is whole in its replica when the backward is over (`shoal.parallel.split`). Replicas sum theirs by
an all-gather of row numbers and rows, and each adds up the same rows in the same order:

    bytes sent per rank and step = (replicas - 1) x rows touched x (width x bytes of a number + 8)

whatever the size of the table. The norm is that of the dense gradients and the tables' together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.gradients.gradients import OverReplica, Tuned, VisibleGradients
from shoal.gradients.reducer import OwnGradient
from shoal.state import Owned, Trained, owned_whole


class WithSparseRows(OverReplica):
    """`Gradients` of `dense` and of `tables`; their `.grad` are sparse. `order` are the names of all, in the model's
    order; the gradient of a table is summed over its group in `across`, and the norm adds up over `replica`.
    """

    def __init__(
        self,
        dense: VisibleGradients,
        tables: Sequence[Trained],
        *,
        order: Sequence[str],
        across: Sequence[Collective],
        replica: Collective,
    ) -> None:
        place = {name: index for index, name in enumerate(order)}
        owned = [*dense.owned, *(owned_whole(table) for table in tables)]
        self.owned: Sequence[Owned] = sorted(owned, key=lambda one: place[one.name])
        self._dense, self._tables, self._replica = dense, tables, replica
        self._across, self._device = across, tables[0].parameter.device

    @property
    def own(self) -> OwnGradient:
        return self._dense.own

    @property
    def tuned(self) -> Tuned | None:
        return self._dense.tuned

    def start(self) -> None:
        for table in self._tables:
            table.parameter.grad = None
        self._dense.start()

    def backward(self, *, last: bool) -> AbstractContextManager[None]:
        return self._dense.backward(last=last)

    def schedule(self) -> AbstractContextManager[None]:
        return self._dense.schedule()

    def reduce(self) -> Tensor:
        norm = self._dense.reduce()
        square = norm.new_zeros((), dtype=torch.float64)
        for table, group in zip(self._tables, self._across, strict=True):
            gradient = _summed(_rows_of(table.parameter), group)
            table.parameter.grad = gradient
            square += gradient._values().double().square().sum()
        if self._replica.size > 1:
            self._replica.all_reduce(square).wait()
        return (norm.double().square() + square).sqrt().to(norm.dtype)

    def scale(self, factor: float | Tensor) -> None:
        self._dense.scale(factor)
        for table in self._tables:
            if table.parameter.grad is not None:
                table.parameter.grad._values().mul_(factor)

    @property
    def used(self) -> frozenset[str]:
        """All tables, whose gradients are their rows that were used."""
        return self._dense.used | {table.holding.name for table in self._tables}

    def expose(self, names: Collection[str]) -> None:
        self._dense.expose(names)

    def accept(self) -> None:
        self._dense.accept()

    def accept_weights(self) -> None:
        self._dense.accept_weights()

    def gather(self) -> None:
        self._dense.gather()

    def settle(self) -> None:
        self._dense.settle()

    def full_parameters(self, *, compares: bool = True) -> AbstractContextManager[None]:
        return self._dense.full_parameters(compares=compares)

    def close(self) -> None:
        self._dense.close()


def _rows_of(parameter: Tensor) -> Tensor:
    """The gradient with each row once, ascending. Without any, an empty one; a dense one by its rows that are not 0."""
    if parameter.grad is None:
        none = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
        return torch.sparse_coo_tensor(none, parameter.new_zeros(0, *parameter.shape[1:]), parameter.shape).coalesce()
    gradient = parameter.grad
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()


def _summed(gradient: Tensor, group: Collective) -> Tensor:
    """The sum over `group` of coalesced gradients, the same bits on every rank."""
    if group.size == 1:
        return gradient
    rows, values = gradient.indices()[0], gradient.values()
    most = torch.tensor(len(rows), device=rows.device)
    counts = rows.new_empty(group.size)
    group.all_gather(counts, most[None]).wait()
    block = int(counts.max())
    all_rows = _gathered(rows, block, group)
    all_values = _gathered(values, block, group)
    real = (torch.arange(block, device=rows.device) < counts[:, None]).flatten()
    return torch.sparse_coo_tensor(all_rows[real][None], all_values[real], gradient.shape).coalesce()


def _gathered(own: Tensor, block: int, group: Collective) -> Tensor:
    """Every rank's rows, padded to `block`."""
    padded = own.new_zeros(block, *own.shape[1:])
    padded[: len(own)] = own
    everyone = own.new_empty(group.size * block, *own.shape[1:])
    group.all_gather(everyone, padded).wait()
    return everyone
