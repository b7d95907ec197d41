"""`Compression`: what a gradient becomes on the wire."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """Sends tensors as they are. A subclass changes both methods."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What is sent, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        """The inverse."""
        return tensor


class _Cast(Compressor):
    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, context: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tensor.to(context)


class FP16(_Cast):
    """Floating-point tensors as float16."""

    dtype = torch.float16


class BF16(_Cast):
    """Floating-point tensors as bfloat16, which has float32's range."""

    dtype = torch.bfloat16


class Compression:
    """The choices, by Horovod's names."""

    none, fp16, bf16 = Compressor, FP16, BF16
