"""Injected faults in a rank: at the labels of `shoal.resilience.faults`, for `shoal rehearse` alone.

A rank whose environment names no scenario has no `Injector`, and none of this is called. Otherwise the injector is
handed to what passes labels: the conditions of the wire, the update policy, the optimizer's hooks, the saver, and the
search for a checkpoint.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.codec.moments import Quantised
from shoal.comm.conditions import Conditions
from shoal.comm.conditions import Fault as WireFault
from shoal.comm.ledger import Sent
from shoal.data.sample import Batch, first_leaf, map_tree
from shoal.engine.rank_context import RankContext
from shoal.engine.state import TrainState
from shoal.engine.step import TrainStep
from shoal.engine.updates import Outcome, UpdatePolicy, Work
from shoal.gradients.gradients import Gradients
from shoal.launcher.orphans import LAUNCHER_PID
from shoal.resilience.faults import REHEARSAL, Fault, Strike, claim, has_struck, read_faults, wait_until_acted

_INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16}
_INTEGERS[torch.bfloat16] = torch.int16
_MANTISSA_BIT = {torch.float64: 40, torch.float32: 18, torch.float16: 6, torch.bfloat16: 4}
"""A bit in the upper half of the mantissa: the value stays finite and close."""


def injector_from(environ: Mapping[str, str]) -> Injector | None:
    """The injector of this rank; None but in a rehearsal. Raises `EnvironmentFault` where its scenario is missing."""
    if REHEARSAL not in environ:
        return None
    folder = Path(environ[REHEARSAL])
    return Injector(folder, read_faults(folder), rank=int(environ["RANK"]), launcher=int(environ[LAUNCHER_PID]))


class Injector:
    """Strikes where a fault of `faults` is due on `rank`. `step` is the one that the rank takes; 0 before the first."""

    def __init__(self, folder: Path, faults: list[Fault], *, rank: int, launcher: int) -> None:
        self._folder, self._faults, self._rank, self._launcher = folder, faults, rank, launcher
        self._passed: Counter[str] = Counter()
        self._struck_step: Callable[[Work], AbstractContextManager[Work]] | None = None
        self.step = 0

    def begin(self, step: int) -> None:
        """The rank is at `step` now; passings are counted anew."""
        if step != self.step:
            self.step = step
            self._passed.clear()

    def reached(self, label: str) -> None:
        """The rank passes `label`. Raises `OSError` where the disk is to fail."""
        fault = self.due(label)
        if fault is None:
            return
        if fault.action in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
        elif fault.action in ("stop_run", "kill_launcher"):
            os.kill(self._launcher, signal.SIGTERM if fault.action == "stop_run" else signal.SIGKILL)
        elif fault.action == "hang":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        elif fault.action == "wait":
            time.sleep(fault.seconds)
        elif fault.action == "outside":
            wait_until_acted(self._folder)
        elif fault.action == "fail_disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), label)

    def due(self, label: str) -> Fault | None:
        """The fault that strikes at this passing of `label`, after it is recorded; None: nothing does."""
        self._passed[label] += 1
        for number, fault in enumerate(self._faults):
            if fault.label == label and self._is_due(number, fault):
                now = Strike(time.time(), self.step, self._rank, os.getpid(), label)
                if claim(self._folder, number, now) or fault.every_passing:
                    return fault
        return None

    def _is_due(self, number: int, fault: Fault) -> bool:
        if fault.rank != self._rank:
            return False
        if fault.label.startswith("save/"):  # a thread saves, while this rank may take the next steps already
            due = self.step >= fault.step
        else:
            due = fault.step in (0, self.step) and (fault.every_passing or self._passed[fault.label] == fault.passing)
        if not due:
            return False
        return all(has_struck(self._folder, before) for before in range(number))

    def conditions(self, conditions: Conditions | None) -> Conditions:
        """`conditions` of a wire whose collectives pass labels."""
        known = conditions or Conditions()
        return _Labelled(known.faults, known.bytes_per_second, known.between_bytes_per_second, known.rates, known.link,
                         self.reached)  # fmt: skip

    def announce(self, announce: Callable[[str, Callable[[], str]], str]) -> Callable[[str, Callable[[], str]], str]:
        """`announce`, by which all ranks learn of the checkpoint, with a label behind it."""

        def labelled(key: str, find: Callable[[], str]) -> str:
            found = announce(key, find)
            if found:
                self.reached("recovery/in")
            return found

        return labelled

    def around(self, step: TrainStep, state: TrainState, model: nn.Module) -> TrainStep:
        """`step`, whose update passes labels and is struck; `model` and `state` are this rank's parts."""
        optimizer = state.optimizer.optimizer
        self.step = state.progress.step
        optimizer.register_step_pre_hook(lambda *_: self.reached("optimizer/before"))
        optimizer.register_step_post_hook(lambda *_: self.reached("optimizer/after"))
        policy = _Struck(step.policy, self, model, optimizer)
        self._struck_step = policy.struck
        return step.by(policy)

    def around_own(self, work: Work) -> AbstractContextManager[Work]:
        """A step of a script's own loop, from its begin to its update, after a call of `around`: what it works on."""
        assert self._struck_step is not None, "the step is wrapped before the loop takes it"
        return self._struck_step(work)


