"""Which line of Python calls an operator: one more step, with PyTorch's profiler recording Python's frames too.

That slows the step down several times, so its times are not used, and its operators only as parts of one another.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

_BETWEEN = ("torch/", "<", "__torch_function__")
"""PyTorch's own frames, those of functions in C, and those that see every operator."""


def sources(step: Callable[[], object], names: Collection[str]) -> dict[str, str]:
    """For each operator of these names that a function of the model's called, that function: "file.py(12): forward".

    Takes one step. Of several functions, the one in which the operator took longest.
    """
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
        step()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    return {} if results is None else callers(frames_in(results.experimental_event_tree()), names)


Frame = tuple[int, int, int, str, bool]
"""Thread, begin and end in ns, name, and whether it is a function of Python."""


def frames_in(tree: Iterable[Any]) -> Iterator[Frame]:
    """What PyTorch's profiler recorded, of which each event knows those within it: from 2.11 on the one place that
    tells functions of Python from operators.
    """
    for event in tree:
        is_python = event.tag in (_EventType.PyCall, _EventType.PyCCall)
        yield event.start_tid, event.start_time_ns, event.end_time_ns, event.name, is_python
        yield from frames_in(event.children)


def callers(frames: Iterable[Frame], names: Collection[str]) -> dict[str, str]:
    """The innermost of the model's functions around each operator."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    stack: list[Frame] = []
    for frame in sorted(frames, key=lambda frame: (frame[0], frame[1], -frame[2])):
        thread, begin, end, name, is_python = frame
        while stack and (stack[-1][0] != thread or stack[-1][2] <= begin):
            stack.pop()
        if is_python:
            stack.append(frame)
        elif name in names and (around := _models_function(stack)) is not None:
            found[name][around] += end - begin
    return {name: counts.most_common(1)[0][0] for name, counts in found.items()}


def _models_function(stack: Sequence[Frame]) -> str | None:
    """The first frame around that is not PyTorch's; None where Shoal's own engine called the operator."""
    name = next((frame[3] for frame in reversed(stack) if not any(part in frame[3] for part in _BETWEEN)), None)
    engine = name is not None and "shoal/" in name and "shoal/models/" not in name
    return None if engine else name
