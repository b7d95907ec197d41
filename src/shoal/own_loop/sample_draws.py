"""Random numbers of a model that a script calls itself: keyed on the samples, as under `shoal train`.

Hooks around the models' forwards enter the keyed draws (`shoal.models.keyed_draws`) and leave them. A model that draws
nothing is called without them, as under `shoal train` (`shoal.models.draw_watch`), if it is one model, called once a
microbatch, and changes no buffers: a forward that has drawn after all can then be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn

from shoal.engine.compute import Compute
from shoal.models.draw_watch import DrawWatch


class DrawsBySample:
    """Keys what `models` draw while they train, where `inside` says that a step is open. `compute` is how a rank calls
    them under `shoal train`. Call `close` to give the models back.
    """

    def __init__(self, models: Sequence[nn.Module], compute: Compute, *, inside: Callable[[], bool]) -> None:
        self._sleeping, self._buffers, self._inside = compute.randomness.sleeping, compute.buffers, inside
        self._open: list[_Forward] = []
        self._hooks = ExitStack()
        if self._sleeping is None:
            return
        if len(models) > 1:
            self._sleeping.may_sleep = False
        for model in models:
            for handle in (
                # before the draws' own hook, which has to find them entered, or the model's own draws had no module
                model.register_forward_pre_hook(self._before, prepend=True),
                model.register_forward_hook(self._returned, prepend=True, with_kwargs=True),
                model.register_forward_hook(self._after, always_call=True),
            ):
                self._hooks.callback(handle.remove)

    def close(self) -> None:
        """Takes the hooks off the models."""
        self._hooks.close()

    def _before(self, module: nn.Module, inputs: object) -> None:
        sleeping = self._sleeping
        if sleeping is None or not module.training or not self._inside():
            return
        sleeping.forwards += 1
        if sleeping.forwards > 1 or self._buffers.moving:
            sleeping.stay()
        self._open.append(_Forward(DrawWatch() if sleeping.may_sleep else None, entered=not sleeping.draws.asleep))
        if self._open[-1].entered:
            sleeping.draws.__enter__()

    def _returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """None, or the output of a repeated forward in the place of one that has drawn without the draws."""
        sleeping = self._sleeping
        if sleeping is None or not self._open or (watch := self._open[-1].watch) is None:
            return None
        if self._open[-1].entered:
            sleeping.learn(watch, stays=False)
            return None
        if not watch.drew():
            return None
        sleeping.stay()
        watch.rewind()
        self._buffers.take_back()
        with sleeping.draws, sleeping.draws.calling():
            return module.forward(*args, **kwargs)

    def _after(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if self._sleeping is not None and self._open and self._open.pop().entered:
            self._sleeping.draws.__exit__(None, None, None)


class _Forward:
    """A forward under way. `watch` is None where the draws are there to stay; `entered`: it runs under them."""

    def __init__(self, watch: DrawWatch | None, *, entered: bool) -> None:
        self.watch, self.entered = watch, entered
