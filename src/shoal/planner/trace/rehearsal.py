"""One block by itself, forward and backward, between tensors that stand for what comes in from both sides.

Its operators are written down, and which storages begin and end between them. That is its script, from which
`planner.trace.alike` says what blocks like it do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shoal.planner.trace.operator import Message, Operator
from shoal.planner.trace.recorder import Alive, Recorder

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format)
"""What a block may get or give beside tensors: it is all in its value."""


NUMBERS_OF_BLOCKS = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "number"})
"""Attributes of modules that say which block it is."""


def is_number_of_block(name: Any, value: Any) -> bool:
    """Does this attribute of a module say which block it is?"""
    return name in NUMBERS_OF_BLOCKS and type(value) is int


class Unlike(Exception):
    """A block cannot be rehearsed, or what comes back to it is not what came back in the rehearsal."""


class _Watched:
    """An int that knows whether it was looked at. Handing it on, as to a cache that is off, is no look."""

    __class__ = int  # type: ignore[assignment]

    def __init__(self, value: int, looks: list[int]) -> None:
        self._value, self._looks = value, looks

    def __getattr__(self, name: str) -> Any:
        self._looks.append(self._value)
        return getattr(self._value, name)


def _watched(name: str) -> Callable[..., Any]:
    return lambda number, *args: number.__getattr__(name)(*args)


for _name in vars(int):
    if _name.startswith("__") and _name not in ("__new__", "__getattribute__", "__doc__"):
        setattr(_Watched, _name, _watched(_name))


@contextmanager
def _blind_to_numbers(block: nn.Module) -> Iterator[None]:
    """Raises `Unlike` where the numbers of blocks in `block` are looked at inside: other blocks may do other things."""
    looks = list[int]()
    numbers = [
        (vars(module), name, value)
        for module in block.modules()
        for name, value in vars(module).items()
        if is_number_of_block(name, value)
    ]
    for attributes, name, value in numbers:
        attributes[name] = _Watched(value, looks)
    try:
        yield
    except TypeError as error:  # of what takes a true int alone; any other is raised again where all is traced
        raise Unlike from error
    finally:
        for attributes, name, value in numbers:
            attributes[name] = value
    if looks:
        raise Unlike


@dataclass(frozen=True, slots=True)
class Event:
    """Bytes begin or end, or a term comes to a gradient. `number`: of a storage in the order of their beginnings, or of
    an input, or of an output whose gradient it is."""

    kind: str
    number: int
    size: int = 0
    unit: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Made:
    """A tensor that leaves a block, and the number of its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    number: int
    trained: bool = True

    def again(self) -> Tensor:
        """Another one."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


@dataclass(frozen=True)
class Given:
    """A tensor that leaves a block as it came: the `number`-th of its inputs, or of its outputs' gradients."""

    number: int


@dataclass
class Script:
    """What one block did. `outputs` are the leaves of what it returned, `gradients` those of its inputs."""

    path: str
    unit: int | None
    names: Mapping[str, str]
    form: TreeSpec
    outputs: list[Any] = field(default_factory=list)
    gradients: list[Made | Given | None] = field(default_factory=list)
    forward: tuple[Event, ...] = ()
    backward: tuple[Event, ...] = ()
    operators: tuple[Operator, ...] = ()
    messages: tuple[Message, ...] = ()

    @cached_property
    def made(self) -> list[Made]:
        """The outputs that it made."""
        return [output for output in self.outputs if isinstance(output, Made)]

    @cached_property
    def kept(self) -> dict[str, frozenset[int]]:
        """Inputs ("input") and storages of outputs ("end") that its backward keeps until it is done with them."""
        return {
            kind: frozenset(event.number for event in self.backward if event.kind == kind) for kind in ("input", "end")
        }


