"""Modules in other people's styles: those of `transformers`, a GPT as nanoGPT writes it, and an MLP-mixer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VOCABULARY = 16, 61

SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {
        "vocab_size": 61, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
    },
    "BertForMaskedLM": {
        "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
        "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
    "LlamaForCausalLM": {
        "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32,
    },
    "ViTForImageClassification": {
        "image_size": 8, "patch_size": 2, "num_channels": 1, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 32, "num_labels": 10,
    },
    "T5ForConditionalGeneration": {
        "vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2,
        "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0, "tie_word_embeddings": False,
    },
}  # fmt: skip


def built(name: str) -> nn.Module:
    """A model of transformers with random weights, as a user's function builds it."""
    import transformers

    torch.manual_seed(3)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SIZES[name]))
    model.config.use_cache = False
    return model


class SelfAttention(nn.Module):
    """In the manner of nanoGPT: one matrix, split by an attribute; the width of a head computed from the input's."""

    def __init__(self, reads_input: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.head_dim, self.reads_input = 4, WIDTH, WIDTH // 4, reads_input

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        size = c // self.n_head if self.reads_input else self.head_dim
        q, k, v = (part.view(b, t, self.n_head, size).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c if self.reads_input else -1))


class Block(nn.Module):
    def __init__(self, reads_input: bool) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), SelfAttention(reads_input), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Embeddings and blocks in a dictionary, a tied head, and a decision on an optional argument."""

    def __init__(self, reads_input: bool = True) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(VOCABULARY, WIDTH), "wpe": nn.Embedding(32, WIDTH),
             "h": nn.ModuleList(Block(reads_input) for _ in range(2)), "ln_f": nn.LayerNorm(WIDTH)}
        )  # fmt: skip
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        t = idx.size(1)
        if t > 32:
            raise ValueError(f"cannot take {t} tokens")
        x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(t, device=idx.device))
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


class MixerBlock(nn.Module):
    """Mixes patches, then channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.norm_2, self.channels = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_2(x))


class Mixer(nn.Module):
    """An MLP-mixer (arXiv:2105.01601) of 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 2, stride=2)
        self.blocks, self.norm = nn.ModuleList(MixerBlock() for _ in range(2)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        if x.shape[1] != 16:
            raise ValueError("16 patches")
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def nano() -> nn.Module:
    torch.manual_seed(3)
    return NanoGPT()


def nano_with_heads() -> nn.Module:
    torch.manual_seed(3)
    return NanoGPT(reads_input=False)


def mixer() -> nn.Module:
    torch.manual_seed(3)
    return Mixer()


class Pairs:
    """Sequences to and from, as an encoder-decoder takes them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        tokens = torch.randint(0, 61, (25,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens[:12], "decoder_input_ids": tokens[12:24]}, tokens[13:25]


def pairs() -> Pairs:
    return Pairs()
