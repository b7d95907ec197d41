"""Roles of the parameters of a transformers model, from the tensor plan that it declares.

A plan maps modules, numbers in their names replaced by `*`, to styles (`base_model_tp_plan` of a config, `_tp_plan` of
a class):

    colwise                            column                     rows of the weight and the bias
    rowwise                            row, and bias              columns of the weight; the bias is added once
    colwise_gather_output, colwise_rep head                       the logits stay split
    embedding_rowwise                  embedding                  rows
    replicated_with_grad_allreduce     norm                       whole; its gradient is a sum

The parts of a column layer are runs of its rows: where an attention has queries, keys and values in one column layer,
those of each head therefore stand together (GPT-NeoX). Layers whose outputs the plan gathers, and the row layer behind
them, are whole: those before a norm of all heads (OLMo2), or before a cut into two (GLM). The input embedding is split,
even if the plan leaves it out, where all it does is look up. A head that is tied to an embedding which is not split is
whole with it (Gemma). Stacked experts that the expert plan splits have the role
expert, whatever the tensor plan says. Layers that no plan names are whole on every rank of `tensor`. An adapter (LoRA)
on a column layer is A, whole, and B, split like the layer; on a row layer A is split and B whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserCodeError
from shoal.models.mixture import grouped_linear
from shoal.models.roles import Kind, Role
from shoal.models.token_exchange import LocalExchange, through_experts

# Experts of transformers' mixtures, whose tokens Shoal's exchange takes to them.
#
# transformers stacks the experts of a layer in one module (`gate_up_proj` and `down_proj`, `[experts, ...]`), calls it
# with tokens that its own router has placed, and looks up the function that computes in its `ExpertsInterface`. The one
# registered here sends tokens by the `exchange` that stands in the module, which a rank with some of the experts
# replaces (`shoal.parallel.expert`). The expert plan of a config (`base_model_ep_plan`) says what is stacked:
#
#     grouped_gemm                    expert              a parameter of all experts: split over them
#     ep_dispatch_experts             the module that is called with tokens, choices and their weights
#
# Where every expert is here, transformers' own grouped products compute, except in float64, which they do not take.


NAME = "shoal"
"""In transformers' `ExpertsInterface`."""

_STACKED, _CALLED = "grouped_gemm", "ep_dispatch_experts"


def use_exchanges(model: Any) -> None:
    """Gives every module of stacked experts an exchange, and has `model` send its tokens by it."""
    experts = [module for module in model.modules() if _is_experts(module)]
    if not experts:
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    for module in experts:
        module.exchange, module.stacked = LocalExchange(), ()
    for _, module in planned_experts(model):
        module.stacked = tuple(name for name, _ in module.named_parameters())
    model.set_experts_implementation(NAME)


def planned_experts(model: Any) -> Iterator[tuple[str, Any]]:
    """The modules that the expert plan splits, by name: all of their parameters are stacked."""
    plan = getattr(model, "_ep_plan", None) or {}
    for name, module in model.named_modules():
        if not _is_experts(module) or plan.get(pattern_of(name)) != _CALLED:
            continue
        if all(plan.get(pattern_of(f"{name}.{own}")) == _STACKED for own, _ in module.named_parameters()):
            yield name, module


def pattern_of(name: str) -> str:
    """A name as plans write it, `*` for each number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`hidden_states` `[tokens, width]` through the experts `top_k_index` `[tokens, top_k]`, weighted and summed."""
    exchange = module.exchange
    if exchange.local and next(module.parameters()).dtype != torch.float64:
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    tokens, chosen, gates = (exchange.split(x[None])[0] for x in (hidden_states, top_k_index, top_k_weights))
    done = through_experts(
        tokens, chosen, gates, number=module.num_experts, exchange=exchange, experts=partial(_products, module)
    )
    return exchange.join(done.to(hidden_states.dtype)[None], seq=len(hidden_states))[0]


def _is_experts(module: nn.Module) -> bool:
    """Is its class one of those that look up the function (`use_experts_implementation`)?"""
    return hasattr(module, "_is_expert_parallel")


