"""Tensors as MPI sees them: memory by address, and numbers that MPI can add.

Data that only moves goes as bytes, in any dtype. MPI has no 16-bit floats: they are widened to float32, reduced, and
rounded once, which sends twice the bytes. Means are sums, divided at the end.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_NAMES = {
    torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int8: "INT8_T", torch.uint8: "UINT8_T",
    torch.int16: "INT16_T", torch.int32: "INT32_T", torch.int64: "INT64_T", torch.bool: "C_BOOL",
}  # fmt: skip
_SHORT = (torch.float16, torch.bfloat16)
_OPS: dict[Any, str] = {
    dist.ReduceOp.SUM: "SUM",
    dist.ReduceOp.AVG: "SUM",
    dist.ReduceOp.MAX: "MAX",
    dist.ReduceOp.MIN: "MIN",
    dist.ReduceOp.PRODUCT: "PROD",
}
_LOGICAL = {"SUM": "LOR", "MAX": "LOR", "PROD": "LAND", "MIN": "LAND"}


def moved(mpi: Any, tensor: Tensor, *, blocks: int = 1) -> list[Any]:
    """A contiguous tensor as bytes to be moved: MPI's [memory, count, type]; its count is that of one of `blocks`."""
    return [mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), tensor.nbytes // blocks, mpi.BYTE]


def added(mpi: Any, tensor: Tensor, *, blocks: int = 1) -> list[Any]:
    """The same of numbers, in a dtype that `numbers_of` gave."""
    memory = mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return [memory, tensor.numel() // blocks, getattr(mpi, _NAMES[tensor.dtype])]


def numbers_of(tensor: Tensor) -> Tensor:
    """A contiguous copy in a dtype that MPI adds. Raises `ValueError` where there is none."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise ValueError("MPI takes dense tensors on the CPU: move them there, or take another transport")
    if tensor.dtype in _SHORT:
        return tensor.detach().float().contiguous()
    if tensor.dtype not in _NAMES:
        raise ValueError(f"MPI has no reduction of {tensor.dtype}: reduce in float32, or take another transport")
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def operation(mpi: Any, reduce_op: Any, dtype: torch.dtype) -> Any:
    """MPI's. Raises `ValueError` where there is none."""
    name = next((name for op, name in _OPS.items() if reduce_op == op), None)
    if name is None or (reduce_op == dist.ReduceOp.AVG and not dtype.is_floating_point):
        raise ValueError(f"MPI's transport has no {reduce_op} of {dtype}: sum, and divide afterwards")
    return getattr(mpi, _LOGICAL[name] if dtype is torch.bool else name)
