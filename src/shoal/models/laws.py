"""Laws of PyTorch's random functions: what each computes from random bits (`shoal.models.keyed_functions`).

A law is called as `law(bits, out, args, kwargs)`, and returns the numbers that `out` is overwritten with; `args` and
`kwargs` are what the function was called with. The laws are those of PyTorch's functions; the numbers are others.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.maths.counter import normal, uniform


class Loops(Protocol):
    """Loops over numbers in the memory of a CPU, as `shoal.codec.kernels.Kernels` has them: bit for bit what operators
    of PyTorch compute in a dozen passes.
    """

    def mask(self, keys: Tensor, layer: int, first: Tensor, out: Tensor, *, least: int, kept: float) -> None:
        """See `Kernels.mask`."""
        ...

    def bits(self, keys: Tensor, layer: int, first: Tensor, out: Tensor) -> None:
        """See `Kernels.bits`."""
        ...

    def uniform(self, keys: Tensor, counter: int, out: Tensor) -> None:
        """See `Kernels.uniform`."""
        ...


@dataclass(frozen=True)
class Bits:
    """64 random bits for each element of a tensor, `numbers`, int64 in its shape; `loops` None: operators of PyTorch's
    compute with them.
    """

    numbers: Tensor
    loops: Loops | None = None

    def uniform(self, dtype: torch.dtype, *, counter: int = 0) -> Tensor:
        """Numbers of the open interval (0, 1), in `dtype`, float32 or float64; other ones for another `counter`."""
        if self.loops is None or not self.numbers.is_cpu:
            return uniform(self.numbers, torch.full_like(self.numbers, counter), dtype=dtype)
        numbers = self.numbers.contiguous()
        out = torch.empty_like(numbers, dtype=dtype)
        self.loops.uniform(numbers, counter, out)
        return out

    def normal(self) -> Tensor:
        """Standard normal numbers, float64: those of `shoal.maths.counter.normal`."""
        if self.loops is None:
            return normal(self.numbers, torch.zeros_like(self.numbers), dtype=torch.float64)
        radius = self.uniform(torch.float64).log_().mul_(-2).sqrt_()
        return radius.mul_(self.uniform(torch.float64, counter=1).mul_(2 * math.pi).cos_())


Law = Callable[[Bits, Tensor, Any, Any], Tensor]


def _uniform(drawn: Bits, out: Tensor) -> Tensor:
    return drawn.uniform(torch.float64 if out.dtype in (torch.float64, torch.complex128) else torch.float32)


def _below_one(drawn: Bits, out: Tensor) -> Tensor:
    """Uniform numbers that a half type does not round to 1."""
    return _uniform(drawn, out).clamp_(max=1 - torch.finfo(out.dtype).eps / 2)


def _standard_normal(drawn: Bits, out: Tensor) -> Tensor:
    """In float64. Both parts of a complex number together have the variance 1."""
    numbers = drawn.normal()
    return numbers * math.sqrt(0.5) if out.is_complex() else numbers


def _argument(args: Any, kwargs: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _uniform_in_place(drawn: Bits, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    low, high = _argument(args, kwargs, 1, "from", 0.0), _argument(args, kwargs, 2, "to", 1.0)
    return low + (high - low) * _below_one(drawn, out)


def _normal_in_place(drawn: Bits, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    mean, std = _argument(args, kwargs, 1, "mean", 0.0), _argument(args, kwargs, 2, "std", 1.0)
    return mean + std * _standard_normal(drawn, out)


def _normal_of(drawn: Bits, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    mean, std = _argument(args, kwargs, 0, "mean", 0.0), _argument(args, kwargs, 1, "std", 1.0)
    return mean + std * _standard_normal(drawn, out)


def _log_normal(drawn: Bits, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    mean, std = _argument(args, kwargs, 1, "mean", 1.0), _argument(args, kwargs, 2, "std", 2.0)
    return (mean + std * _standard_normal(drawn, out)).exp()


def _cauchy(drawn: Bits, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    median, sigma = _argument(args, kwargs, 1, "median", 0.0), _argument(args, kwargs, 2, "sigma", 1.0)
    return median + sigma * (math.pi * (_uniform(drawn, out).double() - 0.5)).tan()


def _geometric(drawn: Bits, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    failing = 1 - torch.as_tensor(_argument(args, kwargs, 1, "p", 0.5), dtype=torch.float64)
    return (_uniform(drawn, out).double().log() / failing.log()).ceil().clamp(min=1)


def _integers_in_place(drawn: Bits, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    """`x.random_(to)`, `x.random_(from, to)`, or `x.random_()`, which goes as far as the type counts exactly."""
    bounds = [bound for bound in (*args[1:], kwargs.get("from"), kwargs.get("to")) if bound is not None]
    low = bounds[0] if len(bounds) > 1 else 0
    high = bounds[-1] if bounds else _count_limit(out.dtype)
    return low + (drawn.numbers >> 1).remainder(high - low)


def _count_limit(dtype: torch.dtype) -> int:
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return 2 if dtype == torch.bool else min(torch.iinfo(dtype).max + 1, 2**63 - 1)


def _normal(drawn: Bits, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    return _standard_normal(drawn, out)


def _bernoulli(drawn: Bits, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    p = _argument(args, kwargs, 1, "p", None)
    return _uniform(drawn, out) < (args[0] if p is None else p)


def _bernoulli_in_place(drawn: Bits, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    return _uniform(drawn, out) < _argument(args, kwargs, 1, "p", 0.5)


def _exponential(drawn: Bits, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    return -_uniform(drawn, out).log() / _argument(args, kwargs, 1, "lambd", 1.0)


def _integers(drawn: Bits, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    numbers = [x for x in args if isinstance(x, int)]
    low = kwargs.get("low", numbers[0] if len(numbers) > 1 else 0)
    high = kwargs.get("high", numbers[-1] if numbers else 1)
    return low + (drawn.numbers >> 1).remainder(high - low)


def _uniform_below_one(drawn: Bits, out: Tensor, args: Any, kwargs: Any) -> Tensor:
    return _below_one(drawn, out)


LAWS: Mapping[Any, Law] = types.MappingProxyType(
    {
        **dict.fromkeys((torch.rand, torch.rand_like), _uniform_below_one),
        **dict.fromkeys((torch.randn, torch.randn_like), _normal),
        **dict.fromkeys((torch.randint, torch.randint_like), _integers),
        torch.bernoulli: _bernoulli,
        Tensor.bernoulli_: _bernoulli_in_place,
        Tensor.uniform_: _uniform_in_place,
        Tensor.normal_: _normal_in_place,
        Tensor.exponential_: _exponential,
        Tensor.random_: _integers_in_place,
        Tensor.cauchy_: _cauchy,
        Tensor.log_normal_: _log_normal,
        Tensor.geometric_: _geometric,
        torch.normal: _normal_of,
    }
)
"""By the function of PyTorch's whose place they take."""
