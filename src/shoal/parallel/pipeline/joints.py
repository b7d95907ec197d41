"""What crosses the boundary between two stages, its form and its coding; and where weights join the path through a
stage, which is what lets a backward be split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from shoal.codec.codec import Codec, pack, unpack
from shoal.codec.config import BlockwiseConfig, CastConfig
from shoal.config.check import implementation_of
from shoal.errors import UserCodeError
from shoal.state import numbers_on

# `Form`: the shape and dtype of what crosses a boundary, and how the receiver is told.
#
# Microbatches whose inputs have the same shapes have one form, so it is announced once, in front of the first of them.
# Which these are every rank knows, for all ranks of a pipeline have the same samples.


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMS = 8
HEADER_NUMEL = 3 + _MOST_DIMS


@dataclass(frozen=True)
class Form:
    """`differentiable` is False where everything before the boundary is frozen: no gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @classmethod
    def of(cls, output: Tensor, *, stage: int) -> Form:
        """Raises `UserCodeError` for what cannot travel: no tensor, not floating point, or of too many dimensions."""
        if not isinstance(output, Tensor) or output.dtype not in _DTYPES or output.ndim > _MOST_DIMS:
            found = f"{output.dtype} of {output.ndim} dimensions" if isinstance(output, Tensor) else type(output)
            raise UserCodeError(
                f"stage {stage} gave {found}; between stages travels one tensor of floating point with at most "
                f"{_MOST_DIMS} dimensions: return that, and take the rest from the context"
            )
        return cls(tuple(output.shape), output.dtype, output.requires_grad)

    def header(self, device: torch.device) -> Tensor:
        """int64 `[HEADER_NUMEL]`."""
        sizes = [*self.shape, *[0] * (_MOST_DIMS - len(self.shape))]
        numbers = [_DTYPES.index(self.dtype), self.differentiable, len(self.shape), *sizes]
        return numbers_on(device, numbers, dtype=torch.int64)

    @classmethod
    def read(cls, header: Tensor) -> Form:
        """The inverse of `header`."""
        dtype, differentiable, dims, *sizes = header.tolist()
        return cls(tuple(sizes[:dims]), _DTYPES[dtype], bool(differentiable))

    def empty(self, device: torch.device) -> Tensor:
        """A tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


# Where weights join the path from a stage's input to its output: what lets a backward be split (arXiv:2401.10241).
#
# In the graph of a backward, the nodes from which the input can be reached are the *path*. A node of the path that has
# a branch to weights beside it, such as a matrix product, is a *joint*:
#
#     output -> ... -> joint -> ... -> joint -> input
#                        |               |
#                      weight          weight
#
# The gradient of the input runs along the path and is noted where it passes a joint. The gradients of the weights
# follow later, from each joint into its branch and no further. Joints that share a weight are taken together, each with
# the gradient that was noted at it, which already holds what came to it through the others.


Noted = dict[Node, tuple[Tensor | None, ...]]
"""What arrived at a node, by its outputs."""


@dataclass
class Branches:
    """Joints that share weights, directly or through each other, and these weights by their nodes."""

    joints: list[Node] = field(default_factory=list)
    weights: dict[Node, Tensor] = field(default_factory=dict)

    def gradients(self, noted: Noted) -> Iterable[tuple[Tensor, Tensor]]:
        """(weight, its gradient) for the weights that got any."""
        arrived = [(j, i, g) for j in self.joints for i, g in enumerate(noted.get(j, ())) if g is not None]
        if not arrived:
            return []
        hooks = [joint.register_prehook(_replaced(noted[joint])) for joint in self.joints if joint in noted]
        try:
            found = torch.autograd.grad(
                [GradientEdge(joint, index) for joint, index, _ in arrived],
                [GradientEdge(node, 0) for node in self.weights],
                [gradient for _, _, gradient in arrived],
                retain_graph=True,  # a node of the path may lie between joints of several branches
                allow_unused=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
        return [(w, g) for w, g in zip(self.weights.values(), found, strict=True) if g is not None]


def find_branches(root: Tensor, x: Tensor, weights: Sequence[Tensor]) -> list[Branches] | None:
    """The branches between output `root` and input `x`, both differentiable; None where no path leads from one to the
    other. Weights that need no gradient are left out."""
    entrance = _node(x)
    by_node = {_node(weight): weight for weight in weights if weight.requires_grad}
    on_path: set[Node] = set()
    below: dict[Node, set[Node]] = {}
    joints: list[tuple[Node, set[Node]]] = []
    for node in _children_first(_node(root)):
        children = [child for child, _ in node.next_functions if child is not None]
        beside = set().union(*(below[child] for child in children if child not in on_path))
        if node is entrance or any(child in on_path for child in children):
            on_path.add(node)
            joints += [(node, beside)] if beside else []
        else:
            below[node] = beside | ({node} if node in by_node else set())
    return _grouped(joints, by_node) if _node(root) in on_path else None


def noting(branches: Iterable[Branches], noted: Noted) -> list[Any]:
    """Hooks that note what arrives at the joints; remove them after the backward of the input."""
    return [joint.register_prehook(_note(noted, joint)) for branch in branches for joint in branch.joints]


def _grouped(joints: Iterable[tuple[Node, set[Node]]], by_node: dict[Node, Tensor]) -> list[Branches]:
    owner: dict[Node, Branches] = {}
    for joint, nodes in joints:
        merged = Branches([joint], {node: by_node[node] for node in by_node if node in nodes})
        for other in {id(owner[node]): owner[node] for node in nodes if node in owner}.values():
            merged.joints += other.joints
            merged.weights |= other.weights
        owner.update(dict.fromkeys(merged.weights, merged))
    return list({id(branch): branch for branch in owner.values()}.values())


def _node(tensor: Tensor) -> Node:
    """The node whose gradient is the tensor's; that of a leaf is made on demand, through a view."""
    node = tensor.grad_fn or tensor.view_as(tensor).grad_fn.next_functions[0][0]  # pyright: ignore[reportOptionalMemberAccess]
    assert node is not None
    return node


