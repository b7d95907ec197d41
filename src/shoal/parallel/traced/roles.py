"""Which layers of a module that declares nothing tensor parallelism can split: pairs found by following features.

A linear layer's output features are followed through the trace (Megatron-LM's pairs, arXiv:1909.08053):

    linear -> elementwise functions, heads split off and joined, attention, products of equals -> linear
    column                                                                                      row

If every path of a layer's features ends in the input features of linear layers, the first is a column layer and the
last row layers, with one sum behind each. A number of heads that a forward has as a constant must be an integer
attribute of its module: each rank is given its share of it. Everything else stays whole, and is said by name.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from shoal.parallel.traced.tracer import ForwardTracer, reason_of

_ELEMENTWISE_MODULES = (
    nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Identity, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.Softplus,
    nn.Hardswish, nn.Mish,
)  # fmt: skip
_ELEMENTWISE = {
    F.gelu, F.relu, F.silu, F.dropout, F.leaky_relu, F.elu, F.softplus, F.mish, torch.relu, torch.tanh, torch.sigmoid,
    torch.square, torch.exp, "relu", "tanh", "sigmoid", "square", "contiguous", "float", "to", "gelu",
}  # fmt: skip
_PAIRED = {operator.mul, operator.add, operator.sub, torch.mul, torch.add, operator.truediv}
_PRODUCTS = {operator.matmul, torch.matmul, torch.bmm}
_OWN_CODE = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)
"""PyTorch's layers whose forward reads the weights of its parts itself."""


@dataclass(frozen=True)
class Count:
    """The attribute `name` of a module, `value` now, of which each rank of `tensor` has its share."""

    module: str
    name: str
    value: int

    @property
    def full_name(self) -> str:
        """Such as `blocks.0.attention.heads`."""
        return f"{self.module}.{self.name}".lstrip(".")


@dataclass
class Proposal:
    """Roles by names of weights, the counts that go with them, and why other linear layers stay whole, by name."""

    roles: dict[str, str] = field(default_factory=dict)
    counts: dict[str, Count] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


class _Unfollowed(Exception):
    """Features cannot be followed any further, for this reason."""


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
            proposal.whole[str(node.target)] = "PyTorch's own layer, whose forward reads the weights of its parts itself"
        if _is_linear(model, node) and f"{node.target}.weight" not in proposal.roles:
            _try(model, node, values.shapes, proposal)
    return proposal


class _Layers(ForwardTracer):
    """Goes into all modules but PyTorch's own layers and those that cannot be traced; `inside`: where it is."""

    def __init__(self, leaves: Mapping[str, str]) -> None:
        super().__init__()
        self._leaves, self.inside = leaves, ""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves or super().is_leaf_module(m, module_qualified_name)

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
    return [given.pop(0) if given else named.get(str(n.target), *n.args[:1]) for n in places if given or named or n.args]


