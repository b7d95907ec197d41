"""What each architecture does under each layout: "same" as one process, or a part of the sentence that refuses it."""

from __future__ import annotations

from typing import Any

from tests.models.huggingface.architectures import ADAPTED, LLAMA, QWEN2_MOE, QWEN3_MOE, TABLES, TIED_LLAMA

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate 2": {"layout": {"replicate": 2}, "batch": {"micro_samples": 2}},
    "ZeRO-1": {"layout": {"shard": 2}, "memory": {"zero": 1}},
    "ZeRO-2": {"layout": {"shard": 2}, "memory": {"zero": 2}},
    "ZeRO-3": {"layout": {"shard": 2}, "memory": {"zero": 3}},
    "ZeRO-3, recompute": {"layout": {"shard": 2}, "memory": {"zero": 3, "recompute": "full"}},
    "ZeRO-2, replicate 2": {"layout": {"shard": 2, "replicate": 2}, "memory": {"zero": 2}},
    "tensor 2": {"layout": {"tensor": 2}},
    "tensor 2, sequence": {"layout": {"tensor": 2, "sequence_parallel": True}},
    "pipeline 2": {"layout": {"pipeline": 2}},
    "pipeline 2, interleaved": {
        "layout": {"pipeline": 2}, "pipeline": {"schedule": "Interleaved1F1B", "stages_per_rank": 2},
    },
    "context 2": {"layout": {"context": 2}},
    "tensor 2, pipeline 2": {"layout": {"tensor": 2, "pipeline": 2}},
    "expert 2, ZeRO-1": {"layout": {"shard": 2, "expert": 2}, "memory": {"zero": 1}},
    "expert 2, ZeRO-3, recompute": {"layout": {"shard": 2, "expert": 2}, "memory": {"zero": 3, "recompute": "full"}},
    "expert 2 of shard 4": {"layout": {"shard": 4, "expert": 2}, "memory": {"zero": 3}},
    "expert 2, tensor 2": {"layout": {"tensor": 2, "expert": 2}},
    "expert 2, tensor 2, sequence": {"layout": {"tensor": 2, "expert": 2, "sequence_parallel": True}},
    "expert 2, context 2": {"layout": {"context": 2, "expert": 2}},
    "expert 2, pipeline 2": {"layout": {"pipeline": 2, "shard": 2, "expert": 2}, "memory": {"zero": 1}},
    "expert 4, tensor 2": {"layout": {"shard": 2, "tensor": 2, "expert": 4}, "memory": {"zero": 1}},
}  # fmt: skip

_NO_TENSOR, _NO_PIPELINE, _NO_CONTEXT = "declares no tensor plan", "declares no pipeline plan", "plain causal"
_NO_DECODER = "is no decoder of blocks with one plain causal self-attention each"
_NO_EXPERTS = "declares no expert plan"
_MIXTURES = ("Mixtral", "Qwen2-MoE", "Qwen3-MoE")
_CAUSAL = ("Llama", "Qwen3", "tied Llama", "LoRA", *_MIXTURES)

MODELS = {
    **TABLES,
    "tied Llama": {"model": TIED_LLAMA},
    "LoRA": {"model": LLAMA | ADAPTED},
    "Qwen2-MoE": {"model": QWEN2_MOE},
    "Qwen3-MoE": {"model": QWEN3_MOE},
}


def expected(model: str, layout: str) -> str:
    """The outcome of a cell."""
    axes = LAYOUTS[layout]["layout"]
    if model == "LoRA" and axes.get("sequence_parallel"):
        return "layout.sequence_parallel = true: adapters of LlamaForCausalLM"
    if "expert" in axes and model in ("Llama", "Qwen3", "tied Llama", "LoRA"):
        return _NO_EXPERTS
    if model in _CAUSAL or (model == "GPT-2" and "context" in axes and "expert" not in axes):
        return "same"
    if "tensor" in axes:
        return _NO_TENSOR
    if "pipeline" in axes:
        return _NO_PIPELINE
    if "expert" in axes:
        return _NO_EXPERTS
    return _NO_CONTEXT if "context" in axes else "same"


def tables_of(model: str, layout: str) -> dict[str, Any]:
    """The tables of the run file."""
    return MODELS[model] | LAYOUTS[layout]


def world_of(layout: str) -> int:
    """The ranks that it takes."""
    world = 1
    for axis in ("replicate", "shard", "tensor", "pipeline", "context"):
        world *= LAYOUTS[layout]["layout"].get(axis, 1)
    return world


FURTHER_LAYOUTS = ("ZeRO-3", "tensor 2", "tensor 2, sequence", "pipeline 2", "context 2", "tensor 2, pipeline 2")
_PLANLESS = ("Falcon", "OPT", "Bloom", "StableLM", "Mamba")
_MASKED = ("Falcon", "Bloom", "StableLM", "Mamba", "Gemma2", "GPT-OSS")
_SLICED = {
    "Gemma": "the embedding of GemmaForCausalLM, behind which sequences are cut",
    "Gemma2": _NO_DECODER,
    "OLMo2": "self_attn of Olmo2ForCausalLM is split by no tensor plan",
    "DeepSeek-V3": "self_attn of DeepseekV3ForCausalLM is split by no tensor plan",
    "ERNIE": "the model flattens samples and tokens before them",
}


def further_refusal(model: str, layout: str) -> str:
    """A part of the sentence that refuses a cell of the further decoders; empty: the same as one process."""
    axes = LAYOUTS[layout]["layout"]
    if "tensor" in axes and model == "GPT-OSS":
        return "use layout.expert, layout.replicate or layout.shard"
    if "tensor" in axes and model in _PLANLESS:
        return "`shoal split` proposes model.roles"
    if "pipeline" in axes and model in _PLANLESS:
        return "`shoal split` proposes model.parts"
    if axes.get("sequence_parallel"):
        return _SLICED.get(model, "")
    return _NO_DECODER if "context" in axes and model in _MASKED else ""