def _products(module: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """`rows` sorted by expert through the experts that are here, in the general form of transformers' products."""
    with torch.autocast(rows.device.type, enabled=False):  # which autocast leaves alone
        inner = _linear(module, "gate_up_proj" if module.has_gate else "up_proj", rows, counts)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        done = _linear(module, "down_proj", inner, counts)
        return module.post_expert_norm(done) if module.has_post_expert_norm else done


def _linear(module: Any, name: str, rows: Tensor, counts: Tensor) -> Tensor:
    weight = getattr(module, name)
    done = grouped_linear(rows.to(weight.dtype), weight.mT if module.is_transposed else weight, counts)
    return done + getattr(module, f"{name}_bias").repeat_interleave(counts, 0) if module.has_bias else done


_LINEAR: Mapping[str, Kind] = MappingProxyType(
    {"colwise": "column", "rowwise": "row", "colwise_gather_output": "head", "colwise_rep": "head"}
)
_GATHERED = frozenset({"colwise_gather_output", "colwise_rep", "rowwise_split_input"})
"""Of layers whose outputs are gathered, and of those behind them: whole here, but for the head."""
_NOT_SPLIT = (None, "replicated", "norm")
_WHOLE = frozenset({"replicated_with_grad_allreduce", "replicated", "sequence_parallel"})
_ADAPTER = re.compile(r"\.(base_layer|lora_A\.[^.]+|lora_B\.[^.]+)$")


def declares_roles(config: Any) -> bool:
    """Is there a tensor plan, or an expert plan?"""
    return bool(getattr(config, "base_model_tp_plan", None) or getattr(config, "base_model_ep_plan", None))


def settle_plan(model: Any) -> None:
    """Finds, while the model is whole, what the plans say of it: ties are between its first layer and its last."""
    kinds = _kinds_of(model)
    model.planned_kinds = kinds
    for path, module in model.named_modules():
        if getattr(module, "is_causal", None) is None:
            continue
        linear = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
        given = [child.out_features for name, child in linear.items() if kinds.get(f"{path}.{name}.weight") == "column"]
        taken = [child.in_features for name, child in linear.items() if kinds.get(f"{path}.{name}.weight") == "row"]
        if given and taken and max(given) > max(taken):
            module.packs_heads = True  # see `shoal.parallel.tensor.region`


def roles_by_plan(model: Any) -> dict[str, Role]:
    """The role of every parameter, by all of its names; what has a style that Shoal does not know is replicated. With
    those of parameters that other stages of a pipeline hold.
    """
    kinds = model.planned_kinds
    roles = {name: Role(kind or "replicated", init=None, decay=True) for name, kind in kinds.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        roles[name] = Role(kinds.get(name) or "replicated", init=None, decay=parameter.ndim >= 2)
    return roles


def check_tensor_plan(model: Any) -> None:
    """Refuses what cannot be split as the plan says.

    Raises `UserCodeError` for styles that Shoal does not know, and for parameters between layers that are split.
    """
    kinds = model.planned_kinds
    for name, kind in kinds.items():
        if kind is None:
            layer = _ADAPTER.sub("", name.rpartition(".")[0])
            raise UserCodeError(
                f"the tensor plan of {type(model).__name__} splits {layer!r} by {model._tp_plan[pattern_of(layer)]!r}, "
                "which Shoal does not know: set layout.tensor = 1"
            )
    if not {"column", "row", "expert"} & {*kinds.values()}:
        raise UserCodeError(
            f"the tensor plan of {type(model).__name__} gathers what each of its layers gives, so that every rank "
            "would have all of them whole: set layout.tensor = 1"
        )
    for path, module in model.named_modules():
        children = [child for child, _ in module.named_children()]
        split = {child for child in children if kinds.get(f"{path}.{child}.weight") in ("column", "row")}
        for name in _beside(module, split) if split else ():
            raise UserCodeError(
                f"{type(model).__name__} has {path}.{name} between layers that its tensor plan splits, where every "
                "rank would see a part of the features: set layout.tensor = 1"
            )


def _beside(module: nn.Module, split: set[str]) -> Iterator[str]:
    """Parameters of a module that are none of its split layers', none of its whole ones', and none of single heads."""
    size = getattr(module, "head_size", getattr(module, "head_dim", None))
    for name, child in module.named_modules():
        if name.split(".")[0] in split or isinstance(child, nn.Linear):
            continue
        for own, parameter in child.named_parameters(recurse=False):
            if tuple(parameter.shape) != (size,):
                yield f"{name}.{own}".lstrip(".")


def _kinds_of(model: Any) -> dict[str, Kind | None]:
    """What the plans say of parameters, by name; None where Shoal does not know the style."""
    kinds: dict[str, Kind | None] = {}
    plan, embedding = dict(model._tp_plan), model.get_input_embeddings()
    for path, module in model.named_modules():
        if module is embedding and getattr(model.config, "base_model_tp_plan", None):
            plan.setdefault(pattern_of(path), "embedding_rowwise")
        if plan.get(pattern_of(path)) in _GATHERED and module is not model.get_output_embeddings():
            del plan[pattern_of(path)]
        kinds |= dict(_kinds_in(path, module, plan))
    for path, module in planned_experts(model):
        kinds |= {f"{path}.{name}": "expert" for name, _ in module.named_parameters()}
    whole = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if kinds.get(name) in _NOT_SPLIT}
    for name in [name for name, kind in kinds.items() if kind in ("embedding", "head")]:
        if id(model.get_parameter(name)) in whole:
            kinds[name] = "replicated"
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
