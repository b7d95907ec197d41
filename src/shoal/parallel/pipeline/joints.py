"""Where weights join the path from a stage's input to its output: what lets a backward be split (arXiv:2401.10241).

In the graph of a backward, the nodes from which the input can be reached are the *path*. A node of the path that has
a branch to weights beside it, such as a matrix product, is a *joint*:

    output -> ... -> joint -> ... -> joint -> input
                       |               |
                     weight          weight

The gradient of the input runs along the path and is noted where it passes a joint. The gradients of the weights
follow later, from each joint into its branch and no further. Joints that share a weight are taken together, each with
the gradient that was noted at it, which already holds what came to it through the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

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
