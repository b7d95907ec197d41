"""Whether a forward has drawn anything from PyTorch's generators, seen from outside.

A generator that has not moved has given no number. Its state is compared before and after: microseconds, where a mode
that looks at every call costs a small model a third of its step. On that rests a bet: a model that has drawn nothing
is called without the mode that keys draws (`KeyedDraws`), and of one that draws by dropout alone, whose masks need no
generator, only the modules that have drawn are called under it. Where something is then drawn elsewhere after all, the
forward is taken back, and repeated under the mode, which stays. Whoever bets or not, the numbers are the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import checkpoint

from shoal.models.batch_norm import GroupedBatchNorm, StepStatistics
from shoal.models.keyed_draws import KeyedDraws, active_draws
from shoal.models.roles import tables_in

T = TypeVar("T")


@cache
def _accelerator() -> torch.device | None:
    """Of which kind PyTorch was built for: the same as long as the process lives."""
    return torch.accelerator.current_accelerator()


def generators_in_use() -> list[torch.Generator]:
    """PyTorch's, of the CPU and of the accelerator that this process uses."""
    found = [torch.default_generator]
    accelerator = _accelerator()
    if accelerator is None:
        return found
    module = torch.get_device_module(accelerator)
    if accelerator.type == "mps":
        return [*found, module._get_default_mps_generator()]
    return [*found, module.default_generators[module.current_device()]] if module.is_initialized() else found


def seed_all_devices(seed: int) -> None:
    """Seeds the generators of all accelerators of this process, where it uses any: a model may lie on several."""
    accelerator = _accelerator()
    if accelerator is None:
        return
    module = torch.get_device_module(accelerator)
    if accelerator.type != "mps" and module.is_initialized() and torch.accelerator.device_count() > 1:
        module.manual_seed_all(seed)


def seed_host(seed: int) -> None:
    """Seeds the generators that a process shares with all its threads: Python's `random`, and NumPy's old functions."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def host_states() -> dict[str, Any]:
    """The state of the generators of `seed_host`, by name, to be compared."""
    return _states(random.getstate(), np.random.get_state(legacy=False))


def host_states_after(seed: int) -> dict[str, Any]:
    """What `seed_host` leaves them in."""
    return _states(random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state(legacy=False))


def _states(own: Any, numpy: Mapping[str, Any] | tuple[Any, ...]) -> dict[str, Any]:
    assert isinstance(numpy, Mapping), "asked for as a mapping"
    twister = numpy["state"]
    return {"Python's random": own, "NumPy": (twister["key"].tobytes(), twister["pos"], numpy["has_gauss"])}


_DRAW_NOTHING = frozenset({
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Unflatten,
    nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax,
    nn.AvgPool1d, nn.AvgPool2d, nn.MaxPool1d, nn.MaxPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
})  # fmt: skip


def draws_nothing(model: nn.Module) -> bool:
    """Is `model` made of modules alone that draw nothing, or whose draws are keyed: PyTorch's and Shoal's? A class of a
    user's, whatever it does, is none of them, nor is a module with a hook or with a forward of its own.
    """
    for module in model.modules():
        known = type(module) in _DRAW_NOTHING or type(module).__module__.startswith("shoal.models.")
        if not known or "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
            return False
    return True


def _outside_transforms() -> AbstractContextManager[Any]:
    """Around the states of generators: a transform of `torch.func` would wrap them."""
    return nullcontext() if peek_interpreter_stack() is None else temporarily_clear_interpreter_stack()


class DrawWatch:
    """The state of `generators_in_use` when it was made; `host`: that of Python's and NumPy's generators, too, which
    takes ten times as long.
    """

    def __init__(self, *, host: bool = False) -> None:
        self._generators = generators_in_use()
        with _outside_transforms():
            self._before = [generator.get_state() for generator in self._generators]
        self.host = host_states() if host else None

    def drew(self) -> bool:
        """Has any of them given a number since?"""
        with _outside_transforms():
            for generator, before in zip(self._generators, self._before, strict=True):
                if generator.get_state().numpy().tobytes() != before.numpy().tobytes():  # `torch.equal` is slower
                    return True
        return self.host is not None and host_states() != self.host

    def rewind(self) -> None:
        """PyTorch's generators will give the same numbers once more."""
        with _outside_transforms():
            for generator, state in zip(self._generators, self._before, strict=True):
                generator.set_state(state)


