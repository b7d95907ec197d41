"""The element types that a checkpoint can hold, under the three names they go by.

A manifest uses PyTorch's names, because people read it; an object's header uses those of the safetensors format
(https://github.com/huggingface/safetensors, section "Format").
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from shoal.errors import UsageError


class Dtype(NamedTuple):
    """One element type: its name in a manifest, its code in an object, its size."""

    name: str
    code: str
    itemsize: int
    torch: torch.dtype


_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = tuple(Dtype(str(dtype).removeprefix("torch."), code, dtype.itemsize, dtype) for dtype, code in _CODES.items())
BY_NAME = {dtype.name: dtype for dtype in DTYPES}


def dtype_name(tensor: torch.Tensor, name: str) -> str:
    """The manifest's name for the element type of `tensor`, which is called `name`; `UsageError` if it has none."""
    found = str(tensor.dtype).removeprefix("torch.")
    if found not in BY_NAME:
        raise UsageError(
            f"tensor {name!r} is {found}, which a checkpoint cannot hold: store one of {', '.join(BY_NAME)}"
        )
    return found
