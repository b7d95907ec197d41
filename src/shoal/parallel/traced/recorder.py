"""A forward as a graph, recorded while it runs on a batch: which function takes which tensor, and from which module.

    tensors     are the real ones; a `TorchFunctionMode` sees every function that takes or gives one
    modules     of PyTorch, and GPT-2's linear layer, are one call each; into all others the recording goes
    integers    those of `x.shape`, and the integer attributes of modules, remember where they were read, so that the
                graph tells a width that an attribute says from one that is read off a tensor

Whatever the forward decides in Python, it decides on this batch: unlike `torch.fx`'s tracer, nothing has to be known
without it. The graph is that of `torch.fx` (arXiv:2112.08429); it is for reading, not for running.
"""

from __future__ import annotations

import dataclasses
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError
from torch.overrides import TorchFunctionMode

from shoal.errors import ShoalError
from shoal.models.roles import is_conv1d


def reason_of(error: Exception) -> str:
    """Why a trace failed, in a line."""
    said = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, TraceError | ShoalError):
        return said
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return f"{where}{type(error).__name__}: {said}"


_OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "matmul": operator.matmul,
    "__getitem__": operator.getitem, "__add__": operator.add, "__radd__": operator.add, "__mul__": operator.mul,
    "__rmul__": operator.mul, "__matmul__": operator.matmul, "__truediv__": operator.truediv, "__sub__": operator.sub,
}  # fmt: skip


