"""What a program hands to the wire, as NumPy sees it: without a copy where it lies on the CPU.

    NumPy arrays                          as they are
    `__dlpack__` (JAX, torch, CuPy)       on the CPU: the same memory; on another device: a copy on the CPU, which the
                                          framework itself makes
    the buffer protocol, `__array__`      the same memory (bytearray, array.array, TensorFlow's eager tensors)

DLPack: https://dmlc.github.io/dlpack/latest/python_spec.html. bfloat16 is NumPy's by the package ml_dtypes, which JAX
and TensorFlow bring along; DLPack knows it and NumPy does not, so such arrays come by `__array__`, and torch's, which
have none, as the same memory in 16 bits.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal.comm.shm.core import BYTES, DTYPES, MOVED, mark_of
from shoal.errors import UsageError

Array = np.ndarray[Any, np.dtype[Any]]
_CPU = 1  # DLDeviceType
_AS_PAIRS = {"complex64": "float32", "complex128": "float64"}
_REAL = ("float16", "bfloat16", "float32", "float64")


def as_array(given: Any) -> Array:
    """`given`, to be read: the same memory where that can be. Raises `UsageError` for what is no array."""
    if isinstance(given, np.ma.MaskedArray):
        raise UsageError("a masked array cannot be sent: its mask would be lost; give its filled(...) and its mask")
    if isinstance(given, np.ndarray):
        return given if type(given) is np.ndarray else np.asarray(given)  # a matrix has no flat form
    for look in (_by_dlpack, _by_buffer, _by_bits, _by_array):
        if (found := look(given)) is not None:
            return found
    raise UsageError(
        f"a {type(given).__name__} is no array: the wire takes NumPy arrays, and what has the buffer protocol, "
        "`__dlpack__` or `__array__`; wrap it in numpy.asarray"
    )


def readable(given: Any) -> Array:
    """`given` in one piece of memory, row by row; a copy where it is not. Raises `UsageError`."""
    found = as_array(given)
    if found.flags.c_contiguous and not found.dtype.hasobject:
        return found
    if found.dtype.hasobject:
        raise UsageError("an array of Python objects cannot be sent: give it a dtype of fixed size")
    return np.ascontiguousarray(found).reshape(found.shape)


def writable(given: Any, *, like: Array, shape: Sequence[int]) -> tuple[Array, Callable[[], object]]:
    """Memory for a result of `shape` and of the dtype of `like`, and what is to be done when it is there.

    `given` is the caller's `out`, or None: new memory. Raises `UsageError` where `out` cannot hold the result.
    """
    if given is None:
        return np.empty(shape, like.dtype), _nothing
    target = as_array(given)
    if target.shape != tuple(shape) or target.dtype != like.dtype:
        raise UsageError(
            f"out is {target.dtype} {list(target.shape)}, the result {like.dtype} {list(shape)}: give an array of that "
            "dtype and shape, or none"
        )
    if not target.flags.writeable:
        raise UsageError(f"out, a {type(given).__name__}, cannot be written: leave it out, and take what is returned")
    if target.flags.c_contiguous:
        return target, _nothing
    flat = np.empty(shape, like.dtype)
    return flat, lambda: np.copyto(target, flat)


def apart(send: Array, receive: Array, *, at: int = 0) -> Array:
    """`send`, or a copy where `receive` lies in its memory, which would be overwritten before it is sent. `at`, in
    bytes from the beginning of `send`, is where `receive` may begin: what a call does in place.
    """
    if (send is receive and at == 0) or not np.may_share_memory(send, receive):  # addresses take microseconds
        return send
    return send if address(receive) - address(send) == at else send.copy()


def address(array: Array) -> int:
    """Where its memory begins."""
    return array.__array_interface__["data"][0]


@functools.lru_cache(maxsize=256)
def reduction_numbers(dtype: np.dtype[Any], op: str) -> int:
    """The core's number of `dtype` where it is reduced by `op`. Raises `UsageError` where it cannot be."""
    name = dtype.name
    if name in _AS_PAIRS and op in ("sum", "avg"):
        name = _AS_PAIRS[name]
    elif name in ("uint16", "uint32", "uint64") and op in ("sum", "product"):
        name = name[1:]  # the same bits
    if name not in DTYPES or not dtype.isnative or (op == "avg" and name not in _REAL):
        rule = "a mean is one of floating-point numbers" if op == "avg" else f"the wire reduces {', '.join(DTYPES)}"
        raise UsageError(f"{dtype} cannot be reduced by {op!r}: {rule}; convert the array")
    return DTYPES[name]


@functools.lru_cache(maxsize=256)
def dtype_number(dtype: np.dtype[Any]) -> int:
    """By which ranks see that they mean the same numbers; `BYTES` of a dtype that the core does not know."""
    return MOVED.get(dtype.name, BYTES) if dtype.isnative else BYTES


@functools.lru_cache(maxsize=4096)
def mark(dtype: np.dtype[Any], shape: tuple[int, ...], codec: str = "") -> int:
    """The same on all ranks whose arrays, and codecs, are alike."""
    unknown = codec or dtype_number(dtype) == BYTES
    return mark_of(shape, what=f"{codec} {dtype}" if unknown else "")


def combine(arrays: Sequence[Array], op: str, *, out: Array) -> None:
    """The reduction of `arrays`, from left to right, as the core in C makes it."""
    if out.dtype.kind == "c":  # two numbers each, for the core too
        real = np.dtype(f"f{out.dtype.itemsize // 2}")
        combine([array.reshape(-1).view(real) for array in arrays], op, out=out.reshape(-1).view(real))
        return
    wide = np.float32 if out.dtype.name in ("float16", "bfloat16") else out.dtype
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        _UFUNCS[op](total, array.astype(wide, copy=False), out=total)
    if op == "avg":
        np.divide(total, len(arrays), out=total)
    out.reshape(total.shape)[...] = total.astype(out.dtype)


_UFUNCS = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}


def _by_dlpack(given: Any) -> Array | None:
    if not hasattr(given, "__dlpack__") or "bfloat16" in str(getattr(given, "dtype", "")):
        return None
    try:
        if given.__dlpack_device__()[0] == _CPU:
            return np.from_dlpack(given)
        return np.from_dlpack(given, device="cpu")
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):  # a tensor that requires its gradient
        if hasattr(given, "__array__"):
            return None
        raise


def _by_buffer(given: Any) -> Array | None:
    try:
        return np.asarray(memoryview(given))
    except (BufferError, TypeError, ValueError):
        return None


def _by_bits(given: Any) -> Array | None:
    """A tensor of torch's in bfloat16; None where ml_dtypes, which says what the bits mean, is not installed."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(given, torch.Tensor) or given.dtype != torch.bfloat16 or given.requires_grad:
        return None
    try:
        return np.asarray(given.view(torch.int16)).view(importlib.import_module("ml_dtypes").bfloat16)
    except (ImportError, RuntimeError, TypeError):
        return None


def _by_array(given: Any) -> Array | None:
    if not hasattr(given, "__array__"):
        return None
    try:
        return np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UsageError(
            f"a {type(given).__name__} gives no array: {reason}; give numbers on the CPU, of a dtype of NumPy's (under "
            "jax.jit: shoal.jax)"
        ) from None


def _nothing() -> None:
    """The result is where it should be."""
