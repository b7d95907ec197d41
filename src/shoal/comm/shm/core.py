"""The shared-memory core in C, as Python sees it: loaded with ctypes, so that calls leave the interpreter lock.
What is called most is also called in the interpreter's own way (`load_call`). It imports neither torch nor NumPy.

The sources lie in `core/`; `core.h` tells how it works. The names and numbers here mirror that file.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.machinery
import os
import zlib
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_bool, c_double, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path

_FOLDER = Path(__file__).parent

BYTES = 10
DTYPES = {
    name: number
    for number, name in enumerate(
        ("float32", "float64", "bfloat16", "float16", "int8", "uint8", "int16", "int32", "int64", "bool")
    )
}
"""The core's numbers of what it can reduce, by the names that torch and NumPy share."""
MOVED = DTYPES | {
    name: BYTES + 1 + number
    for number, name in enumerate(
        ("complex64", "complex128", "uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e5m2")
    )
}
"""And of what it only moves, by which ranks see that they mean the same numbers; `BYTES` stand for any other."""
REDUCTIONS = ("sum", "avg", "max", "min", "product")


class Kind(IntEnum):
    """What a call is."""

    ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, GATHER = range(6)
    SCATTER, ALL_TO_ALL, BARRIER, SEND, RECV = range(6, 11)


class CallState(IntEnum):
    """What became of a call. FOREIGN: it is another process's."""

    PENDING, DONE, BROKEN, FOREIGN = range(4)


class Fault(IntEnum):
    """Why a call failed."""

    NO_FAULT, PEER_DEAD, PEER_LEFT, PEER_FAILED, TIMED_OUT, DISAGREE = range(6)
    WRONG_SIZE, CLOSED, NO_MEMORY, UNSHARED, EARLIER = range(6, 11)


class Settings(Structure):
    """Sizes of a segment, and how waiting is done. The same on all ranks, but for the last three."""

    _fields_ = (
        ("places", c_uint32),
        ("place_bytes", c_uint64),
        ("ring_bytes", c_uint64),
        ("one_shot_bytes", c_uint64),
        ("spins", c_uint32),
        ("spare_core", c_bool),
        ("timeout_s", c_double),
    )


class Signature(Structure):
    """What the ranks of a call must agree on."""

    _fields_ = (
        ("kind", c_uint32),
        ("dtype", c_uint32),
        ("reduction", c_uint32),
        ("root", c_int32),
        ("bytes", c_uint64),
        ("mark", c_uint64),
        ("window", c_uint64),
        ("offset", c_uint64),
    )


_PLACES, _PLACE_BYTES, _RING_BYTES = 16, 256 << 10, 1 << 20
_ONE_SHOT_BYTES = 128 << 10  # for up to 4 ranks: each reads what all have brought
_SPINS = 100


def core_settings(size: int, *, timeout_s: float, threads: int) -> Settings:
    """For a group of `size` ranks, each of which computes on so many `threads`."""
    one_shot_bytes = _ONE_SHOT_BYTES * 4 // max(4, size)
    cores = len(os.sched_getaffinity(0))
    spins = _SPINS if size <= cores else 0
    spare_core = size * threads < cores
    return Settings(_PLACES, _PLACE_BYTES, _RING_BYTES, one_shot_bytes, spins, spare_core, timeout_s)


# `mark` of a `Signature`: the shape of an array, so that [2, 3] is not summed into [3, 2]. The first 4 bits have the
# number of dimensions, and one; the other 60 are divided among them. A shape that does not fit gives a hash, and so
# does a dtype that has no number here.

_HASHED, _SHAPE_BITS = 15, 60


def mark_of(shape: Sequence[int], *, what: str = "") -> int:
    """Never 0, which says nothing. `what`: whatever else of the arrays has to be alike, where it has no number."""
    most = len(shape)
    each = _SHAPE_BITS // max(1, most)
    if what or most + 1 >= _HASHED or any(length >> each for length in shape):
        text = f"{what} {list(shape)}".encode()
        return _HASHED << _SHAPE_BITS | zlib.crc32(text) << 28 | zlib.adler32(text) >> 4
    packed = 0
    for length in shape:
        packed = packed << each | length
    return (most + 1) << _SHAPE_BITS | packed


def _shape(mark: int) -> str:
    """Empty where the mark is a hash, or says nothing."""
    if (most := (mark >> _SHAPE_BITS) - 1) < 0 or most + 1 == _HASHED:
        return ""
    each = _SHAPE_BITS // max(1, most)
    return f" of shape {[mark >> each * place & (1 << each) - 1 for place in reversed(range(most))]}"


class CoreMissing(Exception):
    """Why there is no core, for people."""