class _Log(Alive):
    """Writes down what begins and ends, of what neither lives in the trace around it nor comes in."""

    def __init__(self, around: Alive) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.around, self._numbers, self._count = around, dict[int, int](), count()
        self._outside: dict[int, tuple[Event, Any]] = {}

    def watch(self, tensor: Tensor, kind: str, number: int) -> None:
        """A tensor that comes in: an event of `kind` is when it ends."""
        storage = tensor.untyped_storage()
        self._outside[storage._cdata] = Event(kind, number), (tensor.shape, tensor.stride())
        weakref.finalize(storage, self._let_go, storage._cdata)

    def _let_go(self, key: int) -> None:
        self.events.append(self._outside.pop(key)[0])

    def knows(self, key: int) -> bool:
        return key in self._outside or super().knows(key) or self.around.knows(key)

    def begin(self, key: int, size: int, unit: int | None) -> None:
        self._numbers[key] = next(self._count)
        self.events.append(Event("begin", self._numbers[key], size, unit))
        super().begin(key, size, unit)

    def end(self, key: int) -> None:
        if key in self._living:
            self.events.append(Event("end", self._numbers[key]))
        super().end(key)

    def fill(self, name: str, size: int) -> None:
        self.events.append(Event("fill", 0, size, name=name))

    def leaving(self, tensor: Tensor) -> Made | None:
        """What leaves the block; None if its storage is not its own, or larger."""
        storage, stride = tensor.untyped_storage(), tensor.stride()
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True)) + 1
        if storage._cdata not in self._living or storage.nbytes() != reach * tensor.element_size():
            return None
        number = self._numbers[storage._cdata]
        return Made(tuple(tensor.shape), stride, tensor.dtype, number, tensor.requires_grad)

    def coming(self, tensor: Tensor, kind: str) -> Given | None:
        """What leaves the block as it came."""
        event, form = self._outside.get(tensor.untyped_storage()._cdata, (None, None))
        if event is None or event.kind != kind or form != (tensor.shape, tensor.stride()):
            return None
        return Given(event.number)

    @property
    def is_over(self) -> bool:
        """Has everything ended?"""
        return not self._living and not self._outside


