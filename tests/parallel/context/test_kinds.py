"""Every kind of context parallelism against attention over whole sequences."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.collective import Alone, Collective
from shoal.errors import LayoutError, UserCodeError
from shoal.models.attention_config import BigBird, BlockLists, SlidingWindow, SparseAttentionConfig
from shoal.models.layers import CausalAttention
from shoal.models.sparse_attention import SparseAttention
from shoal.parallel.context import tiles
from shoal.parallel.context.core import positions
from shoal.parallel.context.fetch import FetchedAttention, fetch_of
from shoal.parallel.context.kernels import Plain
from shoal.parallel.context.kinds import KINDS, check_context, put_context
from tests.comm.local import local_group
from tests.waiting import HANG_S

# Other orders of the same float64 sums.
F64 = {"rtol": 1e-12, "atol": 1e-13}
# Each tile's result is rounded to bfloat16 before the tiles are merged, where the unsplit result is rounded once.
BF16_WORSE = 1.5
CONTEXT = sorted(KINDS)


def on_threads(size: int, function: Callable[[Collective], Any]) -> list[Any]:
    """`function(group)` on the ranks of a local group."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(group: Collective) -> None:
        try:
            results[group.rank] = function(group)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(group,)) for group in local_group(size, timeout_s=HANG_S)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def inputs(
    *, batch: int, heads: int, kv_heads: int, seq: int, packed: bool, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], Tensor | None]:
    """Query, key, value and the gradient of the result; document numbers."""
    g = torch.Generator().manual_seed(7)
    shapes = [(batch, n, seq, 8) for n in (heads, kv_heads, kv_heads, heads)]
    tensors = [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) * 2 for shape in shapes]
    lengths = torch.randint(0, 4, (batch, seq), generator=g)
    return tensors, (lengths == 0).cumsum(1) if packed else None


def with_gradients(core: nn.Module, tensors: list[Tensor], documents: Tensor | None) -> list[Tensor]:
    query, key, value, grad = tensors
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    out = core(*leaves, documents)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def split_and_whole(
    kind: Any, size: int, tensors: list[Tensor], documents: Tensor | None, whole_core: CausalAttention | None = None
) -> list[tuple[Tensor, Tensor]]:
    """(every rank's slice, the same slice of the unsplit result) for the result and three gradients."""
    plain = whole_core or CausalAttention()
    whole = with_gradients(plain, tensors, documents)

    def run(group: Collective) -> list[tuple[Tensor, Tensor]]:
        here = positions(tensors[0].shape[2], size=size, rank=group.rank)
        parts = [x[:, :, here] for x in tensors]
        model = nn.Sequential(plain)
        put_context(model, group, kind)
        own = with_gradients(model[0], parts, None if documents is None else documents[:, here])
        return [(mine, all_[:, :, here]) for mine, all_ in zip(own, whole, strict=True)]

    return [pair for pairs in on_threads(size, run) for pair in pairs]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(2, 4, 4), (2, 6, 3), (3, 6, 2), (4, 4, 1), (4, 8, 2)])
@pytest.mark.parametrize("kind", CONTEXT)
def test_the_slices_are_those_of_the_unsplit_attention(
    kind: str, size: int, heads: int, kv_heads: int, packed: bool
) -> None:
    """Result and gradients, for odd batches, groups of heads, and packed documents."""
    tensors, documents = inputs(batch=3, heads=heads, kv_heads=kv_heads, seq=48, packed=packed)
    for mine, whole in split_and_whole(kind, size, tensors, documents):
        torch.testing.assert_close(mine, whole, **F64)


@pytest.mark.parametrize("kind", CONTEXT)
def test_bfloat16_is_as_near_to_the_truth_as_the_unsplit_attention(kind: str) -> None:
    tensors, _ = inputs(batch=1, heads=4, kv_heads=2, seq=64, packed=False, dtype=torch.bfloat16)
    truth = with_gradients(CausalAttention(), [x.double() for x in tensors], None)
    split = split_and_whole(kind, 4, tensors, None)
    for index, exact in enumerate(truth):
        ours, theirs = (torch.stack([pair[side] for pair in split[index::4]], 0) for side in (0, 1))
        exact = torch.stack([exact[:, :, positions(64, size=4, rank=rank)] for rank in range(4)])
        assert ours.dtype == torch.bfloat16
        assert (ours - exact).norm() <= BF16_WORSE * (theirs - exact).norm()