VALUE = "value"
"""In the `meta` of a node that is an integer: which one."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """The graph, and the shape of every tensor in it."""

    graph: fx.Graph
    shapes: Mapping[fx.Node, tuple[int, ...]]


def record(model: nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> Recording:
    """What `model` does with one batch. Raises what its forward raises."""
    recorder = _Recorder(model)
    for index, value in enumerate(tensors_in((args, named))):
        recorder.note(value, recorder.graph.placeholder(f"input_{index}"))
    hooks = list(recorder.hooks())
    try:
        with torch.no_grad(), recorder, recorder.known_attributes():
            output = model(*args, **named)
    finally:
        for hook in hooks:
            hook.remove()
    recorder.graph.output(tuple(recorder.node_of(value) for value in tensors_in(output)))
    return Recording(recorder.graph, recorder.shapes)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists, dictionaries and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from tensors_in(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


class _Size(int):
    """An integer of a tensor's shape or of a module's attribute, or computed from such: it keeps its node."""

    node: fx.Node

    @classmethod
    def of(cls, value: int, node: fx.Node) -> _Size:
        found = cls(value)
        found.node = node
        node.meta[VALUE] = value
        return found


def _arithmetic(function: Callable[[Any, Any], Any], *, reflected: bool) -> Callable[[_Size, Any], Any]:
    def compute(size: _Size, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        left, right = (other, size) if reflected else (size, other)
        nodes = tuple(number.node if isinstance(number, _Size) else number for number in (left, right))
        value = function(int(left), int(right))
        return _Size.of(value, size.node.graph.call_function(function, nodes)) if isinstance(value, int) else value

    return compute


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(_Size, f"__{_name}__", _arithmetic(getattr(operator, _name), reflected=False))
    setattr(_Size, f"__r{_name}__", _arithmetic(getattr(operator, _name), reflected=True))


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.graph, self.shapes = fx.Graph(), dict[fx.Node, tuple[int, ...]]()
        self._names = {id(p): name for name, p in [*model.named_parameters(), *model.named_buffers()]}
        self._modules = dict(model.named_modules())
        self._nodes: dict[int, tuple[Tensor, fx.Node]] = {}  # with the tensor, so that its id stays its own
        self._stack: list[str] = []
        self._within: nn.Module | None = None

    def note(self, value: Tensor, node: fx.Node) -> None:
        self._nodes[id(value)] = (value, node)
        self.shapes[node] = tuple(map(int, value.shape))

    def node_of(self, value: Tensor) -> fx.Node:
        """Of a tensor that no recorded function gave: a parameter, or a constant."""
        if id(value) not in self._nodes:
            node = self.graph.create_node("get_attr", self._names.get(id(value), "constant"))
            self.note(value, node)
        return self._nodes[id(value)][1]

    def hooks(self) -> Iterator[Any]:
        for name, module in self._modules.items():
            yield module.register_forward_pre_hook(_entering(self, name))
            yield module.register_forward_hook(_leaving(self, name), with_kwargs=True)

    @contextmanager
    def known_attributes(self) -> Iterator[None]:
        """The integer attributes of modules are known by their names, `blocks.0.attention.heads`."""
        own = {name: module for name, module in self._modules.items() if not _is_whole(module)}
        found = [(module, name, key, value) for name, module in own.items() for key, value in vars(module).items()
                 if type(value) is int]  # fmt: skip
        for module, name, key, value in found:
            node = self.graph.create_node("get_attr", f"{name}.{key}".lstrip("."))
            vars(module)[key] = _Size.of(value, node)
        try:
            yield
        finally:
            for module, _, key, value in found:
                vars(module)[key] = value

    def enter_module(self, name: str) -> None:
        module = self._modules[name]
        self._stack.append(name)
        if self._within is None and _is_whole(module):
            self._within = module

    def leave_module(self, name: str, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        self._stack.pop()
        if self._within is self._modules[name]:
            self._within = None
            self._add("call_module", name, args, named, output)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        found = func(*args, **named)
        if self._within is not None:
            return found
        if _reads(func, "shape") or _reads(func, "size"):
            return self._measured(self.node_of(args[0]), found, args, named)
        if any(True for _ in tensors_in((args, named))) or any(True for _ in tensors_in(found)):
            method, name = _is_method(func), _name_of(func)
            plain = not isinstance(found, Tensor | tuple | list)
            if plain and not (name in ("__bool__", "item", "tolist", "__len__") and found is not None):
                return found  # a dtype, a device, a number of dims
            if method and name in _OPERATORS:
                self._add("call_function", _OPERATORS[name], args, named, found)
            else:
                self._add("call_method" if method else "call_function", name if method else func, args, named, found)
        return found

    def _measured(self, source: fx.Node, found: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if isinstance(found, int):
            dim = named.get("dim", args[1] if len(args) > 1 else 0)
            return _Size.of(found, self.graph.call_method("size", (source, int(dim))))
        return torch.Size(_Size.of(n, self.graph.call_method("size", (source, i))) for i, n in enumerate(found))

    def _add(self, op: str, target: Any, args: tuple[Any, ...], named: dict[str, Any], found: Any) -> None:
        node = self.graph.create_node(op, target, self._as_nodes(args), self._as_nodes(named))
        path = self._stack[-1] if self._stack else ""
        node.meta["nn_module_stack"] = {path: (path, type(self._modules[path]))}
        if isinstance(found, Tensor):
            self.note(found, node)
        elif isinstance(found, tuple | list):
            for index, part in enumerate(found):
                if isinstance(part, Tensor):
                    self.note(part, self.graph.call_function(operator.getitem, (node, index)))
        else:
            for part in tensors_in(found):
                self.note(part, self.graph.call_function(operator.getitem, (node, "")))

    def _as_nodes(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, _Size):
            return value.node
        if isinstance(value, tuple | list):
            return tuple(self._as_nodes(entry) for entry in value)
        if isinstance(value, dict):
            return {key: self._as_nodes(entry) for key, entry in value.items()}
        if isinstance(value, slice):
            return slice(*(self._as_nodes(n) for n in (value.start, value.stop, value.step)))
        return value


def _entering(recorder: _Recorder, name: str) -> Callable[..., None]:
    return lambda module, args: recorder.enter_module(name)


def _leaving(recorder: _Recorder, name: str) -> Callable[..., None]:
    return lambda module, args, named, output: recorder.leave_module(name, args, named, output)


def _is_whole(module: nn.Module) -> bool:
    """Is it recorded as one call?"""
    of_torch = type(module).__module__.startswith("torch.nn") and not isinstance(module, nn.Sequential)
    return of_torch or is_conv1d(module)


def _reads(func: Any, name: str) -> bool:
    """Is it the property or method `name` of tensors?"""
    if getattr(func, "__name__", "") == "__get__":
        return getattr(func.__self__, "__name__", "") == name
    return func is getattr(Tensor, name)


def _is_method(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__get__" or func is getattr(Tensor, name, None)


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name == "__get__" else name
