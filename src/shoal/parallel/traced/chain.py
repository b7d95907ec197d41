"""A module that declares no chain, as a chain of parts: cut where one tensor alone goes on.

The forward is traced down to the blocks (members of `nn.ModuleList` and `nn.Sequential`, and the other modules beside
them), which are called as they are. Values that follow from the inputs alone (masks, positions) are the context, which
every stage computes itself. Between two calls of modules with parameters the chain can be cut if exactly one value that
depends on parameters is still needed:

    tokens -> embedding -> | block 0 -> | block 1 -> | norm -> head
    mask   ------------------^------------^                            (context)
"""

from __future__ import annotations

import inspect
import linecache
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

from shoal.errors import UserCodeError
from shoal.models.roles import Part
from shoal.parallel.traced.recorder import reason_of

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
Values = dict[fx.Node, Any]


@dataclass(frozen=True)
class TracedChain:
    """`context` and `parts` as `shoal.models.roles.DeclaresParts` asks for them."""

    context: Callable[..., Values]
    parts: tuple[Part, ...]


def traced_chain(model: nn.Module) -> TracedChain:
    """The chain that `model` is. Its modules are found by name at each call, so that they may be replaced by parts.

    Raises `UserCodeError` where the forward cannot be traced, draws dropout by a function, or nowhere has one value.
    """
    graph, given = _trace(model)
    _refuse_functional_dropout(model, graph)
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    dependent = _dependent(model, nodes)
    own = [node for node in nodes if node in dependent]
    result = _result(graph)
    segments = _segments(model, own, dependent, result)
    if len(segments) < 2:
        raise UserCodeError(
            f"{type(model).__name__} cannot be cut by tracing: between any two of its modules several values that "
            "depend on parameters go on; give it context() and parts(), or set layout.pipeline=1"
        )
    shared = [node for node in nodes if node not in dependent]
    ends = [*(entry for entry, _ in segments[1:]), result]
    parts = [
        Part(_name(model, segment), _modules(model, segment), partial(_run, model, segment, entry, end))
        for (entry, segment), end in zip(segments, ends, strict=True)
    ]
    return TracedChain(partial(_context, model, given, _placeholders(graph), shared), tuple(parts))


class _Blocks(fx.Tracer):
    """Goes into modules that hold lists of blocks, and calls all others as they are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._trunk = trunk_of(model)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._trunk

    def to_bool(self, obj: fx.Proxy) -> bool:
        """An assertion holds. Raises `TraceError` for a decision that depends on the data."""
        filename, line = _users_line()
        if linecache.getline(filename, line).lstrip().startswith("assert"):
            return True
        raise TraceError(f"{filename}:{line} decides by a value that is known only when it runs")

    def iter(self, obj: fx.Proxy) -> Any:
        """A tuple that is unpacked. Raises `TraceError` where its length is not known."""
        node = obj.node
        if node.target in ("chunk", torch.chunk) and len(node.args) > 1 and isinstance(node.args[1], int):
            return iter([operator.getitem(obj, index) for index in range(node.args[1])])  # pyright: ignore[reportArgumentType, reportCallIssue]
        try:
            return super().iter(obj)
        except TraceError:
            filename, line = _users_line()
            raise TraceError(f"{filename}:{line} loops over a tensor or tuple whose length is not known") from None


def _users_line() -> tuple[str, int]:
    """Where the forward stands: the innermost frame that is neither torch's nor this module's."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name.split(".")[0] != "torch":
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def trunk_of(model: nn.Module) -> set[str]:
    """The names of the modules around the outermost lists of blocks, and of these lists."""
    found = {""}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found if _is_list(model, other))
        if _is_list(model, name) and not inside:
            steps = name.split(".") if name else []
            found |= {".".join(steps[:count]) for count in range(len(steps) + 1)}
            if isinstance(module, nn.Sequential):
                found.add(name)
    for name, module in model.named_modules():  # lists in such lists are not called either
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and name.rpartition(".")[0] in found:
            found.add(name)
    return found


def _is_list(model: nn.Module, name: str) -> bool:
    module = model.get_submodule(name)
    weighty = [child for child in module.children() if any(True for _ in child.parameters())]
    return isinstance(module, _LISTS) and len(weighty) > 1


def _trace(model: nn.Module) -> tuple[fx.Graph, inspect.Signature]:
    """The graph, in which arguments with a default have it."""
    signature, tracer = inspect.signature(model.forward), _Blocks(model)
    defaults = {n: p.default for n, p in signature.parameters.items() if p.default is not inspect.Parameter.empty}
    try:
        return tracer.trace(model, concrete_args=defaults or None), signature
    except Exception as error:
        raise UserCodeError(
            f"{type(model).__name__} cannot be cut by tracing: {reason_of(error)}. Give it context() and "
            "parts() (see shoal.models.roles), or set layout.pipeline=1"
        ) from None


