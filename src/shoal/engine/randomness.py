"""Where a step's random numbers come from: from (seed, step, sample), never from what was drawn before.

Shoal's own dropout is keyed on the sample, and so is what a user's module, or a loop of a script's own, draws through
`F.dropout` and the common random functions (`shoal.models.keyed_draws`): neither depends on the layout. Whatever else
is drawn comes from PyTorch's generator, which is seeded anew in each step from (seed, step, replica), so that a resumed
run draws what the uninterrupted one would have drawn, and no generator state needs saving.

Python's `random` and NumPy's generator are asked for what a batch has in common: the lambda of a mixup, a coin, the
size of images. They are seeded from (seed, step) before each microbatch, so that all ranks and microbatches get what
one process draws for the global batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoal.codec.kernels import load_kernels
from shoal.errors import UserCodeError
from shoal.maths.counter import bits, key_of
from shoal.models.draw_watch import (
    DrawWatch,
    SleepingDraws,
    generators_in_use,
    host_states,
    host_states_after,
    seed_all_devices,
    seed_host,
)
from shoal.models.keyed_draws import KeyedDraws
from shoal.models.layers import KeyedDropout, set_sample_keys

T = TypeVar("T")

COMPILED_PROGRAM = "a program of torch.compile"
"""Stands among the names of unkeyed functions: no mode sees into it."""


class Randomness:
    """Seeds what a step of `model` draws. `draws`: the mode for a user's module; None for one of Shoal's own.

    `may_sleep`: a forward may be repeated, so that a mode which has nothing to key is left out (`SleepingDraws`).
    `seeds_host`: Python's and NumPy's generators, too, of which a user's code may draw.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        seed: int,
        replica: int,
        draws: KeyedDraws | None = None,
        may_sleep: bool = False,
        seeds_host: bool = False,
    ) -> None:
        self._seed, self._replica, self.draws, self.seeds_host = seed, replica, draws, seeds_host
        if draws is not None and (kernels := load_kernels()) is not None:
            draws.loops = kernels
        self.sleeping = None if draws is None else SleepingDraws(draws, may_sleep=may_sleep)
        self._sample_key, self._host_seed = key_of(seed, "dropout"), key_of(seed, "host", 0)
        self._step, self._step_seed = 0, 0
        self._keyed = [m for m in model.modules() if isinstance(m, KeyedDropout) and m.p > 0]
        self._drew_before = 0

    def step(self, step: int) -> None:
        """Before a step."""
        self._step, self._drew_before = step, 0 if self.draws is None else self.draws.drew
        seed = self._step_seed = key_of(self._seed, "step", step, self._replica)
        self._host_seed = key_of(self._seed, "host", step)
        for generator in generators_in_use():  # `torch.manual_seed` takes a millisecond to note it for absent GPUs
            generator.manual_seed(seed)
        seed_all_devices(seed)

    def microbatch(self, positions: Tensor, *, tokens: int = 0) -> None:
        """Before the forward of a microbatch whose samples stand at `positions` (int64 [samples]).

        `tokens`: of each sample this rank gets so many.
        """
        if self._keyed:
            set_sample_keys(self._keyed, bits(self._sample_key, positions))
        if self.sleeping is not None:
            self.sleeping.forwards = 0
            self.sleeping.draws.begin(self._step, lambda: bits(self._sample_key, positions), tokens=tokens)
        if self.seeds_host:
            seed_host(self._host_seed)
            if self.sleeping is not None:
                self.sleeping.host_seed = self._host_seed

    def drawing(self) -> AbstractContextManager[Any]:
        """Around a forward, and every backward, which may repeat one."""
        return nullcontext() if self.draws is None or self.draws.asleep else self.draws.opened()

    def beside_loop(self) -> AbstractContextManager[None]:
        """Around what is no part of what a script's own loop draws: a backward, an update."""
        return nullcontext() if self.draws is None else self.draws.outside_loop()

    def end_samples(self) -> None:
        """All gradients of a step are there: see `KeyedDraws.end_samples`."""
        if self.draws is None:
            return
        self.draws.end_samples()
        keyed = self.draws.drew > self._drew_before
        if _compiled() and not keyed and not self.draws.unkeyed and any(map(self._moved, generators_in_use())):
            self.draws.unkeyed.add(COMPILED_PROGRAM)

    def seed_alike(self, what: str) -> None:
        """From here to the next step every rank draws the same from PyTorch's generators."""
        for generator in generators_in_use():
            generator.manual_seed(key_of(self._seed, "alike", self._step, what))

    @contextmanager
    def updating(self, *, in_pieces: bool) -> Iterator[None]:
        """Around the step of a script's optimizer: what it draws is the same on every rank. Raises `UserCodeError`
        where it draws for pieces of parameters, and so other numbers than for whole ones.
        """
        with self.beside_loop():
            self.seed_alike("update")
            watch = DrawWatch() if in_pieces else None
            yield
        if watch is not None and watch.drew():
            raise UserCodeError(
                f"step {self._step}: the optimizer draws random numbers in its step, and under ZeRO each rank would "
                "draw those of its own pieces of parameters, others than one process: use layout.replicate"
            )

    @contextmanager
    def alike(self, what: str) -> Iterator[None]:
        """Inside, every rank draws the same from PyTorch's generators, and other numbers for every step and `what`."""
        generators = generators_in_use()
        states = [generator.get_state() for generator in generators]
        self.seed_alike(what)
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    def forward(self, forward: Callable[[], T], *, take_back: Callable[[], None], repeatable: Callable[[], bool]) -> T:
        """What `forward` returns, its draws keyed. See `SleepingDraws`."""
        if self.sleeping is None:
            return forward()
        return self.sleeping(forward, take_back=take_back, repeatable=repeatable)

    def host_draws(self) -> list[str]:
        """Of which generators that are not PyTorch's the last microbatch has drawn, where they are seeded for it."""
        if not self.seeds_host:
            return []
        seeded = host_states_after(self._host_seed)
        return [name for name, state in host_states().items() if state != seeded[name]]

    def unkeyed(self, device: torch.device) -> frozenset[str]:
        """What this step's forwards have drawn so far that no sample's key decides: names of functions of PyTorch.

        Where no mode keys the draws (`draws` is None), all are unkeyed; that there were any is seen by PyTorch's
        generator of `device`, and named "PyTorch's generator".
        """
        if self.draws is not None:
            return frozenset(self.draws.unkeyed)
        used = next(generator for generator in generators_in_use() if generator.device.type == device.type)
        return frozenset({"PyTorch's generator"} if self._moved(used) else ())

    def _moved(self, generator: torch.Generator) -> bool:
        """Has it given a number since the step began?"""
        fresh = torch.Generator(generator.device)
        fresh.manual_seed(self._step_seed)
        return not torch.equal(fresh.get_state(), generator.get_state())


def _compiled() -> bool:
    """Has `torch.compile` made a program in this process?"""
    return "torch._dynamo.utils" in sys.modules and sys.modules["torch._dynamo.utils"].counters["frames"]["ok"] > 0
