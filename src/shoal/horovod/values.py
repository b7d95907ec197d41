"""What travels between ranks: values without pickle, MessagePack for what holds them, safetensors for tensors; and
`Compression`, what a gradient becomes.

Numbers, strings, bytes, None, tensors, and lists, tuples and dictionaries of them; tuples and whole-number keys come
back as they were.
"""

from __future__ import annotations

from typing import Any

import msgspec
import safetensors.torch
import torch
from torch import Tensor

from shoal.errors import UsageError

_TENSOR, _TUPLE, _SCALARS = 1, 2, (bool, int, float, str, bytes, type(None))


def encode(value: Any) -> bytes:
    """The bytes of `value`. Raises `UsageError` for an object that is none of these."""
    tensors: dict[str, Tensor] = {}
    tree = msgspec.msgpack.encode(_replaced(value, tensors))
    return len(tree).to_bytes(8, "big") + tree + safetensors.torch.save(tensors)


def decode(content: bytes) -> Any:
    """The value of these bytes; tensors are on the CPU."""
    length = int.from_bytes(content[:8], "big")
    tensors = safetensors.torch.load(content[8 + length :])
    return _restored(msgspec.msgpack.decode(content[8 : 8 + length]), tensors)


def _replaced(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return msgspec.msgpack.Ext(_TENSOR, name.encode())
    if isinstance(value, tuple):
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode([_replaced(each, tensors) for each in value]))
    if isinstance(value, list):
        return [_replaced(each, tensors) for each in value]
    if isinstance(value, dict):
        return {key: _replaced(each, tensors) for key, each in value.items()}
    if isinstance(value, _SCALARS):
        return value
    raise UsageError(
        f"a {type(value).__name__} cannot be sent to other ranks: send numbers, strings, tensors, and lists and "
        "dictionaries of them"
    )


def _restored(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, msgspec.msgpack.Ext):
        if value.code == _TENSOR:
            return tensors[bytes(value.data).decode()]
        return tuple(_restored(each, tensors) for each in msgspec.msgpack.decode(value.data))
    if isinstance(value, list):
        return [_restored(each, tensors) for each in value]
    if isinstance(value, dict):
        return {key: _restored(each, tensors) for key, each in value.items()}
    return value


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: to_device(each, device) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(each, device) for each in value)
    return value


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
