"""How many parameters, and where they lie.

A layer: 2hd(a+g) of attention + 2hf (3hf gated) of feed-forward + norms and biases (Megatron-LM's
`theoretical_memory_usage.py`). Embedding Vh, a second one for the head where it is not tied. A mixture has `experts`
feed-forwards and a router of h x experts.
"""

from __future__ import annotations

import functools

from shoal.cost.transformer import Transformer


def attention_parameters(model: Transformer) -> int:
    """Matrices of one layer's attention: query, key, value, output."""
    return 2 * model.hidden * (model.attention_width + model.kv_width)


@functools.lru_cache(maxsize=64)
def expert_parameters(model: Transformer) -> int:
    """Matrices of one feed-forward, which is one expert where there are several."""
    return model.feed_forward_matrices * model.hidden * model.feed_forward


@functools.lru_cache(maxsize=64)
def dense_layer_parameters(model: Transformer) -> int:
    """One layer without its experts: what every rank of a tensor group shares."""
    feed_forward = _shared(model) if model.experts else expert_parameters(model)
    return attention_parameters(model) + feed_forward + _vectors(model)


def layer_parameters(model: Transformer) -> int:
    """One layer, all of it."""
    return dense_layer_parameters(model) + model.experts * expert_parameters(model)


def matmul_parameters(model: Transformer) -> int:
    """What one layer multiplies a token with: of a mixture, its own experts, the shared ones and the router."""
    copies = model.experts_per_token if model.experts else 1
    shared = _shared(model) if model.experts else 0
    return attention_parameters(model) + copies * expert_parameters(model) + shared


def embedding_parameters(model: Transformer) -> int:
    """Token and position vectors in front of the first layer."""
    return model.vocabulary * model.hidden + model.positions * model.hidden


def head_parameters(model: Transformer) -> int:
    """The output matrix where it is its own, and the last norm."""
    return (0 if model.tied else model.vocabulary * model.hidden) + _norm(model)


def total_parameters(model: Transformer) -> int:
    """The whole model, tied weights counted once."""
    return model.layers * layer_parameters(model) + embedding_parameters(model) + head_parameters(model)


def active_parameters(model: Transformer) -> int:
    """What one token meets: of a mixture, its own experts only."""
    idle = (model.experts - model.experts_per_token) * expert_parameters(model) if model.experts else 0
    return total_parameters(model) - model.layers * idle


def _shared(model: Transformer) -> int:
    """A mixture's router, and the features that every token goes through."""
    return model.hidden * (model.experts + model.feed_forward_matrices * model.shared_feed_forward)


def _norm(model: Transformer) -> int:
    return (2 if model.layer_norm else 1) * model.hidden


def _vectors(model: Transformer) -> int:
    """Two norms, and the biases of four linear layers where there are any."""
    biases = model.attention_width + 2 * model.kv_width + 2 * model.hidden + model.feed_forward if model.biases else 0
    return 2 * _norm(model) + biases
