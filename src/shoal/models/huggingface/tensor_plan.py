"""Roles of the parameters of a transformers model, from the tensor plan that it declares.

A plan maps modules, numbers in their names replaced by `*`, to styles (`base_model_tp_plan` of a config, `_tp_plan` of
a class):

    colwise                            column                     rows of the weight and the bias
    rowwise                            row, and bias              columns of the weight; the bias is added once
    colwise_gather_output, colwise_rep head                       the logits stay split
    embedding_rowwise                  embedding                  rows
    replicated_with_grad_allreduce     norm                       whole; its gradient is a sum

Layers that no plan names, and experts, are whole on every rank of `tensor`. An adapter (LoRA) on a column layer is
A, whole, and B, split like the layer; on a row layer A is split and B whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from shoal.errors import UserCodeError
from shoal.models.roles import Kind, Role

_LINEAR: Mapping[str, Kind] = MappingProxyType(
    {"colwise": "column", "rowwise": "row", "colwise_gather_output": "head", "colwise_rep": "head"}
)
_WHOLE = frozenset({"replicated_with_grad_allreduce", "replicated", "sequence_parallel"})
_ADAPTER = re.compile(r"\.(base_layer|lora_A\.[^.]+|lora_B\.[^.]+)$")


def declares_tensors(architecture: Any, config: Any) -> bool:
    """Is there a plan?"""
    return bool(getattr(config, "base_model_tp_plan", None)) and architecture is not None


def roles_by_plan(model: Any) -> dict[str, Role]:
    """The role of every parameter, by all of its names. What `check_plan` refuses is whole, as without a plan."""
    return _planned(model)[0]


def check_plan(model: Any) -> None:
    """Raises `UserCodeError` for a style that Shoal does not know, and for ties to a layer that the plan leaves out."""
    for refusal in _planned(model)[1]:
        raise UserCodeError(refusal)


def _planned(model: Any) -> tuple[dict[str, Role], list[str]]:
    """The roles, and why `model` cannot be split by them."""
    plan: Mapping[str, str] = model._tp_plan
    refusals: list[str] = []
    kinds: dict[str, Kind] = {}
    for path, module in model.named_modules():
        for name, kind in _kinds_in(path, module, plan):
            if kind is None:
                refusals.append(
                    f"the tensor plan of {type(model).__name__} splits {name!r} in a way that Shoal does not know: set "
                    "layout.tensor = 1"
                )
            kinds[name] = kind or "replicated"
    by_name = dict(model.named_parameters(remove_duplicate=False))
    tied = {id(by_name[name]): kind for name, kind in kinds.items() if kind in ("embedding", "head")}
    roles = {}
    for name, parameter in by_name.items():
        kind = kinds.get(name, "replicated")
        if kind == "replicated" and id(parameter) in tied:
            refusals.append(
                f"{name!r} of {type(model).__name__} is tied to a layer that is split over the vocabulary, and has no "
                "place in its tensor plan: set tie_word_embeddings = false in model.config, or layout.tensor = 1"
            )
        roles[name] = Role(kind, init=None, decay=parameter.ndim >= 2)
    return roles, refusals


def _kinds_in(path: str, module: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, Kind | None]]:
    """The parameters that `module` itself has, and their roles; None for a style that Shoal does not know."""
    own = [name for name, _ in module.named_parameters(recurse=False)]
    found = _ADAPTER.search(path)
    layer = path[: found.start()] if found else path
    style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", layer))
    if style is None or not own:
        return
    for name in own:
        yield f"{path}.{name}", _kind(module, name, style, found.group(1)[:6] if found else "")


def _kind(module: nn.Module, name: str, style: str, adapter: str) -> Kind | None:
    if style in _WHOLE:
        return "norm"
    if style == "embedding_rowwise" and type(module) is nn.Embedding:
        return "embedding"
    if style.startswith(("moe", "packed", "grouped")) or (style in _LINEAR and not isinstance(module, nn.Linear)):
        return "replicated"
    if style == "embedding_rowwise":  # an embedding that does more than look up
        return "replicated"
    kind = _LINEAR.get(style)
    if kind is None:
        return None
    if adapter == "lora_A":
        return "row" if kind == "row" else "replicated"
    if adapter == "lora_B":
        return "replicated" if kind == "row" else kind
    return "bias" if kind == "row" and name == "bias" else kind
