"""Expert parallelism of a model: each rank of `expert` keeps an equal share of every mixture's experts.

    blocks.3.feed_forward.experts.up    [experts, hidden, width]  ->  [experts / E, hidden, width]
    blocks.3.feed_forward.router.weight                               whole; each rank routes tokens of its own

Parameters stay plain tensors under the names of the unsplit model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.comm.collective import Collective
from shoal.errors import LayoutError
from shoal.models.token_exchange import Apply, SendsTokens, counted
from shoal.topology.refusal import nearest_divisors, nearest_multiples

# How tokens get to their experts and back, as autograd functions: each one's backward is its inverse on gradients.


def all_to_all(rows: Tensor, group: Collective, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """`rows` `[sum(sent), ...]`: `sent[r]` of them go to rank r, `received[r]` come from it, in rank order."""
    return _AllToAll.apply(rows, group, list(sent), list(received))


def split_tokens(x: Tensor, group: Collective) -> Tensor:
    """This rank's slice of the sequence, of `x` `[batch, seq, width]` that all ranks have; slices may be uneven.

    The gradients of the slices are gathered, so that every rank has the gradient of all of `x`.
    """
    return _Split.apply(x, group)


def join_tokens(x: Tensor, group: Collective, *, seq: int) -> Tensor:
    """The inverse: the slices `[batch, seq', width]` of all ranks as `[batch, seq, width]`, on each."""
    return _Join.apply(x, group, seq)


def bounds(seq: int, group: Collective) -> tuple[int, int]:
    """Where this rank's slice of a sequence begins and ends; slices differ by one at most, the longer ones first."""
    return _start(seq, group.rank, group.size), _start(seq, group.rank + 1, group.size)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Collective, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchanged(rows, group, sent=sent, received=received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchanged(gradients[0], ctx.group, sent=ctx.received, received=ctx.sent), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective) -> Tensor:
        ctx.group, ctx.seq = group, x.shape[1]
        return x.narrow(1, *_start_and_length(x.shape[1], group)).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gathered(gradients[0], ctx.group, ctx.seq), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective, seq: int) -> Tensor:
        ctx.group = group
        return _gathered(x, group, seq)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        whole = gradients[0]
        return whole.narrow(1, *_start_and_length(whole.shape[1], ctx.group)).contiguous(), None, None


def _exchanged(rows: Tensor, group: Collective, *, sent: list[int], received: list[int]) -> Tensor:
    output = rows.new_empty(sum(received), *rows.shape[1:])
    group.all_to_all(output, rows.contiguous(), output_sizes=received, input_sizes=sent).wait()
    return output


def _gathered(x: Tensor, group: Collective, seq: int) -> Tensor:
    """The slices of all ranks side by side: padded to one length on the wire, cut to their own behind it."""
    longest = -(-seq // group.size)
    padded = x.new_zeros(x.shape[0], longest, *x.shape[2:])
    padded[:, : x.shape[1]] = x
    everyone = padded.new_empty(group.size * x.shape[0], *padded.shape[1:])
    group.all_gather(everyone, padded).wait()
    starts = [_start(seq, rank, group.size) for rank in range(group.size + 1)]
    slices = everyone.unflatten(0, (group.size, x.shape[0]))
    return torch.cat([slices[r][:, : starts[r + 1] - starts[r]] for r in range(group.size)], dim=1)


def _start(seq: int, rank: int, size: int) -> int:
    each, extra = divmod(seq, size)
    return rank * each + min(rank, extra)


def _start_and_length(seq: int, group: Collective) -> tuple[int, int]:
    start, end = bounds(seq, group)
    return start, end - start


# The surroundings of a mixture whose experts, and whose tokens, lie on several ranks.
#
#     tokens sorted by expert --all-to-all--> by (rank, expert) --sort--> by expert --experts--> and all the way back
#
# Every token is routed once. Ranks along `tensor` that have the same tokens split them first (GShard, arXiv:2006.16668,
# for the exchange); under sequence parallelism they have different ones already. What belongs to a sequence as a whole,
# loads and the order of its tokens, is agreed among the ranks that route its parts.


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

    @property
    def local(self) -> bool:
        return self.groups.expert.size == 1 and not self._repeated

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


@dataclass(frozen=True)
class ExpertPart:
    """What this rank holds of a stacked parameter of the unsplit model: `length` experts from `offset` along `dim`."""

    dim: int
    offset: int
    length: int


def split_experts(model: nn.Module, groups: ExpertGroups) -> dict[str, ExpertPart]:
    """Leaves in every mixture of `model`, in place, this rank's experts, and lets its tokens travel over `groups`.

    Call it wherever any of the groups has more than one rank, also with whole experts on each: the tokens that ranks
    along `tensor` share are then still routed once. Takes parameters of any device, "meta" too. Returns the part of
    every parameter with the role "expert"; empty for a model, or a stage of one, without mixtures.

    Raises:
        LayoutError: `expert` does not divide the experts; the model is left as it was.
    """
    senders = {name: module for name, module in model.named_modules() if isinstance(module, SendsTokens)}
    stacked = [f"{name}.{own}".lstrip(".") for name, module in senders.items() for own in module.stacked]
    parameters = {name: model.get_parameter(name) for name in stacked}
    for name, parameter in parameters.items():
        check_experts(parameter.shape[0], groups.expert.size, name=name)
    for module in senders.values():
        if module.stacked:
            module.exchange = GroupExchange(groups)
    return {name: _keep(model, name, parameter, groups) for name, parameter in parameters.items()}


def check_experts(experts: int, size: int, *, name: str) -> None:
    """Raises `LayoutError` unless `size` ranks can hold equally many of the `experts` stacked in `name`."""
    if experts % size:
        sizes = " or ".join(f"expert={n}" for n in nearest_divisors(experts, size))
        others = " or ".join(map(str, nearest_multiples(size, experts)))
        raise LayoutError(
            f"{name} has {experts} experts, which expert={size} does not divide; nearest: {sizes}, or {others} experts"
        )


def _keep(model: nn.Module, name: str, parameter: nn.Parameter, groups: ExpertGroups) -> ExpertPart:
    length = parameter.shape[0] // groups.expert.size
    part = ExpertPart(0, groups.expert.rank * length, length)
    own = parameter.detach().narrow(0, part.offset, length).clone()
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, nn.Parameter(own, requires_grad=parameter.requires_grad))
    return part
