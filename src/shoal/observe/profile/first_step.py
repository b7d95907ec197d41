"""What the first step of a run shows once: which kernels its attention took, and how many operations its matrices cost.

PyTorch chooses the kernel of `scaled_dot_product_attention` call by call, from shapes, types, masks and the device, and
says nothing. So the operators of one step are recorded, by PyTorch's profiler on the host alone: what was called, in
models of any origin, with or without a compiler. A compiled run is looked at in its second step: the first calls the
compiler, which calls operators too. From then on nothing is recorded, and nothing costs time.

Operations are those of matrix products and attention, a multiply-add counted as two (`cost.transformer`, "causal"):
causal attention counts the half of the square below the diagonal where the call says that it is causal, all of it under
a mask of the script's; its backward counts twice its forward. Those of a backward beyond twice its forward are
repeated ones, by recomputation: they count for the hardware and not for the model. So do those of an optimizer's step.

    hardware = forward + backward + update,   model = min(forward + backward, 3 forward)

A product that is made of others (groups of experts on a CPU, distributed and sparse tensors) counts by them, once.

What a compiler has made of attention in plain operators, FlexAttention's kernels among them, is no call and not seen;
nor are the products inside of kernels of recurrent layers and of a script's own, those with vectors, and those of
nested tensors, whose shapes no recording keeps.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
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
_IN_UPDATE = "Optimizer.step#"
_COMPILES = "(dynamo_timed)"
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
class StepOperations:
    """What one step of this rank did: its calls of attention, each with how many there were, and its operations."""

    attention: Mapping[Attention, int]
    model_flops: float
    hardware_flops: float

    def times(self, factor: float) -> StepOperations:
        """Of so many such parts of a step."""
        calls = {call: round(factor * count) for call, count in self.attention.items()}
        return StepOperations(calls, factor * self.model_flops, factor * self.hardware_flops)

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
    size, value = call.query[-1], call.value[-1]
    if len(call.query) != 4:
        return f"its query has {len(call.query)} dimensions; give [batch, heads, tokens, features]"
    if device == "cpu" and value != size:  # GPUs have a kernel for these
        return f"heads of query and key have {size} features, those of value {value}; make them equal"
    if device == "cpu":
        return "the CPU's fast kernel has no dropout; set the dropout of attention to 0" if call.dropout else None
    if call.dtype == "float64":
        return 'no fast kernel takes float64; set precision.kind = "bfloat16" or "float32"'
    step = 4 if call.dtype == "float32" else 8
    if odd := next((each for each in (size, value) if each % step), None):
        masked = "with a mask, " if call.mask else ""
        return f"{masked}heads of {odd} features in {call.dtype} fit no fast kernel; make them a multiple of {step}"
    return None


PRODUCTS: Mapping[str, int] = {
    "mm": 0, "bmm": 0, "_scaled_mm": 0, "_grouped_mm": 0, "_scaled_grouped_mm": 0, "addmm": 1, "baddbmm": 1,
}  # fmt: skip
"""Operators that multiply matrices, or batches of them, and which of their arguments is the left one."""
_CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
_COUNTED = _CONVOLUTIONS | _BACKWARDS | PRODUCTS.keys() | {name for name in FORWARDS if FORWARDS[name] != "math"}
_MATTER = (_IN_BACKWARD, _IN_UPDATE, *_COUNTED, *FORWARDS)


def work_of(events: Iterable[Any]) -> StepOperations:
    """Of the events of a profile with shapes."""
    calls: Counter[Attention] = Counter()
    flops: Counter[tuple[bool, bool]] = Counter()
    for operator in _operators(events):
        name, event = operator.name, operator.event
        if name in FORWARDS and (call := _attention(name, FORWARDS[name], event)) is not None:
            calls[call] += 1
        if operator.counts:
            backward = operator.backward or name in _BACKWARDS or name == "convolution_backward"
            flops[operator.update, backward] += _flops(name, event)  # type: ignore[assignment]
    forward, backward, update = flops[False, False], flops[False, True], flops[True, False]
    if flops[True, True] > 0:  # the optimizer calls a closure, which computes forward and backward
        forward, backward, update = forward + update, backward + flops[True, True], 0
    return StepOperations(calls, float(min(forward + backward, 3 * forward)), float(forward + backward + update))


@dataclass
class _Operator:
    """One that was called: in a backward, in an optimizer's step, in another one that counts (`inside`)? It `counts`
    where none that does was called in it.
    """

    event: Any
    name: str
    backward: bool = False
    update: bool = False
    inside: _Operator | None = None
    counts: bool = False

    def calls(self, event: Any) -> _Operator:
        """`event` was called in this one. Whatever a convolution calls is its own."""
        name = event.name()
        inside = self if self.name in _COUNTED else self.inside
        inner = _Operator(
            event,
            name.removeprefix("aten::"),
            self.backward or name.startswith(_IN_BACKWARD),
            self.update or name.startswith(_IN_UPDATE),
            inside,
        )
        convolution = inside is not None and inside.name in _CONVOLUTIONS and inside.name != inner.name
        inner.counts = inner.name in _COUNTED and not convolution
        if inner.counts and inside is not None:
            inside.counts = False
        elif convolution:
            inner.inside, inner.name = inside, ""
        return inner


def _operators(events: Iterable[Any]) -> list[_Operator]:
    """Those that matter, with what each was called in: what lies within its time, on the same thread."""
    found: list[_Operator] = []
    around: dict[int, list[_Operator]] = {}
    matter = [event for event in events if event.name().removeprefix("aten::").startswith(_MATTER)]
    for event in sorted(matter, key=lambda event: (event.start_ns(), -event.end_ns())):
        outer = around.setdefault(event.start_thread_id(), [_Operator(None, "")])
        while len(outer) > 1 and outer[-1].event.end_ns() <= event.start_ns():
            outer.pop()
        outer.append(outer[-1].calls(event))
        found.append(outer[-1])
    return found


def _flops(name: str, event: Any) -> float:
    """Of this operator alone; of one whose matrices have no shapes, as those of nested tensors, nothing."""
    if name in _CONVOLUTIONS:
        return _convolution(name, event)
    if name in PRODUCTS:
        left, right = event.shapes()[PRODUCTS[name] :][:2]
        if min(len(left), len(right)) < 2:
            return 0.0
        return 2.0 * prod(left[1:] if len(left) > len(right) else left) * right[-1]  # groups may share `right`
    call = _attention(name, "flash", event)
    return 0.0 if call is None else call.flops * (2 if name in _BACKWARDS else 1)


def _convolution(name: str, event: Any) -> float:
    """A backward computes the gradient of its input, that of its weight, or both."""
    places, shapes, given = _places(name), event.shapes(), event.concrete_inputs()
    inputs, weight = shapes[places["input"]], shapes[places["weight"]]
    if min(len(inputs), len(weight)) < 3:
        return 0.0
    if given[places["transposed"]]:
        own = 2.0 * prod(inputs) * prod(weight[1:])
    else:
        outer = [given[places[which]] for which in ("stride", "padding", "dilation")]
        moves = zip(
            inputs[2:], weight[2:], *(each * (len(inputs) - 2 if len(each) == 1 else 1) for each in outer), strict=True
        )
        positions = prod((n + 2 * pad - dilated * (k - 1) - 1) // step + 1 for n, k, step, pad, dilated in moves)
        own = 2.0 * inputs[0] * positions * prod(weight)
    return own * sum(given[places["output_mask"]][:2]) if name == "convolution_backward" else own


@cache
def _places(name: str) -> dict[str, int]:
    """Where each argument of an operator stands."""
    operator = getattr(torch.ops.aten, name).default
    return {argument.name: place for place, argument in enumerate(operator._schema.arguments)}


def _attention(name: str, backend: Backend, event: Any) -> Attention | None:
    """None where the shapes are not known."""
    places, shapes, given = _places(name), event.shapes(), event.concrete_inputs()
    query, key, value = (tuple(shapes[places[which]]) for which in ("query", "key", "value"))
    if min(map(len, (query, key, value))) < 2:
        return None
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

    @property
    def lasts(self) -> bool:
        return self._profiler is not None

    def end(self) -> Sequence[Any]:
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
    that refer to its class, which takes some ten milliseconds. (A list of all of them, `gc.get_objects`, would hold
    tuples that other threads still fill: their `tuple(...)` would fail.) A daemon may begin one at any time.
    """
    if torch.autograd._profiler_enabled() or "KINETO_USE_DAEMON" in os.environ:  # pyright: ignore[reportPrivateImportUsage]
        return True
    kinds = {profile, *profile.__subclasses__()}
    profiles = [one for one in gc.get_referrers(*kinds) if type(one) in kinds]
    return any(one.entered and one.kineto_results is None for one in profiles)


