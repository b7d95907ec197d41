"""Attention of gathered blocks, beside attention under the whole mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import ConfigError, UserCodeError
from shoal.models.attention_config import BigBird, BlockLists, SlidingWindow, SparseAttentionConfig
from shoal.models.huggingface.build import build
from shoal.models.huggingface.config import TransformersConfig
from shoal.models.layers import CausalAttention
from shoal.models.sparse_attention import SparseAttention, kept_blocks, takes_flex
from shoal.runfile.layout_rules import layout_refusal
from tests.models.huggingface.architectures import BERT, FURTHER, GPT2, LLAMA, QWEN2
from tests.sync.steps import ADAM, gap, train
from tests.verification.layouts import GPT, corpus, run_file_of, verified

MASKS: dict[str, SparseAttentionConfig] = {
    "window": SlidingWindow(window=5, block=4),
    "window of a block": SlidingWindow(window=8, block=8),
    "window of all": SlidingWindow(window=64, block=4),
    "dilated": SlidingWindow(window=3, dilation=3, block=4),
    "global": SlidingWindow(window=2, global_tokens=3, block=4),
    "bigbird": BigBird(window_blocks=2, global_blocks=1, random_blocks=1, block=4),
    "lists": BlockLists(kept=((), (0,), (), (1, 2), (3, 0), (5,)), block=4),
}


def sees(config: SparseAttentionConfig, query: int, key: int) -> bool:
    """Token by token, as the papers say it."""
    if key > query:
        return False
    if isinstance(config, SlidingWindow):
        back = query - key
        return key < config.global_tokens or (back % config.dilation == 0 and back // config.dilation < config.window)
    own, other = query // config.block, key // config.block
    if isinstance(config, BlockLists):
        return other == own or other in config.kept[own]
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


IN_TF32 = 5e-3
"""Products of float32 on a GPU may be of 10 bits."""


def in_blocks_of(config: SparseAttentionConfig) -> SparseAttentionConfig:
    return msgspec.structs.replace(config, form="blocks")


FLEX: dict[str, tuple[SparseAttentionConfig, int, bool]] = {
    "window": (SlidingWindow(window=40, global_tokens=3, block=48, form="flex"), 300, True),
    "bigbird": (BigBird(block=8, form="flex"), 77, False),
    "lists": (BlockLists(kept=((), (0,), (), (1,)), block=80, form="flex"), 300, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FLEX)
def test_flex_attention_is_attention_under_the_mask(case: str) -> None:
    """Compiled, without gradients, which it has on GPUs alone; of blocks that its own do not divide."""
    config, length, documents = FLEX[case]
    numbers = (torch.arange(length) // 50).expand(2, -1) if documents else None
    query, key, value = (torch.randn(2, heads, length, 16) for heads in (4, 2, 2))
    with torch.no_grad():
        found = SparseAttention(config)(query, key, value, numbers)
    blocks = SparseAttention(in_blocks_of(config))(query, key, value, numbers)
    assert (found - blocks).abs().max() < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make gpu")
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
def test_gpus_take_flex_attention_and_its_gradients(documents: bool) -> None:
    numbers = (torch.arange(300, device="cuda") // 50).expand(2, -1) if documents else None
    inputs = [torch.randn(2, heads, 300, 64, device="cuda").requires_grad_() for heads in (4, 2, 2)]
    weights = torch.randn(2, 4, 300, 64, device="cuda")
    for config in (SlidingWindow(window=40, global_tokens=3), BigBird(block=32)):
        assert takes_flex(config, inputs[0])
        found = [SparseAttention(each)(*inputs, numbers) for each in (config, in_blocks_of(config))]
        ours, theirs = (torch.autograd.grad((each * weights).sum(), inputs) for each in found)
        for one, other in zip((found[0], *ours), (found[1], *theirs), strict=True):
            assert (one - other).norm() < IN_TF32 * other.norm(), config


def test_flex_attention_is_refused_where_it_has_no_kernel() -> None:
    config, query = SlidingWindow(window=4, form="flex"), torch.randn(1, 2, 8, 16)
    with torch.no_grad(), pytest.raises(UserCodeError, match=r'form = "flex": .* this is torch.float64 on a cpu'):
        SparseAttention(config)(*(query.double(),) * 3)
    with pytest.raises(UserCodeError, match="no backward on CPUs"):
        SparseAttention(config)(query.requires_grad_(), query, query)
    assert SparseAttention(SlidingWindow(window=4))(query, query, query).requires_grad


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


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "pipeline", "shard", "context"])
def test_every_layout_trains_under_a_mask_as_one_process(ranks, folder: Path, layout: str) -> None:
    mask = {"kind": "window", "window": 5, "global_tokens": 1, "block": 4}
    tables = ADAM | {"model": GPT | {"layers": 2, "attention": mask}}
    wanted = ranks(1, train, tables, str(folder), 0, 4)[0]
    found = ranks(2, train, tables | {"layout": {layout: 2}}, str(folder), 0, 4)[0]
    assert gap(found.weights, wanted.weights) < 1e-10
    verdict, *_ = ranks(2, verified, tables | {"layout": {layout: 2}}, str(folder), False, 2)
    assert verdict["holds"], verdict["sentence"]


# Masks in models of transformers.


def decoder(table: dict[str, Any], attention: Any) -> Any:
    torch.manual_seed(0)
    config = table["config"] | {"resid_pdrop": 0.0, "embd_pdrop": 0.0} if table is GPT2 else table["config"]
    found = build(TransformersConfig(architecture=table["architecture"], config=config, attention=attention))
    return found.double()


LENGTH = 22
PADDING = torch.ones(2, LENGTH, dtype=torch.int64)
PADDING[0, :3] = PADDING[1, 18:] = 0
RESTARTING = torch.cat([torch.arange(10), torch.arange(LENGTH - 10)]).expand(2, -1)
GIVEN: dict[str, tuple[dict[str, Tensor], Tensor]] = {
    "tokens alone": ({}, torch.ones_like(PADDING)),
    "padded": ({"attention_mask": PADDING}, PADDING),
    "packed": ({"position_ids": RESTARTING}, (torch.arange(LENGTH) >= 10).long().expand(2, -1)),
}
DECODERS = {
    "Llama": LLAMA,
    "GPT-2": GPT2,
    "Qwen2": QWEN2,
    "Gemma": FURTHER["Gemma"],
    "Mistral": LLAMA | {"architecture": "MistralForCausalLM", "config": LLAMA["config"] | {"sliding_window": 40}},
}
IN_SINGLE = 1e-6
"""transformers' eager attention takes its softmax in float32."""


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("mask", ["global", "bigbird", "lists"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_of_transformers_compute_it(name: str, mask: str, given: str) -> None:
    """As transformers' own attention under the whole mask, with padding and packed documents; gradients as well."""
    config, (named, documents), table = MASKS[mask], GIVEN[given], DECODERS[name]
    masked, plain = decoder(table, config), decoder(table, "eager")
    tokens = torch.randint(3, 61, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    seen = torch.tensor([[sees(config, q, k) for k in range(LENGTH)] for q in range(LENGTH)])
    whole = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    added = torch.zeros(whole.shape, dtype=torch.float64).masked_fill(~whole, torch.finfo(torch.float64).min)
    others = {name: value for name, value in named.items() if name != "attention_mask"}
    wanted = plain.architecture_forward(input_ids=tokens, attention_mask=added, **others).logits
    found = masked(tokens, **named).logits
    real = documents > 0 if given == "padded" else documents > -1
    assert (found - wanted)[real].abs().max() < IN_SINGLE
    ours, theirs = (
        torch.autograd.grad(logits[real].square().mean(), list(model.parameters()))
        for model, logits in ((masked, found), (plain, wanted))
    )
    assert all((one - other).abs().max() < IN_SINGLE for one, other in zip(ours, theirs, strict=True))
    assert (plain(tokens).logits - found).abs().max() > 1e-3, "a mask changes something"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "pipeline", "shard", "context"])
def test_every_layout_trains_a_decoder_of_transformers_under_a_mask(ranks, folder: Path, layout: str) -> None:
    mask = {"kind": "window", "window": 5, "global_tokens": 1, "block": 4}
    tables = ADAM | {"model": LLAMA | {"attention": mask}}
    wanted = ranks(1, train, tables, str(folder), 0, 4)[0]
    found = ranks(2, train, tables | {"layout": {layout: 2}}, str(folder), 0, 4)[0]
    assert gap(found.weights, wanted.weights) < 1e-10
    plain = ranks(1, train, tables | {"model": LLAMA}, str(folder), 0, 4)[0]
    assert gap(plain.weights, wanted.weights) > 1e-6


def test_windows_of_packed_documents_are_kept_apart() -> None:
    """As Shoal's data gives them, also where a token sees all before it, a window of the model's own, or by chance."""
    windowed = LLAMA | {"architecture": "MistralForCausalLM", "config": LLAMA["config"] | {"sliding_window": 4}}
    dropping = LLAMA | {"config": LLAMA["config"] | {"attention_dropout": 1e-12}}
    numbers = (torch.arange(LENGTH) >= 10).long().expand(2, -1)
    tokens = torch.randint(3, 61, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    for table in (LLAMA, windowed, dropping):
        model = decoder(table, "auto")
        found = model(tokens=tokens, positions=RESTARTING, documents=numbers).logits
        assert torch.allclose(found[:, :10], model(tokens[:, :10]).logits, rtol=1e-9)
        assert torch.allclose(found[:, 10:], model(tokens[:, 10:]).logits, rtol=1e-9)


@pytest.mark.parametrize("mask", [None, "global", "lists"])
@pytest.mark.parametrize("table", [LLAMA, GPT2], ids=["Llama", "GPT-2"])
def test_text_is_generated_with_a_cache_as_without(table: dict[str, Any], mask: str | None) -> None:
    """Every new token sees what it would see if all were computed anew, behind padding as well."""
    model = decoder(table, "auto" if mask is None else MASKS[mask]).eval()
    tokens = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(2))
    tokens[0, :3], padding = 0, torch.ones_like(tokens)
    padding[0, :3] = 0
    said: Any = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    said |= {"output_logits": True, "return_dict_in_generate": True, "attention_mask": padding}
    cached, anew = (torch.stack(model.generate(tokens, use_cache=c, **said).logits) for c in (True, False))
    assert torch.allclose(cached, anew, rtol=1e-9, atol=1e-12)


def test_an_encoder_has_no_masks_and_keeps_no_documents_apart() -> None:
    with pytest.raises(ConfigError, match=r'model.attention.kind = "bigbird": BertForMaskedLM is no decoder'):
        decoder(BERT, BigBird())
    inputs = dict.fromkeys(("tokens", "positions", "documents"), PADDING)
    with pytest.raises(UserCodeError, match=r'data.packing = "documents": BertForMaskedLM is no decoder'):
        decoder(BERT, "auto")(**inputs)


def test_what_a_mask_cannot_compute_is_refused() -> None:
    window = MASKS["window"]
    table = LLAMA | {"architecture": "MistralForCausalLM", "config": LLAMA["config"] | {"sliding_window": 4}}
    with pytest.raises(
        UserCodeError, match=r"uses sliding_window, which attention under a mask of \[model.attention\]"
    ):
        decoder(table, window)(PADDING)
    with pytest.raises(UserCodeError, match="has 6 lists of blocks of 4 tokens, for sequences of at most 24"):
        decoder(LLAMA, MASKS["lists"])(torch.ones(1, 25, dtype=torch.int64))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "blocks on two ranks": (
        {"model": GPT | {"attention": {"kind": "bigbird"}}, "layout": {"context": 2}},
        "model.attention.block = 64 does not divide the two chunks of 4 tokens of batch.sequence = 16 that a rank of "
        'layout.context = 2 holds: set it to 4, or context.kind = "ulysses"',
    ),
    "flex over parts of sequences": (
        {"model": GPT | {"attention": {"kind": "bigbird", "block": 4, "form": "flex"}}, "layout": {"context": 2}},
        'model.attention.form = "flex" with layout.context = 2: ranks compute with the blocks that they have fetched',
    ),
    "flex on cores": (
        {"model": GPT | {"attention": {"kind": "bigbird", "block": 4, "form": "flex"}}, "run": {"device": "cpu"}},
        'model.attention.form = "flex" with run.device = "cpu": FlexAttention has no backward there',
    ),
    "too few lists": (
        {"model": GPT | {"attention": {"kind": "blocks", "kept": [[]]}}, "batch": {"sequence": 65}},
        "model.attention.kept has 1 lists of blocks of 64 tokens, and batch.sequence = 65: give 2 lists",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_masks_that_cannot_be_are_refused_before_ranks_start(case: str, tmp_path: Path) -> None:
    tables, sentence = REFUSED[case]
    assert sentence in (layout_refusal(run_file_of(tmp_path, **tables)) or "")


def test_lists_name_earlier_blocks() -> None:
    with pytest.raises(ValueError, match=r"kept\[1\] names block 2; attention is causal"):
        BlockLists(kept=((), (2,)))
