"""Products with weights of which two of every four are zero, as GPUs have them: twice the rate of dense ones at most.

    forward      y = x W^T       two of every four along W's rows
    backward     dx = dy W       two of every four along W's columns: of a transposable mask (arXiv:2102.08124), whose
                                 tiles of 4 x 4 keep two of each row and column; else dense
                 dW = dy^T x     dense: what is masked in it is left out afterwards, as without these products

A weight stays dense, and so do its gradient, the optimizer's state and checkpoints. Beside it a layer holds its kept
numbers in the order of the device, made anew when weights or masks have changed: once a step, whatever the number of
microbatches. Evaluations compute with the dense weight, which gives the same but for the order of sums.

What makes a product of a weight is passed in: `of_device` is PyTorch's; tests on CPUs pass one in plain operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensorCUTLASS, to_sparse_semi_structured

from shoal.errors import ConfigError
from shoal.sparsity.masks import Masks

Product = Callable[[Tensor], Tensor]
"""From `x` `[n, in]` to `x W^T` `[n, out]`."""
Compress = Callable[[Tensor], Product]
"""The product of a weight `[out, in]`, two of every four of whose rows are zero."""

ROWS, COLUMNS = 32, 64
"""What the sizes of a weight are multiples of, in both of PyTorch's implementations, for numbers of 16 bits."""
LEAST_CAPABILITY = (8, 0)


def of_device(weight: Tensor) -> Product:
    """By cuSPARSELt, or by CUTLASS where PyTorch was built without it."""
    if torch.backends.cusparselt.is_available():
        compressed = to_sparse_semi_structured(weight)
    else:
        compressed = SparseSemiStructuredTensorCUTLASS.from_dense(weight)
    return lambda x: F.linear(x, compressed)


class SemiStructured:
    """Has the linear `layers` compute with compressed weights in training, by the names of their weights.

    `both`: masks are transposable, so that `dx` is computed so, too. Raises `ConfigError` for a layer that cannot be.
    """

    def __init__(self, layers: Mapping[str, nn.Module], compress: Compress, *, both: bool) -> None:
        self._compress, self._both = compress, both
        self._ready: dict[str, tuple[Product, Product]] = {}
        self._masked: frozenset[str] = frozenset()
        self._version = -1
        for name, module in layers.items():
            layer = _checked(name, module)
            layer.forward = partial(self._forward, name, layer, layer.forward)

    def refresh(self, masks: Masks) -> None:
        """Weights have changed, or `masks`: they are compressed again when they are computed with next. Layers whose
        masks do not keep two of every four yet compute as they are.
        """
        self._ready.clear()
        if self._version != masks.version:
            self._version = masks.version
            self._masked = frozenset(name for name, bits in masks.bits.items() if _halved(bits))

    def _forward(self, name: str, layer: nn.Linear, dense: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
        if name not in self._masked or not layer.training:
            return dense(input)
        device, weight = input.device.type, layer.weight
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        if name not in self._ready:
            self._ready[name] = self._compressed(weight.detach().to(dtype))
        bias = None if layer.bias is None else layer.bias.to(dtype)
        found = _Linear.apply(input.to(dtype).reshape(-1, input.shape[-1]), weight, *self._ready[name])
        found = found.view(*input.shape[:-1], layer.out_features)
        return found if bias is None else found + bias

    def _compressed(self, weight: Tensor) -> tuple[Product, Product]:
        turned = self._compress(weight.t().contiguous()) if self._both else partial(torch.matmul, other=weight)
        return self._compress(weight.contiguous()), turned


class _Linear(torch.autograd.Function):
    """`x W^T`, by `product`; `turned` is that of `W^T`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: Product, turned: Product) -> Tensor:
        ctx.save_for_backward(x)
        ctx.turned, ctx.dtype = turned, weight.dtype
        return product(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x,), (given,) = ctx.saved_tensors, gradients
        given = given.contiguous()
        to_input = ctx.turned(given) if ctx.needs_input_grad[0] else None
        to_weight = (given.t() @ x).to(ctx.dtype) if ctx.needs_input_grad[1] else None
        return to_input, to_weight, None, None


def _checked(name: str, layer: nn.Module) -> nn.Linear:
    said = f'sparsity.products = "semi_structured": {name}'
    if not isinstance(layer, nn.Linear):
        raise ConfigError(f"{said} is of {type(layer).__name__}, not nn.Linear; name linear layers in sparsity.layers")
    if layer.out_features % ROWS or layer.in_features % COLUMNS:
        raise ConfigError(
            f"{said} is {layer.out_features} x {layer.in_features}, and GPUs take multiples of {ROWS} x {COLUMNS}; "
            'leave it out of sparsity.layers, or use products = "dense"'
        )
    return layer


def check_device(device: torch.device) -> None:
    """Raises `ConfigError` where there are no such products."""
    if device.type != "cuda":
        raise ConfigError(
            f'sparsity.products = "semi_structured" on a {device.type} device, which has no such products; use "dense"'
        )
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        raise ConfigError(
            f'sparsity.products = "semi_structured" on {torch.cuda.get_device_name(device)}: they come with compute '
            'capability 8.0 (A100 and later); use "dense"'
        )


def _halved(bits: Tensor) -> bool:
    """Whether every four of a mask's bits hold two. What ends within a byte ends with zeros, and so does not."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return bool(((bits[:, None] >> places & 1).view(-1, 4).sum(1) == 2).all())
