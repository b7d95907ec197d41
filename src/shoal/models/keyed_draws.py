"""Random numbers that a user's module draws, made a function of (seed, step, layer, sample, position).

`F.dropout` takes its mask from a generator whose state depends on everything drawn before, and so on how samples are
cut. `KeyedDraws` is a mode of PyTorch under which dropout (that of attention and of recurrent layers, too) and the
common random functions (`keyed_functions`) take their numbers from a counter instead, as `KeyedDropout` does:

    bits(bits(sample key, layer key), index of the element within its sample)

The layer is the innermost module that is being called, by name, with the number of its call in this forward and of the
draw in this call. So a stage of a pipeline and a repeated forward draw what the whole model would. Which
dimension counts samples is found by its length (`shoal.models.sample_places`). A tensor without them, such as a weight,
is drawn from (seed, step, layer): the same on every rank.

A loop of a script's own may draw past its model's forward: noise, time steps, a part of the model that it calls by
itself. Of these draws the loop is the layer (`enter_loop`), and their number is the order in which it makes them.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from shoal.errors import UserCodeError
from shoal.maths.counter import bits, key_of
from shoal.models.keyed_functions import AS_FLOAT32, BODIES, DROPPING, HANDLERS, drawn, factor_of_kept
from shoal.models.laws import Bits, Loops
from shoal.models.mode_stack import enter_below, entered_modes, in_backward, in_memory, leave
from shoal.models.sample_places import (
    AskedOnce,
    Extent,
    Inside,
    SampleKeys,
    Slices,
    bits_in,
    extents_in,
    numbered,
    rows_of,
    samples_in,
)


@dataclass
class _Call:
    """A call of a module that is under way; `number` counts the calls of one forward, None where that is unknown."""

    module: str
    number: int | None
    draws: int = 0
    inside: Inside | None = None
    entered_here: bool = False


LOOP = "\0loop"
"""What draws past the model's forward."""


@dataclass(frozen=True)
class Moment:
    """The state of `KeyedDraws` between two draws of a forward."""

    step: int
    keys: SampleKeys | None
    tokens: int
    sequence: Mapping[int, Extent]
    calls: Sequence[_Call]
    counts: Mapping[str, int]


class _MappedError(Exception):
    """What is drawn has dimensions that cannot be seen from within `torch.vmap`."""