def repeats_alike(model: nn.Module) -> bool:
    """Can a forward of `model` be taken back? Not one that asks servers for rows, or adds up statistics of a step, of
    which those of batch norms over groups alone are known (`shoal.engine.batch_statistics`).
    """
    statistics = [module for module in model.modules() if isinstance(module, StepStatistics)]
    return not tables_in(model) and all(isinstance(module, GroupedBatchNorm) for module in statistics)


class SleepingDraws:
    """Calls forwards under `draws`, or for as long as that is enough without them or with some modules under them. See
    above.

    `may_sleep`: a forward can be repeated, as it cannot where ranks exchange something in it, or where it draws from
    Python's or NumPy's generators: their state takes too long to be read before each forward. Those that begin to draw
    from them later are given what they got before (`host_seed`), unless the script's loop draws from them, too.
    """

    def __init__(self, draws: KeyedDraws, *, may_sleep: bool) -> None:
        self.draws, self.may_sleep = draws, may_sleep
        self.forwards = 0
        """Of this microbatch, so far."""
        self.host_seed: int | None = None
        """With which `seed_host` was called before this microbatch; None: it was not."""
        self._loop_draws = False

    def __call__(self, forward: Callable[[], T], *, take_back: Callable[[], None], repeatable: Callable[[], bool]) -> T:
        """What `forward` returns. `take_back` undoes what it changed beside its result; `repeatable` is asked after it
        whether it met other ranks.
        """
        draws = self.draws
        if not self.may_sleep or not draws.training:
            with draws.opened():
                return forward()
        watch = self.watch()
        if not draws.asleep and not draws.dozes:
            with draws:
                result = forward()
            self.learn(watch, stays=not repeatable())
            return result
        with draws.opened() if draws.dozes else nullcontext():
            result = forward()
        if not watch.drew():
            return result
        self.start_again(watch, take_back)
        with draws:
            return forward()

    def watch(self) -> DrawWatch:
        """Before a forward which can be repeated, or of which is learned whether the next ones can."""
        return DrawWatch(host=self.host_seed is not None and not (self.draws.asleep or self.draws.dozes))

    def start_again(self, watch: DrawWatch, take_back: Callable[[], None]) -> None:
        """The forward since `watch` has drawn what nobody has keyed: all is as before it, and the mode is awake."""
        self.stay()
        watch.rewind()
        if self.host_seed is not None and not self._loop_draws:
            seed_host(self.host_seed)
        take_back()
        self.draws.restart()

    def learn(self, watch: DrawWatch, *, stays: bool) -> None:
        """After a forward under the mode, which `watch` has seen: `stays` the mode, whatever was drawn?"""
        draws = self.draws
        self._loop_draws = self.host_seed is not None and watch.host != host_states_after(self.host_seed)
        if stays or watch.drew() or (draws.drawers and not draws.may_doze):
            self.stay()
        elif draws.drawers:
            draws.doze()
        else:
            draws.sleep()

    def stay(self) -> None:
        """The mode has something to do: it is there from now on."""
        self.may_sleep = False
        self.draws.wake()


# Draws of a forward that a user's model repeats in the backward, by `torch.utils.checkpoint`.
#
# PyTorch takes down the state of its own generators for that, and autograd leaves every mode before it repeats
# anything: what a mode has keyed (`KeyedDraws`) would be drawn from the generators the second time, and the gradient
# would be that of another mask, without a word. So what `checkpoint` is given, a module or any function, is repeated
# under the mode as it was when its forward began. That is done where both kinds of checkpoint, with and without
# re-entrant autograd, keep the function that they repeat.


Function = Callable[..., Any]


@cache
def key_checkpoints() -> None:
    """From now on, in this process."""
    without, forward = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction.forward

    @wraps(without)
    def repeats_keyed(function: Function, *args: Any, **kwargs: Any) -> Any:
        draws = active_draws()
        repeated = function if draws is None else _repeated(draws, function)
        return without(repeated, *args, **kwargs)

    @wraps(forward)
    def forward_keyed(ctx: Any, function: Function, *args: Any) -> Any:
        draws = active_draws()
        if draws is None:
            return forward(ctx, function, *args)
        repeated = _repeated(draws, function)
        result = forward(ctx, function, *args)
        ctx.run_function = repeated
        return result

    checkpoint._checkpoint_without_reentrant_generator = repeats_keyed
    setattr(checkpoint.CheckpointFunction, "forward", staticmethod(forward_keyed))  # noqa: B010


def _repeated(draws: KeyedDraws, function: Function) -> Function:
    """`function` as it will be repeated: its draws are those that it makes from here on."""
    moment = draws.moment()

    def repeated(*args: Any, **kwargs: Any) -> Any:
        with draws.replaying(moment):
            return function(*args, **kwargs)

    return repeated