def sentence(
    fault: Fault, rank: int, ours: Signature, theirs: Signature, *, own: int, timeout_s: float,
    over: str = "shared memory",
) -> str:  # fmt: skip
    """Why a call of rank `own` failed, because of `rank`."""
    mine, other = _named(ours), _named(theirs)
    if mine == other:  # it is the arrays, then
        mine += _shape(ours.mark)
        other += _shape(theirs.mark) or " of arrays of another shape, dtype or codec"
    return {
        Fault.PEER_DEAD: f"Connection closed by peer: rank {rank} of the group is gone",
        Fault.PEER_LEFT: f"rank {rank} of the group has closed it",
        Fault.PEER_FAILED: f"another rank of the group gave up on rank {rank}",
        Fault.TIMED_OUT: f"{over}: Timed out after {timeout_s:g} s waiting for rank {rank} of the group, in {mine}",
        Fault.DISAGREE: f"rank {own} called {mine}, rank {rank} of the group {other}: all ranks must "
        "make the same calls in the same order",
        Fault.WRONG_SIZE: f"rank {rank} of the group sends {theirs.bytes} bytes, rank {own} expects {ours.bytes}",
        Fault.CLOSED: "this group is closed",
        Fault.UNSHARED: f"rank {rank} of the group has not allocated the memory of this call, or another size: all "
        "ranks must allocate the same in the same order",
        Fault.NO_MEMORY: "no memory for a message that nobody has asked for yet",
        Fault.EARLIER: f"an earlier call of this group has failed because of rank {rank}: make another group",
    }.get(fault, f"shared memory failed ({fault.name})")


_REDUCING = (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER)
_ROOTED = (Kind.REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER)


def _named(call: Signature) -> str:
    kind = Kind(call.kind)
    numbers = next((name for name, number in MOVED.items() if number == call.dtype), "")
    how = f" ({REDUCTIONS[call.reduction]} of {numbers})" if kind in _REDUCING else numbers and f" in {numbers}"
    root = f" with root {call.root}" if kind in _ROOTED else ""
    where = f" at byte {call.offset} of shared allocation {call.window}" if call.window else ""
    return f"{kind.name.lower()} of {call.bytes} bytes{how}{root}{where}"


_POINTERS, _COUNTS, _SIGNATURE = POINTER(c_void_p), POINTER(c_uint64), POINTER(Signature)
_FUNCTIONS = {
    "segment_bytes": (c_uint64, [c_int, POINTER(Settings)]),
    "map": (c_void_p, [c_int, c_uint64]),
    "unmap": (None, [c_void_p, c_uint64]),
    "open": (c_void_p, [c_int, c_int, _POINTERS, POINTER(c_int), POINTER(Settings)]),
    "start": (c_void_p, [c_void_p, _SIGNATURE, c_void_p, c_void_p, c_bool]),
    "start_lists": (c_void_p, [c_void_p, _SIGNATURE, _POINTERS, _COUNTS, _POINTERS, _COUNTS, c_bool]),
    "share": (c_void_p, [c_void_p, c_int, c_uint64, POINTER(c_int)]),
    "address": (c_void_p, [c_void_p]),
    "peer": (c_void_p, [c_void_p, c_void_p, c_uint64, c_int]),
    "release": (None, [c_void_p]),
    "message": (c_void_p, [c_void_p, c_int, c_int, c_void_p, c_uint64, c_int, c_int64, c_bool]),
    "wait": (c_int, [c_void_p, c_double, c_bool]),
    "leave": (None, [c_void_p]),
    "limit": (None, [c_void_p, c_double]),
    "test": (c_int, [c_void_p]),
    "report": (None, [c_void_p, POINTER(c_int), POINTER(c_int), _SIGNATURE, _SIGNATURE, POINTER(c_int)]),
    "drop": (None, [c_void_p]),
    "end": (None, [c_void_p]),
    "free": (None, [c_void_p]),
    "break": (None, [c_void_p, c_int, c_int]),
}


Core = ctypes.CDLL


@functools.cache
def load_core() -> Core:
    """The core, its functions declared. Raises `CoreMissing` where the package was installed without a C compiler."""
    path = _library()
    try:
        core = ctypes.CDLL(str(path))
    except OSError as error:
        raise CoreMissing(f"the shared-memory core cannot be loaded: {error}") from None
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(core, f"shoal_{name}")
        function.restype, function.argtypes = result, arguments
    return core


@functools.cache
def load_call() -> Callable[..., None] | None:
    """`call` of `core/python.c`; None where the core was built without Python's headers."""
    try:
        return importlib.import_module("shoal.comm.shm._core").call
    except ImportError:
        return None


@functools.cache
def core_identity() -> str:
    """The same for the same build. Raises `CoreMissing`."""
    load_core()
    return f"{zlib.crc32(_library().read_bytes()):08x}"


def _library() -> Path:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        if (path := _FOLDER / f"_core{suffix}").exists():
            return path
    raise CoreMissing("the shared-memory core was not built: install a C compiler, then reinstall Shoal")