class KeyedDraws(TorchFunctionMode):
    """The mode, for the modules of `model`, which must be called while it is entered.

    `one_at_a_time`: a backward follows its forward before the next begins, so that a forward that is repeated in the
    backward is the last one. `unkeyed` has the names of functions that were called and that draw from PyTorch's
    generator, which knows no samples: what they return depends on the layout.

    Each call of PyTorch's and of a module passes through Python here, which a small model feels. So a mode whose model
    has drawn nothing may be `asleep`: it is not entered, and its hooks are off, until `wake`. Where some modules have
    drawn, it may `doze`: only they are called under it, and what is inside them. Who lets it sleep or doze sees to it
    that nothing is drawn elsewhere meanwhile (`shoal.models.draw_watch`). `drew`: how often something was drawn;
    `drawers`: the names of the modules that drew; `is_asked_for`: somebody has asked for the mode that is entered, and
    relies on it being there.
    """

    def __init__(self, model: nn.Module, *, seed: int, one_at_a_time: bool = True) -> None:
        super().__init__()
        self._model, self._seed, self.one_at_a_time = model, seed, one_at_a_time
        self._process = os.getpid()
        self.slices = Slices()
        self.unkeyed: set[str] = set()
        self.drew, self.drawers = 0, set[str]()
        self.is_asked_for = self.dozes = False
        self.loops: Loops | None = None
        """What writes numbers on a CPU in one pass; None: operators of PyTorch's do."""
        self._keys_of: SampleKeys | None = None
        self._step, self._tokens, self._entered, self._replays = 0, 0, 0, 0
        self._calls: list[_Call] = []
        self._loop, self._of_samples, self._evaluated = _Call(LOOP, 0), True, False
        self._counts: dict[str, int] = {}
        self._sequence: Mapping[int, Extent] = {}
        self._modules = list(model.named_modules())
        self._hooks: dict[tuple[str, str], tuple[OrderedDict[int, Any], RemovableHandle]] = {}
        self._ahead: dict[tuple[str, str], frozenset[int]] = {}
        self.wake()

    @property
    def asleep(self) -> bool:
        """Whether the modules are called without it."""
        return not self._hooks

    @property
    def training(self) -> bool:
        """Whether its model is."""
        return self._model.training

    def sleep(self) -> None:
        """Its model is to be called without it."""
        for place, (hooks, handle) in self._hooks.items():
            self._ahead[place] = frozenset(takewhile(lambda each, own=handle.id: each != own, hooks))
            handle.remove()
        self._hooks, self.dozes = {}, False

    def doze(self) -> None:
        """Only modules that have drawn, and those inside them, are to be called with it."""
        self.sleep()
        self.dozes, drawers = True, tuple(f"{name}." if name else "" for name in self.drawers)
        self._hook(lambda name: f"{name}.".startswith(drawers))

    @property
    def may_doze(self) -> bool:
        """Does nothing but draws need to know which modules are under way?"""
        return self.one_at_a_time and not (self.is_asked_for or self.slices.columns or self.slices.rows)

    def wake(self) -> None:
        """Its model is to be called with it."""
        if self.dozes:
            self.sleep()
        if self.asleep:
            self._hook(lambda name: True)

    def is_called_with(self, module: nn.Module) -> bool:
        """Is that its model, whose calls it hears of now?"""
        return module is self._model and ("", "before") in self._hooks

    def begin_call(self) -> None:
        """Its model is being called, and its own hook was not there when that began."""
        self._before("")(self._model, ())

    def _hook(self, wanted: Callable[[str], bool]) -> None:
        for name, module in self._modules:
            if wanted(name):
                before = module.register_forward_pre_hook(self._before(name))
                after = module.register_forward_hook(self._after(name), always_call=True)
                self._put(before, module._forward_pre_hooks, (name, "before"))
                self._put(after, module._forward_hooks, (name, "after"))

    def _put(self, handle: RemovableHandle, hooks: Any, place: tuple[str, str]) -> None:
        """The new hook of `handle` goes where the one before it was taken off: a hook of the user's that draws belongs
        to the same layer, whenever the mode sleeps. For the same reason modules that came later have none.
        """
        if (ahead := self._ahead.get(place)) is not None:
            for other in [each for each in hooks if each not in ahead and each != handle.id]:
                hooks.move_to_end(other)
        self._hooks[place] = hooks, handle

    def open(self) -> None:
        """A forward or a backward of the model follows, until `__exit__`."""
        if self.dozes:
            self._entered += 1
        else:
            self.__enter__()

    def opened(self) -> AbstractContextManager[Any]:
        """Around a forward or a backward of the model."""
        return _Opened(self)

    def restart(self) -> None:
        """The forward that has been made so far does not count: another of the same samples follows."""
        for call in self._calls:  # the outermost module's, where its own hook asks for that
            if call.entered_here:
                self.__exit__(None, None, None)
        self._calls, self._counts = [], {}

    def begin(self, step: int, sample_keys: SampleKeys, *, tokens: int) -> None:
        """A forward follows, of samples with these keys, of which this rank gets so many tokens."""
        self._step, self._keys_of, self._tokens = step, AskedOnce(sample_keys), tokens
        self._calls, self._counts, self._loop, self._of_samples = [], {}, _Call(LOOP, 0), True
        self._evaluated = not self._model.training
        self._sequence = {} if self.slices.sequence is None else self.slices.sequence(tokens)

    def moment(self) -> Moment:
        """Where this forward stands: what `replaying` goes back to."""
        calls = [replace(call) for call in self._calls]
        return Moment(self._step, self._keys_of, self._tokens, self._sequence, calls, dict(self._counts))

    @property
    def in_loop(self) -> bool:
        """Is a script's own loop under way, past its model's forward?"""
        return bool(self._calls) and self._calls[0].module == LOOP

    def enter_loop(self, *, here: bool = True) -> None:
        """What follows is drawn by a script's own loop, which runs `here`, on this thread, or waits for it."""
        self._entered += 1
        if here:
            enter_below(self)
        self._calls = [self._loop]

    def leave_loop(self) -> bool:
        """The loop calls its model, or what draws nothing that has to be keyed. Whether it runs on this thread."""
        self._loop, self._calls = self._calls[0], []
        self._entered -= 1
        return leave(self)

    def end_samples(self) -> None:
        """What the loop draws from here to the next forward is for weights and gradients, whatever its shape."""
        self._of_samples = False

    def outside_loop(self) -> AbstractContextManager[None]:
        """Around what is no part of a loop's own draws, where a loop is under way."""
        return _OutsideLoop(self)

    @contextmanager
    def replaying(self, moment: Moment) -> Iterator[None]:
        """Around the part of a forward that began at `moment` and is repeated in the backward."""
        before = self.moment()
        self._go_to(moment)
        self._replays += 1
        try:
            with self:  # autograd leaves every mode
                yield
        finally:
            self._replays -= 1
            self._go_to(before)

    @contextmanager
    def from_the_start(self) -> Iterator[None]:
        """Around the model's own forward where a part of a chain calls it past its hooks: its draws are those of a
        whole forward, whatever parts ran before, and however it is left.
        """
        before = self.moment()
        self._calls, self._counts = [_Call("", 0)], {}
        try:
            yield
        finally:
            self._go_to(before)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Around the model's own forward where its hooks are passed by: what they do."""
        self.begin_call()
        try:
            yield
        finally:
            self._after("")(self._model, (), None)

    def _go_to(self, moment: Moment) -> None:
        self._step, self._keys_of = moment.step, moment.keys
        self._tokens, self._sequence = moment.tokens, moment.sequence
        self._calls, self._counts = [replace(call) for call in moment.calls], dict(moment.counts)

    def __enter__(self) -> KeyedDraws:
        self._entered += 1
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._entered -= 1
        leave(self)  # which does nothing where the loop runs on another thread

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is None or self._keys_of is None or not self._trains():
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():  # what a script compiles by itself draws from PyTorch's generator
            return func(*args, **kwargs)
        if self._process != os.getpid():  # a fork of this one, such as a worker of a DataLoader, draws for itself
            return func(*args, **kwargs)
        if func in BODIES:
            with self:
                return BODIES[func](*args, **kwargs)
        if not self._calls and not (in_backward() and handler in DROPPING):
            return func(*args, **kwargs)
        try:
            return drawn(handler, self, func, args, kwargs)
        except _MappedError:  # vmap draws for each of what it maps, or for none, or refuses
            self.unkeyed.add(f"{func.__name__} under vmap")
            return func(*args, **kwargs)

    def _trains(self) -> bool:
        """Not where its model is evaluated for a while: a loop may train one that is in evaluation mode all along."""
        return self._model.training or (self._evaluated and self.in_loop)

    def _before(self, name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            if torch.compiler.is_compiling() or not self._entered:
                return
            if self.in_loop:
                if name in self.slices.columns:
                    self._calls[0].inside = Inside(None)  # what the loop draws next may be of a part of a sample
                return
            count = self._counts.get(name, 0)
            if in_backward() and not self._replays:
                known = count == 1 and self.one_at_a_time
                self._calls.append(_Call(name, 0 if known else None, entered_here=True))
                self.__enter__()  # autograd leaves every mode
            else:
                self._counts[name] = count + 1
                alone = self.dozes and not self._calls
                self._calls.append(_Call(name, count, entered_here=alone))
                if alone:
                    self.__enter__()

        return before

    def _after(self, name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or not self._entered or not self._calls or self.in_loop:
                return
            if self._calls.pop().entered_here:
                self.__exit__(None, None, None)
            if self._calls and name in self.slices.columns:
                self._calls[-1].inside = self.slices.columns[name]
            elif self._calls and name in self.slices.rows:
                self._calls[-1].inside = None

        return after

    def bits_for(self, shape: Sequence[int], *, device: torch.device, samples: bool = True) -> Bits:
        """64 random bits for each element of a tensor of this shape, the next draw of the module that is called."""
        return Bits(self._bits(self._next_key(), shape, device=device, samples=samples), in_memory(self.loops))

    def mask_for(
        self, shape: Sequence[int], *, p: float, dtype: torch.dtype, device: torch.device, samples: bool = True
    ) -> Tensor:
        """1 / (1 - p) where the bits of the next draw are among the 1 - p that stay, else 0."""
        key, loops, least = self._next_key(), in_memory(self.loops), math.floor(p * 2**64) - 2**63
        dim, inner = self._samples_of(shape) if samples else (None, ())
        writable = loops is not None and device.type == "cpu" and dtype in AS_FLOAT32
        if loops is None or not writable or dim is None or not inner or self._extents(inner):
            drawn = self._bits(key, shape, device=device, samples=samples)
            return (drawn >= least).to(dtype) / (1 - p)
        keys = self._sample_keys().to(device).contiguous()
        mask = torch.empty(len(keys), *inner, dtype=torch.float32, device=device)
        loops.mask(keys, key, rows_of(inner), mask, least=least, kept=factor_of_kept(p, dtype))
        return (mask.view(shape) if dim == 0 else mask.movedim(0, dim).reshape(shape)).to(dtype)

    def _next_key(self) -> int:
        """That of the next draw."""
        if not self._calls:
            raise _repeated("a function that is no module")
        if any(level.key() == TransformType.Vmap for level in get_interpreter_stack() or ()):
            raise _MappedError
        call, self.drew = self._calls[-1], self.drew + 1
        self.drawers.add(call.module)
        if call.number is None:
            raise _repeated(f"the module {call.module}")
        key = key_of(self._seed, "draw", call.module, call.number, call.draws)
        call.draws += 1
        return key

    def _bits(self, key: int, shape: Sequence[int], *, device: torch.device, samples: bool) -> Tensor:
        dim, inner = self._samples_of(shape) if samples else (None, tuple(shape))
        if dim is None:
            return bits(key_of(key, "step", self._step), numbered(inner, self._extents(inner), device))
        keys = self._sample_keys().to(device)
        drawn = bits_in(keys, key, inner, self._extents(inner), loops=in_memory(self.loops))
        return drawn.movedim(0, dim).reshape(shape)

    def _sample_keys(self) -> Tensor:
        assert self._keys_of is not None
        return self._keys_of()

    def counts_samples(self, length: int) -> bool:
        """Are there as many samples in this forward?"""
        return length == len(self._sample_keys())

    def dim_of_samples(self, shape: Sequence[int]) -> int | None:
        """Which dimension of a tensor counts samples, if any does."""
        return self._samples_of(shape)[0]

    def _samples_of(self, shape: Sequence[int]) -> tuple[int | None, tuple[int, ...]]:
        """Which dimension counts the samples, and the shape of one; None where nothing does."""
        if self.in_loop and not self._of_samples:
            return None, tuple(shape)
        samples = len(self._sample_keys())
        return samples_in(shape, samples, rows={samples * tokens for tokens in (self._tokens, *self._sequence)})

    def _extents(self, inner: Sequence[int]) -> dict[int, Extent]:
        inside = next((call.inside for call in reversed(self._calls) if call.inside is not None), None)
        return extents_in(inner, self._sequence, inside, module=self._calls[-1].module)


class _Opened:
    """See `KeyedDraws.opened`. A class, as this and the next one are entered several times in a step."""

    def __init__(self, draws: KeyedDraws) -> None:
        self._draws = draws

    def __enter__(self) -> None:
        self._draws.open()

    def __exit__(self, *_: object) -> None:
        self._draws.__exit__(None, None, None)


class _OutsideLoop:
    """See `KeyedDraws.outside_loop`."""

    def __init__(self, draws: KeyedDraws) -> None:
        self._draws = draws
        self._here: bool | None = None

    def __enter__(self) -> None:
        if self._draws.in_loop:
            self._here = self._draws.leave_loop()

    def __exit__(self, *_: object) -> None:
        if self._here is not None:
            self._draws.enter_loop(here=self._here)


def active_draws() -> KeyedDraws | None:
    """The mode that is entered here."""
    entered = [mode for mode in entered_modes() if isinstance(mode, KeyedDraws)]
    if not entered:
        return None
    entered[-1].is_asked_for = True
    return entered[-1]


def draws_of_a_forward() -> AbstractContextManager[None]:
    """`KeyedDraws.from_the_start` of the mode that is entered here; nothing where none is."""
    mode = active_draws()
    return nullcontext() if mode is None else mode.from_the_start()


def _repeated(where: str) -> UserCodeError:
    return UserCodeError(
        f"{where} draws random numbers in a forward that torch.utils.checkpoint repeats, and which of its calls is "
        'repeated cannot be known: set memory.recompute = "full" instead of calling checkpoint, or turn dropout off'
    )
