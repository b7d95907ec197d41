"""What a trace holds: operators with their shapes and arithmetic, and what ranks say to each other between them.

Arithmetic counts a multiply-add as two and the square of causal attention as half, as `cost.flops` does by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from shoal.cost.roofline import Matmul

Phase = Literal["forward", "backward", "recompute"]
Gives = Literal["output", "input", "weight"]
"""What a product gives: an output in the forward, the gradient of an input or of a weight in the backward."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One tensor: its sizes, bytes of a number, and the bytes of memory behind it (fewer where it was expanded)."""

    dims: tuple[int, ...]
    element_bytes: int
    size: int

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return prod(self.dims)


@dataclass(frozen=True, slots=True)
class Product:
    """A (batched) matrix product, a convolution as the product that it is, and what it gives."""

    matmul: Matmul
    gives: Gives


@dataclass(frozen=True, slots=True)
class Operator:
    """One call that reads and writes memory; views are none.

    `module` is the innermost module that it belongs to, "" the model itself; `unit` its place among the units of the
    trace, None outside of them. `attention_flops` are those of fused attention, which has no `products`.
    `moved_bytes` is what it reads and writes, each tensor once.
    """

    name: str
    phase: Phase
    module: str
    unit: int | None
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    products: tuple[Product, ...]
    attention_flops: float
    moved_bytes: int

    @property
    def flops(self) -> float:
        """Arithmetic of its products and its attention."""
        return sum(product.matmul.flops for product in self.products) + self.attention_flops


@dataclass(frozen=True, slots=True)
class Message:
    """One collective between tensor ranks; `size` are the bytes of the whole tensor, as `cost.wire.Links` counts."""

    kind: Literal["all_reduce", "all_gather"]
    size: int
    phase: Phase
    unit: int | None


@dataclass(frozen=True, slots=True)
class ParameterTrace:
    """A parameter of this rank's part: its numbers, the units that hold it (several where it is tied), its role,
    whether it is trained."""

    numel: int
    units: tuple[int | None, ...]
    role: str
    trained: bool
