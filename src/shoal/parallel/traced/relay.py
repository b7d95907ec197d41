"""A module that declares no chain, as a chain by its own forward: each part runs it, and skips what others compute.

    part 0      tokens -> embedding -> block 0 -> at block 1 it stops: what block 1 would have got is the result
    part 1      embedding and block 0 are skipped; block 1 gets what part 0 gave -> block 1 -> at block 2 it stops

What a skipped module gives has the shape of its output and is NaN. So masks and positions, which follow from the
inputs, are made by the model's own code on every stage, and a value that the cut forgets shows itself: the
result is NaN, which is an error in the first forward of a part.

The parts are lists of names of modules in the order in which the forward calls them; the first of each is where it
begins. `chain_of_calls` finds them on a batch, and keeps the cuts through which the output is the same, bit by bit:
in evaluation, after other inputs went through the model, so that nothing is left of this batch in its modules; and in
training, where dropout draws, not NaN.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shoal.errors import UserCodeError
from shoal.models.keyed_draws import draws_of_a_forward
from shoal.models.roles import DeclaresParts, DeclaresRoles, Kind, Part, Role
from shoal.parallel.traced.chain import traced_chain, trunk_of
from shoal.parallel.traced.recorder import reason_of, tensors_in

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


class _Reached(BaseException):
    """The forward stands at the module where the next part begins, with this as its input."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


