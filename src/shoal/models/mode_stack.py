"""The modes of PyTorch's functions that are entered on this thread, as a loop enters and leaves one of its own.

A mode that is entered calls Python for each function of PyTorch's. `with` leaves the topmost one; a script's own loop
enters and leaves others meanwhile, so that Shoal's lies below them, and is taken out from beneath.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch._C import (
    _get_dispatch_mode,
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
    _TorchDispatchModeKey,
)
from torch._C._functorch import get_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.overrides import _get_current_function_mode_stack as entered_modes

__all__ = ["enter_below", "entered_modes", "in_backward", "in_memory", "leave"]

T = TypeVar("T")


def enter_below(mode: TorchFunctionMode) -> None:
    """Enters `mode` below those that a script leaves when it likes, each from the top; above that of PyTorch's default
    device, which has to be the lowest.
    """
    if _len_torch_function_stack() == 0:
        _push_on_torch_function_stack(mode)
        return
    above = [_pop_torch_function_stack() for _ in entered_modes()]
    if above and above[-1] is getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None):
        _push_on_torch_function_stack(above.pop())
    for each in (mode, *reversed(above)):
        _push_on_torch_function_stack(each)


def leave(mode: TorchFunctionMode) -> bool:
    """Leaves `mode`, which others may lie above of. False where this thread has not entered it."""
    depth = _len_torch_function_stack()
    if depth == 0:
        return False
    if _get_function_stack_at(depth - 1) is mode:  # as always, several times a step
        _pop_torch_function_stack()
        return True
    if mode not in entered_modes():
        return False
    above = []
    while (top := _pop_torch_function_stack()) is not mode:
        above.append(top)
    for each in reversed(above):
        _push_on_torch_function_stack(each)
    return True


def in_backward() -> bool:
    """Whether autograd calls, which leaves every mode."""
    return torch._C._current_graph_task_id() != -1


def in_memory(loops: T) -> T | None:
    """`loops`, which read and write tensors at their addresses; None where new tensors have none: within transforms of
    `torch.func`, and under the mode that makes fake ones.
    """
    fake = _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None
    return None if fake or get_interpreter_stack() else loops