def _children_first(root: Node) -> list[Node]:
    """All nodes below `root` and itself, each after those that it leads to; deep graphs need a loop, not recursion."""
    order: list[Node] = []
    seen = {root}
    stack = [(root, iter(root.next_functions))]
    while stack:
        node, children = stack[-1]
        child = next((c for c, _ in children if c is not None and c not in seen), None)
        if child is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(child)
            stack.append((child, iter(child.next_functions)))
    return order


def _note(noted: Noted, joint: Node) -> Callable[..., None]:
    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        noted[joint] = gradients

    return hook


def _replaced(gradients: tuple[Tensor | None, ...]) -> Callable[..., Any]:
    return lambda _: gradients


# What a tensor becomes between two stages: as it is, or coded in fewer bits.
#
#     x' = decode(encode(x))              what the next stage computes with
#     dL/dx = decode(encode(dL/dx'))      straight-through: coding counts as the identity in the backward
#
# Numbers are rounded to nearest, those of a block by the scale of the block:
#
#     int8         |x - x'| <= max |x| of the block / 254
#     bfloat16     |x - x'| <= |x| / 256
#
# The errors are no noise that averages out: for activations that hardly change from epoch to epoch it is better to send
# the changes (Wang et al., "Fine-tuning Language Models over Slow Networks using Activation Quantization with
# Guarantees", arXiv:2206.01299), at the price of memory for each sample. What is not finite stays so.


class Packing(Protocol):
    """From tensors to what is sent, and back; both ends know the form."""

    def packed(self, tensor: Tensor) -> Tensor:
        """What is sent of `tensor`, contiguous."""
        ...

    def buffer(self, form: Form, device: torch.device) -> Tensor:
        """A tensor to receive it into."""
        ...

    def unpacked(self, buffer: Tensor, form: Form) -> Tensor:
        """The tensor of `form` that was received; no gradient is tracked."""
        ...


class AsItIs:
    """All bits are sent."""

    def packed(self, tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous()

    def buffer(self, form: Form, device: torch.device) -> Tensor:
        return form.empty(device)

    def unpacked(self, buffer: Tensor, form: Form) -> Tensor:
        return buffer


@dataclass(frozen=True)
class StageCodec:
    """What `codec`, which is not linear and has no random numbers, makes of the tensor."""

    codec: Codec

    def packed(self, tensor: Tensor) -> Tensor:
        return pack(self.codec, self.codec.encode(tensor))

    def buffer(self, form: Form, device: torch.device) -> Tensor:
        return torch.empty(self.codec.wire_bytes(_numel(form)), dtype=torch.uint8, device=device)

    def unpacked(self, buffer: Tensor, form: Form) -> Tensor:
        wide = torch.promote_types(form.dtype, torch.float32)
        numel = _numel(form)
        flat = self.codec.decode(unpack(self.codec, buffer, numel), numel, dtype=wide)
        return flat.to(form.dtype).view(form.shape)


def _numel(form: Form) -> int:
    return torch.Size(form.shape).numel()


AS_IT_IS = AsItIs()


def packing_of(config: CastConfig | BlockwiseConfig | None) -> Packing:
    """By the codec of this table; None: as it is."""
    return AS_IT_IS if config is None else StageCodec(implementation_of(config)(config))
