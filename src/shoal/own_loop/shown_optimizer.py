"""What a script sees of its optimizer around and between steps, where a rank steps pieces of parameters (ZeRO,
`layout.tensor`).

`StepHooks` stand inside of the script's own hooks, and `ShownGroups` lists whole parameters wherever the script looks.
So the script's step hooks, and what it does between two steps, see what they see in a plain loop.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo as uncompiled
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal.errors import UserCodeError

StepHook = Callable[[torch.optim.Optimizer, Any, Any], None]
"""Of an optimizer and of what its `step` was called with."""


MOMENTS = ("exp_avg", "momentum_buffer", "sum")
"""State of PyTorch's optimizers that has the shape of its parameter."""


class StepHooks:
    """`before` and `after` each step of `optimizer`, inside of the hooks of the script, also of those that come later:
    behind its pre-hooks and ahead of its post-hooks. Of two, the one that was made last is the inner one. A step that
    calls the one of its base class, which PyTorch may have given hooks too, is one step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, before: StepHook, after: StepHook) -> None:
        self._optimizer, self._calls, self._depth = optimizer, (before, after), 0
        self._before = optimizer.register_step_pre_hook(self._enter)
        self._after = optimizer.register_step_post_hook(self._leave)
        self._ordering = register_optimizer_step_pre_hook(self._put_inside)

    def reset(self) -> None:
        """No step is under way, also where the last one failed."""
        self._depth = 0

    @uncompiled
    def _enter(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._calls[0](optimizer, args, kwargs)

    @uncompiled
    def _leave(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._calls[1](optimizer, args, kwargs)

    def close(self) -> None:
        """Takes them off the optimizer."""
        for handle in (self._before, self._after, self._ordering):
            handle.remove()

    @uncompiled
    def _put_inside(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self._optimizer:
            cast(OrderedDict, optimizer._optimizer_step_pre_hooks).move_to_end(self._before.id)
            cast(OrderedDict, optimizer._optimizer_step_post_hooks).move_to_end(self._after.id, last=False)


class EmptyStep:
    """A call of `optimizer.step` in which nothing is to be updated, from here to `end`. The optimizer sees parameters
    without gradients, or no `parameters` at all, as for PyTorch's Adam, of which that is less to take.

    One that counts its steps beside its state, in its groups (`group["step"] += 1`) or itself, would count this call
    too: such numbers are put back. PyTorch's own optimizers keep none. One that `moves_alone` changes weights or their
    state without a gradient, as Lookahead does: they are put back, too.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, parameters: bool, moves_alone: bool = False) -> None:
        groups = optimizer.param_groups
        self._lists, self._gradients = list[tuple[dict[str, Any], list[Parameter]]](), list[tuple[Parameter, Any]]()
        self._numbers = list[tuple[dict[str, Any], dict[str, Any]]]()
        self._states = list[_StateOf]()
        if not parameters:
            self._lists = [(group, group["params"]) for group in groups]
            for group in groups:
                group["params"] = []
            return
        self._gradients = [(parameter, parameter.grad) for group in groups for parameter in group["params"]]
        for parameter, _ in self._gradients:
            parameter.grad = None
        if not type(optimizer).__module__.startswith("torch.optim."):
            self._numbers = [(place, {k: _kept(v) for k, v in place.items()}) for place in _places(optimizer)]
        if moves_alone:
            self._states = [_StateOf(optimizer, parameter) for parameter, _ in self._gradients]

    @torch.no_grad()
    def end(self) -> None:
        """All is as it was."""
        for group, parameters in self._lists:
            group["params"] = parameters
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for each in self._states:
            each.put_back()
        for place, before in self._numbers:
            for name in [name for name, value in place.items() if name not in before and _is_number(value)]:
                del place[name]
            for name, value in before.items():
                if isinstance(value, Tensor) and isinstance(now := place.get(name), Tensor):
                    now.copy_(value)
                elif value is not _LEFT:
                    place[name] = value


class _StateOf:
    """The numbers of a parameter, and of what `optimizer` keeps of it."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: Parameter) -> None:
        self._optimizer, self._parameter, self._place = optimizer, parameter, parameter.data
        self._state = dict(optimizer.state[parameter]) if parameter in optimizer.state else None
        tensors = [self._place, *(value for value in (self._state or {}).values() if isinstance(value, Tensor))]
        self._tensors = [(tensor, tensor.clone()) for tensor in tensors]

    def put_back(self) -> None:
        """In place: others have views of them."""
        for tensor, before in self._tensors:
            tensor.copy_(before)
        if self._parameter.data_ptr() != self._place.data_ptr():
            self._parameter.data = self._place
        if self._state is None:
            self._optimizer.state.pop(self._parameter, None)
            return
        now = self._optimizer.state[self._parameter]
        now.clear()
        now.update(self._state)


_LEFT = object()
"""Stands for what is no number."""


def _places(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Where it and the optimizers inside of it keep numbers beside their state: each once."""
    found, open_optimizers = dict[int, dict[str, Any]](), [optimizer]
    while open_optimizers:
        own = vars(open_optimizers.pop())
        if id(own) not in found:
            found |= {id(place): place for place in (own, *own.get("param_groups", ()))}
            open_optimizers += [value for value in own.values() if isinstance(value, torch.optim.Optimizer)]
    return list(found.values())


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return value is None or isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _kept(value: Any) -> Any:
    if not _is_number(value):
        return _LEFT
    return value.detach().clone() if isinstance(value, Tensor) else value


