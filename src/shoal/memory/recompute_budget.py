"""Which operators of which blocks keep their outputs under `memory.recompute = "budget"`: those that save most a byte.

A block that is computed again pays for its operators twice. Each output that is kept instead takes its bytes and saves
its operator's time, and a block that keeps all that its backward needs is not computed again at all. For every block
this gives a list of choices, (bytes kept, time repeated):

    (0, all)   (b_1, all - t_1)   (b_1 + b_2, all - t_1 - t_2)   ...   (saved by autograd, 0)

with operators in the order of t / b. Of these points the lower convex hull remains, and its edges, of all blocks
together, are taken steepest first while they fit: the greedy rule of the multiple-choice knapsack (Kellerer, Pferschy,
Pisinger, "Knapsack Problems", 2004, section 11.2), at most one edge from the best. Of equal edges the last block's come
first: its backward is the first, when all blocks before it still keep theirs. What is left is spent on points off the
hull. Checkmate (arXiv:1910.02653) and Rockmate solve the general problem by integer programming; here a block repeats
as a whole what it has not kept, so that times add up and nothing else has to be ordered.

Blocks are looked at in the first forward, by one more forward that leaves no trace, and again when an input is larger
than any before it. Choices are those of the largest inputs so far: smaller ones keep less than the budget. Ranks that
exchange something inside of blocks choose alike, from the larger of what each has seen. Times are
not measured but computed, so that every run of the same shapes keeps the same outputs: bytes moved, and products by the
arithmetic that a device makes while it moves a byte. Keeping some outputs of a block costs a look at each of its calls,
so that small blocks are kept whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from itertools import pairwise
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

BYTES_OF_A_CALL: Mapping[str, float] = {"cpu": 1e5, "cuda": 1e7}
"""Moved in the 10 us for which a call waits for Python, which looks at it in the forward and in its repetition."""
OPERATIONS_A_BYTE: Mapping[str, float] = {"cpu": 10.0, "cuda": 100.0}
"""Of a product, in the time in which memory moves a byte: a core with AVX2 or AVX-512, and GPUs since the A100."""

Operator = tuple[str, int]
"""The name of an operator, and the number of its call in one forward of its block, from 0."""


Sizes = tuple[tuple[int, ...], ...]
"""Of the tensors among a block's inputs, each: the bytes of an element, and its shape."""


def sizes_of(inputs: Any) -> Sizes:
    """Of all tensors in `inputs`, in order."""
    return tuple((x.element_size(), *x.shape) for x in tree_leaves(inputs) if isinstance(x, Tensor))


def _within(sizes: Sizes, larger: Sizes) -> bool:
    """As many tensors of as many dims, none of them larger in any."""
    return list(map(len, sizes)) == list(map(len, larger)) and all(
        a <= b for own, other in zip(sizes, larger, strict=True) for a, b in zip(own, other, strict=True)
    )


@dataclass(frozen=True)
class Candidate:
    """An operator whose output may be kept: its bytes, and the time of computing it again, in moved bytes."""

    operator: Operator
    bytes: int
    time: float


@dataclass(frozen=True)
class Profile:
    """One forward of a block: what may be kept, and what autograd saves of it where nothing is computed again."""

    candidates: tuple[Candidate, ...]
    saved_bytes: int
    overhead: float = 0.0
    """Time that it takes to keep some outputs and not others, whatever they are."""

    @property
    def time(self) -> float:
        """Of computing all of it again."""
        return sum(candidate.time for candidate in self.candidates)

    def covering(self, other: Profile) -> Profile:
        """The larger of both in everything."""
        own = {candidate.operator: candidate for candidate in self.candidates}
        for each in other.candidates:
            known = own.get(each.operator, each)
            own[each.operator] = Candidate(each.operator, max(each.bytes, known.bytes), max(each.time, known.time))
        saved, overhead = max(self.saved_bytes, other.saved_bytes), max(self.overhead, other.overhead)
        return Profile(tuple(own.values()), saved, overhead)


@dataclass(frozen=True)
class KeptOutputs:
    """What a block keeps: the outputs of `operators`, or, `whole`, all that its backward needs."""

    operators: frozenset[Operator] = frozenset()
    whole: bool = False
    bytes: int = 0
    time: float = 0.0


