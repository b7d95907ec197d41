"""`PartialGradient`: what `.grad` is where a rank does not have the whole gradient of a parameter.

Scripts act on gradients between the backward and the optimizer's step: they clip them by norm or by value, scale them,
add a penalty, log how large they are. Under ZeRO-1 to -3 a rank has one run of the elements of each gradient,

    elements of the parameter, row by row    | rank 0 | rank 1 | ...
    local                                    its run of them, one-dimensional, of no elements on some ranks

and between two microbatches of a step nobody has anything yet that such code could act on: `local` is empty.

A `PartialGradient` has the shape of the whole and no memory of its own, as a `DTensor`. An operator that treats every
element alone is applied to the run, with the same run of every whole tensor beside it. A sum, a mean, a norm or an
extreme of all elements is one all-reduce: every rank has to ask for it. So is the whole that an operator needs which
writes into a tensor of the script's own, such as `fisher.add_(p.grad**2)`. Everything else raises `UserCodeError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map

from shoal.comm.collective import Alone, Collective, Reduction
from shoal.errors import UserCodeError

aten = torch.ops.aten


class PartialGradient(Tensor):
    """The gradient of a parameter, of which this rank has the elements from `start` on in `local`. `group` are the
    ranks over which it is divided, `what` says in words whose gradient it is and why it is not whole. `counts`: no rank
    of the group before this one has the same elements.
    """

    local: Tensor
    start: int
    group: Collective
    what: str
    counts: bool

    @staticmethod
    def __new__(
        cls, local: Tensor, start: int, shape: Sequence[int], *, group: Collective, what: str, counts: bool = True
    ) -> Any:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)

    def __init__(
        self, local: Tensor, start: int, shape: Sequence[int], *, group: Collective, what: str, counts: bool = True
    ) -> None:
        self.local, self.start, self.group, self.what, self.counts = local, start, group, what, counts

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PartialGradient({list(self.shape)}, {self.local.numel()} elements here: {self.what})"

    def like(self, local: Tensor) -> PartialGradient:
        """Divided as this one, with other numbers."""
        return PartialGradient(local, self.start, self.shape, group=self.group, what=self.what, counts=self.counts)

    def run_of(self, whole: Tensor) -> Tensor:
        """This rank's elements of a tensor of the parameter's shape."""
        return whole.reshape(-1)[self.start : self.start + self.local.numel()]

    @property
    def counted(self) -> Tensor:
        """Those of its elements that no other rank counts."""
        return self.local if self.counts else self.local[:0]

    @property
    def counts_others(self) -> bool:
        """Whether this rank counts what stands beside it in a list and is no partial gradient: every rank has that."""
        return self.group.rank == 0

    def whole(self) -> Tensor:
        """All of it, a tensor of its own: one all-reduce, for which every rank has to ask."""
        flat = torch.zeros(self.numel(), dtype=self.dtype, device=self.device)
        flat[self.start : self.start + self.counted.numel()] = self.counted
        self.group.all_reduce(flat).wait()
        return flat.view(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet in _NORMS:
            return _norm(*args, **kwargs)
        if packet is aten._foreach_norm:
            return _norms(*args, **kwargs)
        if packet in _REDUCTIONS and len(args) == 1 and not kwargs:
            return _REDUCTIONS[packet](args[0])
        first = next(each for each in _flat(args, kwargs) if isinstance(each, PartialGradient))
        if packet.__name__.startswith("_foreach_"):
            return _foreach(func, args, kwargs)
        if torch.Tag.pointwise in func.tags or packet in _OF_ELEMENTS:
            return _on_elements(func, first, args, kwargs)
        raise UserCodeError(
            f"{first.what}, and {packet.__name__} needs the whole: use what treats each number alone (scaling, adding, "
            "clipping by value), norms and sums"
        )


def placeholder(name: str, parameter: Parameter) -> PartialGradient:
    """What `.grad` is between two microbatches of a step."""
    what = f"the gradient of {name} is not there before the step's last microbatch (if run.last_of_step)"
    nothing = torch.empty(0, dtype=parameter.grad_dtype, device=parameter.device)
    return PartialGradient(nothing, 0, parameter.shape, group=Alone(), what=what)


def _on_elements(func: Any, first: PartialGradient, args: Any, kwargs: Any) -> Any:
    """`func`, which treats every element alone, on this rank's run of every argument of the parameter's shape; on the
    whole of every gradient where it writes into another tensor, which is whole on every rank.
    """
    if first.group.size > 1 and _writes_into_whole(func, args, kwargs):
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs))

    def run_of(each: Any) -> Any:
        if isinstance(each, PartialGradient):
            return each.local if each.shape == first.shape else _refuse_shape(first, each)
        if isinstance(each, Tensor) and each.dim():
            return first.run_of(_spread(first, each))
        return each

    found = func(*tree_map(run_of, args), **tree_map(run_of, kwargs))
    if func._schema.is_mutable and isinstance(args[0], PartialGradient):
        return args[0]
    return first.like(found)


def _writes_into_whole(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `func` writes into a tensor that is not divided."""
    given = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **kwargs}
    written = [given.get(each.name) for each in func._schema.arguments if each.is_write]
    return any(isinstance(each, Tensor) and not isinstance(each, PartialGradient) for each in written)


