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

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn

from shoal.models.roles import is_conv1d
from shoal.parallel.traced.recorder import VALUE, reason_of, record

_ELEMENTWISE_MODULES = (
    nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Identity, nn.ReLU6, nn.LeakyReLU, nn.ELU,
    nn.Softplus, nn.Hardswish, nn.Mish,
)  # fmt: skip
_ELEMENTWISE = frozenset(
    {"gelu", "relu", "silu", "dropout", "leaky_relu", "elu", "softplus", "mish", "tanh", "sigmoid", "square", "exp",
     "pow", "sqrt", "neg", "abs", "erf", "clamp", "contiguous", "clone", "float", "to", "type_as"}
)  # fmt: skip
"""Names of functions and methods."""
_PAIRED = frozenset({operator.mul, operator.add, operator.sub, torch.mul, torch.add, operator.truediv})
_IN_BLOCKS = frozenset({"split", torch.split, "chunk", torch.chunk})
_PRODUCTS = frozenset({operator.matmul, torch.matmul, torch.bmm})
_JOINS = frozenset({torch.cat, torch.concat})


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


class Unfollowed(Exception):
    """Features cannot be followed any further, for this reason."""


def is_linear(model: nn.Module, node: fx.Node) -> bool:
    """Does the node call a linear layer of PyTorch or of GPT-2?"""
    if node.op != "call_module":
        return False
    module = model.get_submodule(str(node.target))
    return type(module) is nn.Linear or is_conv1d(module)


