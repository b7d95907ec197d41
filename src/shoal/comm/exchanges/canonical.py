"""`Canonical`: a sum in one fixed tree of pairs, whatever the number of ranks.

    ((g0 + g1) + (g2 + g3)) + ((g4 + g5) + (g6 + g7))          8 shards

Sums of floating-point numbers depend on their order. Here the leaves are the gradients of logical shards of the batch,
which stay the same. A rank sends its shards one after the other, and adds equally large branches as soon as there are
two. Ranks then exchange parts of their branches: rank r gets part r of each, adds them in the same tree, and tells all
the sum. So 1, 2, 4 and 8 ranks get the same bits, for the bytes of an all-reduce.

Every rank has a whole branch: as many shards as any other, a power of two of them, or it is alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from shoal.comm.collective import Collective, Handle
from shoal.comm.exchanges.exchange import Segment


class Canonical:
    """The sum of all that is sent in a step, over the ranks of `group`, in `buffer` `[numel]`; a shard a `send`."""

    by_microbatch: ClassVar[bool] = True

    def __init__(self, group: Collective, buffer: Tensor, segments: Sequence[Segment] = ()) -> None:
        self.group, self.result = group, buffer
        self._tree = _Tree()
        self._handle: Handle | None = None
        part = -(-buffer.numel() // group.size)
        self._filled = torch.zeros(part * group.size, dtype=buffer.dtype, device=buffer.device)
        self._rows = torch.empty_like(self._filled)

    def start(self) -> None:
        self._tree, self._handle = _Tree(), None

    def send(self, buffer: Tensor) -> None:
        self._tree.add(buffer.clone())

    def land(self) -> None:
        """The buffer was read when it was sent."""

    def settle(self) -> None:
        branch = self._tree.root()
        if self.group.size == 1:
            self.result.copy_(branch)
            return
        self._filled[: branch.numel()] = branch
        self._handle = self.group.all_to_all(self._rows, self._filled)

    def wait(self) -> None:
        if self._handle is None:
            return
        self._handle.wait()
        tree = _Tree()
        for row in self._rows.view(self.group.size, -1):
            tree.add(row.clone())
        self.group.all_gather(self._filled, tree.root()).wait()
        self.result.copy_(self._filled[: self.result.numel()])
        self._handle = None

    def commit(self) -> None:
        """Nothing is carried over."""


class _Tree:
    """Sums of branches that are not complete: at most one of each power of two leaves, the largest first."""

    def __init__(self) -> None:
        self._branches: list[tuple[int, Tensor]] = []

    def add(self, leaf: Tensor) -> None:
        """One more leaf, which is written to."""
        leaves, branch = 1, leaf
        while self._branches and self._branches[-1][0] == leaves:
            branch = self._branches.pop()[1].add_(branch)
            leaves *= 2
        self._branches.append((leaves, branch))

    def root(self) -> Tensor:
        """The sum of all leaves: what is left over joins from the smallest branch on."""
        branch = self._branches[-1][1]
        for _, larger in reversed(self._branches[:-1]):
            branch = larger.add_(branch)
        return branch
