"""Ranks that contribute to a parameter server as one worker: they sum their gradients first, and share what is read.

With gradients g_i, each a mean over samples of weight w_i, the party contributes

    g = sum(w_i g_i) / W,    W = sum(w_i)

A rank whose gradient is not finite adds nothing, with no weight. One rank of a host so pushes and pulls for all of it,
over the host's fast memory, and only one row of parameters crosses the link between hosts each way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.sync.server_part import Standing


class Party:
    """The `ranks` of a party; the first of them pushes and pulls."""

    def __init__(self, ranks: Collective) -> None:
        self._ranks = ranks

    def sum(self, gradient: Tensor, weight: float, lr: float | None) -> tuple[float, float | None]:
        """`gradient` [numel] becomes that of the party; its weight, and its learning rate (None: nobody's is finite).

        `lr` None: this rank's gradient is not finite.
        """
        told = torch.tensor([0.0 if lr is None else weight, 0.0 if lr is None else 1.0], dtype=torch.float64)
        rate = torch.tensor([-1.0 if lr is None else lr], dtype=torch.float64)
        handles = [self._ranks.all_reduce(told), self._ranks.all_reduce(rate, op="max")]
        if lr is None:
            gradient.zero_()
        else:
            gradient.mul_(weight)
        handles.append(self._ranks.all_reduce(gradient))
        for handle in handles:
            handle.wait()
        total, finite = told.tolist()
        if not finite:
            return 0.0, None
        if total:
            gradient.div_(total)
        return total, float(rate)

    def share(self, row: Tensor, standings: dict[int, Standing]) -> dict[int, Standing]:
        """What the first rank has read becomes that of all: the parameters `row` [numel], and its standings."""
        numbers = torch.tensor([list(standing) for standing in standings.values()], dtype=torch.float64)
        handles = [self._ranks.broadcast(numbers, root=0), self._ranks.broadcast(row, root=0)]
        for handle in handles:
            handle.wait()
        return {server: Standing(*map(int, found)) for server, found in zip(standings, numbers.tolist(), strict=True)}
