"""Roles of the parameters of a transformers model, from the tensor plan that it declares.

A plan maps modules, numbers in their names replaced by `*`, to styles (`base_model_tp_plan` of a config, `_tp_plan` of
a class):

    colwise                            column                     rows of the weight and the bias
    rowwise                            row, and bias              columns of the weight; the bias is added once
    colwise_gather_output, colwise_rep head                       the logits stay split
    embedding_rowwise                  embedding                  rows
    replicated_with_grad_allreduce     norm                       whole; its gradient is a sum

Stacked experts that the expert plan splits (`shoal.models.huggingface.experts`) have the role expert, whatever the
tensor plan says. Layers that no plan names are whole on every rank of `tensor`. An adapter (LoRA) on a column layer is
A, whole, and B, split like the layer; on a row layer A is split and B whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from shoal.errors import UserCodeError
from shoal.models.huggingface.experts import pattern_of, planned_experts
from shoal.models.roles import Kind, Role

_LINEAR: Mapping[str, Kind] = MappingProxyType(
    {"colwise": "column", "rowwise": "row", "colwise_gather_output": "head", "colwise_rep": "head"}
)
_WHOLE = frozenset({"replicated_with_grad_allreduce", "replicated", "sequence_parallel"})
_ADAPTER = re.compile(r"\.(base_layer|lora_A\.[^.]+|lora_B\.[^.]+)$")


def declares_roles(config: Any) -> bool:
    """Is there a tensor plan, or an expert plan?"""
    return bool(getattr(config, "base_model_tp_plan", None) or getattr(config, "base_model_ep_plan", None))


def roles_by_plan(model: Any) -> dict[str, Role]:
    """The role of every parameter, by all of its names; what has a style that Shoal does not know is replicated."""
    kinds = _kinds_of(model)
    roles = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        roles[name] = Role(kinds.get(name) or "replicated", init=None, decay=parameter.ndim >= 2)
    return roles


def check_tensor_plan(model: Any) -> None:
    """Raises `UserCodeError` for a plan whose styles Shoal does not know, or with ties to layers that it leaves out."""
    kinds, by_name = _kinds_of(model), dict(model.named_parameters(remove_duplicate=False))
    for name, kind in kinds.items():
        if kind is None:
            layer = name.rpartition(".")[0]
            raise UserCodeError(
                f"the tensor plan of {type(model).__name__} splits {layer!r} by {model._tp_plan[pattern_of(layer)]!r}, "
                "which Shoal does not know: set layout.tensor = 1"
            )
    split = {id(by_name[name]) for name, kind in kinds.items() if kind in ("embedding", "head")}
    for name, parameter in by_name.items():
        if kinds.get(name, "replicated") == "replicated" and id(parameter) in split:
            raise UserCodeError(
                f"{name!r} of {type(model).__name__} is tied to a layer that is split over the vocabulary, and has no "
                "place in its tensor plan: set tie_word_embeddings = false in model.config, or layout.tensor = 1"
            )


def _kinds_of(model: Any) -> dict[str, Kind | None]:
    """What the plans say of parameters, by name; None where Shoal does not know the style."""
    kinds: dict[str, Kind | None] = {}
    for path, module in model.named_modules():
        kinds |= dict(_kinds_in(path, module, model._tp_plan))
    for path, module in planned_experts(model):
        kinds |= {f"{path}.{name}": "expert" for name, _ in module.named_parameters()}
    return kinds


def _kinds_in(path: str, module: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, Kind | None]]:
    """The parameters that `module` itself has, and their roles."""
    own = [name for name, _ in module.named_parameters(recurse=False)]
    found = _ADAPTER.search(path)
    layer = path[: found.start()] if found else path
    style = plan.get(pattern_of(layer))
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
