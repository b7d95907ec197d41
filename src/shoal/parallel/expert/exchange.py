"""The surroundings of a mixture whose experts, and whose tokens, lie on several ranks.

    tokens sorted by expert --all-to-all--> by (rank, expert) --sort--> by expert --experts--> and all the way back

Every token is routed once. Ranks along `tensor` that have the same tokens split them first (GShard, arXiv:2006.16668,
for the exchange); under sequence parallelism they have different ones already. What belongs to a sequence as a whole,
loads and the order of its tokens, is agreed among the ranks that route its parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.collective import Collective
from shoal.models.mixture_exchange import Apply, counted
from shoal.parallel.expert.operators import all_to_all, bounds, join_tokens, split_tokens


@dataclass(frozen=True)
class ExpertGroups:
    """Who a rank exchanges tokens with.

    `expert`: the ranks among which the experts are split. `tensor`: those that have the same samples and, without
    `sequence_parallel`, the same tokens. `sequence`: all that have parts of the same samples, context x tensor.
    """

    expert: Collective
    tensor: Collective
    sequence: Collective
    sequence_parallel: bool = False


@dataclass(frozen=True)
class GroupExchange:
    """`Exchange` over groups of ranks."""

    groups: ExpertGroups

    def split(self, x: Tensor) -> Tensor:
        return split_tokens(x, self.groups.tensor) if self._repeated else x

    def join(self, x: Tensor, *, seq: int) -> Tensor:
        return join_tokens(x, self.groups.tensor, seq=seq) if self._repeated else x

    def positions(self, given: Tensor | None, x: Tensor) -> Tensor:
        """Raises `RuntimeError` where the samples are split over `context` and nobody says how."""
        if given is not None:
            return self.part(given)
        if self.groups.sequence.size != self.groups.tensor.size:
            raise RuntimeError(
                "a mixture of experts whose samples are split over context found no positions; pass each token's place "
                "in its sample, `positions` [batch, seq], to the model"
            )
        longer = self.groups.tensor.size if self.groups.sequence_parallel else 1
        return self.part(counted(x.shape[1] * longer, x))

    def part(self, per_token: Tensor) -> Tensor:
        start, end = bounds(per_token.shape[1], self.groups.tensor)
        return per_token[:, start:end]

    def sum_over_sequence(self, sums: Tensor) -> Tensor:
        total = sums.clone()
        self.groups.sequence.all_reduce(total).wait()
        return total

    def gather_over_sequence(self, keys: Tensor, *, fill: int, seq: int) -> Tensor:
        group = self.groups.sequence
        longest = -(-seq // self.groups.tensor.size) if self._repeated else seq
        padded = keys.new_full((keys.shape[0], longest, keys.shape[2]), fill)
        padded[:, : keys.shape[1]] = keys
        padded = padded.flatten()
        everyone = keys.new_empty(group.size * len(padded))
        group.all_gather(everyone, padded).wait()
        return everyone

    def apply(self, rows: Tensor, counts: Tensor, experts: Apply) -> Tensor:
        group = self.groups.expert
        if group.size == 1:
            return experts(rows, counts)
        wanted = counts.view(group.size, -1)  # [rank, its experts]
        coming = torch.empty_like(wanted)
        group.all_to_all(coming, wanted).wait()
        sent, received = torch.stack((wanted, coming)).sum(-1).tolist()
        arrived = all_to_all(rows, group, sent=sent, received=received)
        order = by_expert(coming)
        done = experts(arrived[order], coming.sum(0))
        back = torch.zeros_like(done).index_copy(0, order, done)
        return all_to_all(back, group, sent=received, received=sent)

    @property
    def _repeated(self) -> bool:
        """Do several ranks have the same tokens?"""
        return self.groups.tensor.size > 1 and not self.groups.sequence_parallel


def by_expert(counts: Tensor) -> Tensor:
    """The order that sorts rows by expert which lie by (rank, expert); `counts` int64 `[ranks, experts]` of each."""
    ranks, experts = counts.shape
    belongs = torch.arange(experts, device=counts.device).repeat(ranks).repeat_interleave(counts.flatten())
    return torch.argsort(belongs, stable=True)