def choices_of(profile: Profile) -> list[KeptOutputs]:
    """Nothing kept, one operator more after the other, and all that autograd saves."""
    found, kept, size, time = [KeptOutputs(time=profile.time)], set[Operator](), 0, profile.time
    for each in sorted(profile.candidates, key=lambda c: -c.time / max(1, c.bytes)):
        kept.add(each.operator)
        size, time = size + each.bytes, time - each.time
        found.append(KeptOutputs(frozenset(kept), bytes=size, time=max(0.0, time) + profile.overhead))
    return [*found, KeptOutputs(whole=True, bytes=profile.saved_bytes)]


def chosen(profiles: Sequence[Profile], budget_bytes: int) -> list[KeptOutputs]:
    """What each block keeps, so that all of them together keep at most `budget_bytes`."""
    points = [choices_of(profile) for profile in profiles]
    curves = [_hull(each) for each in points]
    at, left = [0] * len(curves), budget_bytes
    edges = sorted(
        (
            ((a.time - b.time) / max(1, b.bytes - a.bytes), block, number)
            for block, curve in enumerate(curves)
            for number, (a, b) in enumerate(pairwise(curve))
        ),
        key=lambda edge: (-edge[0], -edge[1], edge[2]),  # the steepest first, and of equal ones the last block's
    )
    for _, block, number in edges:
        more = curves[block][number + 1].bytes - curves[block][at[block]].bytes
        if more <= left:
            at[block], left = number + 1, left - more
    return _filled([curve[number] for curve, number in zip(curves, at, strict=True)], points, left)


def _filled(found: list[KeptOutputs], points: Sequence[Sequence[KeptOutputs]], left: int) -> list[KeptOutputs]:
    """The same with what is left spent on choices off the hull, the block that gains most first."""
    while True:
        better = [
            (found[block].time - point.time, -point.bytes, block, number)
            for block, own in enumerate(points)
            for number, point in enumerate(own)
            if point.time < found[block].time and point.bytes - found[block].bytes <= left
        ]
        if not better:
            return found
        _, _, block, number = max(better)
        left -= points[block][number].bytes - found[block].bytes
        found[block] = points[block][number]


def _hull(points: list[KeptOutputs]) -> list[KeptOutputs]:
    hull: list[KeptOutputs] = []
    for point in sorted(points, key=lambda c: (c.bytes, c.time)):
        if hull and point.time >= hull[-1].time:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _above(a: KeptOutputs, b: KeptOutputs, c: KeptOutputs) -> bool:
    """Does `b` lie on or above the line from `a` to `c`?"""
    return (b.time - a.time) * (c.bytes - a.bytes) >= (c.time - a.time) * (b.bytes - a.bytes)


Exchange = Callable[[Any], Sequence[Any]]
"""From a JSON value to those of all ranks that exchange something inside of blocks, in the same order on each."""


@dataclass
class RecomputeBudget:
    """What the blocks of one rank keep, together at most `bytes`, if each runs once in a forward, in order, and what it
    computes has sizes that follow from those of its inputs. Where one is looked at, it and the blocks behind it keep
    nothing but their inputs.

    With `exchange`, all its ranks choose alike: what a block repeats, it exchanges again, so that a rank which kept all
    of it would be missed. `looks_again`: at larger inputs; not where these may come on one rank alone, which would wait
    for the others in its look.
    """

    bytes: int
    profiles: dict[int, Profile] = field(default_factory=dict)
    exchange: Exchange | None = None
    looks_again: bool = True
    _choices: dict[int, KeptOutputs] = field(default_factory=dict)
    _seen: dict[int, list[Sizes]] = field(default_factory=dict)

    def choice(self, block: int, sizes: Sizes, look: Callable[[], Profile]) -> KeptOutputs:
        """What the block of this number keeps in the forward that begins, of inputs of these sizes. `look` profiles it,
        if none that it was profiled with were as large.
        """
        seen = self._seen.setdefault(block, [])
        if not seen or (self.looks_again and not any(_within(sizes, larger) for larger in seen)):
            found = look()
            self.profiles[block] = self.profiles.get(block, found).covering(found)
            self._seen[block] = [*(smaller for smaller in seen if not _within(smaller, sizes)), sizes]
            self._choices = {}
            return KeptOutputs()
        if not self._choices and block == min(self.profiles):
            if self.exchange is not None:
                self.profiles = _covering(self.exchange(msgspec.to_builtins(self.profiles)))
            order = sorted(self.profiles)
            self._choices = dict(zip(order, chosen([self.profiles[n] for n in order], self.bytes), strict=True))
        return self._choices.get(block, KeptOutputs())

    @property
    def kept_bytes(self) -> int:
        """What the choices keep; 0 before they are made."""
        return sum(choice.bytes for choice in self._choices.values())

    @property
    def keeps_all(self) -> bool:
        """Whether the choices leave nothing to compute again; False before they are made."""
        return bool(self._choices) and all(choice.whole for choice in self._choices.values())


