"""What the first step of a run shows once: which kernels its attention took, and how many operations its matrices cost.

PyTorch chooses the kernel of `scaled_dot_product_attention` call by call, from shapes, types, masks and the device, and
says nothing. So the operators of one step are recorded, by PyTorch's profiler on the host alone: what was called, in
models of any origin, with or without a compiler. A compiled run is looked at in its second step: the first calls the
compiler, which calls operators too. From then on nothing is recorded, and nothing costs time.

Operations are those of matrix products and attention, a multiply-add counted as two (`cost.transformer`, "causal"):
causal attention counts the half of the square below the diagonal where the call says that it is causal, all of it under
a mask of the script's; its backward counts twice its forward. Those of a backward beyond twice its forward are
repeated ones, by recomputation: they count for the hardware and not for the model.

    hardware = forward + backward,   model = min(hardware, 3 forward)

What a compiler has made of attention in plain operators, FlexAttention's kernels among them, is no call and not seen;
nor are the products inside of recurrent layers' own kernels.
"""

from __future__ import annotations

import gc
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, wraps
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd import profiler as profilers
from torch.autograd.profiler import profile  # torch.profiler's imports a second's worth of modules when it begins

from shoal import units

Backend = Literal["cudnn", "flash", "efficient", "math", "overrideable"]
FORWARDS: Mapping[str, Backend] = {
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_fused_attention_overrideable": "overrideable",
    "_scaled_dot_product_attention_math": "math",
    "_scaled_dot_product_attention_math_for_mps": "math",
}
"""PyTorch's operators of attention, and the backend of `torch.nn.attention.SDPBackend` that each is."""
_BACKWARDS = frozenset(f"{name}_backward" for name in FORWARDS)
_IN_BACKWARD = "autograd::engine::evaluate_function"
_DTYPES: Mapping[str, str] = {
    "float": "float32",
    "double": "float64",
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
}


class Attention(NamedTuple):
    """A call: its kernel, the shapes `[batch, heads, tokens, features]` of query, key and value, what came along."""

    backend: Backend
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: str
    causal: bool = False
    mask: bool = False
    dropout: float = 0.0

    @property
    def flops(self) -> float:
        """Of its forward: scores and weighted values."""
        *outer, queries, _ = self.query
        square = 2.0 * prod(outer) * queries * self.key[-2] * (self.query[-1] + self.value[-1])
        return square / 2 if self.causal else square

    def __str__(self) -> str:
        mask = "causal" if self.causal else "a mask" if self.mask else "no mask"
        dropout = f", dropout {self.dropout:g}" if self.dropout else ""
        keys = "" if self.key == self.query else f", keys {list(self.key)}"
        return f"{self.backend}, {self.dtype} {list(self.query)}{keys}, {mask}{dropout}"


@dataclass(frozen=True)
class StepWork:
    """What one step of this rank did: its calls of attention, each with how many there were, and its operations."""

    attention: Mapping[Attention, int]
    model_flops: float
    hardware_flops: float

    def facts(self) -> list[str]:
        """A line for each kind of call, the commonest first."""
        ranked = sorted(self.attention.items(), key=lambda entry: -entry[1])
        return [f"{units.plural(count, 'call')}: {call}" for call, count in ranked]

    def warnings(self, device: str) -> list[str]:
        """A sentence for each kind of call that took the slow kernel for a reason that can be mended."""
        return [
            f"{units.plural(count, 'attention call')} of a step took PyTorch's plain kernel (math), which keeps all "
            f"scores in memory: {why}"
            for call, count in self.attention.items()
            if call.backend == "math" and (why := why_math(call, device)) is not None
        ]


def why_math(call: Attention, device: str) -> str | None:
    """Why the better kernels of `device`, "cuda" or "cpu", refuse such a call, and the repair. None where nothing of
    the kind shows: then the script has chosen it, or nothing better is there.

    The rules are those of PyTorch's `sdp_utils`.
    """
    if device not in ("cuda", "cpu"):
        return None
    size, others = call.query[-1], {call.key[-1], call.value[-1]}
    if len(call.query) != 4:
        return f"its query has {len(call.query)} dimensions; give [batch, heads, tokens, features]"
    if others != {size}:
        sizes = f"{size}, {call.key[-1]} and {call.value[-1]}"
        return f"heads of query, key and value have {sizes} features; make them equal"
    if device == "cpu":
        return "the CPU's fast kernel has no dropout; set the dropout of attention to 0" if call.dropout else None
    if call.dtype == "float64":
        return 'no fast kernel takes float64; set precision.kind = "bfloat16" or "float32"'
    step = 4 if call.dtype == "float32" else 8
    if size % step:
        masked = "with a mask, " if call.mask else ""
        return f"{masked}heads of {size} features in {call.dtype} fit no fast kernel; make them a multiple of {step}"
    return None


def work_of(events: Iterable[Any]) -> StepWork:
    """Of the events of a profile with shapes."""
    recorded = list(events)
    backwards = _Backwards(recorded)
    calls: Counter[Attention] = Counter()
    forward = backward = 0.0
    for event in recorded:
        name = event.name().removeprefix("aten::")
        if name in FORWARDS:
            calls[_attention(name, FORWARDS[name], event)] += 1
        if name == "convolution_backward":
            forward += (own := _convolution(event))
            backward += 2 * own
        elif (flops := _flops(name, event)) and (name in _BACKWARDS or backwards.around(event)):
            backward += flops
        else:
            forward += flops
    return StepWork(calls, min(forward + backward, 3 * forward), forward + backward)


PRODUCTS: Mapping[str, int] = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "baddbmm": 1}
"""Operators that multiply matrices, or batches of them, and which of their arguments is the left one."""