class ShownGroups:
    """Between two steps the groups of `optimizer`, which steps pieces of parameters, list the `whole` ones of the
    model: what a script does with a group's parameters, such as a clip by the norm of their gradients, is then what it
    is in a plain loop, and the same on every rank. State stays with the pieces, and is refused between two steps, but
    that it may be let go: `pieces` are those that this rank steps of each whole parameter. A `state_dict` has that of
    this rank's pieces alone, which is said once by `warn`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        whole: Sequence[Sequence[Parameter]],
        pieces: Mapping[Parameter, Sequence[Parameter]] = MappingProxyType({}),
        *,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._pieces_of, self._warn = pieces, warn
        self._optimizer, self._whole = optimizer, [list(group) for group in whole]
        self._pieces = [group["params"] for group in optimizer.param_groups]
        self._hooks, self._steps = ExitStack(), None
        if all(list(map(id, a)) == list(map(id, b)) for a, b in zip(self._pieces, self._whole, strict=True)):
            return
        self._steps = StepHooks(optimizer, lambda *_: self._hide(), lambda *_: self._show())
        self._hooks.callback(self._steps.close)
        for handle in (
            optimizer.register_state_dict_pre_hook(lambda _: self._before_state_dict()),
            optimizer.register_state_dict_post_hook(lambda *_: self._show()),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(lambda _: self._show()),
        ):
            self._hooks.callback(handle.remove)
        self._hooks.callback(optimizer.register_state_dict_pre_hook, lambda _: _refuse_state())
        self._show()

    def reset(self) -> None:
        """See `StepHooks.reset`."""
        if self._steps is not None:
            self._steps.reset()

    def close(self) -> None:
        """Takes the hooks off. The groups go on to list the whole parameters; their state, of which this rank has
        pieces, goes on to be refused.
        """
        self._hooks.close()

    def _before_state_dict(self) -> None:
        if self._warn is not None:
            self._warn(
                "the optimizer's state_dict() has the state of this rank's pieces alone (memory.zero or layout.tensor "
                "divides it), and no file made of it is a whole one: checkpoints of the run have all of it, under any "
                "layout (run.save())"
            )
        self._warn = None
        self._hide()

    def _before_load(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Raises `UserCodeError` for state of other parameters than this rank's pieces, as that of a plain loop."""
        if not _is_of(state, self._pieces):
            raise UserCodeError(
                "the optimizer's load_state_dict got state of whole parameters, and under memory.zero or layout.tensor "
                "this rank steps pieces of them: call it before shoal.start, which takes the state over"
            )
        self._hide()

    def _show(self) -> None:
        self._list(self._whole, _refuse_state)

    def _hide(self) -> None:
        self._list(self._pieces, dict)

    def _list(self, parameters: Sequence[list[Parameter]], missing: Callable[[], Any]) -> None:
        for group, own in zip(self._optimizer.param_groups, parameters, strict=False):  # groups that are added follow
            group["params"] = own
        state = self._optimizer.state
        if isinstance(state, defaultdict) and not isinstance(state, _PiecesState):  # a loaded one, too
            state = self._optimizer.state = _PiecesState(None, state)
            state.pieces = self._pieces_of
        if isinstance(state, defaultdict):
            state.default_factory = missing


def _is_of(state: Mapping[str, Any], pieces: Sequence[Sequence[Parameter]]) -> bool:
    """Whether a `state_dict` may be that of an optimizer of `pieces`, by group: of the moments, each has the numbers of
    its piece.
    """
    groups = [group["params"] for group in state["param_groups"]]
    if list(map(len, groups)) != list(map(len, pieces)):
        return False
    of = {key: piece for group, own in zip(groups, pieces, strict=True) for key, piece in zip(group, own, strict=True)}
    moments = ((of[key], state["state"][key].get(name)) for key in of if key in state["state"] for name in MOMENTS)
    return all(piece.shape == each.shape for piece, each in moments if isinstance(each, torch.Tensor))


class _PiecesState(defaultdict[Any, Any]):
    """An optimizer's state, which is that of pieces. A script may ask whether there is some of a whole parameter, and
    let it go, as loops do that thaw a layer with fresh moments; its values are refused.
    """

    pieces: Mapping[Parameter, Sequence[Parameter]] = MappingProxyType({})
    """Those that this rank steps, by the whole parameter."""

    def __contains__(self, key: object) -> bool:
        own = self.pieces.get(key)  # type: ignore[call-overload]
        return super().__contains__(key) if own is None else any(super(_PiecesState, self).__contains__(p) for p in own)

    def get(self, key: Any, default: Any = None) -> Any:
        return _refuse_state() if key in self.pieces and key in self else super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self.pieces:
            return super().pop(key, *default)
        for piece in self.pieces[key]:
            super().pop(piece, None)
        return default[0] if default else {}

    def __delitem__(self, key: Any) -> None:
        if key in self.pieces:
            self.pop(key)
        else:
            super().__delitem__(key)


def _refuse_state() -> Any:
    raise UserCodeError(
        "the optimizer's state of a parameter was asked for outside of step(), and under ZeRO and layout.tensor every "
        "rank has that of its own pieces alone: use layout.replicate, where each has all of it"
    )


def widen_state(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """The moments of steps taken before, in the type that their parameters have now."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            moments = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == parameter.shape}
            state.update({name: each.to(parameter.dtype) for name, each in moments.items() if each.is_floating_point()})