class Rehearsal:
    """One block by itself. `recorder` writes it down."""

    def __init__(self, recorder: Recorder, path: str, block: nn.Module) -> None:
        self._recorder, self._path, self._block = recorder, path, block
        names = {recorder.names[id(p)]: own for own, p in block.named_parameters()}
        self._names, self._log = names, _Log(recorder.alive)

    def __call__(self, forward: Callable[..., Any], leaves: Sequence[Any], form: TreeSpec) -> Script:
        """Raises `Unlike` where it leaves anything behind, changes what it is given, looks at the number of its block,
        or gives what is neither its own nor given.
        """
        recorder, log = self._recorder, self._log
        unit, late = recorder.units.holding(self._path), list[int]()
        given: list[Made | Given | None] = [None] * len(leaves)
        with recorder.apart(log), _blind_to_numbers(self._block):
            script, roots, seeds = self._forward(forward, leaves, form, given, unit)
            before = len(log.events)
            with _outside_autocast(log.around, late):
                cached = [replace(event, kind="later") for event in log.events[before:]]
                script.forward, log.events = (*log.events[:before], *cached), []
                recorder.turn()
                if roots:
                    torch.autograd.backward(roots, seeds)
            script.backward, script.gradients = tuple(log.events), given
            script.operators, script.messages = recorder.finished(), tuple(recorder.messages)
        recorder.ends_with_forward += late
        if not log.is_over:
            raise Unlike
        return script

    def _forward(
        self, forward: Callable[..., Any], leaves: Sequence[Any], form: TreeSpec, gradients: list[Any], unit: int | None
    ) -> tuple[Script, list[Tensor], list[Tensor]]:
        """Nothing of what comes in outlives this call but what autograd keeps."""
        fresh = self._fresh(leaves, gradients)
        args, kwargs = tree_unflatten(fresh, form)
        results, returned = tree_flatten(forward(*args, **kwargs))
        self._check_unchanged(tree_flatten((args, kwargs)), fresh, form)
        script = Script(self._path, unit, self._names, returned, [self._output(result, fresh) for result in results])
        numbers = [made.number for made in script.made]
        if len(numbers) != len({*numbers}):
            raise Unlike
        with self._recorder.silent():
            made = [result for result, what in zip(results, script.outputs, strict=True) if isinstance(what, Made)]
            roots = [_Exit.apply(out, place, self) for place, out in enumerate(made) if out.requires_grad]
            return script, roots, [torch.empty(()) for _ in roots]

    @staticmethod
    def _check_unchanged(now: tuple[list[Any], TreeSpec], given: Sequence[Any], form: TreeSpec) -> None:
        """A list or a table that the block adds to, or a tensor that it writes into, is read by what follows."""
        written = any(isinstance(one, Tensor) and one._version for one in given)
        if written or now[1] != form or any(one is not was for one, was in zip(now[0], given, strict=True)):
            raise Unlike

    def _fresh(self, leaves: Sequence[Any], gradients: list[Any]) -> list[Any]:
        """`leaves` with a new tensor for each of their tensors; one that occurs twice becomes one again."""
        made: dict[int, Tensor] = {}
        with self._recorder.silent():
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and id(leaf) not in made:
                    like = Made(tuple(leaf.shape), leaf.stride(), leaf.dtype, place)
                    seed = torch.empty(0, requires_grad=True)
                    fresh = _Entrance.apply(seed, like, self, gradients) if leaf.requires_grad else like.again()
                    self._log.watch(fresh, "input", place)
                    made[id(leaf)] = fresh
        return [made.get(id(leaf), leaf) for leaf in leaves]

    def _output(self, result: Any, fresh: Sequence[Any]) -> Any:
        if not isinstance(result, Tensor):
            if isinstance(result, PLAIN) and not isinstance(result, _Watched):
                return result
            raise Unlike
        for place, tensor in enumerate(fresh):
            if tensor is result:
                return Given(place)
        return self._must(self._log.leaving(result))

    def gradient_of(self, place: int, gradient: Tensor, gradients: list[Any]) -> None:
        """Of the input `place`, as it leaves the block."""
        gradients[place] = self._must(self._log.leaving(gradient) or self._log.coming(gradient, "gradient"))

    def comes_back(self, place: int, like: Made) -> Tensor:
        """The gradient of an output."""
        with self._recorder.silent():
            gradient = like.again()
            self._log.watch(gradient, "gradient", place)
            return gradient

    @staticmethod
    def _must(what: Made | Given | None) -> Made | Given:
        if what is None:
            raise Unlike
        return what


@contextmanager
def _outside_autocast(around: Alive, late: list[int]) -> Iterator[None]:
    """Autocast keeps the weights that it has cast until its outermost context ends, and a backward runs outside. Those
    that were cast before, in the trace `around`, live on as `late`.
    """
    depth, enabled = torch.autocast_increment_nesting() - 1, torch.is_autocast_enabled("cpu")
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    with around.postponing() as postponed:
        torch.clear_autocast_cache()
        late += postponed
    torch.set_autocast_enabled("cpu", False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", enabled)
        for _ in range(depth):
            torch.autocast_increment_nesting()


class _Entrance(torch.autograd.Function):
    """An input that is no leaf."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, like: Made, rehearsal: Rehearsal, gradients: list[Any]) -> Tensor:
        ctx.place, ctx.rehearsal, ctx.gradients = like.number, rehearsal, gradients
        return like.again()

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        ctx.rehearsal.gradient_of(ctx.place, given[0], ctx.gradients)
        return None, None, None, None


class _Exit(torch.autograd.Function):
    """An output, of which nothing is kept."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, place: int, rehearsal: Rehearsal) -> Tensor:
        like = torch.empty_like(output)
        ctx.like = Made(tuple(like.shape), like.stride(), like.dtype, place)
        ctx.rehearsal = rehearsal
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        return ctx.rehearsal.comes_back(ctx.like.number, ctx.like), None, None