@dataclass(frozen=True)
class _Labelled(Conditions):
    reached: Callable[[str], None] = field(default=lambda label: None, compare=False, repr=False)

    def fault(self, operation: str, call: int) -> WireFault | None:
        self.reached("collective/before")
        return super().fault(operation, call)

    def due_s(self, sent: Sent) -> float:
        self.reached("collective/in")
        return super().due_s(sent)


class _Struck:
    """An update policy between labels, whose samples, gradients, parameters and moments can be changed."""

    def __init__(
        self, policy: UpdatePolicy, injector: Injector, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._policy, self._injector, self._model, self._optimizer = policy, injector, model, optimizer
        self.overlaps_steps = policy.overlaps_steps

    @property
    def gradients(self) -> Gradients:
        return self._policy.gradients

    def __call__(self, context: RankContext, work: Work) -> Outcome:
        with self.struck(work) as given:
            return self._policy(context, given)

    @contextmanager
    def struck(self, work: Work) -> Iterator[Work]:
        """What a step works on, between its labels."""
        injector = self._injector
        injector.begin(work.step)
        injector.reached("step/before")
        struck, hook = injector.due("step/data"), None
        if struck is not None and struck.action == "nan" and _floats(work.batches[0]):
            work = replace(work, batches=[_spoilt(work.batches[0]), *work.batches[1:]])
        elif struck is not None:
            hook = self._first_parameter().register_hook(_spoil if struck.action == "nan" else flipped)
        try:
            yield replace(work, on_gradients=self._reduced(work))
        finally:
            if hook is not None:
                hook.remove()
        struck = injector.due("step/state")
        if struck is not None:
            self._flip(struck)
        injector.reached("step/after")

    def _reduced(self, work: Work) -> Callable[[float], None]:
        def reduced(norm: float) -> None:
            self._injector.reached("gradients/reduced")
            if work.on_gradients is not None:
                work.on_gradients(norm)

        return reduced

    def _first_parameter(self) -> nn.Parameter:
        return next(parameter for parameter in self._model.parameters() if parameter.requires_grad)

    @torch.no_grad()
    def _flip(self, fault: Fault) -> None:
        """One bit of the first parameter, or of the first moment of the optimizer."""
        tensor: Tensor = self._first_parameter()
        if fault.action == "flip_moment":
            states = self._optimizer.state.values()
            held = (v.scales if isinstance(v, Quantised) else v for state in states for v in state.values())
            tensor = next(v for v in held if isinstance(v, Tensor) and v.numel() > 1)
        tensor.copy_(flipped(tensor))


def flipped(tensor: Tensor) -> Tensor:
    """`tensor` with one bit of the mantissa of its largest element flipped."""
    changed = tensor.detach().clone()
    bits = changed.view(-1).view(_INTEGERS[tensor.dtype])
    bits[int(changed.view(-1).abs().argmax())] ^= 1 << _MANTISSA_BIT[tensor.dtype]
    return changed


def _spoil(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, float("nan"))


def _floats(batch: Batch) -> bool:
    return first_leaf(batch.inputs).is_floating_point()


def _spoilt(batch: Batch) -> Batch:
    """`batch` with inputs that are not numbers."""

    def spoil(leaf: Tensor) -> Tensor:
        return _spoil(leaf) if leaf.is_floating_point() else leaf

    return replace(batch, inputs=map_tree(spoil, batch.inputs))