def _is_linear(model: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and type(model.get_submodule(str(node.target))) is nn.Linear


def _try(model: nn.Module, start: fx.Node, shapes: Mapping[fx.Node, tuple[int, ...]], proposal: Proposal) -> None:
    """Adds the pair that begins at `start`, with all layers that share its features, or says why there is none."""
    name = str(start.target)
    following = _Following(model, shapes)
    try:
        following.follow(start)
    except _Unfollowed as reason:
        proposal.whole.setdefault(name, str(reason))
        return
    columns, rows = {str(n.target) for n in following.columns}, {str(n.target) for n in following.rows}
    taken = {layer for layer in columns | rows if f"{layer}.weight" in proposal.roles}
    if columns & rows or taken or _used_again(model, columns | rows, start.graph):
        proposal.whole.setdefault(name, "shares its features with a layer that is split otherwise")
        return
    for layers, role in ((columns, "column"), (rows, "row")):
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


class _Following:
    """Where the output features of a layer go. `split` has the dim of every value along which they lie."""

    def __init__(self, model: nn.Module, shapes: Mapping[fx.Node, tuple[int, ...]]) -> None:
        self._model, self._shapes = model, shapes
        self.split: dict[fx.Node, int] = {}
        self.columns: list[fx.Node] = []
        self.rows: list[fx.Node] = []
        self.counts: list[Count] = []

    def follow(self, start: fx.Node) -> None:
        """Raises `_Unfollowed`."""
        self._begin(start)
        waiting = list(start.users)
        while waiting:
            node = waiting.pop(0)
            if node in self.split or node in self.rows:
                continue
            if not all(other in self.split for other in self._features(node)):
                self._begin_beside(node, waiting)
                continue
            if self._ends(node):
                continue
            self.split[node] = self._through(node)
            waiting += node.users
        if not self.rows:
            raise _Unfollowed("no linear layer takes its features")

    def _begin(self, layer: fx.Node) -> None:
        self.columns.append(layer)
        self.split[layer] = len(self._shapes[layer]) - 1

    def _features(self, node: fx.Node) -> list[fx.Node]:
        """The tensors whose features meet in this node, masks and numbers left out."""
        inputs = [n for n in node.all_input_nodes if n in self._shapes]
        if node.target in _PAIRED:
            split = [n for n in inputs if n in self.split]
            return [n for n in inputs if n in split or self._shapes[n] == self._shapes[split[0]]]
        if node.target is F.scaled_dot_product_attention:
            return [n for n in node.args[:3] if isinstance(n, fx.Node)]
        return inputs if node.target in _PRODUCTS else inputs[:1]

    def _begin_beside(self, node: fx.Node, waiting: list[fx.Node]) -> None:
        """The layers whose features meet those that are followed: found upwards, and followed too."""
        for other in self._features(node):
            if other not in self.split:
                source = self._source(other, node)
                if source not in self.columns:
                    self._begin(source)
                    waiting += source.users
                elif node not in waiting:
                    pass
        if node not in waiting:
            waiting.append(node)

    def _source(self, node: fx.Node, meeting: fx.Node) -> fx.Node:
        while not _is_linear(self._model, node):
            inputs = [n for n in node.all_input_nodes if n in self._shapes]
            if len(inputs) != 1:
                raise _Unfollowed(f"its features meet others that no linear layer gives, in {_described(meeting)}")
            (node,) = inputs
        return node

    def _ends(self, node: fx.Node) -> bool:
        """Is it a linear layer that takes all the features?"""
        source = self._features(node)[0] if self._features(node) else node.all_input_nodes[0]
        if _is_linear(self._model, node):
            if self.split[source] != len(self._shapes[source]) - 1:
                raise _Unfollowed(f"{node.target} takes its heads, and not its features")
            self.rows.append(node)
            return True
        return False

    def _through(self, node: fx.Node) -> int:
        """The dim of the features behind `node`."""
        source = self._features(node)[0]
        dim, target = self.split[source], node.target
        if node.op == "output":
            raise _Unfollowed("its features are returned")
        if node.op == "call_module":
            module = self._model.get_submodule(str(target))
            if isinstance(module, _ELEMENTWISE_MODULES):
                return dim
            raise _Unfollowed(f"its features go through {target} ({type(module).__name__})")
        if target in _ELEMENTWISE or target in _PAIRED:
            return self._same(node, dim)
        if target in _PRODUCTS or target is F.scaled_dot_product_attention:
            ndim = len(self._shapes[source])
            if dim < ndim - 2 and all(self.split[n] == dim for n in self._features(node)):
                return dim
            raise _Unfollowed(f"its features are summed in {_described(node)}")
        if target in (F.softmax, torch.softmax, "softmax"):
            over = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
            if isinstance(over, int) and over % len(self._shapes[source]) != dim:
                return dim
        if target in ("masked_fill", torch.masked_fill):
            return dim
        if target in ("transpose", torch.transpose):
            first, second = (_place(a, self._shapes[source]) for a in node.args[1:3])
            return {first: second, second: first}.get(dim, dim)
        if target in ("permute", torch.permute):
            order = node.args[1:] if isinstance(node.args[1], int) else node.args[1]
            return [_place(a, self._shapes[source]) for a in order].index(dim)  # type: ignore[union-attr]
        if target in ("view", "reshape", "unflatten", "flatten", torch.flatten, torch.reshape):
            return self._reshaped(node, source, dim)
        raise _Unfollowed(f"its features go through {_described(node)}")

    def _same(self, node: fx.Node, dim: int) -> int:
        if any(self.split[n] != dim for n in self._features(node)):
            raise _Unfollowed(f"features of two kinds meet in {_described(node)}")
        others = [n for n in node.all_input_nodes if n in self._shapes and n not in self.split]
        back = len(self._shapes[node]) - dim
        if any(len(self._shapes[n]) >= back and self._shapes[n][-back] != 1 for n in others):
            raise _Unfollowed(f"its features meet others that are whole, in {_described(node)}")
        return dim

    def _reshaped(self, node: fx.Node, source: fx.Node, dim: int) -> int:
        """Features into heads, heads into features: along the dims before, nothing changes."""
        old, new = self._shapes[source], self._shapes[node]
        if new[:dim] != old[:dim]:
            raise _Unfollowed(f"{_described(node)} moves its features")
        apart = dim == len(old) - 1 and len(new) > len(old)
        joined = dim == len(old) - 2 and len(new) == len(old) - 1
        if not (apart or joined):
            raise _Unfollowed(f"{_described(node)} moves its features")
        args = [a for a in (node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:])]
        if node.target in ("flatten", torch.flatten):
            return dim
        sizes = args[1] if node.target == "unflatten" else args
        written = sizes[0] if node.target == "unflatten" else sizes[dim] if len(sizes) > dim else -1
        if isinstance(written, fx.Node):
            raise _Unfollowed(f"{_described(node)} reads its width off a tensor; write -1 there")
        if written != -1:
            self._count(node, int(written))
        return dim

    def _count(self, node: fx.Node, value: int) -> None:
        """The attribute that has this constant, which must become a rank's share."""
        stack = node.meta.get("nn_module_stack") or {}
        path = next(reversed(stack.values()))[0] if stack else ""
        names = [n for n, v in vars(self._model.get_submodule(path)).items() if type(v) is int and v == value]
        if len(names) != 1:
            said = "no attribute" if not names else f"the attributes {' and '.join(names)}"
            raise _Unfollowed(f"{_described(node)} has the constant {value}, which {said} of {path or 'it'} has: write -1")
        self.counts.append(Count(path, names[0], value))


def _place(dim: Any, shape: tuple[int, ...]) -> int:
    return int(dim) % len(shape)


def _described(node: fx.Node) -> str:
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return f"{target}() in {path}" if path else f"{target}()"