def _covering(found: Sequence[Any]) -> dict[int, Profile]:
    """The larger of what all ranks have seen, of each block."""
    every = [msgspec.convert(each, dict[int, Profile], strict=False) for each in found]
    return {block: reduce(Profile.covering, [each[block] for each in every]) for block in every[0]}


def profiled(forward: Callable[[], Any], apart: Collection[Tensor]) -> Profile:
    """The profile of one `forward`, whose graph is dropped. `apart` are tensors that are there anyway: the block's
    inputs, parameters and buffers.
    """
    held = {_key(tensor) for tensor in apart}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _key(tensor) not in held:
            saved[_key(tensor)] = tensor.untyped_storage()
        return tensor.detach()

    operators = _Operators()
    with saved_tensors_hooks(pack, lambda tensor: tensor), operators:
        result = forward()
    del result
    last = max((number for number, call in enumerate(operators.calls) if call.made & saved.keys()), default=-1)
    candidates = tuple(
        Candidate(call.operator, call.bytes, call.time)
        for call in operators.calls[: last + 1]  # what follows is not computed again: the repetition stops there
        if call.operator is not None
    )
    device = next((tensor.device.type for tensor in apart), "cpu")
    overhead = 2 * operators.number * BYTES_OF_A_CALL.get(device, BYTES_OF_A_CALL["cuda"])
    return Profile(candidates, sum(storage.nbytes() for storage in saved.values()), overhead)


class Numbering:
    """Counts the calls of operators that may be kept, by name. A repeated forward counts the same: casts, which
    autocast remembers, and views are left out, and what draws random numbers is always computed.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def number(self, func: Any) -> Operator | None:
        """Of this call; None where it is none of them."""
        name = _name_if_kept(func)
        if name is None:
            return None
        self._counts[name] = count = self._counts.get(name, -1) + 1
        return name, count


@dataclass(frozen=True)
class _Called:
    operator: Operator | None
    bytes: int
    time: float
    made: frozenset[int]


class _Operators(TorchDispatchMode):
    """Takes down what is called, with its output's bytes and its time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Called] = []
        self.number = 0
        self._numbering = Numbering()
        self._alive: list[torch.UntypedStorage] = []  # so that no other storage gets the address of one

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.number += 1
        operator = self._numbering.number(func)
        outputs = list(_tensors(result))
        given = {_key(x) for x in _tensors((args, kwargs))}
        fresh = [x for x in outputs if _key(x) not in given]
        self._alive += [x.untyped_storage() for x in fresh]
        if fresh:
            size = sum({_key(x): x.untyped_storage().nbytes() for x in fresh}.values())
            time = _time(func, args, kwargs or {}, result)
            self.calls.append(_Called(operator, size, time, frozenset(map(_key, fresh))))
        return result


@cache
def _name_if_kept(func: Any) -> str | None:
    """The name of an operator whose output may be kept."""
    return func._schema.name if _may_be_kept(func) else None


def _may_be_kept(func: Any) -> bool:
    schema = func._schema
    if func.namespace != "aten" or schema.name in ("aten::_to_copy", "aten::clone", "aten::copy"):
        return False
    if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in schema.name:
        return False
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    fresh = all(returned.alias_info is None for returned in schema.returns)
    return takes_tensors and fresh and any("Tensor" in str(returned.type) for returned in schema.returns)


def _time(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """Of one call, in bytes that memory moves meanwhile."""
    tensors = [*_tensors((args, kwargs)), *_tensors(result)]
    moved = float(sum(x.numel() * x.element_size() for x in tensors))
    rate = OPERATIONS_A_BYTE.get(tensors[0].device.type, OPERATIONS_A_BYTE["cuda"]) if tensors else 1.0
    return moved + _operations(func, args, kwargs, result) / rate


def _operations(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """Additions and multiplications of a product or an attention; of others what an element costs beside its bytes."""
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        return float(count(*args, **kwargs, out_val=result))
    if "attention" in func._schema.name:
        query, key = args[0], args[1]  # [batch, heads, tokens, size]
        return 4.0 * query.numel() * key.shape[-2]
    return 0.0


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and math.prod(leaf.shape))


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
