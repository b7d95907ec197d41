"""Which layers of a module that declares nothing tensor parallelism can split: pairs found by following features.

A linear layer's output features are followed through the trace (Megatron-LM's pairs, arXiv:1909.08053):

    linear -> elementwise functions, heads split off and joined, attention, products of equals -> linear
    column                                                                                      row

If every path of a layer's features ends in the input features of linear layers, the first is a column layer and the
last row layers, with one sum behind each. A layer whose features are cut into equal blocks first (queries, keys and
values, or a gate beside what it gates) is a packed one. A number of heads that a forward has as a constant must be an
integer attribute of its module: each rank is given its share of it. Everything else stays whole, and is said by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoal.parallel.tensor.layers import is_conv1d
from shoal.parallel.traced.following import Count, Following, Unfollowed, is_linear
from shoal.parallel.traced.tracer import ForwardTracer, reason_of

_OWN_CODE = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)
"""PyTorch's layers whose forward reads the weights of its parts itself."""


@dataclass
class Proposal:
    """Roles by names of weights, the counts that go with them, and why other linear layers stay whole, by name."""

    roles: dict[str, str] = field(default_factory=dict)
    counts: dict[str, Count] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


def propose_roles(model: nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> Proposal:
    """The pairs of `model`, traced on the inputs of one batch, on the model's device.

    A module that cannot be traced is left whole, with the reason.
    """
    proposal, leaves = Proposal(), dict[str, str]()
    graph = None
    while graph is None:
        tracer = _Layers(leaves)
        try:
            graph = tracer.trace(model)
        except Exception as error:
            if not tracer.inside:
                proposal.whole[""] = f"cannot be traced: {reason_of(error)}"
                return proposal
            leaves[tracer.inside] = f"cannot be traced: {reason_of(error)}"
    values = _Shapes(fx.GraphModule(model, graph))
    try:
        values.run(*_in_order(graph, args, named))
    except Exception as error:
        proposal.whole[""] = f"its trace does not run on a batch: {reason_of(error)}"
        return proposal
    proposal.whole |= leaves
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(model.get_submodule(str(node.target)), _OWN_CODE):
            proposal.whole[str(node.target)] = "a layer of PyTorch's, whose forward reads its parts' weights itself"
        if is_linear(model, node) and f"{node.target}.weight" not in proposal.roles:
            _try(model, node, values.shapes, proposal)
    return proposal


class _Layers(ForwardTracer):
    """Goes into all modules but PyTorch's own layers and those that cannot be traced; `inside`: where it is."""

    def __init__(self, leaves: Mapping[str, str]) -> None:
        super().__init__()
        self._leaves, self.inside = leaves, ""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves or is_conv1d(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, self.inside = self.inside, self.path_of_module(m)
        found = super().call_module(m, forward, args, kwargs)
        self.inside = before  # not after an error, which is this module's
        return found


class _Shapes(fx.Interpreter):
    """Runs the trace, and notes the shape of every tensor in it."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        with torch.no_grad():
            found = super().run_node(n)
        if isinstance(found, Tensor):
            self.shapes[n] = tuple(found.shape)
        return found


def _in_order(graph: fx.Graph, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    given, places = list(args), [node for node in graph.nodes if node.op == "placeholder"]
    return [
        given.pop(0) if given else named.get(str(n.target), *n.args[:1]) for n in places if given or named or n.args
    ]


def _try(model: nn.Module, start: fx.Node, shapes: Mapping[fx.Node, tuple[int, ...]], proposal: Proposal) -> None:
    """Adds the pair that begins at `start`, with all layers that share its features, or says why there is none."""
    name = str(start.target)
    following = Following(model, shapes)
    try:
        following.follow(start)
    except Unfollowed as reason:
        proposal.whole.setdefault(name, str(reason))
        return
    columns, rows = {str(n.target) for n in following.columns}, {str(n.target) for n in following.rows}
    packed = {str(n.target) for n in following.packed}
    taken = {layer for layer in columns | rows if f"{layer}.weight" in proposal.roles}
    if columns & rows or taken or _used_again(model, columns | rows, start.graph):
        proposal.whole.setdefault(name, "shares its features with a layer that is split otherwise")
        return
    for layers, role in ((columns - packed, "column"), (packed, "packed"), (rows, "row")):
        proposal.roles |= {f"{layer}.weight": role for layer in sorted(layers)}
        for layer in layers:
            proposal.whole.pop(layer, None)
    proposal.counts |= {count.full_name: count for count in following.counts}


def _used_again(model: nn.Module, layers: set[str], graph: fx.Graph) -> bool:
    """Is one of the layers called more than once, or its weight read or tied elsewhere?"""
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    read = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    weights = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    own = [model.get_submodule(layer).weight for layer in layers]
    return any(calls.count(layer) > 1 or f"{layer}.weight" in read for layer in layers) or any(
        weights.count(id(weight)) > 1 for weight in own
    )