def _refuse_functional_dropout(model: nn.Module, graph: fx.Graph) -> None:
    """A trace fixes whether it drops."""
    if any(node.target in _DROPOUTS for node in graph.nodes if node.op == "call_function"):
        raise UserCodeError(
            f"{type(model).__name__} cannot be cut by tracing: its forward calls F.dropout between its blocks, and a "
            "trace does not see when training ends; use nn.Dropout there"
        )


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _result(graph: fx.Graph) -> Any:
    """What the forward returns, in terms of nodes."""
    return next(node for node in graph.nodes if node.op == "output").args[0]


def _is_parameter(model: nn.Module, node: fx.Node) -> bool:
    if node.op != "get_attr":
        return False
    return isinstance(operator.attrgetter(str(node.target))(model), nn.Parameter)


def _has_parameters(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return any(True for _ in model.get_submodule(str(node.target)).parameters())
    return _is_parameter(model, node)


def _dependent(model: nn.Module, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes whose value depends on parameters."""
    found: set[fx.Node] = set()
    for node in nodes:
        if _has_parameters(model, node) or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _segments(
    model: nn.Module, own: Sequence[fx.Node], dependent: set[fx.Node], result: Any
) -> list[tuple[fx.Node | None, list[fx.Node]]]:
    """Runs of nodes, each with the one value that it takes from the run before."""
    last_use = {node: index for index, node in enumerate(own)}
    for index, node in enumerate(own):
        for source in node.all_input_nodes:
            if source in dependent:
                last_use[source] = index
    fx.map_arg(result, lambda node: last_use.__setitem__(node, len(own)))
    found: list[tuple[fx.Node | None, list[fx.Node]]] = [(None, [])]
    seen: set[str] = set()
    for index, node in enumerate(own):
        live = [other for other in own[:index] if last_use[other] >= index]
        fresh = node.op == "call_module" and _has_parameters(model, node) and str(node.target) not in seen
        if fresh and len(live) == 1 and any(_has_parameters(model, n) for n in found[-1][1]):
            found.append((live[0], []))
        found[-1][1].append(node)
        seen.add(str(node.target))
    return found


def _name(model: nn.Module, segment: Sequence[fx.Node]) -> str:
    """The first module or parameter in it."""
    return next(str(node.target) for node in segment if _has_parameters(model, node))


def _modules(model: nn.Module, segment: Sequence[fx.Node]) -> tuple[str, ...]:
    """The modules and parameters of a segment, modules first."""
    wanted = [node for node in segment if _has_parameters(model, node)]
    modules = [str(node.target) for node in wanted if node.op == "call_module"]
    return tuple(dict.fromkeys([*modules, *(str(node.target) for node in wanted if node.op == "get_attr")]))


def _context(
    model: nn.Module,
    signature: inspect.Signature,
    placeholders: Sequence[fx.Node],
    shared: Sequence[fx.Node],
    *inputs: Any,
    **named: Any,
) -> Values:
    """The inputs and what follows from them alone."""
    bound = signature.bind(*inputs, **named)
    for name, value in bound.arguments.items():
        default = signature.parameters[name].default
        if default is not inspect.Parameter.empty and value is not default:
            raise UserCodeError(
                f"{type(model).__name__} was traced without its optional input {name!r}, which the data gives; give it "
                "context() and parts(), or make the input one that is always given"
            )
    bound.apply_defaults()
    values: Values = {node: bound.arguments[str(node.target)] for node in placeholders}
    for node in shared:
        values[node] = _compute(model, node, values)
    return values


def _run(
    model: nn.Module, segment: Sequence[fx.Node], entry: fx.Node | None, result: Any, x: Tensor | None, context: Values
) -> Any:
    """The values of a segment, of which `result` is returned."""
    values: dict[fx.Node, Any] = {**context}
    if entry is not None:
        values[entry] = x
    for node in segment:
        values[node] = _compute(model, node, values)
    return fx.map_arg(result, values.__getitem__)


def _compute(model: nn.Module, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    args, named = fx.map_arg(node.args, values.__getitem__), fx.map_arg(node.kwargs, values.__getitem__)
    if node.op == "call_module":
        return model.get_submodule(str(node.target))(*args, **named)
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(model)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **named)
    assert callable(node.target), f"a node of kind {node.op}"
    return node.target(*args, **named)
