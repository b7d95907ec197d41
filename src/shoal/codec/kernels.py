"""The hot loops in C of the codecs (`core/kernels.c`), of moments in 8 bits and AdamW (`core/adam.c`), of LAMB and LARS
(`core/layerwise.c`), and of random numbers (`core/counters.c`), as Python sees them: loaded with ctypes, so that calls
leave the interpreter lock.

They work on float32 vectors in the memory of a CPU. For all others, and where Shoal was installed without a C compiler,
`kernels_for` returns None, and the torch forms run: these are also the oracle of the tests.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from shoal.errors import EnvironmentFault

_VECTOR = (c_void_p, c_uint64)
_FUNCTIONS = {
    "encode": (None, (*_VECTOR, c_uint64, c_int, c_float, c_int, c_float, c_int, c_int, c_uint64, c_void_p, c_void_p)),
    "decode": (None, (c_void_p, *_VECTOR, c_uint64, c_int, c_int, c_int, c_void_p)),
    "narrow": (None, (*_VECTOR, c_uint64, c_int, c_float, c_void_p, c_void_p)),
    "widen": (None, (c_void_p, *_VECTOR, c_uint64, c_int, c_void_p)),
    "largest": (c_float, _VECTOR),
    "to_bfloat16": (None, (*_VECTOR, c_void_p)),
    "from_bfloat16": (None, (*_VECTOR, c_void_p)),
    "select": (c_uint64, (*_VECTOR, c_float, c_void_p, c_uint64)),
    "adam": (None, (c_void_p, *_VECTOR, c_uint64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
    "encode_moment": (None, (*_VECTOR, c_uint64, c_void_p, c_int, c_void_p, c_void_p)),
    "decode_moment": (None, (c_void_p, *_VECTOR, c_uint64, c_void_p, c_int, c_void_p)),
    "lamb_moments": (None, (c_void_p, c_void_p, c_void_p, *_VECTOR, c_void_p, c_void_p)),
    "lamb_step": (None, (c_void_p, c_void_p, *_VECTOR, c_void_p, c_float, c_float)),
    "lars_norms": (None, (c_void_p, *_VECTOR, c_void_p)),
    "lars_step": (None, (c_void_p, c_void_p, *_VECTOR, c_float, c_float, c_float, c_float, c_int)),
    "squares": (c_double, (c_void_p, *_VECTOR)),
    "multiply": (None, (c_void_p, *_VECTOR, c_float)),
    "multiply_measured": (c_double, (c_void_p, *_VECTOR, c_float)),
    "mask": (None, (*_VECTOR, c_uint64, *_VECTOR, c_uint64, c_int64, c_float, c_void_p)),
    "bits": (None, (*_VECTOR, c_uint64, *_VECTOR, c_uint64, c_void_p)),
    "uniform32": (None, (*_VECTOR, c_uint64, c_void_p)),
    "uniform64": (None, (*_VECTOR, c_uint64, c_void_p)),
}

SCALES = ("largest", "norm", "mean")
ROUNDINGS = ("nearest", "stochastic", "sign")
GROUP = 16
"""Numbers that `select` looks at together."""
FORMATS = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
"""As in `core/kernels.c`, in the order of its enumerations."""


class Moment(NamedTuple):
    """A vector in 8 bits, `codes` one byte each `[numel]` and `scales` float32 `[blocks]`; `form`: what is known of its
    map, float32 `[26]`, as `core/adam.c` has it.
    """

    codes: Tensor
    scales: Tensor
    form: Tensor


class Vectors(NamedTuple):
    """Several vectors: where each lies in memory, and how many numbers it has; both uint64 `[vectors]`."""

    places: array[int]
    sizes: array[int]

    def arguments(self) -> tuple[int, int, int]:
        """As the library takes them."""
        return self.places.buffer_info()[0], self.sizes.buffer_info()[0], len(self.sizes)


class Kernels:
    """The functions of the library at `path`. All tensors are contiguous and on the CPU, vectors float32 `[numel]`.

    Raises `EnvironmentFault` for the library of another version of Shoal.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, f"shoal_codec_{name}", None)
            if function is None:
                raise EnvironmentFault(
                    f"{path} was built from another version of Shoal, and has no {name}: build it again, by pip install"
                )
            function.restype, function.argtypes = result, arguments
        self._library = library

    def encode(
        self, x: Tensor, scales: Tensor, out: Tensor, *, block: int, scale: str, rounding: str, levels: int,
        base: int, key: int,
    ) -> None:  # fmt: skip
        """Writes the scales, float32 `[blocks]`, and the packed digits, one-byte numbers, of `shoal.codec.quantise`."""
        offset = 0 if base == 256 else levels
        self._library.shoal_codec_encode(
            x.data_ptr(), x.numel(), block, SCALES.index(scale), float(levels), ROUNDINGS.index(rounding),
            float(levels), offset, base, key % (1 << 64), scales.data_ptr(), out.data_ptr(),
        )  # fmt: skip

    def decode(self, scales: Tensor, packed: Tensor, out: Tensor, *, block: int, levels: int, base: int) -> None:
        """The inverse: writes `out`, float32 `[numel]`."""
        factor, offset = (2, 1) if base == 2 else (1, levels)
        self._library.shoal_codec_decode(
            scales.data_ptr(), packed.data_ptr(), out.numel(), block, factor, offset, base, out.data_ptr()
        )

    def narrow(self, x: Tensor, scales: Tensor, out: Tensor, *, block: int) -> None:
        """Writes a scale for each block, and x / scale in the format of `out` `[numel]`, one of `FORMATS`."""
        most = torch.finfo(out.dtype).max
        self._library.shoal_codec_narrow(
            x.data_ptr(), x.numel(), block, FORMATS.index(out.dtype), most, scales.data_ptr(), out.data_ptr()
        )

    def widen(self, scales: Tensor, narrow: Tensor, out: Tensor, *, block: int) -> None:
        """The inverse: writes `out`, float32 `[numel]`."""
        self._library.shoal_codec_widen(
            scales.data_ptr(), narrow.data_ptr(), out.numel(), block, FORMATS.index(narrow.dtype), out.data_ptr()
        )

    def to_bfloat16(self, x: Tensor, out: Tensor) -> None:
        """Writes `out`, bfloat16 `[numel]`: `x`, rounded to nearest."""
        self._library.shoal_codec_to_bfloat16(x.data_ptr(), x.numel(), out.data_ptr())

    def from_bfloat16(self, narrow: Tensor, out: Tensor) -> None:
        """Writes `out`, float32 `[numel]`."""
        self._library.shoal_codec_from_bfloat16(narrow.data_ptr(), out.numel(), out.data_ptr())

    def largest(self, x: Tensor) -> float:
        """The largest magnitude; not finite if any number is not."""
        return self._library.shoal_codec_largest(x.data_ptr(), x.numel())

    def adam(
        self, x: Tensor, gradient: Tensor, moments: tuple[Moment, Moment], factors: Sequence[float], *, block: int
    ) -> None:
        """One step of `x` and its two `moments`, the first of which has signs; `factors` as `core/adam.c` has them."""
        (first, first_scales, signed), (second, second_scales, unsigned) = moments
        maps = torch.cat([signed, unsigned])
        self._library.shoal_codec_adam(
            x.data_ptr(), gradient.data_ptr(), x.numel(), block, maps.data_ptr(), first.data_ptr(),
            first_scales.data_ptr(), second.data_ptr(), second_scales.data_ptr(),
            _floats(factors),
        )  # fmt: skip

    def encode_moment(self, x: Tensor, moment: Moment, *, block: int) -> None:
        """Writes the codes and scales of `x`."""
        codes, scales, form = moment
        self._library.shoal_codec_encode_moment(
            x.data_ptr(), x.numel(), block, form.data_ptr(), codes.dtype == torch.int8, codes.data_ptr(),
            scales.data_ptr(),
        )  # fmt: skip

    def decode_moment(self, moment: Moment, out: Tensor, *, block: int) -> None:
        """The inverse: writes `out`, float32 `[numel]`."""
        codes, scales, form = moment
        self._library.shoal_codec_decode_moment(
            codes.data_ptr(), scales.data_ptr(), out.numel(), block, form.data_ptr(), codes.dtype == torch.int8,
            out.data_ptr(),
        )  # fmt: skip

    def lamb_moments(
        self, x: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], factors: Sequence[float]
    ) -> list[float]:
        """Moves both `moments`; the sums of squares of `x` and of its update. `factors` as `core/layerwise.c` has
        them.
        """
        squares = (c_double * 2)()
        self._library.shoal_codec_lamb_moments(
            x.data_ptr(), gradient.data_ptr(), moments[0].data_ptr(), moments[1].data_ptr(), x.numel(),
            _floats(factors), ctypes.byref(squares),
        )  # fmt: skip
        return list(squares)

    def lamb_step(
        self, x: Tensor, moments: tuple[Tensor, Tensor], factors: Sequence[float], *, kept: float, rate: float
    ) -> None:
        """`x` becomes `kept` times itself less `rate` times its update."""
        self._library.shoal_codec_lamb_step(
            x.data_ptr(), moments[0].data_ptr(), moments[1].data_ptr(), x.numel(), _floats(factors), kept, rate
        )

    def lars_norms(self, x: Tensor, gradient: Tensor) -> list[float]:
        """The sums of squares of both."""
        squares = (c_double * 2)()
        self._library.shoal_codec_lars_norms(x.data_ptr(), gradient.data_ptr(), x.numel(), ctypes.byref(squares))
        return list(squares)

    def lars_step(
        self, x: Tensor, gradient: Tensor, velocity: Tensor, *, factor: float, decay: float, momentum: float,
        lr: float, nesterov: bool,
    ) -> None:  # fmt: skip
        """One step of `x` and its `velocity`."""
        self._library.shoal_codec_lars_step(
            x.data_ptr(), gradient.data_ptr(), velocity.data_ptr(), x.numel(), factor, decay, momentum, lr, nesterov
        )

    def select(self, x: Tensor, least: float, *, room: int) -> tuple[Tensor, int]:
        """The first places, int64 ascending, of magnitude `least` or more, `room` of them at most; and how many there
        are in all.
        """
        places = x.new_empty(room + GROUP, dtype=torch.int64)
        found = self._library.shoal_codec_select(x.data_ptr(), x.numel(), least, places.data_ptr(), room)
        return places[: min(found, room)], found

    def joint_norm(self, vectors: Vectors) -> float:
        """The 2-norm of all their numbers together, added up in float64."""
        return math.sqrt(self._library.shoal_codec_squares(*vectors.arguments()))

    def multiply(self, vectors: Vectors, factor: float) -> None:
        """Multiplies all of them in place. Autograd does not see it: whoever calls this says so."""
        self._library.shoal_codec_multiply(*vectors.arguments(), factor)

    def multiply_measured(self, vectors: Vectors, factor: float) -> float:
        """Both in one pass: multiplies all of them, and returns the `joint_norm` that they had before."""
        return math.sqrt(self._library.shoal_codec_multiply_measured(*vectors.arguments(), factor))

    def mask(self, keys: Tensor, layer: int, first: Tensor, out: Tensor, *, least: int, kept: float) -> None:
        """Writes `out`, `[samples, rows, numel]`: `kept` where `bits(bits(keys, layer), first + i)` is `least` or more,
        else 0. Both `keys` `[samples]` and `first` `[rows]` are int64.
        """
        self._library.shoal_codec_mask(
            keys.data_ptr(), len(keys), layer % (1 << 64), first.data_ptr(), len(first), out.shape[-1], least, kept,
            out.data_ptr(),
        )  # fmt: skip

    def bits(self, keys: Tensor, layer: int, first: Tensor, out: Tensor) -> None:
        """Writes those bits, int64, in the place of a mask."""
        self._library.shoal_codec_bits(
            keys.data_ptr(), len(keys), layer % (1 << 64), first.data_ptr(), len(first), out.shape[-1], out.data_ptr()
        )

    def uniform(self, keys: Tensor, counter: int, out: Tensor) -> None:
        """Writes `out`, float32 or float64 in the shape of `keys`: `shoal.maths.counter.uniform(keys, counter)`."""
        double = out.dtype == torch.float64
        write = self._library.shoal_codec_uniform64 if double else self._library.shoal_codec_uniform32
        write(keys.data_ptr(), keys.numel(), counter, out.data_ptr())


