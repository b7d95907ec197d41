"""A transformers model as a chain of parts, from the pipeline plan that it declares.

A plan (`base_model_pp_plan` of a config, `_pp_plan` of a class) names the modules of the chain in order: an embedding,
perhaps dropout, a list of layers, a norm, a head. What the layers get beside the activations (masks, rotary factors,
positions) is made by the architecture's own forward. So a `Probe` runs that forward with recorders in place of all
parts, which keep what they are called with; a stage then calls its own layers with it. The two ends run the forward
too, with recorders in place of what they do not compute, so that all that the architecture does around its layers
(a factor of the embedding, a soft cap of the logits) is in them:

    first part      tokens -> embedding -> what layers.0 is called with
    last part       what the last layer gave -> norm -> head -> output

The recorders of the probe also show whether the architecture does anything between its layers, or keeps a value from
before them: then the chain would leave it out, and it is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.errors import UserCodeError
from shoal.models.keyed_draws import draws_of_a_forward
from shoal.models.roles import Part


@dataclass(frozen=True)
class Probe:
    """The keywords of the model's forward, and what each layer is called with beside the activations."""

    inputs: Mapping[str, Any]
    calls: tuple[tuple[tuple[Any, ...], Mapping[str, Any]], ...]


@dataclass(frozen=True)
class _Places:
    """Names of the chain's modules: the head's in the whole model, the others' in the base model."""

    base: str
    before: tuple[str, ...]
    layers: str
    norm: str
    head: str

    def full(self, name: str) -> str:
        return f"{self.base}.{name}"


def declares_chain(architecture: Any, config: Any) -> bool:
    """Is there a plan of embedding, layers, norm and head?"""
    plan, top = getattr(config, "base_model_pp_plan", None) or {}, getattr(architecture, "_pp_plan", None) or {}
    layers = _layers_in(plan)
    if layers is None or not 1 <= layers == len(plan) - 2 or len(top) != 1:
        return False
    return next(iter(plan.values()))[0] == ["input_ids"]


def has_chain(model: Any) -> bool:
    """Are the modules of its plan there?"""
    places, names = _places(model), {name for name, _ in model.named_modules()}
    return {*map(places.full, (*places.before, places.layers, places.norm)), places.head} <= names


def probed(model: Any, inputs: Mapping[str, Any]) -> Probe:
    """The context of the chain for these keywords of the model's forward, without computing a layer.

    Raises `UserCodeError` where the architecture computes between its layers, or keeps a value from before them.
    """
    places, tokens = _places(model), inputs["input_ids"]
    count = len(model.get_submodule(places.full(places.layers)))
    like = next(p for p in model.parameters() if p.is_floating_point())
    shape = (*tokens.shape, model.config.get_text_config().hidden_size)
    stream = _pattern(shape, like)
    recorders = [_Recorder(stream), *(_Recorder() for _ in range(count - 1))]
    norm, head = _Recorder(), _Recorder()
    with torch.no_grad():
        embedded = like.new_full((), nan).expand(shape)
        output = _own_forward(model, places, inputs, recorders, embedded=embedded, norm=norm, head=head)
    for name, recorder in [*((f"{places.layers}.{i}", r) for i, r in enumerate(recorders)), (places.norm, norm)][1:]:
        _check_untouched(model, name, recorder, stream)
    calls = tuple((recorder.args, recorder.named) for recorder in recorders)
    if any(_unknown(value) for value in tree_leaves((calls, output.logits))):
        raise UserCodeError(
            f"{type(model).__name__} uses what its embedding gives beside or behind its {places.layers}, so it is no "
            "chain of the modules in its pipeline plan: set layout.pipeline = 1"
        )
    return Probe(inputs, calls)


def parts_of(model: Any) -> list[Part]:
    """Embedding, one part for each layer, norm and head, of which the last gives the model's output."""
    places = _places(model)
    layers = model.get_submodule(places.full(places.layers))
    count = len(layers)

    def layer(index: int, x: Tensor, context: Probe) -> Tensor:
        args, named = context.calls[index]
        found = layers[index](x, *args, **named)
        return found if isinstance(found, Tensor) else found[0]

    def first(x: Tensor | None, context: Probe) -> Tensor:
        recorders = [_Recorder() for _ in range(count)]
        _own_forward(model, places, context.inputs, recorders, norm=_Recorder(), head=_Recorder())
        seen = recorders[0].seen
        assert seen is not None, "the probe has called it"
        return seen

    def last(x: Tensor, context: Probe) -> Any:
        recorders = [_Recorder(x), *(_Recorder() for _ in range(count - 1))]
        embedded = x.new_full((), nan).expand(*context.inputs["input_ids"].shape, x.shape[-1])
        return _own_forward(model, places, context.inputs, recorders, embedded=embedded)

    names = [f"{places.layers}.{index}" for index in range(count)]
    return [
        Part("embedding", tuple(map(places.full, places.before)), first),
        *(Part(name, (places.full(name),), partial(layer, index)) for index, name in enumerate(names)),
        Part("head", (places.full(places.norm), places.head), last),
    ]


def _own_forward(
    model: Any,
    places: _Places,
    inputs: Mapping[str, Any],
    recorders: Sequence[nn.Module],
    *,
    embedded: Tensor | None = None,
    norm: nn.Module | None = None,
    head: nn.Module | None = None,
) -> Any:
    """The output of the class's own forward with these in place of modules, past its hooks: these belong to stages.

    `embedded` `[samples, tokens, width]` is what the modules before the layers give; None: they compute.
    """
    base = model.get_submodule(places.base)
    children: dict[str, nn.Module] = {places.layers: nn.ModuleList(recorders)}
    if norm is not None:
        children[places.norm] = norm
    if embedded is not None:
        children |= {name: nn.Identity() for name in places.before}
        inputs = {name: value for name, value in inputs.items() if name != "input_ids"} | {"inputs_embeds": embedded}
    whole: dict[str, nn.Module] = {places.base: _with_children(base, children)}
    if head is not None:
        whole[places.head] = head
    with draws_of_a_forward():
        return _with_children(model, whole).architecture_forward(**inputs)


def _layers_in(plan: Mapping[str, Any]) -> int | None:
    """Where the layers stand in a plan: the first that takes hidden states."""
    return next((index for index, (inputs, _) in enumerate(plan.values()) if "hidden_states" in inputs), None)


def _places(model: Any) -> _Places:
    plan = model.config.base_model_pp_plan
    *before, layers, norm = plan
    (head,) = type(model)._pp_plan
    return _Places(model.base_model_prefix, tuple(before), layers, norm, head)


class _Recorder(nn.Module):
    """Keeps what it is called with, and hands the activations on, or `gives` others in their place."""

    def __init__(self, gives: Tensor | None = None) -> None:
        super().__init__()
        self.gives = gives
        self.seen: Tensor | None = None
        self.args: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> Tensor:
        self.seen, self.args, self.named = hidden_states, args, named
        return hidden_states if self.gives is None else self.gives


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
        raise UserCodeError(
            f"{type(model).__name__} computes something of its own before {name}, outside of the modules in its "
            "pipeline plan, so it is no chain of them: set layout.pipeline = 1"
        )


def _unknown(value: Any) -> bool:
    """Does it follow from the embedding, which is NaN here?"""
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())
