"""Experts of transformers' mixtures, whose tokens Shoal's exchange takes to them.

transformers stacks the experts of a layer in one module (`gate_up_proj` and `down_proj`, `[experts, ...]`), calls it
with tokens that its own router has placed, and looks up the function that computes in its `ExpertsInterface`. The one
registered here sends tokens by the `exchange` that stands in the module, which a rank with some of the experts replaces
(`shoal.parallel.expert.exchange`). The expert plan of a config (`base_model_ep_plan`) says what is stacked:

    grouped_gemm                    expert              a parameter of all experts: split over them
    ep_dispatch_experts             the module that is called with tokens, choices and their weights

Where every expert is here, transformers' own grouped products compute, except in float64, which they do not take.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.models.mixture import grouped_linear
from shoal.models.mixture_exchange import LocalExchange, through_experts

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
