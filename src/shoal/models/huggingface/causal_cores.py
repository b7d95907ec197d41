"""Causal attention of transformers' decoders by a module of Shoal's, which context parallelism can replace.

transformers looks up the function that computes attention in its `AttentionInterface`. The one registered here hands
query, key and value to a `CausalAttention` that stands beside the projections, as `core`. A rank that holds a part of
every sequence puts another in its place (`shoal.parallel.context`).

What a plain causal core cannot compute, such as padding masks or dropout, goes to transformers' own sdpa, where the
rank sees whole sequences, and is refused where it does not. A core under a mask of `[model.attention]` computes all
itself: padding, and documents that are packed into a sequence, are numbers of documents to it, `[batch, seq]`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import UserCodeError
from shoal.models.layers import CausalAttention
from shoal.models.sparse_attention import SparseAttention

NAME = "shoal"
"""In transformers' `AttentionInterface` and `AttentionMaskInterface`."""

CORE = "core"

_CHANGES = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask", "cache")
"""Keywords by which an architecture asks for something else than softmax(q k') v under the causal mask."""


def use_causal_cores(model: Any, core: Callable[[], CausalAttention] = CausalAttention) -> bool:
    """Gives every attention of a causal decoder a `core`, and has `model` use it; False, and nothing done, elsewhere.

    A decoder is causal where each of its blocks (`_no_split_modules`) has one attention, which says `is_causal`.
    """
    attentions = _causal_attentions(model)
    if not attentions:
        return False
    _register()
    for attention in attentions:
        attention.add_module(CORE, core())
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


def as_mask(documents: Tensor) -> Tensor:
    """Numbers of documents `[batch, seq]` in the form of a mask of four dims, which transformers passes on as it is."""
    return documents[:, None, None].long()


def _documents_of(mask: Tensor | None) -> Tensor | None:
    """What `as_mask` has hidden in a mask; None in one that transformers made."""
    if mask is None or mask.ndim != 4 or mask.dtype != torch.int64 or not mask.numel():
        return None
    return mask[:, 0, 0]


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
    documents = _documents_of(attention_mask)
    masked = documents is None and attention_mask is not None and attention_mask.numel() > 0
    core = module.get_submodule(CORE)
    cached = query.shape[2] != key.shape[2]  # `generate`: the last tokens alone are new
    length = key.shape[2] * getattr(getattr(core, "group", None), "size", 1)
    if not cached and (others.get("sliding_window") or 0) >= length:  # a window of all tokens is none
        others = others | {"sliding_window": None}
    changed = [name for name in _CHANGES if others.get(name) is not None]
    if cached and not isinstance(core, SparseAttention):
        changed.append("a cache")
    if not masked and not changed and not dropout:
        wanted = query.shape[-1] ** -0.5 if scaling is None else scaling
        width = value.shape[-1]
        if type(core) is not CausalAttention:
            widest = max(query.shape[-1], width)  # keys and values travel between ranks in one tensor
            query, key, value = (F.pad(each, (0, widest - each.shape[-1])) for each in (query, key, value))
        scale = query.shape[-1] ** -0.5
        if wanted != scale:
            query = query * (wanted / scale)
        attended = core.of_last if isinstance(core, SparseAttention) and cached else core
        return attended(query, key, value, documents)[..., :width].transpose(1, 2).contiguous(), None
    if type(core) is not CausalAttention:
        what = changed[0] if changed else "an attention mask" if masked else f"attention dropout ({dropout})"
        sparse = isinstance(core, SparseAttention)
        raise UserCodeError(
            f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')} uses {what}, which attention "
            f"{'under a mask of [model.attention]' if sparse else 'over parts of a sequence'} has not: turn it off in "
            f"model.config, or {'leave [model.attention] out' if sparse else 'set layout.context = 1'}"
        )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if documents is not None:
        attention_mask, masked = _mask_of(documents, query.shape[2], window=others.get("sliding_window")), True
    return sdpa_attention_forward(  # type: ignore[return-value]
        module, query, key, value, attention_mask if masked else None, dropout=dropout, scaling=scaling, **others
    )


def _mask_of(documents: Tensor, queries: int, *, window: int | None) -> Tensor:
    """Which tokens each of the last `queries` sees of its own document `[batch, seq]`, `[batch, 1, queries, seq]`."""
    places = torch.arange(documents.shape[1], device=documents.device)
    distance = places[-queries:, None] - places
    near = (distance >= 0) & (distance < (window or documents.shape[1]))
    return (near & (documents[:, -queries:, None] == documents[:, None]))[:, None]


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