class Following:
    """Where the output features of a layer go. `split` has the dim of every value along which they lie."""

    def __init__(self, model: nn.Module, shapes: Mapping[fx.Node, tuple[int, ...]]) -> None:
        self._model, self._shapes = model, shapes
        self.split: dict[fx.Node, int] = {}
        self.columns: list[fx.Node] = []
        self.rows: list[fx.Node] = []
        self.packed: list[fx.Node] = []
        self.counts: list[Count] = []

    def follow(self, start: fx.Node) -> None:
        """Raises `Unfollowed`."""
        self._begin(start)
        waiting, meeting = list(start.users), list[fx.Node]()
        while waiting or meeting:
            if not waiting:  # what meets them has been reached by no path: found upwards
                waiting = self._begin_beside(meeting[0])
            node = waiting.pop(0)
            if node in self.split or node in self.rows or node.target == "size":
                continue
            if not all(other in self.split for other in self._features(node)):
                meeting.append(node)
                continue
            meeting = [other for other in meeting if other is not node]
            if self._ends(node):
                continue
            self.split[node] = self._through(node)
            waiting += node.users
        if not self.rows:
            raise Unfollowed("no linear layer takes its features")

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
            return [n for n in _args(node)[:3] if isinstance(n, fx.Node)]
        if node.target in _JOINS:
            return list(_args(node)[0])
        return inputs if node.target in _PRODUCTS else inputs[:1]

    def _begin_beside(self, meeting: fx.Node) -> list[fx.Node]:
        """Begins at the layers whose features meet those that are followed; what to go on with."""
        missing = [other for other in self._features(meeting) if other not in self.split]
        found = [source for source in self._sources(missing) if source not in self.split]
        if missing and not found:
            raise Unfollowed(f"its features meet others that no linear layer gives, in {_described(meeting)}")
        for source in found:
            self._begin(source)
        return [*(user for source in found for user in source.users), meeting]

    def _sources(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """The linear layers from which these values come, without another such layer between."""
        found, seen, waiting = [], set[fx.Node](), list(nodes)
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if is_linear(self._model, node):
                found.append(node)
            else:
                waiting += [n for n in node.all_input_nodes if VALUE not in n.meta]
        return sorted(found, key=lambda n: str(n.target))

    def _ends(self, node: fx.Node) -> bool:
        """Is it a linear layer that takes all the features?"""
        source = self._features(node)[0] if self._features(node) else node.all_input_nodes[0]
        if is_linear(self._model, node):
            if self.split[source] != len(self._shapes[source]) - 1:
                raise Unfollowed(f"{node.target} takes its heads, and not its features")
            self.rows.append(node)
            return True
        return False

    def _through(self, node: fx.Node) -> int:
        """The dim of the features behind `node`."""
        if node.target is operator.getitem and node.all_input_nodes[0] not in self._shapes:
            return self.split[node.all_input_nodes[0]]  # a block of a packed layer
        source = self._features(node)[0]
        dim, target = self.split[source], node.target
        if node.op == "output":
            raise Unfollowed("its features are returned")
        if node.op == "call_module":
            module = self._model.get_submodule(str(target))
            if isinstance(module, _ELEMENTWISE_MODULES):
                return dim
            raise Unfollowed(f"its features go through {target} ({type(module).__name__})")
        if _named(target) in _ELEMENTWISE or target in _PAIRED:
            return self._same(node, dim)
        if target is operator.getitem:
            return self._indexed(node, source, dim)
        if self._stays(node, source, dim):
            return dim
        if target in ("transpose", torch.transpose):
            first, second = (_place(a, self._shapes[source]) for a in _args(node)[1:3])
            return {first: second, second: first}.get(dim, dim)
        if target in ("permute", torch.permute):
            order = _args(node)[1:] if isinstance(_args(node)[1], int) else _args(node)[1]
            return [_place(a, self._shapes[source]) for a in order].index(dim)
        if _named(target) in ("view", "reshape", "unflatten", "flatten"):
            return self._reshaped(node, source, dim)
        if target in _IN_BLOCKS:
            return self._unpacked(node, source, dim)
        raise Unfollowed(f"its features go through {_described(node)}")

    def _stays(self, node: fx.Node, source: fx.Node, dim: int) -> bool:
        """Whether every feature stays on its own in the same dim: no, or not as far as it is known."""
        target, shape = node.target, self._shapes[source]
        if target in _JOINS:
            along = node.kwargs.get("dim", _args(node)[1] if len(_args(node)) > 1 else 0)
            return _place(along, shape) != dim and self._alike(node, dim)
        if target is F.scaled_dot_product_attention:
            self._check_mask(node, dim)
        if target in _PRODUCTS or target is F.scaled_dot_product_attention:
            if dim < len(shape) - 2 and self._alike(node, dim):
                return True
            raise Unfollowed(f"its features are summed in {_described(node)}")
        if target in (F.softmax, torch.softmax, "softmax"):
            over = node.kwargs.get("dim", _args(node)[1] if len(_args(node)) > 1 else None)
            return isinstance(over, int) and over % len(shape) != dim
        if target == "expand" and self._shapes[node][dim] == shape[dim]:
            written = _args(node)[1] if isinstance(_args(node)[1], tuple) else _args(node)[1:]
            if len(written) != len(shape):
                return False
            if written[dim] != -1 and not self._is_share(written[dim]):
                self._count(node, written[dim])
            return True
        return target in ("masked_fill", torch.masked_fill)

    def _alike(self, node: fx.Node, dim: int) -> bool:
        return all(self.split[n] == dim for n in self._features(node))

    def _unpacked(self, node: fx.Node, source: fx.Node, dim: int) -> int:
        """The features of a layer that packs several, cut into blocks of equal size."""
        args, shape = _args(node), self._shapes[source]
        number, along = args[1], node.kwargs.get("dim", args[2] if len(args) > 2 else 0)
        if source not in self.columns or not isinstance(along, int) or _place(along, shape) != dim:
            raise Unfollowed(f"{_described(node)} cuts its features")
        if isinstance(number, tuple) and len(set(number)) == 1:
            number = number[0]
        value = number.meta.get(VALUE) if isinstance(number, fx.Node) else number
        if not isinstance(value, int) or shape[dim] % value:
            raise Unfollowed(f"{_described(node)} cuts its features into blocks that are not equal")
        if node.target in ("split", torch.split):
            self._count(node, number)
        self.packed.append(source)
        return dim

    def _indexed(self, node: fx.Node, source: fx.Node, dim: int) -> int:
        """`x[..., :half]` and `x[:, :, None]`, which leave the features as they are."""
        index = _args(node)[1]
        index = index if isinstance(index, tuple) else (index,)
        behind = len(self._shapes[source]) - sum(n is not None and n is not ... for n in index)
        old, new = 0, 0
        for entry in index:
            if old > dim:
                break
            if entry is None:
                new += 1
            elif entry is ...:
                old, new = old + behind, new + behind
            elif isinstance(entry, slice) and (old != dim or entry == slice(None)):
                old, new = old + 1, new + 1
            elif isinstance(entry, int) and old != dim:
                old += 1
            else:
                raise Unfollowed(f"{_described(node)} picks some of its features")
        return dim + new - old

    def _check_mask(self, node: fx.Node, dim: int) -> None:
        mask = node.kwargs.get("attn_mask", _args(node)[3] if len(_args(node)) > 3 else None)
        back = len(self._shapes[node]) - dim
        if isinstance(mask, fx.Node) and len(self._shapes[mask]) >= back and self._shapes[mask][-back] != 1:
            raise Unfollowed(f"its heads meet a mask of all heads, in {_described(node)}")

    def _same(self, node: fx.Node, dim: int) -> int:
        if any(self.split[n] != dim for n in self._features(node)):
            raise Unfollowed(f"features of two kinds meet in {_described(node)}")
        others = [n for n in node.all_input_nodes if n in self._shapes and n not in self.split]
        back = len(self._shapes[node]) - dim
        if any(len(self._shapes[n]) >= back and self._shapes[n][-back] != 1 for n in others):
            raise Unfollowed(f"its features meet others that are whole, in {_described(node)}")
        return dim

    def _reshaped(self, node: fx.Node, source: fx.Node, dim: int) -> int:
        """Features into heads, heads into features: along the dims before, nothing changes."""
        old, new = self._shapes[source], self._shapes[node]
        same = new == old
        apart = len(new) > dim + 1 and new[dim] * new[dim + 1] == old[dim] and new[dim + 2 :] == old[dim + 1 :]
        joined = len(old) > dim + 1 and len(new) > dim and new[dim] == old[dim] * old[dim + 1]
        joined = joined and new[dim + 1 :] == old[dim + 2 :]
        if new[:dim] != old[:dim] or not (same or apart or joined):
            raise Unfollowed(f"{_described(node)} moves its features")
        args = _args(node)[1] if isinstance(_args(node)[1], tuple | list) else _args(node)[1:]
        if _named(node.target) == "flatten":
            return dim
        sizes = args[1] if node.target == "unflatten" else args
        written = sizes[0] if node.target == "unflatten" else sizes[dim]
        if written != -1 and not self._is_share(written):
            self._count(node, written)
        return dim

    def _is_share(self, written: Any) -> bool:
        """Is it a size of the features themselves, which on a rank is that of its share?"""
        if not isinstance(written, fx.Node):
            return False
        if written.target == "size":
            source, dim = _args(written)
            return source in self.split and self.split[source] == dim % len(self._shapes[source])
        if written.target is operator.mul:
            return sum(self._is_share(n) for n in _args(written)) == 1
        return False

    def _count(self, node: fx.Node, written: Any) -> None:
        """The attribute that this number is, which must become a rank's share."""
        if not isinstance(written, fx.Node):
            raise Unfollowed(
                f"{_described(node)} has the constant {written}; write -1 there, or an integer attribute of its module"
            )
        if written.op != "get_attr":
            raise Unfollowed(f"{_described(node)} reads its width off a tensor; write -1 or an attribute there")
        path, _, name = str(written.target).rpartition(".")
        self.counts.append(Count(path, name, written.meta[VALUE]))


def _named(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _place(dim: Any, shape: tuple[int, ...]) -> int:
    return int(dim) % len(shape)


def _described(node: fx.Node) -> str:
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return f"{target}() in {path}" if path else f"{target}()"


def _args(node: fx.Node) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", node.args)


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