@pytest.mark.parametrize("kind", ["ring", "allgather"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_plain_kernel_and_tiles_cut_into_rows_give_the_same(
    kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs where there is no fused kernel, and where a mask is too large to be written at once."""
    monkeypatch.setattr(tiles, "MOST_MASKED_NUMEL", 1000)
    monkeypatch.setattr(tiles, "kernel_for", lambda *_, **__: Plain())
    tensors, documents = inputs(batch=2, heads=4, kv_heads=2, seq=40, packed=packed)
    for mine, whole in split_and_whole(kind, 2, tensors, documents):
        torch.testing.assert_close(mine, whole, **F64)


@pytest.mark.parametrize("kind", CONTEXT)
def test_autocast_is_that_of_the_unsplit_attention(kind: str) -> None:
    """Float32 queries under autocast are attended to in bfloat16."""
    tensors, _ = inputs(batch=1, heads=2, kv_heads=2, seq=16, packed=False, dtype=torch.float32)

    def run(group: Collective) -> torch.dtype:
        here = positions(16, size=2, rank=group.rank)
        with torch.autocast("cpu", torch.bfloat16):
            return KINDS[kind](group)(*(x[:, :, here] for x in tensors[:3])).dtype

    assert on_threads(2, run) == [torch.bfloat16] * 2


@pytest.mark.parametrize("kind", CONTEXT)
def test_a_gradient_that_is_not_contiguous(kind: str) -> None:
    """As the sum of the result gives it: one number, expanded."""
    tensors, _ = inputs(batch=2, heads=4, kv_heads=2, seq=16, packed=False)
    tensors[3] = torch.ones((), dtype=torch.float64).expand_as(tensors[3])
    for mine, whole in split_and_whole(kind, 2, tensors, None):
        torch.testing.assert_close(mine, whole, **F64)


def test_too_few_heads_are_refused_with_the_nearest_number_of_ranks() -> None:
    tensors, _ = inputs(batch=1, heads=6, kv_heads=6, seq=16, packed=False)
    with pytest.raises(LayoutError, match=r"context=4 .* 6 query heads .* context=3 or context=6, or another kind"):
        on_threads(4, lambda group: KINDS["ulysses"](group)(*(x[:, :, :4] for x in tensors[:3])))


def test_only_causal_attention_is_replaced_and_a_group_of_one_changes_nothing() -> None:
    group = local_group(2)[0]
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(CausalAttention()))
    put_context(model, Alone(), "ring")
    assert type(model[1][0]) is CausalAttention
    put_context(model, group, "ring")
    assert type(model[1][0]) is KINDS["ring"]
    assert type(model[0]) is nn.Linear


def test_a_model_without_the_module_is_refused() -> None:
    with pytest.raises(UserCodeError, match=r"Linear has no module of type .*CausalAttention.*; or|Linear has no"):
        check_context(nn.Linear(2, 2), local_group(2)[0])


MASKS: dict[str, SparseAttentionConfig] = {
    "window": SlidingWindow(window=5, block=4),
    "dilated, global": SlidingWindow(window=3, dilation=3, global_tokens=2, block=2),
    "own tokens alone": SlidingWindow(window=1, block=4),
    "bigbird": BigBird(window_blocks=2, global_blocks=1, random_blocks=1, block=4),
    "lists": BlockLists(kept=((), (0,), (), (1, 2), (3, 0), (5,), (), (7, 2), (), (), (1,), (9,)), block=4),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(2, 6, 3), (3, 6, 2)])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("mask", MASKS)
def test_under_a_mask_the_slices_are_those_of_the_unsplit_attention(
    mask: str, kind: str, size: int, heads: int, kv_heads: int, packed: bool
) -> None:
    tensors, documents = inputs(batch=3, heads=heads, kv_heads=kv_heads, seq=48, packed=packed)
    for mine, whole in split_and_whole(kind, size, tensors, documents, SparseAttention(MASKS[mask])):
        torch.testing.assert_close(mine, whole, **F64)


def test_a_rank_fetches_what_its_queries_see_and_nothing_else() -> None:
    """Of a window the block before each of its chunks, whatever the length; what one sends the other fetches."""
    window = SlidingWindow(window=64, block=64)
    for blocks in (16, 256):
        plans = [fetch_of(window, blocks, size=4, rank=rank) for rank in range(4)]
        assert [len(plan.coming) for plan in plans] == [1, 2, 2, 1]  # the ends meet: rank 3 has both middle chunks
        for rank, plan in enumerate(plans):
            assert plan.from_each == [other.to_each[rank] for other in plans]
    everything = fetch_of(SlidingWindow(window=1024, block=64), 16, size=4, rank=3)
    assert sorted(everything.own + everything.coming) == list(range(10))  # what follows the later chunk is not seen


def test_blocks_that_lie_on_two_ranks_are_refused() -> None:
    tensors, _ = inputs(batch=1, heads=2, kv_heads=2, seq=24, packed=False)
    with pytest.raises(LayoutError, match=r"block = 4 does not divide the two chunks of 6 tokens .* 2 context ranks"):
        on_threads(2, lambda group: FetchedAttention(group, MASKS["window"])(*(x[:, :, :12] for x in tensors[:3])))
