"""Writes down every operator of a forward and a backward, with the module that it belongs to.

Modules are known by hooks in the forward. In the backward, autograd's node says which operator it is the gradient of:
nodes are numbered in the order of the forward, and the hooks know at which number each module began and ended.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _get_sequence_nr  # pyright: ignore[reportPrivateImportUsage]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.memory.recompute import blocks_of
from shoal.models.roles import DeclaresParts
from shoal.planner.trace.operator import Message, Operator, Phase, Shape, WeightGradients, attention_flops, products_of

# The units of a model: what stages are made of and what is computed again; what belongs to none lies outside.
#
# A model that declares a chain has its parts; another the blocks that `memory.recompute` would find; else none.


@dataclass(frozen=True)
class Units:
    """Names in order, and the unit of a module by its path; `blocks` are those between a chain's first and last part,
    or all."""

    names: tuple[str, ...]
    of_module: Mapping[str, int]
    blocks: tuple[int, ...]
    is_chain: bool

    def holding(self, path: str) -> int | None:
        """The unit of a module or a parameter by its path, that of the module around it included."""
        while path:
            if path in self.of_module:
                return self.of_module[path]
            path = path.rpartition(".")[0]
        return None


def units_of(model: nn.Module) -> Units:
    """The units of `model`, before or after it was split."""
    if isinstance(model, DeclaresParts) and (parts := list(model.parts())):
        named = [(part.name, part.modules) for part in parts]
        inner = range(1, len(named) - 1) if len(named) > 2 else range(len(named))
        return _units(named, blocks=tuple(inner), is_chain=True)
    blocks = blocks_of(model)
    return _units([(name, (name,)) for name in blocks], blocks=tuple(range(len(blocks))), is_chain=False)


def _units(named: Iterable[tuple[str, Iterable[str]]], *, blocks: tuple[int, ...], is_chain: bool) -> Units:
    named = list(named)
    of_module = {module: index for index, (_, modules) in enumerate(named) for module in modules}
    return Units(tuple(name for name, _ in named), of_module, blocks, is_chain)


# Bytes that are alive at each moment of a trace: what an eager program would hold, storage by storage.
#
# Fake tensors die when real ones would, so that the timeline of their storages is that of an allocator without
# fragmentation. It holds what autograd keeps, what a recomputed block keeps of its inputs, and temporaries between
# operators; scratch memory inside of an operator it does not see.


NAMELESS = count(-1, -1)
"""Names of what lives without a storage: negative, as those of storages are not."""


@dataclass(frozen=True)
class Filled:
    """The gradient of the parameter `name`, of `bytes`, is added to. `before_bytes`: the most that lived since the one
    before; `with_term_bytes`: what lives now, the term that is added included.
    """

    name: str
    bytes: int
    before_bytes: int
    with_term_bytes: int


@dataclass
class Alive:
    """Counts storages from their first sight to their end; those of `apart` never. `filled` are the gradients in the
    order in which a backward adds to them, and `since_bytes` the most that lived since the last of them.
    """

    bytes: int = 0
    peak_bytes: int = 0
    since_bytes: int = 0
    filled: list[Filled] = field(default_factory=list)
    peak_by_unit: dict[int | None, int] = field(default_factory=dict)
    _living: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    _apart: set[int] = field(default_factory=set)
    _kept_bytes: int = 0
    _kept: set[int] = field(default_factory=set)
    _postponed: list[int] | None = None

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """These are no activations: parameters, gradients, inputs. They must outlive the trace."""
        self._apart |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def see(self, tensor: Tensor, unit: int | None) -> None:
        """A tensor that came out of an operator of `unit`."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if not self.knows(key) and size:
            weakref.finalize(storage, self.end, key)
            self.begin(key, size, unit)

    def knows(self, key: int) -> bool:
        """Is the storage `key` counted now, or left out?"""
        return key in self._apart or key in self._living

    def begin(self, key: int, size: int, unit: int | None) -> None:
        """`size` bytes live from now on."""
        self._living[key] = (size, unit)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        self.since_bytes = max(self.since_bytes, self.bytes)
        new = self.bytes - self._kept_bytes
        self.peak_by_unit[unit] = max(self.peak_by_unit.get(unit, 0), new)

    def end(self, key: int) -> None:
        """What began as `key` lives no longer; a second time is none."""
        if key not in self._living:
            return
        size, unit = self._living.pop(key)
        if self._postponed is not None:
            self._postponed.append(next(NAMELESS))
            self._living[self._postponed[-1]] = size, unit
            return
        self.bytes -= size
        if key in self._kept:
            self._kept.discard(key)
            self._kept_bytes -= size

    @contextmanager
    def postponing(self) -> Iterator[list[int]]:
        """Inside, what ends lives on: as the numbers that this gives."""
        self._postponed = postponed = list[int]()
        try:
            yield postponed
        finally:
            self._postponed = None

    def fill(self, name: str, size: int) -> None:
        """A term of it was added to the gradient of a parameter, of `size` bytes, and ends next."""
        self.filled.append(Filled(name, size, self.since_bytes, self.bytes))
        self.since_bytes = 0

    def keep(self) -> dict[int | None, int]:
        """Bytes by unit that are alive now, at the end of a forward: from here on, what is new is counted apart."""
        held: dict[int | None, int] = {}
        for size, unit in self._living.values():
            held[unit] = held.get(unit, 0) + size
        self._kept, self._kept_bytes = set(self._living), self.bytes
        self.peak_by_unit = {}
        return held


LOOKED_UP = frozenset(
    {"aten.embedding", "aten.index", "aten.index_select", "aten.gather", "aten.nll_loss_forward", "aten._unsafe_index"}
)
"""Operators that read of their first argument only as much as they give."""