class _Skipped(nn.Module):
    """In the place of a module that another part computes: NaN in the shape of its output."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        bare = {id(t): _without_storage(t) for t in [*module.parameters(), *module.buffers()]}
        object.__setattr__(self, "_copy", copy.deepcopy(module, bare).eval())
        self._name, self._shapes, self._dtype = name, dict[Any, Any](), torch.float32

    def computes_in(self, dtype: torch.dtype) -> None:
        """That of the model, which may be cast after it is built."""
        if dtype != self._dtype:
            self._dtype, self._shapes = dtype, {}
            self.__dict__["_copy"].to(dtype)

    def __getattr__(self, name: str) -> Any:
        """What the forward reads of the module beside calling it, such as the kind of its attention."""
        return getattr(self.__dict__["_copy"], name)

    def forward(self, *args: Any, **named: Any) -> Any:
        given = list(tensors_in((args, named)))
        key = tuple((tuple(t.shape), t.dtype) for t in given)
        if key not in self._shapes:
            bare_args, bare_named = tree_map_only(Tensor, lambda t: t.to("meta"), (args, named))
            with torch.no_grad(), torch.device("meta"):
                self._shapes[key] = self.__dict__["_copy"](*bare_args, **bare_named)
        device = given[0].device if given else torch.device("cpu")
        return tree_map_only(Tensor, partial(self._unknown, device=device), self._shapes[key])

    def _unknown(self, like: Tensor, *, device: torch.device) -> Tensor:
        if not like.is_floating_point():
            raise UserCodeError(
                f"{self._name} gives whole numbers, and stages that do not hold it cannot make up such: set "
                "layout.pipeline = 1, or give the model context() and parts() (see shoal.models.roles)"
            )
        return torch.full(like.shape, nan, dtype=like.dtype, device=device)


class Relay:
    """`context` and `parts` as `shoal.models.roles.DeclaresParts` asks for them, of these lists of modules."""

    def __init__(
        self, model: nn.Module, names: Sequence[Sequence[str]], skipped: Mapping[str, _Skipped] | None = None
    ) -> None:
        self._model, self._names = model, names
        listed = [name for part in names for name in part]
        self._skipped = skipped or skipped_of(model, listed)
        self._unseen = set(range(1, len(names))) if skipped is None else set[int]()
        self.parts = tuple(
            Part(part[0], tuple(part), partial(self._run, index)) for index, part in enumerate(names)
        )  # fmt: skip

    def context(self, *inputs: Any, **named: Any) -> Inputs:
        """The inputs: each part runs the forward on them."""
        return inputs, named

    def _run(self, index: int, x: Tensor | None, context: Inputs) -> Any:
        args, named = context
        last = index + 1 == len(self._names)
        with self._alone(index, x):
            try:
                with draws_of_a_forward():
                    output = self._model.forward(*args, **named)
            except _Reached as reached:
                return self._first_seen(index, x, reached.value)
        if not last:
            raise UserCodeError(
                f"the forward of {type(self._model).__name__} ended before it called {self._names[index + 1][0]}, "
                "where model.parts says that a part begins; find the parts anew by `shoal split`"
            )
        return self._first_seen(index, x, output)

    def _first_seen(self, index: int, x: Any, output: Any) -> Any:
        """`output`. Raises `UserCodeError` where it is NaN at the first call of a part, and its input is not."""
        if index in self._unseen:
            self._unseen.discard(index)
            if _has_nan(output) and not _has_nan(x):
                raise UserCodeError(
                    f"the part of {type(self._model).__name__} that begins with {self._names[index][0]} gave NaN in "
                    "its first forward: it needs a value that model.parts leaves in another part, if the model itself "
                    "gives none; find the parts anew by `shoal split`"
                )
        return output

    @contextmanager
    def _alone(self, index: int, x: Tensor | None) -> Iterator[None]:
        """The modules of the other parts are skipped, the first of this one gets `x`, that of the next one stops."""
        own, hooks = self._names[index], []
        if index:
            hooks.append(_give_once(self._model.get_submodule(own[0]), x))
        if index + 1 < len(self._names):
            hooks.append(self._skipped[self._names[index + 1][0]].register_forward_pre_hook(_stop, with_kwargs=True))
        places = [(self._model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], stand_in)
                  for name, stand_in in self._skipped.items() if name not in own]  # fmt: skip
        dtype = next(p.dtype for p in self._model.parameters() if p.is_floating_point())
        for _, _, stand_in in places:
            stand_in.computes_in(dtype)
        kept = [(parent, last, parent._modules[last]) for parent, last, _ in places]
        for parent, last, stand_in in places:
            parent._modules[last] = stand_in
        try:
            yield
        finally:
            for parent, last, module in kept:
                parent._modules[last] = module
            for hook in hooks:
                hook.remove()


def skipped_of(model: nn.Module, names: Sequence[str]) -> dict[str, _Skipped]:
    """What stands in the places of these modules where they are skipped. Raises `UserCodeError` for an unknown name."""
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise UserCodeError(
                f"model.parts has {name!r}, which is no module of {type(model).__name__}; find the parts anew by "
                "`shoal split`"
            )
    return {name: _Skipped(name, modules[name]) for name in names}


def chain_of_calls(model: nn.Module, args: Sequence[Any], named: Mapping[str, Any]) -> list[list[str]]:
    """The parts of `model`, found on one batch: as many as there are places where one tensor alone goes on.

    Raises `UserCodeError` where there is none, or where the forward reads parameters outside of its modules.
    """
    kind, trunk = type(model).__name__, trunk_of(model)
    for name, _ in model.named_parameters():
        if name.rpartition(".")[0] in trunk:
            raise UserCodeError(
                f"{kind} cannot be cut: its forward reads the parameter {name} itself, between its blocks; put it into "
                "a module, give the model context() and parts(), or set layout.pipeline=1"
            )
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            units, output = _called(model, trunk, args, named)
            skipped, inputs = skipped_of(model, units), (tuple(args), named)
            starts, reason = [0], ""
            for start in range(1, len(units)):
                cut = [units[:start], units[start:]]
                why = _differs(model, cut, skipped, inputs, output) or _forgets(model, cut, skipped, inputs, flags)
                reason = reason or why
                starts += [] if why else [start]
            parts = [units[a:b] for a, b in zip(starts, [*starts[1:], len(units)], strict=True)]
            why = reason if len(parts) < 2 else _differs(model, parts, skipped, inputs, output)
    finally:
        _set_training(flags)
    if why or len(parts) < 2:
        found = f"of no module is its input all that the rest needs ({why})" if why else "it has a single module"
        raise UserCodeError(
            f"{kind} cannot be cut: {found}; give it context() and parts() (see shoal.models.roles), or set "
            "layout.pipeline=1"
        )
    return parts


def _called(
    model: nn.Module, trunk: set[str], args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[list[str], list[Tensor]]:
    """The modules with parameters right below the trunk in the order of their first calls, and the output."""
    below = {name: m for name, m in model.named_modules() if name not in trunk and name.rpartition(".")[0] in trunk}
    units = {name: module for name, module in below.items() if any(True for _ in module.parameters())}
    order: list[str] = []
    hooks = [module.register_forward_pre_hook(lambda m, a, name=name: order.append(name))
             for name, module in units.items()]  # fmt: skip
    try:
        output = list(tensors_in(model.forward(*args, **named)))
    finally:
        for hook in hooks:
            hook.remove()
    return list(dict.fromkeys([*order, *units])), output


def _differs(
    model: nn.Module,
    names: Sequence[Sequence[str]],
    skipped: Mapping[str, _Skipped],
    context: Inputs,
    output: Sequence[Tensor],
) -> str:
    """Why these parts are not the model; empty if they are."""
    args, named = context
    others = tree_map_only(Tensor, _other, (args, dict(named)))
    x: Any = None
    try:
        for part in Relay(model, names, skipped).parts:
            with suppress(Exception):  # of these inputs, which may be none: lengths that no longer ascend
                model.forward(*others[0], **others[1])  # on a rank of its own, the part finds nothing that another left
            x = part.run(x, context)
    except Exception as error:
        return reason_of(error)
    found = list(tensors_in(x))
    same = len(found) == len(output) and all(torch.equal(a, b) for a, b in zip(found, output, strict=True))
    return "" if same else f"behind {names[1][0]} it needs more than that module's input"


def _other(x: Tensor) -> Tensor:
    """The same numbers for other samples, or at other places where there is one sample."""
    if x.ndim == 0:
        return x
    return x.flip(0) if x.shape[0] > 1 else x.roll(1, -1)


def _forgets(
    model: nn.Module,
    names: Sequence[Sequence[str]],
    skipped: Mapping[str, _Skipped],
    context: Inputs,
    flags: Mapping[nn.Module, bool],
) -> str:
    """Why these parts are not the model in training, as `flags` say; empty if they are, or if the model itself fails on
    so few samples. Leaves buffers as they were.
    """
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    whole = x = None
    _set_training(flags)
    try:
        with suppress(Exception):
            whole = model.forward(*context[0], **context[1])
        if whole is None:
            return ""
        for part in Relay(model, names, skipped).parts:
            x = part.run(x, context)
    except Exception as error:
        return f"in training {reason_of(error)}"
    finally:
        _set_training(dict.fromkeys(flags, False))
        for buffer, value in kept:
            buffer.copy_(value)
    if _has_nan(whole) or not _has_nan(x):
        return ""
    return f"behind {names[1][0]} it needs, in training, more than that module's input"


def _set_training(flags: Mapping[nn.Module, bool]) -> None:
    for module, flag in flags.items():
        module.training = flag


def _has_nan(value: Any) -> bool:
    return any(t.is_floating_point() and bool(t.isnan().any()) for t in tensors_in(value))


def _give_once(module: nn.Module, x: Tensor | None) -> Any:
    left = [x]

    def give(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not left:
            return None
        value = left.pop()
        if args:
            return (value, *args[1:]), named
        return args, {**named, _first_name(named): value}

    return module.register_forward_pre_hook(give, with_kwargs=True, prepend=True)


def _stop(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    raise _Reached(args[0] if args else named[_first_name(named)])


def _first_name(named: Mapping[str, Any]) -> str:
    return next(name for name, value in named.items() if isinstance(value, Tensor))


def _without_storage(tensor: Tensor) -> Tensor:
    bare = tensor.detach().to("meta")
    return nn.Parameter(bare, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare


# What a run file says of a module that declares nothing: roles, counts and a traced chain become its own methods.


def declare(
    model: nn.Module, *, roles: Mapping[str, Kind], counts: Sequence[str], parts: str | Sequence[Sequence[str]]
) -> None:
    """Gives `model` the methods `parameter_roles`, `tensor_counts`, `context` and `parts`, where they are wanted.

    `roles` are patterns of names of parameters, `counts` of integer attributes; `parts` are the modules of each
    part of the chain, or "traced": tracing finds them; or "declared". Raises `UserCodeError` for what the model
    declares itself, and for patterns and names that fit nothing.
    """
    if roles:
        declared = _roles(model, roles)
        _give(model, "parameter_roles", DeclaresRoles, lambda: declared, key="model.roles")
    if counts:
        declared_counts = tuple(name for pattern in counts for name in _counts(model, pattern))
        object.__setattr__(model, "tensor_counts", lambda: declared_counts)
    if parts != "declared":
        chain = traced_chain(model) if isinstance(parts, str) else Relay(model, parts)
        _give(model, "context", DeclaresParts, chain.context, key="model.parts")
        object.__setattr__(model, "parts", lambda: chain.parts)


def _give(model: nn.Module, name: str, protocol: type, method: object, *, key: str) -> None:
    if isinstance(model, protocol):
        raise UserCodeError(f"{type(model).__name__} has {name}() itself; leave {key} out of the run file")
    object.__setattr__(model, name, method)


def _roles(model: nn.Module, roles: Mapping[str, Kind]) -> dict[str, Role]:
    """The role of each parameter by its name; those that no pattern fits stay whole."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in roles:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise UserCodeError(
                f"model.roles has {pattern!r}, which fits no parameter of {type(model).__name__}; propose roles "
                "anew by `shoal split`"
            )
    found: dict[str, Role] = {}
    for name, parameter in named.items():
        fitting: list[Kind] = [roles[pattern] for pattern in roles if fnmatchcase(name, pattern)]
        kind: Kind = fitting[0] if fitting else "replicated"
        found[name] = Role(kind, init=None, decay=parameter.ndim >= 2)
    return found


def _counts(model: nn.Module, pattern: str) -> list[str]:
    """The attributes that it fits, by their full names."""
    fitting = [name for name in integer_attributes(model) if fnmatchcase(name, pattern)]
    if not fitting:
        raise UserCodeError(
            f"model.counts has {pattern!r}, which is no integer attribute of a module of {type(model).__name__}; "
            "propose counts anew by `shoal split`"
        )
    return fitting


def integer_attributes(model: nn.Module) -> Iterator[str]:
    """The full names of all that modules have under a name of their own: `blocks.0.attention.heads`."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) is int:
                yield f"{path}.{name}" if path else name
