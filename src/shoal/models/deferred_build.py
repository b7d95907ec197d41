"""A user's model built without the storage of its parameters, and each parameter's first values made alone, later.

No rank of a layout that splits a model needs all of it, yet a user's function builds all. Under `DeferredBuild` tensors
that are made large (`torch.empty` in `nn.Linear`, ...) go to the meta device, which has shapes and no numbers, and what
is done to them is written down: the operator, its arguments, and the state of the generator that it draws from. To make
one parameter, the operators that its storage depends on are run again, in order, on real memory. Draws get the state
that they had, so the numbers are those of an ordinary build, bit for bit; each is made twice, which is the price.

What is recorded are reads and writes of storages: a view is a place in a storage, and needs no entry. Small tensors
(norms, biases, most buffers) are real from the start. Code that looks at numbers of a large one (`if`, `.item()`, a
draw that is repeated until all fit) gets them: they are made, read and let go. Code that asks for its memory
(`.numpy()`, `.data_ptr()`) cannot be deferred: PyTorch or this module raises, and the model has to be built whole.

PyTorch's own `nn.init` does nothing to tensors on the meta device, and other code may ask for the device, too; so these
tensors say that they are on the CPU as long as the model is built.

(The idea: Facebook's torchdistX, "deferred module initialization", 2022.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from shoal.errors import UserCodeError

LEAST_NUMEL = 1 << 14
"""Numbers of the smallest tensor that is made without storage."""

_DRAWS = frozenset(
    {"uniform_", "normal_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_", "rand", "randn",
     "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli_"}
)  # fmt: skip
"""Operators that take from a generator what depends on shapes alone, not on the numbers that they are given."""

_OVERWRITES = frozenset({"uniform_", "normal_", "zero_", "fill_", "exponential_"})
"""Operators in place that read nothing of what was there."""


@dataclass(frozen=True)
class Place:
    """A tensor as a part of a recorded storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Held:
    """A real tensor that an operator read; another version says that somebody has written to it since."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _Call:
    """One operator on storages. `results` has a place for each tensor that it returned; `state` is what its generator
    had before it drew, None where it draws nothing.
    """

    func: Any
    args: Any
    kwargs: Mapping[str, Any]
    results: tuple[Place | None, ...]
    storages: frozenset[int]
    state: Tensor | None


class DeferredBuild(TorchDispatchMode):
    """The mode, entered by `building`. The generators end where an ordinary build leaves them."""

    def __init__(self, *, least_numel: int = LEAST_NUMEL) -> None:
        super().__init__()
        self._least_numel = least_numel
        self._calls: list[_Call] = []
        self._touching: dict[int, list[int]] = {}
        self._shared: set[int] = set()
        self._alive: dict[int, Any] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Around the model's code. It raises whatever that code does where it asks for memory that is not there."""
        with self, _SaidOnCpu(self):
            yield

    def finished(self, model: nn.Module, dtype: torch.dtype | None = None) -> DeferredNumbers | None:
        """The first values of what has no storage in `model`, whose large buffers get theirs; None: all has storage.

        `dtype`: the type that parameters are wanted in; None: their own. Raises `UserCodeError` for a tensor without
        storage that was made past this mode.
        """
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta and not self.knows(tensor):
                raise UserCodeError(f"{name} was made on the meta device by the model's own code, and has no numbers")
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_meta:
                    setattr(module, name, self.numbers(buffer).clone())
        self._scratch = torch.empty(0, dtype=torch.uint8)
        values = DeferredNumbers(self, model, dtype)
        return values if any(True for _ in values.names) else None

    def knows(self, tensor: Tensor) -> bool:
        """Was it made without storage here?"""
        return tensor.is_meta and tensor.untyped_storage()._cdata in self._alive

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(self.knows(x) for x in given):
            return self._record(func, args, kwargs)
        if _makes_new(func, given) and _on_cpu(kwargs, given):
            with_meta = kwargs | {"device": torch.device("meta")}
            shaped = func(*tree_map_only(Tensor, _shape_of, args), **with_meta)
            if shaped.is_floating_point() and shaped.numel() >= self._least_numel:
                return self._record(func, args, kwargs)
        return func(*args, **kwargs)

    def numbers(self, tensor: Tensor) -> Tensor:
        """The numbers of a tensor that was made without storage, on the CPU; nothing of it is kept here."""
        return self.made(_place_of(tensor))

    @torch.no_grad()
    def made(self, place: Place) -> Tensor:
        """The same, by its place."""
        made = dict[int, Tensor]()
        for index in self._needed(place.storage):
            _run(self._calls[index], made)
        return _view(place, made)

    def _record(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._refuse(func, args, kwargs)
        if _needs_numbers(func):
            return self._looked_at(func, args, kwargs)
        state = self._drawn(func, args, kwargs)
        result = self._shaped(func, args, kwargs)
        results = tuple(_place_of(x) if isinstance(x, Tensor) and x.is_meta else None for x in tree_leaves(result))
        if not _writes(func) and all(place is None or place.storage in self._alive for place in results):
            return result  # a view, or only a shape was asked for
        held = tree_map(self._held, (list(args), kwargs))
        places = [x for x in (*tree_leaves(held), *results) if isinstance(x, Place)]
        storages = frozenset(place.storage for place in places)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._alive.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage())
        self._forget_overwritten(func, args)
        if len(storages) > 1:
            self._shared |= storages
        for storage in storages:
            self._touching.setdefault(storage, []).append(len(self._calls))
        self._calls.append(_Call(func, held[0], held[1], results, storages, state))
        return result

    def _drawn(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """The state of its generator before it draws, which afterwards is where the draw leaves it; None: no draw.

        What is drawn goes to one piece of memory for all: glibc does not reuse aligned memory between small pieces.
        """
        if func._schema.name.removeprefix("aten::") not in _DRAWS:
            return None
        generator = kwargs.get("generator") or torch.default_generator
        state = generator.get_state()
        drawn, out = tree_map_only(Tensor, self._memory_for, (list(args[:1]), kwargs.get("out")))
        read, named = tree_map_only(Tensor, _zeros_like, (list(args[1:]), dict(kwargs)))
        func(*drawn, *read, **(named if out is None else named | {"out": out}))
        return state

    def _memory_for(self, tensor: Tensor) -> Tensor:
        """Some memory that it may lie in as it does in its own: kernels draw in another order, and other numbers of
        them, where strides differ (`normal_` of a slice, or of a transposed matrix).
        """
        nbytes = _extent(tensor.shape, tensor.stride()) * tensor.itemsize
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[:nbytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def _refuse(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises `UserCodeError` for what could not be repeated."""
        name = func._schema.name.removeprefix("aten::")
        if torch.Tag.nondeterministic_seeded in func.tags and name not in _DRAWS:
            raise UserCodeError(f"{name} draws from the numbers of a parameter")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes and isinstance(value, Tensor) and not self.knows(value):
                raise UserCodeError(f"{name} writes the numbers of a parameter into another tensor")

    def _shaped(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result on the meta device."""
        bare_args, bare = tree_map_only(Tensor, _shape_of, (list(args), dict(kwargs)))
        if _takes_device(func):
            bare["device"] = torch.device("meta")
        bare.pop("generator", None)
        return func(*bare_args, **bare)

    def _looked_at(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What comes of the numbers as they are now."""
        real = lambda x: self.numbers(x) if self.knows(x) else x  # noqa: E731
        real_args, real_kwargs = tree_map_only(Tensor, real, (list(args), dict(kwargs)))
        return func(*real_args, **real_kwargs)

    def _held(self, value: Any) -> Any:
        """An argument as it is repeated."""
        if not isinstance(value, Tensor):
            return value
        if self.knows(value):
            return _place_of(value)
        kept = value.detach()
        kept = kept if kept.numel() >= self._least_numel else kept.clone()
        return _Held(kept, kept._version)

    def _forget_overwritten(self, func: Any, args: Sequence[Any]) -> None:
        """What was done to a whole storage before all of it is written anew, unless another tensor came of it."""
        if func._schema.name.removeprefix("aten::") not in _OVERWRITES:
            return
        whole = args[0].untyped_storage()
        touching = self._touching.get(whole._cdata, [])
        if whole._cdata not in self._shared and args[0].is_contiguous() and args[0].nbytes == whole.nbytes():
            del touching[1:]  # the first one made it

    def _needed(self, storage: int) -> list[int]:
        """The calls that the numbers of a storage depend on, in order."""
        found, seen, waiting = set[int](), {storage}, [storage]
        while waiting:
            for index in self._touching.get(waiting.pop(), ()):
                if index not in found:
                    found.add(index)
                    new = self._calls[index].storages - seen
                    seen |= new
                    waiting += new
        return sorted(found)


class _SaidOnCpu(TorchFunctionMode):
    """What the model's code is told of tensors that `build` made without storage."""

    def __init__(self, build: DeferredBuild) -> None:
        super().__init__()
        self._build = build

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner = getattr(func, "__self__", None)
        if owner in (Tensor.is_meta, Tensor.device, Tensor.is_cpu) and self._build.knows(args[0]):
            return {Tensor.is_meta: False, Tensor.is_cpu: True}.get(owner, torch.device("cpu"))
        if func is Tensor.data_ptr and self._build.knows(args[0]):
            raise UserCodeError("its code asks where a parameter lies in memory")
        return func(*args, **(kwargs or {}))


class DeferredNumbers:
    """The first values of a model's large parameters, by name, as they come of what `build` recorded."""

    local = False

    def __init__(self, build: DeferredBuild, model: nn.Module, dtype: torch.dtype | None) -> None:
        self._build, self._dtype = build, dtype
        self._places = {name: _place_of(p) for name, p in model.named_parameters() if p.is_meta}

    @property
    def names(self) -> Iterable[str]:
        """Of the parameters that have no storage yet."""
        return self._places

    def dtype(self, name: str) -> torch.dtype:
        """The type that the numbers of a parameter are wanted in."""
        return self._dtype or self._places[name].dtype

    def numbers(self, name: str) -> Tensor:
        """All of one, on the CPU, in the type that it was built in."""
        return self._build.made(self._places[name])

    def close(self) -> None:
        """Lets go of the record, and of the tensors in it."""
        self._build, self._places = DeferredBuild(), {}


class ReadNumbers:
    """The same of a model whose parameters lie in files that are mapped into memory: nothing is read before its use."""

    local = True

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        self._tensors, self._dtype = tensors, dtype

    @property
    def names(self) -> Iterable[str]:
        """Of all of them."""
        return self._tensors

    def dtype(self, name: str) -> torch.dtype:
        """The type that the numbers of a parameter are wanted in."""
        return self._dtype or self._tensors[name].dtype

    def numbers(self, name: str) -> Tensor:
        """All of one, on the CPU."""
        return self._tensors[name]

    def close(self) -> None:
        """Lets go of the files."""
        self._tensors = {}


def _makes_new(func: Any, given: Sequence[Tensor]) -> bool:
    """Is it a factory that reads no numbers?"""
    name = func._schema.name.removeprefix("aten::")
    return _takes_device(func) and (not given or name.startswith("new_") or name.endswith("_like"))


def _needs_numbers(func: Any) -> bool:
    """Does the result, or its shape, follow from numbers?"""
    data_dependent = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return bool(data_dependent & set(func.tags)) and not _writes(func)


def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _on_cpu(kwargs: Mapping[str, Any], given: Sequence[Tensor]) -> bool:
    device = kwargs.get("device")
    named = torch.device("cpu") if device is None else torch.device(device)
    return named.type == "cpu" and all(x.device.type == "cpu" for x in given) and kwargs.get("pin_memory") is not True


def _writes(func: Any) -> bool:
    infos = [argument.alias_info for argument in func._schema.arguments]
    return any(info is not None and info.is_write for info in infos)


def _shape_of(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")


def _zeros_like(tensor: Tensor) -> Tensor:
    """What a draw reads (chances): how much it takes from the generator does not depend on them."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """From the first element to the last one, both counted; 0 where there is none."""
    return 0 if 0 in size else sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1


def _place_of(tensor: Tensor) -> Place:
    storage = tensor.untyped_storage()._cdata
    return Place(storage, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


def _run(call: _Call, made: dict[int, Tensor]) -> None:
    """Repeats it on real storages, of which `made` has a tensor each that begins where the storage does."""

    def real(value: Any) -> Any:
        if isinstance(value, _Held):
            if value.tensor._version != value.version:
                raise UserCodeError("a tensor that a parameter was made of has changed since: build the model whole")
            return value.tensor
        return _view(value, made) if isinstance(value, Place) else value

    args, kwargs = tree_map(real, (call.args, dict(call.kwargs)))
    if _takes_device(call.func):
        kwargs["device"] = torch.device("cpu")
    if call.state is None:
        result = call.func(*args, **kwargs)
    else:
        kwargs.pop("generator", None)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(call.state)
            result = call.func(*args, **kwargs)
    for place, tensor in zip(call.results, tree_leaves(result), strict=True):
        if place is not None and place.storage not in made:
            made[place.storage] = _as_recorded(place, tensor)


def _as_recorded(place: Place, tensor: Tensor) -> Tensor:
    """`tensor` on a storage in which it lies as the recorded one does: kernels may choose other strides."""
    if tensor.stride() != place.stride or tensor.storage_offset() != place.offset:
        length = place.offset + _extent(place.size, place.stride)
        laid = torch.zeros(length, dtype=place.dtype).as_strided(place.size, place.stride, place.offset)
        tensor = laid.copy_(tensor)
    return tensor


def _view(place: Place, made: Mapping[int, Tensor]) -> Tensor:
    found = made[place.storage]
    if found.dtype != place.dtype:  # a view of the same bytes
        found = torch.empty(0, dtype=place.dtype).set_(found.untyped_storage())
    return found.as_strided(place.size, place.stride, place.offset)
