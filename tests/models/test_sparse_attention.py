"""Attention of gathered blocks, beside attention under the whole mask."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.config import BigBird, SlidingWindow, SparseAttentionConfig
from shoal.models.gpt import SparseAttention, kept_blocks
from shoal.models.layers import CausalAttention
from shoal.runfile.layout_rules import layout_refusal
from tests.sync.steps import ADAM, gap, train
from tests.verification.layouts import GPT, corpus, run_file_of, verified

MASKS: dict[str, SparseAttentionConfig] = {
    "window": SlidingWindow(window=5, block=4),
    "window of a block": SlidingWindow(window=8, block=8),
    "window of all": SlidingWindow(window=64, block=4),
    "dilated": SlidingWindow(window=3, dilation=3, block=4),
    "global": SlidingWindow(window=2, global_tokens=3, block=4),
    "bigbird": BigBird(window_blocks=2, global_blocks=1, random_blocks=1, block=4),
}


def sees(config: SparseAttentionConfig, query: int, key: int) -> bool:
    """Token by token, as the papers say it."""
    if key > query:
        return False
    if isinstance(config, SlidingWindow):
        back = query - key
        return key < config.global_tokens or (back % config.dilation == 0 and back // config.dilation < config.window)
    own, other = query // config.block, key // config.block
    if other < config.global_blocks or own - other < config.window_blocks:
        return True
    return other in kept_blocks(config, own + 1)[own]


def under_whole_mask(
    config: SparseAttentionConfig, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
) -> Tensor:
    length = query.shape[2]
    mask = torch.tensor([[sees(config, q, k) for k in range(length)] for q in range(length)])
    whole = mask.expand(query.shape[0], 1, -1, -1)
    if documents is not None:
        whole = whole & (documents[:, None, :, None] == documents[:, None, None, :])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=whole, enable_gqa=True)


def drawn(length: int, heads: int) -> Tensor:
    generator = torch.Generator().manual_seed(length + heads)
    return torch.randn(2, heads, length, 6, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("length", [16, 23, 3])
@pytest.mark.parametrize("name", MASKS)
def test_gathered_blocks_are_attention_under_the_mask(name: str, length: int, documents: bool) -> None:
    """Results and gradients, with fewer key heads than query heads, at lengths that blocks do not divide."""
    config = MASKS[name]
    numbers = (torch.arange(length) // 5).expand(2, -1) if documents else None
    inputs = drawn(length, 4), drawn(length, 2), drawn(length, 2) * 1.0
    found = SparseAttention(config)(*inputs, numbers)
    wanted = under_whole_mask(config, *inputs, numbers)
    assert torch.allclose(found, wanted, rtol=1e-10)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    ours = torch.autograd.grad((found * weights).sum(), inputs[:2], retain_graph=True)
    theirs = torch.autograd.grad((wanted * weights).sum(), inputs[:2])
    assert all(torch.allclose(one, other, rtol=1e-9, atol=1e-12) for one, other in zip(ours, theirs, strict=True))


def test_a_window_of_everything_is_causal_attention() -> None:
    inputs = drawn(20, 4), drawn(20, 4), drawn(20, 4)
    found = SparseAttention(SlidingWindow(window=20, block=4))(*inputs)
    assert torch.allclose(found, CausalAttention()(*inputs), rtol=1e-10)


def test_what_is_gathered_grows_with_the_length_and_not_with_its_square() -> None:
    """Blocks of keys for each block of queries, whatever the length."""
    window, random = SlidingWindow(window=128, block=64), BigBird()
    for blocks in (16, 64):
        assert max(len(kept) for kept in kept_blocks(window, blocks)) == 3
        assert max(len(kept) for kept in kept_blocks(random, blocks)) == 3 + 1 + 2
    assert kept_blocks(random, 64)[:16] == kept_blocks(random, 16)
    assert kept_blocks(BigBird(seed=1), 64) != kept_blocks(random, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("attention")
    corpus(folder)
    return folder


@pytest.mark.parametrize("layout", ["tensor", "pipeline", "shard"])
def test_every_layout_trains_under_a_mask_as_one_process(ranks, folder: Path, layout: str) -> None:
    mask = {"kind": "window", "window": 5, "global_tokens": 1, "block": 4}
    tables = ADAM | {"model": GPT | {"layers": 2, "attention": mask}}
    wanted = ranks(1, train, tables, str(folder), 0, 4)[0]
    found = ranks(2, train, tables | {"layout": {layout: 2}}, str(folder), 0, 4)[0]
    assert gap(found.weights, wanted.weights) < 1e-10
    verdict, *_ = ranks(2, verified, tables | {"layout": {layout: 2}}, str(folder), False, 2)
    assert verdict["holds"], verdict["sentence"]


def test_parts_of_sequences_are_refused(tmp_path: Path) -> None:
    mask = {"attention": {"kind": "bigbird"}}
    sentence = layout_refusal(run_file_of(tmp_path, model=GPT | mask, layout={"context": 2}))
    assert sentence is not None
    assert 'model.attention.kind = "bigbird" with layout.context = 2' in sentence
