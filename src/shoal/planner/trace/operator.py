"""What a trace holds: operators with their shapes and arithmetic, and what ranks say to each other between them.

Arithmetic counts a multiply-add as two and the square of causal attention as half, as `cost.transformer` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoal.comm.collective import Handle, Reduction, ordinary
from shoal.cost.matmul import Matmul

Phase = Literal["forward", "backward", "recompute"]
Gives = Literal["output", "input", "weight"]
"""What a product gives: an output in the forward, the gradient of an input or of a weight in the backward."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One tensor: its sizes, bytes of a number, and the bytes of memory behind it (fewer where it was expanded)."""

    dims: tuple[int, ...]
    element_bytes: int
    size: int


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
    """One collective between tensor ranks; `size` are the bytes of the whole tensor, as `cost.alpha_beta.Links`
    counts.
    """

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
    shape: tuple[int, ...] = ()


# Arithmetic of PyTorch's operators from the shapes of their arguments.
#
#     mm, addmm, bmm, baddbmm     [m, k] x [k, n]
#     grouped mm                  the same for the rows, or the inner places, of each group; groups are taken as even
#     convolution                 rows: places of the output; columns: output channels; inner: input channels x kernel
#     its backward                the same product for the input's gradient and the weight's, where they are wanted
#     fused attention             4 b h s_q s_k d forward, half of it under a causal mask; backward 2.5 times as much:
#                                 the scores are computed again (arXiv:2205.14135)
#
# Every other operator moves bytes and computes next to nothing.


BACKWARD_ATTENTION = 2.5

Arguments = Sequence[Any]

_ATTENTION: Mapping[str, tuple[int, int, float]] = MappingProxyType(
    {
        "aten._scaled_dot_product_flash_attention_for_cpu": (0, 4, 1.0),
        "aten._scaled_dot_product_flash_attention_for_cpu_backward": (1, 7, BACKWARD_ATTENTION),
    }
)
"""Where query, key and value begin among the arguments, where is_causal stands, work over the forward's."""


def _mm(arguments: Arguments, out: Any) -> tuple[Matmul, ...]:
    (rows, inner), columns = arguments[0].shape, arguments[1].shape[-1]
    return (Matmul(rows, columns, inner),)


def _bmm(arguments: Arguments, out: Any) -> tuple[Matmul, ...]:
    (batch, rows, inner), columns = arguments[0].shape, arguments[1].shape[-1]
    return (Matmul(rows, columns, inner, batch),)


