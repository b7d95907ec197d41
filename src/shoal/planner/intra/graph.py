"""The forward of a model as a graph of operators, views among them: what is fed to what.

Nodes stand in the order in which they ran. A leaf is a parameter, by its name, or an input; an operator has the nodes
that its tensors come from and its arguments, tensors in them replaced by their shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shoal.planner.trace.operator import Product, attention_flops, products_of
from shoal.planner.trace.trace import explained

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Sized:
    """The shape of a tensor among arguments; `shape`, so that rules read it like a tensor's."""

    shape: Dims


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operator, or a leaf (`name` "parameter" or "input"). `sources` and `shapes` are of its tensors in order;
    `shape` and `element_bytes` of what comes out; `label` is a parameter's name."""

    name: str
    label: str
    sources: tuple[int, ...]
    shapes: tuple[Dims, ...]
    shape: Dims
    element_bytes: int
    arguments: tuple[Any, ...] = ()
    products: tuple[Product, ...] = ()
    attention_flops: float = 0.0
    pointwise: bool = False

    @property
    def numel(self) -> int:
        """Numbers that come out."""
        return torch.Size(self.shape).numel()

    @property
    def size(self) -> int:
        """Bytes that come out."""
        return self.numel * self.element_bytes


def graph_of(model: nn.Module, loss: Callable[[], Tensor], *, mode: FakeTensorMode) -> tuple[Node, ...]:
    """The graph of `loss()`, whose model and inputs are fake and of `mode`. Raises `UserCodeError`: see `explained`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with mode, torch.no_grad(), _Capture(names) as capture:
        explained(loss, "the model")
    return tuple(capture.nodes)


class _Capture(TorchDispatchMode):
    """Writes nodes while it is entered. Tensors stay alive until then, so that no two have one identity."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self._names = names
        self._alive: list[Tensor] = []
        self._made: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if func.namespace != "prim" and outputs:
            self._add(func, args, outputs, out)
        return out

    def _add(self, func: Any, args: tuple[Any, ...], outputs: Sequence[Tensor], out: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        name = f"{func.namespace}.{func._schema.name.split('::')[1]}"
        sources = tuple(self._source(tensor) for tensor in tensors)
        for tensor in outputs:
            self._alive.append(tensor)
            self._made[id(tensor)] = len(self.nodes)
        self.nodes.append(
            Node(
                name=name,
                label="",
                sources=sources,
                shapes=tuple(tuple(tensor.shape) for tensor in tensors),
                shape=tuple(outputs[0].shape),
                element_bytes=outputs[0].element_size(),
                arguments=tree_map(lambda leaf: Sized(tuple(leaf.shape)) if isinstance(leaf, Tensor) else leaf, args),
                products=products_of(name, args, out, gives="output"),
                attention_flops=attention_flops(name, args),
                pointwise=torch.Tag.pointwise in func.tags,
            )
        )

    def _source(self, tensor: Tensor) -> int:
        """The node that made it; a leaf is added when it is first seen."""
        if id(tensor) not in self._made:
            label = self._names.get(id(tensor), "")
            self._alive.append(tensor)
            self._made[id(tensor)] = len(self.nodes)
            self.nodes.append(
                Node(
                    name="parameter" if label else "input",
                    label=label,
                    sources=(),
                    shapes=(),
                    shape=tuple(tensor.shape),
                    element_bytes=tensor.element_size(),
                )
            )
        return self._made[id(tensor)]
