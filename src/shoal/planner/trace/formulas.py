"""Arithmetic of PyTorch's operators from the shapes of their arguments.

    mm, addmm, bmm, baddbmm     [m, k] x [k, n]
    convolution                 rows: places of the output; columns: output channels; inner: input channels x kernel
    its backward                the same product for the input's gradient and for the weight's, where those are wanted
    fused attention             4 b h s_q s_k d forward, half of it under a causal mask; backward 2.5 times as much, as
                                the scores are computed again (arXiv:2205.14135)

Every other operator moves bytes and computes next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

from shoal.cost.roofline import Matmul
from shoal.planner.trace.operator import Gives, Product

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


_PRODUCTS: Mapping[str, Callable[[Arguments, Any], tuple[Matmul, ...]]] = MappingProxyType(
    {
        "aten.mm": _mm,
        "aten.addmm": lambda arguments, out: _mm(arguments[1:], out),
        "aten.bmm": _bmm,
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
