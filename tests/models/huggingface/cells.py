"""What each architecture does under each layout: "same" as one process, or a part of the sentence that refuses it."""

from __future__ import annotations

from typing import Any

from tests.models.huggingface.architectures import ADAPTED, LLAMA, TABLES, TIED_LLAMA

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
}  # fmt: skip

_NO_TENSOR, _NO_PIPELINE, _NO_CONTEXT = "declares no tensor plan", "declares no pipeline plan", "plain causal"
_CAUSAL = ("Llama", "Qwen3", "Mixtral", "tied Llama", "LoRA")

MODELS = {**TABLES, "tied Llama": {"model": TIED_LLAMA}, "LoRA": {"model": LLAMA | ADAPTED}}


def expected(model: str, layout: str) -> str:
    """The outcome of a cell."""
    axes = LAYOUTS[layout]["layout"]
    if model == "LoRA" and axes.get("sequence_parallel"):
        return "layout.sequence_parallel = true: adapters of LlamaForCausalLM"
    if model in _CAUSAL or (model == "GPT-2" and "context" in axes):
        return "same"
    if "tensor" in axes:
        return _NO_TENSOR
    if "pipeline" in axes:
        return _NO_PIPELINE
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
