"""Where the output features of a linear layer go in a trace, until other linear layers take them.

See `shoal.parallel.traced.roles`, which makes pairs of them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn

from shoal.parallel.tensor.layers import is_conv1d

_ELEMENTWISE_MODULES = (
    nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Identity, nn.ReLU6, nn.LeakyReLU, nn.ELU,
    nn.Softplus, nn.Hardswish, nn.Mish,
)  # fmt: skip
_ELEMENTWISE = {
    F.gelu, F.relu, F.silu, F.dropout, F.leaky_relu, F.elu, F.softplus, F.mish, torch.relu, torch.tanh, torch.sigmoid,
    torch.square, torch.exp, "relu", "tanh", "sigmoid", "square", "contiguous", "float", "to", "gelu",
}  # fmt: skip
_PAIRED = {operator.mul, operator.add, operator.sub, torch.mul, torch.add, operator.truediv}
_IN_BLOCKS = {"split", torch.split, "chunk", torch.chunk}
_PRODUCTS = {operator.matmul, torch.matmul, torch.bmm}


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
        return inputs if node.target in _PRODUCTS else inputs[:1]

    def _begin_beside(self, node: fx.Node, waiting: list[fx.Node]) -> None:
        """The layers whose features meet those that are followed: found upwards, and followed too."""
        for other in self._features(node):
            if other not in self.split:
                source = self._source(other, node)
                if source not in self.columns:
                    self._begin(source)
                    waiting += source.users
        if node not in waiting:
            waiting.append(node)

    def _source(self, node: fx.Node, meeting: fx.Node) -> fx.Node:
        while not is_linear(self._model, node):
            inputs = [n for n in node.all_input_nodes if n in self._shapes or n in self.split]
            if len(inputs) != 1:
                raise Unfollowed(f"its features meet others that no linear layer gives, in {_described(meeting)}")
            (node,) = inputs
        return node

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
        if target in _ELEMENTWISE or target in _PAIRED:
            return self._same(node, dim)
        if target in _PRODUCTS or target is F.scaled_dot_product_attention:
            ndim = len(self._shapes[source])
            if dim < ndim - 2 and all(self.split[n] == dim for n in self._features(node)):
                return dim
            raise Unfollowed(f"its features are summed in {_described(node)}")
        if target in (F.softmax, torch.softmax, "softmax"):
            over = node.kwargs.get("dim", _args(node)[1] if len(_args(node)) > 1 else None)
            if isinstance(over, int) and over % len(self._shapes[source]) != dim:
                return dim
        if target in ("masked_fill", torch.masked_fill):
            return dim
        if target in ("transpose", torch.transpose):
            first, second = (_place(a, self._shapes[source]) for a in _args(node)[1:3])
            return {first: second, second: first}.get(dim, dim)
        if target in ("permute", torch.permute):
            order = _args(node)[1:] if isinstance(_args(node)[1], int) else _args(node)[1]
            return [_place(a, self._shapes[source]) for a in order].index(dim)
        if target in ("view", "reshape", "unflatten", "flatten", torch.flatten, torch.reshape):
            return self._reshaped(node, source, dim)
        if target in _IN_BLOCKS:
            return self._unpacked(node, source, dim)
        raise Unfollowed(f"its features go through {_described(node)}")

    def _unpacked(self, node: fx.Node, source: fx.Node, dim: int) -> int:
        """The features of a layer that packs several, cut into blocks of equal size."""
        args, shape = _args(node), self._shapes[source]
        number, along = args[1], node.kwargs.get("dim", args[2] if len(args) > 2 else 0)
        if source not in self.columns or not isinstance(along, int) or _place(along, shape) != dim:
            raise Unfollowed(f"{_described(node)} cuts its features")
        if isinstance(number, fx.Node):
            raise Unfollowed(f"{_described(node)} reads its width off a tensor; write chunk() or an attribute there")
        if not isinstance(number, int) or shape[dim] % number:
            raise Unfollowed(f"{_described(node)} cuts its features into blocks that are not equal")
        if node.target in ("split", torch.split):
            self._count(node, number)
        self.packed.append(source)
        return dim

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
        if new[:dim] != old[:dim]:
            raise Unfollowed(f"{_described(node)} moves its features")
        apart = dim == len(old) - 1 and len(new) > len(old)
        joined = dim == len(old) - 2 and len(new) == len(old) - 1
        if not (apart or joined):
            raise Unfollowed(f"{_described(node)} moves its features")
        args = _args(node)[1] if isinstance(_args(node)[1], tuple | list) else _args(node)[1:]
        if node.target in ("flatten", torch.flatten):
            return dim
        sizes = args[1] if node.target == "unflatten" else args
        written = sizes[0] if node.target == "unflatten" else sizes[dim] if len(sizes) > dim else -1
        if isinstance(written, fx.Node):
            raise Unfollowed(f"{_described(node)} reads its width off a tensor; write -1 there")
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
            raise Unfollowed(
                f"{_described(node)} has the constant {value}, which {said} of {path or 'it'} has: write -1"
            )
        self.counts.append(Count(path, names[0], value))


def _place(dim: Any, shape: tuple[int, ...]) -> int:
    return int(dim) % len(shape)


def _described(node: fx.Node) -> str:
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return f"{target}() in {path}" if path else f"{target}()"


def _args(node: fx.Node) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", node.args)
