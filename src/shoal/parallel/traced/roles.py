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

from torch import fx, nn

from shoal.parallel.traced.following import Count, Following, Unfollowed, is_linear
from shoal.parallel.traced.recording import reason_of, record

_OWN_CODE = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)
"""PyTorch's layers whose forward reads the weights of its parts itself."""


@dataclass
class Proposal:
    """Roles by names of weights, the counts that go with them, and why other linear layers stay whole, by name."""

    roles: dict[str, str] = field(default_factory=dict)
    counts: dict[str, Count] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


def propose_roles(model: nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> Proposal:
    """The pairs of `model`, recorded on the inputs of one batch, on the model's device.

    A model whose forward fails on them is left whole, with the reason.
    """
    proposal = Proposal()
    try:
        recording = record(model, args, named)
    except Exception as error:
        proposal.whole[""] = f"does not run on a batch: {reason_of(error)}"
        return proposal
    graph, shapes = recording.graph, recording.shapes
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not type(module).__module__.startswith("torch.nn"):
            proposal.whole[name] = f"a {type(module).__name__}, which may compute otherwise than nn.Linear"
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(model.get_submodule(str(node.target)), _OWN_CODE):
            proposal.whole[str(node.target)] = "a layer of PyTorch's, whose forward reads its parts' weights itself"
        if is_linear(model, node) and f"{node.target}.weight" not in proposal.roles:
            _try(model, node, shapes, proposal)
    return proposal


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