CONVOLUTIONS = "aten.convolution_backward"
"""It says itself which of its products gives what."""

ALLOCATIONS = frozenset({"aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided"})
"""They move nothing."""


class Recorder(TorchDispatchMode):
    """Records while it is entered; fake tensors are made by a mode outside of it."""

    def __init__(self, model: nn.Module, units: Units, alive: Alive) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self.messages: list[Message] = []
        self.in_backward = self.deaf = False
        self.ends_with_forward: list[int] = []
        self.units, self.alive = units, alive
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._paths: list[str] = []
        self.names = {id(p): name for name, p in model.named_parameters()}
        self._model, self._weights = model, WeightGradients(model)

    @contextmanager
    def apart(self, alive: Alive) -> Iterator[None]:
        """Inside, operators, messages and bytes are those of another trace, of a forward within this one."""
        before = self.operators, self.messages, self.alive, self._weights, self._stack, self.ends_with_forward
        self.operators, self.messages, self.alive, self.ends_with_forward = [], [], alive, []
        self._weights, self._stack = WeightGradients(self._model), [*self._stack]
        try:
            yield
        finally:
            self.operators, self.messages, self.alive, self._weights, self._stack, self.ends_with_forward = before
            self.in_backward = False

    def turn(self) -> None:
        """The forward is over, and the backward begins."""
        self.in_backward, self._stack = True, []
        for key in self.ends_with_forward:
            self.alive.end(key)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Inside, nothing is written down."""
        self.deaf = True
        try:
            yield
        finally:
            self.deaf = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            out = self._grouped_mm(func, args, kwargs or {})
        else:
            out = func(*args, **(kwargs or {}))
        if func.namespace != "prim" and not self.deaf:
            self._note(func, args, kwargs or {}, out)
        return out

    def _grouped_mm(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """On the CPU it takes any type, but PyTorch says shapes for bfloat16 alone."""
        dtype = args[0].dtype
        with self.silent():
            left, right = (one.to(torch.bfloat16) for one in args[:2])
            return func(left, right, *args[2:], **kwargs).to(dtype)

    def told(self, kind: str, size: int) -> None:
        """A collective; kinds that tensor ranks do not use are refused."""
        if kind not in ("all_reduce", "all_gather"):
            raise ValueError(f"tensor ranks sum and gather, and this is a {kind}")
        self.messages.append(Message(kind, size, self._phase(), self.units.holding(self._module())))

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Knows which module runs, while it is entered."""
        handles = []
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enters(path), prepend=True))
            handles.append(module.register_forward_hook(self._leaves(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enters(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._stack.append(path)
            self._begin(path)

        return hook

    def _leaves(self) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            self._stack.pop()
            self._begin(self._stack[-1] if self._stack else "")

        return hook

    def _begin(self, path: str) -> None:
        self._starts.append(_get_sequence_nr())
        self._paths.append(path)

    def _phase(self) -> Phase:
        """A backward computes without recording gradients, a block that is computed again with it."""
        if not self.in_backward:
            return "forward"
        return "recompute" if torch.is_grad_enabled() else "backward"

    def _module(self) -> str:
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self.names.get(id(variable), "").rpartition(".")[0]
        place = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._paths[place] if place >= 0 else ""

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not outputs:
            return
        inputs = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
        name, phase, module = f"{func.namespace}.{func._schema.name.split('::')[1]}", self._phase(), self._module()
        unit = self.units.holding(module)
        behind = {tensor.untyped_storage()._cdata for tensor in inputs}
        new = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in behind]
        if not new and not func._schema.is_mutable:
            return  # a view
        if name == "aten.add_" and self._accumulates():
            self._fill(inputs[0])
        for tensor in new:
            self.alive.see(tensor, unit)
        if name in ALLOCATIONS:
            return
        shapes_in, shapes_out = tuple(map(_shape, inputs)), tuple(map(_shape, outputs))
        place = len(self.operators) if phase == "backward" else None
        self._weights.follow(name, inputs, outputs[0], place, ends=self._accumulates())
        self.operators.append(
            Operator(
                name=name,
                phase=phase,
                module=module,
                unit=unit,
                inputs=shapes_in,
                outputs=shapes_out,
                products=products_of(name, args, out, gives="input" if phase == "backward" else "output"),
                attention_flops=attention_flops(name, args),
                moved_bytes=_moved(name, shapes_in, shapes_out),
            )
        )

    def _fill(self, gradient: Tensor) -> None:
        """Of a parameter: a model may make leaves of its own, whose gradients nobody keeps."""
        variable = getattr(torch._C._current_autograd_node(), "variable", None)
        if (name := self.names.get(id(variable))) is not None:
            self.alive.fill(name, gradient.untyped_storage().nbytes())

    def finished(self) -> tuple[Operator, ...]:
        """All operators; of the products in the backward those that gave weights' gradients are told apart."""
        return tuple(
            replace(one, products=tuple(replace(product, gives="weight") for product in one.products))
            if place in self._weights.givers and one.name != CONVOLUTIONS
            else one
            for place, one in enumerate(self.operators)
        )

    def _accumulates(self) -> bool:
        """Is a gradient on its way into its parameter?"""
        return hasattr(torch._C._current_autograd_node(), "variable")


def _shape(tensor: Tensor) -> Shape:
    size = min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
    return Shape(tuple(tensor.shape), tensor.element_size(), size)


def _moved(name: str, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    written = sum(shape.size for shape in outputs)
    if name in LOOKED_UP:
        return 2 * written + sum(shape.size for shape in inputs[1:])
    return written + sum(shape.size for shape in inputs)
