"""Causal attention of transformers' decoders by a module of Shoal's, which context parallelism can replace.

transformers looks up the function that computes attention in its `AttentionInterface`. The one registered here hands
query, key and value to a `CausalAttention` that stands beside the projections, as `core`. A rank that holds a part of
every sequence puts another in its place (`shoal.parallel.context.put`).

What a plain causal core cannot compute, such as padding masks or dropout, goes to transformers' own sdpa, where the
rank sees whole sequences, and is refused where it does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import UserCodeError
from shoal.models.layers import CausalAttention

NAME = "shoal"
"""In transformers' `AttentionInterface` and `AttentionMaskInterface`."""

CORE = "core"

_CHANGES = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask", "cache")
"""Keywords by which an architecture asks for something else than softmax(q k') v under the causal mask."""


def use_causal_cores(model: Any) -> bool:
    """Gives every attention of a causal decoder a core, and has `model` use it; False, and nothing done, elsewhere.

    A decoder is causal where each of its blocks (`_no_split_modules`) has one attention, which says `is_causal`.
    """
    attentions = _causal_attentions(model)
    if not attentions:
        return False
    _register()
    for attention in attentions:
        attention.add_module(CORE, CausalAttention())
    model.set_attn_implementation(NAME)
    return True


def whole_attentions(model: nn.Module, split: Collection[str]) -> Iterator[str]:
    """The names of causal attentions of which no weight is among those `split`."""
    for path, module in model.named_modules():
        own = [f"{path}.{name}" for name, _ in module.named_parameters()]
        if own and getattr(module, "is_causal", None) is not None and not set(own) & set(split):
            yield path


def has_causal_cores(model: nn.Module) -> bool:
    """Has `use_causal_cores` found a causal decoder?"""
    return getattr(model.config, "_attn_implementation", None) == NAME


def whole_order(positions: Tensor) -> Tensor:
    """The mask that says nothing, `[0, 0, 0, 0]`: attention is causal in the order of the whole sequence.

    transformers passes a mask of four dims on as it is, and takes positions that leap for the starts of documents if
    there is none.
    """
    return positions.new_empty((0, 0, 0, 0), dtype=positions.dtype)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Query `[batch, heads, seq, size]`, key and value with `kv_heads`, to `[batch, seq, heads, size]` and no weights.

    Raises `UserCodeError` for what a core over parts of sequences cannot compute.
    """
    masked = attention_mask is not None and attention_mask.numel() > 0
    core = module.get_submodule(CORE)
    length = query.shape[2] * getattr(getattr(core, "group", None), "size", 1)
    if (others.get("sliding_window") or 0) >= length:  # a window of all tokens is none
        others = others | {"sliding_window": None}
    changed = [name for name in _CHANGES if others.get(name) is not None]
    if not masked and not changed and not dropout:
        wanted = query.shape[-1] ** -0.5 if scaling is None else scaling
        width = value.shape[-1]
        if type(core) is not CausalAttention:
            query, key, value = _of_one_width(query, key, value)
        scale = query.shape[-1] ** -0.5
        if wanted != scale:
            query = query * (wanted / scale)
        return core(query, key, value)[..., :width].transpose(1, 2).contiguous(), None
    if type(core) is not CausalAttention:
        what = changed[0] if changed else "an attention mask" if masked else f"attention dropout ({dropout})"
        raise UserCodeError(
            f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')} uses {what}, which attention over "
            "parts of a sequence has not: turn it off in model.config, or set layout.context = 1"
        )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(  # type: ignore[return-value]
        module, query, key, value, attention_mask if masked else None, dropout=dropout, scaling=scaling, **others
    )


def _of_one_width(*tensors: Tensor) -> list[Tensor]:
    """The same with zeros behind what is narrower: keys and values travel between ranks in one tensor."""
    width = max(tensor.shape[-1] for tensor in tensors)
    return [F.pad(tensor, (0, width - tensor.shape[-1])) for tensor in tensors]


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _causal_attentions(model: Any) -> list[nn.Module]:
    """The attention of each block; empty where one has none, several, or one that is not causal."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in kinds]
    config = model.config
    plain = getattr(model, "_supports_attention_backend", False) and not getattr(config, "is_encoder_decoder", False)
    if not plain or set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return []
    found = []
    for block in blocks:
        own = [module for module in block.modules() if hasattr(module, "is_causal")]
        if len(own) != 1 or own[0].is_causal is not True:
            return []
        found += own
    return found