def _floats(numbers: Sequence[float]) -> Any:
    return ctypes.byref((c_float * len(numbers))(*numbers))


_is_cpu, _dtype_of = attrgetter("is_cpu"), attrgetter("dtype")


def vectors_in(tensors: Sequence[Tensor], sizes: Iterable[int] | None = None) -> Vectors | None:
    """Where they lie, if the kernels can work on all of them: float32 in the memory of a CPU, each in a row. An address
    says nothing of what is there, and a script may give a tensor other memory at any time: ask anew for each use.
    `sizes`: how many numbers each has, where that was asked just now.
    """
    if set(map(type, tensors)) != {Tensor} or not all(map(_is_cpu, tensors)):
        return None
    if set(map(_dtype_of, tensors)) != {torch.float32} or not _in_rows(tensors):
        return None
    sizes = map(Tensor.numel, tensors) if sizes is None else sizes
    return Vectors(array("Q", list(map(Tensor.data_ptr, tensors))), array("Q", list(sizes)))


def _in_rows(tensors: Sequence[Tensor]) -> bool:
    try:
        return all(map(Tensor.is_contiguous, tensors))
    except RuntimeError:  # a sparse one has no rows
        return False


def kernels_for(*tensors: Tensor) -> Kernels | None:
    """The kernels, if they can work on these vectors: float32 and in the memory of a CPU."""
    if any(tensor.dtype != torch.float32 or tensor.device.type != "cpu" for tensor in tensors):
        return None
    return load_kernels()


@functools.cache
def load_kernels() -> Kernels | None:
    """None where Shoal was installed without a C compiler."""
    return next((Kernels(path) for path in _candidates() if path.exists()), None)


def _candidates() -> Sequence[Path]:
    return [Path(__file__).parent / f"_kernels{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]


# On a GPU: torch forms that Inductor compiles to one kernel of Triton's or two, where Triton is installed.
#
# The forms are their oracle on a CPU, where both give the same bits. Triton fuses a product and a sum, and divides in
# its own way, so that a GPU may round the last bit otherwise; all ranks of a run do it alike.


def compiles_for(x: Tensor) -> bool:
    """Whether a torch form is worth a compiler for `x`. Without Triton it runs operator by operator."""
    return x.device.type == "cuda" and x.numel() > 0 and has_triton()


@functools.cache
def compiled(form: Callable[..., Any]) -> Callable[..., Any]:
    """`form`, compiled when it is first called, for tensors of all sizes."""
    return torch.compile(form, dynamic=True)