def _whole(each: Any) -> Any:
    return each.whole() if isinstance(each, PartialGradient) else each


def _spread(first: PartialGradient, other: Tensor) -> Tensor:
    """`other` `[...]` in the shape of the gradient, as PyTorch spreads a factor for each row or column."""
    try:
        return other.expand(first.shape)
    except RuntimeError:
        return _refuse_shape(first, other)


def _refuse_shape(first: PartialGradient, other: Tensor) -> Tensor:
    raise UserCodeError(
        f"{first.what}: beside its {list(first.shape)} numbers it takes what can be spread over them, not "
        f"{list(other.shape)}"
    )


def _foreach(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator on lists: on the runs of each, one after the other."""
    single = func.overloadpacket.__name__.removeprefix("_foreach_")
    in_place = single.endswith("_")
    operator: Callable[..., Any] = getattr(Tensor, single)
    lists = [each for each in args if isinstance(each, (list, tuple))]
    found = []
    for number in range(len(lists[0])):
        row = [each[number] if isinstance(each, (list, tuple)) else each for each in args]
        found.append(operator(*row, **kwargs))
    return None if in_place else found


def _norm(own: PartialGradient, order: Any = 2, dims: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    return _norms([own], order, dims)[0]


def _norms(gradients: Sequence[Any], order: Any = 2, dims: Any = None, *args: Any, **kwargs: Any) -> list[Tensor]:
    """The `order`-norms of whole gradients: one all-reduce for all.

    |g|_p = (sum over ranks of sum |g_i|^p)^(1/p),    |g|_inf = largest over ranks
    """
    first = next(each for each in gradients if isinstance(each, PartialGradient))
    if dims not in (None, []) and len(dims) != first.dim():
        raise UserCodeError(f"{first.what}: take its norm over all dims, or use layout.replicate")
    order = float(order)
    parts = [_counted(each, first) for each in gradients]
    if order == float("inf"):
        own = torch.stack([p.abs().max().double() if p.numel() else p.new_zeros(()).double() for p in parts])
        first.group.all_reduce(own, "max").wait()
    else:
        own = torch.stack([p.double().abs().pow(order).sum() for p in parts])
        first.group.all_reduce(own).wait()
        own = own.pow(1.0 / order)
    return [norm.to(each.dtype) for norm, each in zip(own, gradients, strict=True)]


def _counted(each: Tensor, first: PartialGradient) -> Tensor:
    if isinstance(each, PartialGradient):
        return each.counted
    return each if first.counts_others else each.reshape(-1)[:0]


def _reduced(own: PartialGradient, value: Tensor, op: Reduction) -> Tensor:
    total = value.reshape(1).double()
    own.group.all_reduce(total, op).wait()
    return total[0].to(value.dtype)


def _extreme(own: PartialGradient, op: Reduction) -> Tensor:
    edge = float("-inf") if op == "max" else float("inf")
    if own.local.numel() == 0:  # a rank may have no element of a short parameter
        return _reduced(own, own.local.new_full((), edge), op)
    return _reduced(own, own.local.amax() if op == "max" else own.local.amin(), op)


_NORMS = {aten.linalg_vector_norm, aten.norm}
_REDUCTIONS: dict[Any, Callable[[PartialGradient], Tensor]] = {
    aten.sum: lambda own: _reduced(own, own.counted.sum(), "sum"),
    aten.mean: lambda own: _reduced(own, own.counted.sum(), "sum") / own.numel(),
    aten.max: lambda own: _extreme(own, "max"),
    aten.min: lambda own: _extreme(own, "min"),
    aten.any: lambda own: _reduced(own, own.local.any(), "max"),
    aten.all: lambda own: _reduced(own, own.local.all(), "min"),
}
_OF_ELEMENTS = {aten.detach, aten.alias, aten.clone, aten.zero_, aten.fill_, aten.copy_, aten._to_copy} | {
    aten.ones_like, aten.zeros_like, aten.full_like, aten.empty_like
}  # fmt: skip
"""Operators that treat every element alone, and have no tag that says so."""


def _flat(args: Any, kwargs: Any) -> list[Any]:
    found: list[Any] = []
    for each in (*args, *kwargs.values()):
        found += each if isinstance(each, (list, tuple)) else [each]
    return found
