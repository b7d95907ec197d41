"""What `torch.compile` leaves alone: Python that C++ calls in the middle of a compiled program.

Dynamo looks at every Python frame that begins while a compiled program runs, and a process group written in Python has
such frames: C++ calls its methods from DDP's forward, c10d makes it inside of `new_group`. Dynamo cannot trace them: it
refuses a group's own attributes (they are not registered with its opaque type), and a group whose C++ half does not
exist yet, as in `__init__`, ends the process (torch 2.13). There is nothing to gain either: no tensor operation
is in them.

`torch.compiler.disable` does the same around a call. It imports Dynamo, 3 s, and makes each call slower; a strategy of
the code object costs nothing where nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TypeVar

from torch._C._dynamo.eval_frame import (
    _FrameAction,  # pyright: ignore[reportAttributeAccessIssue]
    _FrameExecStrategy,  # pyright: ignore[reportAttributeAccessIssue]
    set_code_exec_strategy,  # pyright: ignore[reportAttributeAccessIssue]
)

Untraced = TypeVar("Untraced", bound=Callable[..., object])

_AS_IT_IS = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # the frame, and those that it begins


def untraced(what: Untraced) -> Untraced:
    """A function, or a class with all methods of its own, which Dynamo runs as they are, with all that they call."""
    for function in _functions_of(what):
        set_code_exec_strategy(function.__code__, _AS_IT_IS)
    return what


def _functions_of(what: object) -> Iterator[FunctionType]:
    for one in vars(what).values() if isinstance(what, type) else [what]:
        function = one.fget if isinstance(one, property) else one
        if isinstance(function, FunctionType):
            yield function
