"""Small configs of eight architectures of transformers, and data that each can train on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

VOCABULARY, WIDTH, SEQUENCE, SAMPLES = 61, 32, 16, 48

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
_ENCODER: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def model(architecture: str, config: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """The table `[model]`."""
    return {"kind": "transformers", "architecture": architecture, "config": config, **keys}


def data(function: str) -> dict[str, Any]:
    """The table `[data]` of inputs that are no tokens alone."""
    return {"kind": "python", "build": f"tests.models.huggingface.architectures:{function}"}


LLAMA = model("LlamaForCausalLM", _DECODER)
TIED_LLAMA = model("LlamaForCausalLM", {**_DECODER, "tie_word_embeddings": True})
QWEN3 = model("Qwen3ForCausalLM", {**_DECODER, "head_dim": 8})
ADAPTED = {"lora_rank": 4, "lora_targets": ["q_proj", "v_proj", "o_proj", "down_proj", "up_proj"]}
LORA_LLAMA = LLAMA | ADAPTED
LORA_QWEN3 = QWEN3 | ADAPTED | {"lora_dropout": 0.1}
GPT2 = model(
    "GPT2LMHeadModel",
    {
        "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0,
    },
)  # fmt: skip
MIXTRAL = model("MixtralForCausalLM", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2})
QWEN2_MOE = model(
    "Qwen2MoeForCausalLM",
    {
        **_DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
)  # fmt: skip
QWEN3_MOE = model(
    "Qwen3MoeForCausalLM",
    {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
)
BERT = model(
    "BertForMaskedLM", {**_ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "hidden_dropout_prob": 0.1}
)
VIT = model(
    "ViTForImageClassification",
    {**_ENCODER, "image_size": 16, "patch_size": 8, "num_channels": 1, "hidden_dropout_prob": 0.0,
     "id2label": {str(i): str(i) for i in range(5)}},
)  # fmt: skip
T5 = model(
    "T5ForConditionalGeneration",
    {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
     "dropout_rate": 0.1, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
)  # fmt: skip
WHISPER = model(
    "WhisperForConditionalGeneration",
    {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32, "dropout": 0.0, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
)  # fmt: skip
PHI3 = model("Phi3ForCausalLM", _DECODER)
"""Its plan gathers what each of its layers gives."""
QWEN2 = model("Qwen2ForCausalLM", _DECODER)
DEBERTA = model("DebertaV2ForMaskedLM", {**_ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 64})
_OLDER = {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"}
NEOX = model("GPTNeoXForCausalLM", {**_OLDER, "hidden_dropout": 0.1})
"""Queries, keys and values of each head in one matrix, and dropout behind its embedding."""
PHI = model("PhiForCausalLM", {**_OLDER, "embd_pdrop": 0.1, "resid_pdrop": 0.1})
GPT_OSS = model("GptOssForCausalLM", {**_DECODER, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2})
"""With sinks in its attention, and an expert plan alone."""
RESNET = model(
    "ResNetForImageClassification",
    {"num_channels": 1, "num_labels": 5, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2],
     "layer_type": "basic"},
)  # fmt: skip
"""Without attention, and with batch norms."""

APERTUS = model("ApertusForCausalLM", _DECODER)
"""Its activations have parameters."""

_NAMES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK_V2 = model(
    "DeepseekV2ForCausalLM",
    {**_DECODER, **_LATENT, "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 4,
     "num_experts_per_tok": 2, "first_k_dense_replace": 1},
)  # fmt: skip
"""Its plan has a style of its own for what keys and values are made of."""
FURTHER: dict[str, dict[str, Any]] = {
    "GPT-NeoX": NEOX,
    "Phi": PHI,
    "Falcon": model("FalconForCausalLM", {**_NAMES, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "OPT": model(
        "OPTForCausalLM",
        {**_NAMES, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
         "word_embed_proj_dim": WIDTH, "dropout": 0.0},
    ),
    "Bloom": model("BloomForCausalLM", {**_NAMES, "n_layer": 2, "n_head": 4}),
    "Gemma": model("GemmaForCausalLM", {**_DECODER, "head_dim": 8}),
    "Gemma2": model("Gemma2ForCausalLM", {**_DECODER, "head_dim": 8, "sliding_window": 8}),
    "OLMo2": model("Olmo2ForCausalLM", _DECODER),
    "StableLM": model("StableLmForCausalLM", _DECODER),
    "Starcoder2": model("Starcoder2ForCausalLM", _DECODER),
    "Cohere": model("CohereForCausalLM", _DECODER),
    "Granite": model("GraniteForCausalLM", {**_DECODER, "embedding_multiplier": 2.0, "logits_scaling": 3.0}),
    "DeepSeek-V3": model(
        "DeepseekV3ForCausalLM",
        {**_DECODER, **_LATENT, "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 4,
         "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "ERNIE": model(
        "Ernie4_5_MoeForCausalLM", {**_DECODER, "moe_intermediate_size": 24, "moe_num_experts": 4, "moe_k": 2}
    ),
    "Mamba": model("MambaForCausalLM", {**_NAMES, "state_size": 4, "num_hidden_layers": 2}),
    "GPT-OSS": GPT_OSS,
}  # fmt: skip
"""Decoders, each with something of its own."""

TABLES: dict[str, dict[str, Any]] = {
    "Llama": {"model": LLAMA},
    "Qwen3": {"model": QWEN3},
    "GPT-2": {"model": GPT2},
    "Mixtral": {"model": MIXTRAL},
    "BERT": {"model": BERT, "data": data("masked_tokens")},
    "ViT": {"model": VIT, "data": data("pictures")},
    "T5": {"model": T5, "data": data("translations")},
    "Whisper": {"model": WHISPER, "data": data("utterances")},
}
"""The tables `[model]` and, where tokens alone are no input, `[data]` of each architecture."""


class Samples:
    """Sample i is made of numbers drawn from i."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.make(np.random.default_rng(index))


