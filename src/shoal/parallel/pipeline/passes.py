"""One stage's forward and backward on one microbatch, whole or split.

    B   dx and dw in one go
    I   dx only, noting what arrives where weights join the path (see `joints`)
    W   dw only, from what was noted

A stage whose input needs no gradient, such as the first, has no path: its I is the whole backward and its W nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.parallel.pipeline.joints import Branches, Noted, find_branches, noting

Weights = Callable[[int], Sequence[Tensor]]
"""The parameters of a stage."""


@dataclass
class Pass:
    """What is kept between a forward and its backward: the input (a leaf), and the output or the loss."""

    x: Tensor | None
    root: Tensor
    branches: list[Branches] = field(default_factory=list)
    noted: Noted = field(default_factory=dict)

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Adds to the parameters' gradients; gives that of the input, None where it needs none."""
        if self.root.requires_grad:
            torch.autograd.backward(self.root, gradient)
        self.root = self.root.detach()
        if self.x is None or not self.x.requires_grad:
            return None
        arrived, self.x.grad = self.x.grad, None
        return torch.zeros_like(self.x) if arrived is None else arrived

    def backward_input(self, gradient: Tensor | None, weights: Sequence[Tensor]) -> Tensor | None:
        """The gradient of the input. Those of `weights`, the stage's, are added by `backward_weight`."""
        if self.x is None or not self.x.requires_grad or not self.root.requires_grad:
            return self.backward(gradient)
        branches = find_branches(self.root, self.x, weights)
        if branches is None:
            return self.backward(gradient)
        self.branches = branches
        hooks = noting(branches, self.noted)
        try:
            (result,) = torch.autograd.grad(self.root, self.x, gradient, retain_graph=True, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        self.root = self.root.detach()
        return torch.zeros_like(self.x) if result is None else result

    def backward_weight(self) -> None:
        """Adds what `backward_input` left to the parameters' gradients."""
        for branch in self.branches:
            for weight, gradient in branch.gradients(self.noted):
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        self.branches, self.noted = [], {}