TRIES = 4
"""Steps that are looked at, where a compiler was at work in those before."""
ENOUGH_S = 0.01
"""Seconds of microbatches that are recorded of a step."""


def flops_of(call: Callable[[], object]) -> float:
    """Operations of the matrix products, convolutions and attentions that `call` computes."""
    recording = _Recording()
    recording.start()
    try:
        call()
    finally:
        events = recording.end()
    return work_of(events).hardware_flops


class StepLook:
    """Looks at one step: the first that is taken, or under a compiler the second. `found` is what it saw.

    Where another profiler is at work, or begins meanwhile, it sees nothing and leaves that one alone. Where a compiler
    is at work, a script's own too, the next step is looked at. What cannot be read is told to `warn`: no step fails by
    being looked at.

    A step of many microbatches is recorded in part: it ends with the first that is over after `ENOUGH_S`, and those
    that follow are taken to be like those before. What an optimizer multiplies is not seen then.
    """

    def __init__(self, *, compiled: bool, warn: Callable[[str], None] = warnings.warn) -> None:
        self._before, self._tries, self._warn = int(compiled), TRIES, warn
        self._recording, self._began_s = _Recording(), 0.0
        self._microbatches, self._part = 0, 0
        self._cut: Sequence[Any] = ()
        self.found: StepOperations | None = None

    def microbatch(self) -> None:
        """Say so before each microbatch of a step, where one follows the other, forward and backward."""
        done = self._microbatches
        self._microbatches += 1
        if self._part == 0 and done > 0 and self._recording.lasts and time.perf_counter() - self._began_s > ENOUGH_S:
            self._cut, self._part = self._recording.end(), done

    def around(self, inner: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
        """What a step is to be taken within, `inner` being what it was before."""

        @contextmanager
        def looking() -> Iterator[None]:
            self._microbatches, self._part, self._cut = 0, 0, ()
            self._recording, self._began_s = _Recording(), time.perf_counter()
            self._recording.start()
            try:
                with inner():
                    yield
            finally:
                rest = self._recording.end()
            self._read(self._cut or rest, times=self._microbatches / self._part if self._part else 1.0)
            self._cut = ()

        def step() -> AbstractContextManager[None]:
            if self._before > 0:
                self._before -= 1
                return inner()
            if self._tries == 0:
                return inner()
            self._tries -= 1
            if _another_profiler():
                self._tries = 0
                return inner()
            return looking()

        return step

    def _read(self, events: Sequence[Any], *, times: float) -> None:
        """A compiler calls operators too, many times those of the step."""
        try:
            if any(event.name().endswith(_COMPILES) for event in events):
                return
            self._tries = 0
            self.found = work_of(events).times(times) if events else None
        except Exception as error:  # the recording's form is PyTorch's own
            self._tries = 0
            self._warn(f"what the first step computed could not be read ({error!r}): no MFU, no attention kernels")


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
