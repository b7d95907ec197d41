"""The sizes of a run file's model, as the planner's closed forms take them."""

from __future__ import annotations

import math
from dataclasses import replace

from shoal.cost.transformer import Transformer, embedding_parameters, head_parameters, total_parameters
from shoal.errors import ConfigError
from shoal.models.config import GPTConfig, ModelConfig, MoEConfig


def transformer_of(model: ModelConfig, *, expert_imbalance: float = 1.0) -> Transformer:
    """The sizes of a GPT or mixture, of which the fullest expert gets `expert_imbalance` times the mean. Raises
    `ConfigError` for other models."""
    if not isinstance(model, GPTConfig):
        kind = model.variant
        raise ConfigError(f'model.kind = "{kind}": only "gpt" and "moe", whose sizes the run file tells, are simulated')
    sizes = Transformer(
        layers=model.layers,
        hidden=model.width,
        heads=model.heads,
        kv_heads=model.key_value_heads,
        head_size=model.width // model.heads,
        feed_forward=model.hidden_width,
        vocabulary=model.vocabulary,
        gated=model.feed_forward == "swiglu",
        tied=model.tied,
    )
    return _mixture(sizes, model, expert_imbalance) if isinstance(model, MoEConfig) else sizes


def _mixture(sizes: Transformer, model: MoEConfig, imbalance: float) -> Transformer:
    mixed = (model.layers - model.first_dense) // model.moe_every
    most = math.inf if model.capacity_factor is None else max(1.0, model.capacity_factor)
    return replace(
        sizes,
        feed_forward=model.width_of_expert,
        experts=model.experts,
        experts_per_token=model.top_k,
        shared_feed_forward=model.shared_experts * model.width_of_expert,
        dense_layers=model.layers - mixed,
        dense_feed_forward=model.hidden_width,
        expert_imbalance=min(imbalance, most),
    )


def hidden_share(model: ModelConfig) -> float:
    """The share of the parameters that are neither embeddings nor the head; 1 of a model whose sizes are not known."""
    if not isinstance(model, GPTConfig):
        return 1.0
    sizes = transformer_of(model)
    return 1 - (embedding_parameters(sizes) + head_parameters(sizes)) / total_parameters(sizes)