def _grouped_mm(arguments: Arguments, out: Any) -> tuple[Matmul, ...]:
    """The places of all groups are one dimension: of the rows, of the columns, or inside (gradients of the weight)."""
    left, right = arguments[0].shape, arguments[1].shape
    groups = max(size[0] for size in (left, right, out.shape) if len(size) == 3)
    rows, inner, columns = left[-2], left[-1], right[-1]
    if len(left) == 2 and len(right) == 2:
        inner = -(-inner // groups)
    elif len(left) == 2:
        rows = -(-rows // groups)
    elif len(right) == 2:
        columns = -(-columns // groups)
    return (Matmul(rows, columns, inner, groups),)


_PRODUCTS: Mapping[str, Callable[[Arguments, Any], tuple[Matmul, ...]]] = MappingProxyType(
    {
        "aten.mm": _mm,
        "aten.addmm": lambda arguments, out: _mm(arguments[1:], out),
        "aten.bmm": _bmm,
        "aten._grouped_mm": _grouped_mm,
        "aten.baddbmm": lambda arguments, out: _bmm(arguments[1:], out),
    }
)


def products_of(name: str, arguments: Arguments, out: Any, *, gives: Gives) -> tuple[Product, ...]:
    """The products of the operator `name` ("aten.mm"); `gives` is what they give where the name does not say."""
    if name == "aten.convolution":
        return (Product(_convolution(arguments[0], arguments[1], out, arguments[6], arguments[8]), "output"),)
    if name == "aten.convolution_backward":
        return tuple(_convolution_backward(arguments))
    found = _PRODUCTS.get(name)
    return () if found is None else tuple(Product(matmul, gives) for matmul in found(arguments, out))


def _convolution(source: Any, weight: Any, out: Any, transposed: bool, groups: int) -> Matmul:
    """`source` [samples, channels, ...], `weight` [channels, channels / groups, ...]."""
    inside, outside = (out, source) if transposed else (source, out)
    rows = outside.shape[0] * prod(outside.shape[2:])
    kernel = prod(weight.shape[2:])
    if transposed:
        return Matmul(rows, inside.shape[1] // groups * kernel, outside.shape[1] // groups, groups)
    return Matmul(rows, outside.shape[1] // groups, inside.shape[1] // groups * kernel, groups)


def _convolution_backward(arguments: Arguments) -> list[Product]:
    """Arguments: gradient, source, weight, ..., transposed at 7, groups at 9, which gradients are wanted at 10."""
    gradient, source, weight, transposed, groups, wanted = (arguments[i] for i in (0, 1, 2, 7, 9, 10))
    forward = _convolution(source, weight, gradient, transposed, groups)
    found = [Product(forward.input_gradient(), "input")] if wanted[0] else []
    return found + ([Product(forward.weight_gradient(), "weight")] if wanted[1] else [])


def attention_flops(name: str, arguments: Arguments) -> float:
    """Of the fused attention that fake CPU tensors go through, forward or backward; 0 for other operators."""
    if name not in _ATTENTION:
        return 0.0
    first, causal, factor = _ATTENTION[name]
    query, key, value = arguments[first : first + 3]
    batch, heads, queries, size = query.shape
    square = 2.0 * batch * heads * queries * key.shape[-2] * (size + value.shape[-1])
    halved = len(arguments) > causal and bool(arguments[causal])
    return factor * square * (0.5 if halved else 1.0)


# Which operators of a backward make the gradients of parameters, and not those of activations.
#
# Autograd adds a gradient to its parameter in a node of its own. What comes in there is followed back to the operator
# that made it, through casts and through sums of the gradients of a parameter that is used several times.


PASSED_ON = frozenset({"aten._to_copy", "aten.add", "aten.clone"})


class WeightGradients:
    """`givers` are the operators that made gradients of parameters, by their place in the trace."""

    def __init__(self, model: nn.Module) -> None:
        self.givers: set[int] = set()
        self._makers: dict[int, tuple[int, ...]] = {}
        shapes = {tuple(p.shape) for p in model.parameters()}
        self._shapes = shapes | {shape[::-1] for shape in shapes}

    def follow(self, name: str, inputs: Sequence[Tensor], out: Tensor, place: int | None, *, ends: bool) -> None:
        """An operator, the `place`-th of the trace, None for those of a forward; `ends`: it adds to a parameter's
        gradient."""
        before = tuple(maker for tensor in inputs for maker in self._makers.get(_storage(tensor), ()))
        if ends:
            self.givers.update(before)
        elif place is not None and tuple(out.shape) in self._shapes:
            self._makers[_storage(out)] = before if name in PASSED_ON and before else (place,)
        else:
            self._makers.pop(_storage(out), None)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# The ranks of a group that a trace pretends to: whatever they are told is written down, and nothing travels.


Told = Callable[[str, int], None]
"""Gets the kind of a collective, and the bytes of the whole tensor."""


class _Done:
    def wait(self) -> None:
        """Nothing was under way."""


def _nobody(kind: str, size: int) -> None:
    """Hears of collectives outside of a trace."""


@dataclass
class TracedGroup:
    """`Collective` of rank 0 among `size`, for tensors without storage. `told` hears of every collective."""

    size: int
    rank: int = 0
    told: Told = _nobody
    wire: str = "no wire: ranks are traced"

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return ordinary(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Handle:
        return self._tell("all_reduce", tensor)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Handle:
        return self._tell("all_gather", input)

    def all_gather(self, output: Tensor, input: Tensor) -> Handle:
        return self._tell("all_gather", output)

    def all_to_all(
        self, output: Tensor, input: Tensor, *, output_sizes: Sequence[int] = (), input_sizes: Sequence[int] = ()
    ) -> Handle:
        return self._tell("all_to_all", input)

    def broadcast(self, tensor: Tensor, *, root: int = 0) -> Handle:
        return self._tell("broadcast", tensor)

    def reduce(self, tensor: Tensor, op: Reduction = "sum", *, root: int = 0) -> Handle:
        return self._tell("all_reduce", tensor)

    def gather(self, outputs: Sequence[Tensor], input: Tensor, *, root: int = 0) -> Handle:
        return self._tell("gather", input)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], *, root: int = 0) -> Handle:
        return self._tell("scatter", output)

    def send(self, tensor: Tensor, *, to: int, tag: int = 0) -> Handle:
        return self._tell("send", tensor)

    def recv(self, tensor: Tensor, *, source: int, tag: int = 0) -> Handle:
        return _Done()

    def barrier(self) -> Handle:
        return _Done()

    def _tell(self, kind: str, tensor: Any) -> Handle:
        self.told(kind, tensor.numel() * tensor.element_size())
        return _Done()
