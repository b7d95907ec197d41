"""A transformers model as a chain of parts, from the pipeline plan that it declares.

A plan (`base_model_pp_plan` of a config, `_pp_plan` of a class) names the modules of the chain in order: an embedding,
a list of layers, a norm, a head. What the layers get beside the activations (masks, rotary factors, positions) is made
by the architecture's own forward. So a `Probe` runs that forward with recorders in place of all parts, which keep what
they are called with; a stage then calls its own layers with it.

The recorders also show whether the architecture does anything between its parts, such as scaling the embedding: then
the chain would leave it out, and it is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserCodeError
from shoal.models.roles import Part

PLANNED = 3
"""Modules in a base model's plan: embedding, layers, norm."""


@dataclass(frozen=True)
class Probe:
    """The tokens `[samples, tokens]`, and what each layer is called with beside the activations."""

    tokens: Tensor
    calls: tuple[tuple[tuple[Any, ...], Mapping[str, Any]], ...]


@dataclass(frozen=True)
class _Places:
    """Names of the chain's modules in the base model and in the whole one."""

    base: str
    embedding: str
    layers: str
    norm: str
    head: str

    def full(self, name: str) -> str:
        return f"{self.base}.{name}"


def declares_chain(architecture: Any, config: Any) -> bool:
    """Is there a plan of embedding, layers, norm and head?"""
    base, top = getattr(config, "base_model_pp_plan", None) or {}, getattr(architecture, "_pp_plan", None) or {}
    inputs = [names for names, _ in base.values()]
    return len(base) == PLANNED and len(top) == 1 and inputs[0] == ["input_ids"] and "hidden_states" in inputs[1]


def probed(model: Any, inputs: Mapping[str, Any]) -> Probe:
    """The context of the chain for these keywords of the model's forward, without computing a layer.

    Raises `UserCodeError` where the architecture computes between its parts.
    """
    places = _places(model)
    tokens = inputs["input_ids"]
    base = model.get_submodule(places.base)
    count = len(base.get_submodule(places.layers))
    recorders = [_Recorder() for _ in range(count)]
    norm, head = _Recorder(), _Recorder()
    stand_ins = {places.layers: nn.ModuleList(recorders), places.norm: norm, places.embedding: nn.Identity()}
    probe = _with_children(model, {places.base: _with_children(base, stand_ins), places.head: head})
    like = next(p for p in model.parameters() if p.is_floating_point())
    stream = _pattern((*tokens.shape, model.config.get_text_config().hidden_size), like)
    others = {name: value for name, value in inputs.items() if name != "input_ids"}
    with torch.no_grad():
        # The class's own forward, past this module's hooks: nothing is computed that they would have to know of.
        output = probe.architecture_forward(inputs_embeds=stream, **others)
    for name, recorder in [*((f"{places.layers}.{i}", r) for i, r in enumerate(recorders)), (places.norm, norm)]:
        _check_untouched(model, name, recorder, stream)
    _check_untouched(model, places.head, head, stream)
    if not torch.equal(output.logits, stream):
        raise _computes_between(model, f"behind {places.head}")
    return Probe(tokens, tuple((r.args, r.named) for r in recorders))


def parts_of(model: Any, output: Callable[[Tensor], Any]) -> list[Part]:
    """Embedding, one part for each layer, norm and head; `output` makes what the model returns of the logits."""
    places = _places(model)
    base = model.get_submodule(places.base)
    layers = base.get_submodule(places.layers)

    def layer(index: int, x: Tensor, context: Probe) -> Tensor:
        args, named = context.calls[index]
        found = layers[index](x, *args, **named)
        return found if isinstance(found, Tensor) else found[0]

    def last(x: Tensor, context: Probe) -> Any:
        return output(model.get_submodule(places.head)(base.get_submodule(places.norm)(x)))

    names = [f"{places.layers}.{index}" for index in range(len(layers))]
    return [
        Part("embedding", (places.full(places.embedding),), lambda x, context: _embedded(base, places, context)),
        *(Part(name, (places.full(name),), partial(layer, index)) for index, name in enumerate(names)),
        Part("head", (places.full(places.norm), places.head), last),
    ]


def head_output(logits: Tensor) -> Any:
    """The logits as transformers returns them."""
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(logits=logits)  # type: ignore[arg-type]


def _embedded(base: nn.Module, places: _Places, context: Probe) -> Tensor:
    return base.get_submodule(places.embedding)(context.tokens)


def _places(model: Any) -> _Places:
    embedding, layers, norm = model.config.base_model_pp_plan
    (head,) = type(model)._pp_plan
    return _Places(model.base_model_prefix, embedding, layers, norm, head)


class _Recorder(nn.Module):
    """Keeps what it is called with, and hands the activations on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None
        self.args: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> Tensor:
        self.seen, self.args, self.named = hidden_states, args, named
        return hidden_states


def _with_children(module: nn.Module, children: Mapping[str, nn.Module]) -> Any:
    """A shallow copy of `module` that has these children in place of its own."""
    twin = copy.copy(module)
    object.__setattr__(twin, "_modules", {**module._modules, **children})
    return twin


def _pattern(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Numbers that no scaling, shift or norm leaves as they are."""
    numbers = torch.arange(shape[-1], dtype=torch.float64, device=like.device) % 7 - 2.5
    return numbers.to(like.dtype).expand(shape)


def _check_untouched(model: Any, name: str, recorder: _Recorder, stream: Tensor) -> None:
    if recorder.seen is None or recorder.seen.shape != stream.shape or not torch.equal(recorder.seen, stream):
        raise _computes_between(model, f"before {name}")


def _computes_between(model: Any, where: str) -> UserCodeError:
    return UserCodeError(
        f"{type(model).__name__} computes something of its own {where}, outside of the modules in its pipeline plan, "
        "so it is no chain of them: set layout.pipeline = 1"
    )