def _flops(name: str, event: Any) -> float:
    """Of this operator alone: math attention consists of products, which are counted as such."""
    if name in PRODUCTS:
        left, right = event.shapes()[PRODUCTS[name] :][:2]
        return 2.0 * prod(left) * right[-1]
    if name in _BACKWARDS:
        return 2 * _attention(name, "flash", event).flops
    return _attention(name, FORWARDS[name], event).flops if FORWARDS.get(name, "math") != "math" else 0.0


def _convolution(event: Any) -> float:
    """The forward that this backward belongs to: its gradient has the shape of the output, its forward's event not."""
    gradient, inputs, weight = event.shapes()[:3]
    transposed = event.concrete_inputs()[_places("convolution_backward")["transposed"]]
    return 2.0 * prod(inputs if transposed else gradient) * prod(weight[1:])


class _Backwards:
    """When each thread was in a backward."""

    def __init__(self, events: Sequence[Any]) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}
        for event in events:
            if event.name().startswith(_IN_BACKWARD):
                self._spans.setdefault(event.start_thread_id(), []).append((event.start_ns(), event.end_ns()))
        for spans in self._spans.values():
            spans.sort()

    def around(self, event: Any) -> bool:
        """Whether `event` lies in one. Those of one thread follow each other."""
        spans, at = self._spans.get(event.start_thread_id(), []), event.start_ns()
        place = bisect_right(spans, at, key=lambda span: span[0])
        return place > 0 and at < spans[place - 1][1]


@cache
def _places(name: str) -> dict[str, int]:
    """Where each argument of an operator of attention stands."""
    operator = getattr(torch.ops.aten, name).default
    return {argument.name: place for place, argument in enumerate(operator._schema.arguments)}


def _attention(name: str, backend: Backend, event: Any) -> Attention:
    places, shapes, given = _places(name), event.shapes(), event.concrete_inputs()
    query, key, value = (tuple(shapes[places[which]]) for which in ("query", "key", "value"))
    masks = [places[which] for which in ("attn_mask", "attn_bias") if which in places]
    dtype: str = event.dtypes()[places["query"]]
    causal, dropout = given[places["is_causal"]], given[places["dropout_p"]]
    mask = any(len(shapes[place]) > 0 for place in masks)
    return Attention(backend, query, key, value, _DTYPES.get(dtype, dtype), bool(causal), mask, float(dropout or 0.0))


class _Recording:
    """The operators that this process calls until `end`, by PyTorch's profiler on the host alone.

    PyTorch has one profiler a process, and a second one makes it crash: where the script begins its own, this one ends
    first, and has seen nothing.
    """

    def __init__(self) -> None:
        self._profiler: profile | None = None
        self._own = {name: getattr(profilers, name) for name in ("_prepare_profiler", "_enable_profiler")}

    def start(self) -> None:
        with _silent():
            profiler = profile(record_shapes=True)
            try:
                profiler.__enter__()
            except RuntimeError:
                return
        self._profiler = profiler
        for name, begin in self._own.items():
            setattr(profilers, name, self._giving_way(begin))

    def end(self) -> list[Any]:
        """What was seen: nothing where it had ended before."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return []
        for name, begin in self._own.items():
            setattr(profilers, name, begin)
        with _silent(), suppress(RuntimeError):
            profiler.__exit__(None, None, None)
        return [] if profiler.kineto_results is None else profiler.kineto_results.events()

    def _giving_way(self, begin: Callable[..., None]) -> Callable[..., None]:
        @wraps(begin)
        def begun(*arguments: Any, **named: Any) -> None:
            self.end()
            begin(*arguments, **named)

        return begun


@contextmanager
def _silent() -> Iterator[None]:
    """The profiler tells of its own start and end otherwise."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]


def _another_profiler() -> bool:
    """Is one at work, or getting ready? PyTorch tells nothing of one that warms up: it is looked for among all objects
    of this process, which takes some ten milliseconds. A daemon may begin one at any time.
    """
    if torch.autograd._profiler_enabled() or "KINETO_USE_DAEMON" in os.environ:  # pyright: ignore[reportPrivateImportUsage]
        return True
    profiles = (one for one in gc.get_objects() if issubclass(type(one), profile))
    return any(one.entered and one.kineto_results is None for one in profiles)


class StepLook:
    """Looks at one step: the first that is taken, or under a compiler the second. `found` is what it saw.

    Where another profiler is at work, or begins meanwhile, it sees nothing and leaves that one alone.
    """

    def __init__(self, *, compiled: bool) -> None:
        self._before = 1 if compiled else 0
        self._looked = False
        self.found: StepWork | None = None

    def around(self, inner: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
        """What a step is to be taken within, `inner` being what it was before."""

        @contextmanager
        def looking() -> Iterator[None]:
            recording = _Recording()
            recording.start()
            try:
                with inner():
                    yield
            finally:
                events = recording.end()
            if events:
                self.found = work_of(events)

        def step() -> AbstractContextManager[None]:
            if self._looked:
                return inner()
            if self._before > 0:
                self._before -= 1
                return inner()
            self._looked = True
            return inner() if _another_profiler() else looking()

        return step


def kernels_here(device: torch.device) -> dict[str, str]:
    """The kernel that causal attention with heads of 64 features takes on `device`, by type: what `shoal doctor` says.
    Calls it once in each, forward and backward; a type that the device does not have is left out.
    """
    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        look = StepLook(compiled=False)
        try:
            query = torch.ones(1, 2, 128, 64, dtype=dtype, device=device, requires_grad=True)
            with look.around(nullcontext)():
                torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
        except (RuntimeError, TypeError):
            continue
        for call in () if look.found is None else look.found.attention:
            found[call.dtype] = call.backend
    return found


if __name__ == "__main__":
    import json

    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps({"device": here.type, "kernels": kernels_here(here)}))