def _tokens(draw: np.random.Generator, length: int) -> Tensor:
    return torch.from_numpy(draw.integers(3, VOCABULARY, length))


def masked_tokens() -> Samples:
    """Tokens of which some are hidden; targets there alone, and padding that a mask hides."""

    def make(draw: np.random.Generator) -> Any:
        tokens, hidden = _tokens(draw, SEQUENCE), torch.from_numpy(draw.random(SEQUENCE) < 0.3)
        hidden[0] = True
        real = torch.arange(SEQUENCE) < int(draw.integers(8, SEQUENCE + 1))
        targets = tokens.masked_fill(~(hidden & real), -100)
        inputs = {"input_ids": tokens.masked_fill(hidden, 1), "attention_mask": real.long()}
        return inputs, targets

    return Samples(make)


def named_tokens() -> Samples:
    """Tokens by the name that a decoder has for them."""
    return Samples(lambda draw: ({"input_ids": _tokens(draw, SEQUENCE)}, _tokens(draw, SEQUENCE)))


def padded_tokens() -> Samples:
    """The same with a mask of the last four."""
    real = (torch.arange(SEQUENCE) < SEQUENCE - 4).long()
    return Samples(
        lambda draw: ({"input_ids": _tokens(draw, SEQUENCE), "attention_mask": real}, _tokens(draw, SEQUENCE))
    )


def pictures() -> Samples:
    """Grey pictures of five classes."""
    return Samples(lambda draw: (draw.standard_normal((1, 16, 16)).astype(np.float32), int(draw.integers(5))))


def translations() -> Samples:
    """Tokens to other tokens, the decoder's inputs shifted by one."""

    def make(draw: np.random.Generator) -> Any:
        source, target = _tokens(draw, 12), _tokens(draw, 9)
        return {"input_ids": source, "decoder_input_ids": torch.cat([torch.zeros(1).long(), target[:-1]])}, target

    return Samples(make)


def utterances() -> Samples:
    """Spectra of 24 frames to tokens."""

    def make(draw: np.random.Generator) -> Any:
        target = _tokens(draw, 9)
        spectra = torch.from_numpy(draw.standard_normal((8, 24)).astype(np.float32))
        return {"input_features": spectra, "decoder_input_ids": torch.cat([torch.ones(1).long(), target[:-1]])}, target

    return Samples(make)
