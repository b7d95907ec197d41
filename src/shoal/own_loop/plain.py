"""`PlainTraining`: a script's own loop in plain PyTorch, for `shoal verify mine.py` to compare a layout with.

It has the calls of `Training`, in one process, and nothing of what makes that correct on many ranks: no bucket, no
hook on a gradient, no placeholder, no piece. A step is one microbatch, the whole global batch, of which `backward` is
PyTorch's; the optimizer's `step` is the optimizer's. Order of samples, and what the model draws at random for each of
them, are those of the run. What every step came to is left in the folder of the `ScriptCheck`.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch._compile import _disable_dynamo as uncompiled

from shoal.assembly.objects import UserObjects
from shoal.assembly.process import settle
from shoal.assembly.reading import epoch_samples, order_of, short_epoch
from shoal.assembly.sameness import RANDOM, samples_of
from shoal.assembly.splitting import draws_of
from shoal.assembly.trainable import require_trainable
from shoal.assembly.workload import load_workload
from shoal.data.dataset import Dataset
from shoal.data.feed import Feed, StepShare, evaluation_batches
from shoal.data.inputs import AsInputs
from shoal.data.sample import Batch
from shoal.engine.compute import Compute, Microbatch
from shoal.engine.forward_backward import evaluating
from shoal.engine.randomness import Randomness
from shoal.errors import UserCodeError
from shoal.launcher.environment import ALONE
from shoal.launcher.own_script import ScriptCheck
from shoal.maths.norm import two_norm
from shoal.optim.layer_statistics import SeesLayers, aside, watch_alone
from shoal.own_loop.losses import NO_WEIGHT, LossKind, as_number, kind_of, one_pass
from shoal.own_loop.open_step import Evaluation, Update, left_epoch
from shoal.own_loop.shown_optimizer import StepHooks, widen_state
from shoal.own_loop.steps import DrawsBySample, Microbatches
from shoal.runfile.run_file import RunFile, run_directory
from shoal.topology.layout import Layout


class PlainTraining:
    """See above, and `Training` for what each call means. `check` says how many steps to take, and where to leave what
    they came to.
    """

    rank, world_size, share = 0, 1, (0, 1)

    def __init__(self, run_file: RunFile, objects: UserObjects, check: ScriptCheck, *, compiled: bool = False) -> None:
        require_trainable(objects.model)
        if check.exact:
            objects.model.double()
            widen_state(objects.optimizers)
        save_file(state_of(objects.model), check.initial)
        run_file = _with_norms_of_pytorch(run_file)
        self.device = settle(run_file, ALONE, os.environ)
        work = load_workload(
            run_file, objects, device=self.device, environ=os.environ, layout=Layout(), micro_samples=None
        )
        self.model: nn.Module = work.model
        self._run_file, self._work, self._check = run_file, work, check
        draws = draws_of(run_file, work.model, own_loop=True)
        randomness = Randomness(work.model, seed=run_file.run.seed, replica=0, draws=draws, seeds_host=True)
        self._compute = Compute(work.model, work.loss, work.precision, self.device, randomness)
        self._feed, data = _whole_steps(run_file, work.data.train, order_of(run_file, work.data)), work.data
        self._with_targets = not isinstance(data.train, AsInputs)
        self._steps, self._position, self.steps_done = min(check.steps, run_file.run.steps), 0, 0
        self._open: Microbatch | None = None
        parameters = dict(work.model.named_parameters())
        self._players = [
            _Player(own.optimizer, {name: parameters[name] for name in own.names}, randomness)
            for own in work.optimizers
        ]
        for seeing in self._seeing:
            watch_alone(seeing, work.model, seed=run_file.run.seed)
            self._compute.announces.append(seeing.microbatch)
        models = list(self.model) if isinstance(self.model, nn.ModuleList) else [self.model]
        self._draws = DrawsBySample(
            models, self._compute, inside=lambda: self._open is not None, keys_loop=not compiled
        )
        self._evaluation = Evaluation()
        self._closed, self._generators, self._keyed = False, "", draws is not None and not compiled
        check.samples.write_text("\n".join(_samples_of(data, run_file)), encoding="utf-8")
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        self._compute.train()
        atexit.register(self._close_at_exit)

    @property
    def directory(self) -> Path:
        return run_directory(self._run_file)

    @property
    def epoch(self) -> float:
        return self._position / self._epoch_samples

    @property
    def update(self) -> Update | None:
        if not (done := [player for player in self._players if player.stepped]):
            return None
        losses = [player.loss for player in done if player.leader is player or not player.leader.stepped]
        return Update(sum(losses), math.hypot(*(player.norm for player in done)), True)

    @property
    def last_of_step(self) -> bool:
        return True

    @property
    def samples(self) -> int:
        return self._batch("samples").real_samples

    @property
    def weights(self) -> Tensor:
        return self._batch("weights").weights

    def batches(self) -> Iterator[Any]:
        return self._until(None)

    def epochs(self) -> Iterator[tuple[int, Iterator[Any]]]:
        size = self._epoch_samples
        while self.steps_done < self._steps:
            before = self._position // size
            yield before, self._until((before + 1) * size)
            if self._position < (before + 1) * size and self.steps_done + (self._open is not None) < self._steps:
                raise left_epoch(self._position / size, size)

    def steps(self) -> Iterator[tuple[int, Microbatches]]:
        while True:
            given = self._next()
            yield self.steps_done, Microbatches(partial(self._one_pass, given))

    @uncompiled
    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | None = None,
        more: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        reduction: str = "mean",
    ) -> None:
        """`weight` and `reduction` change no gradient: this batch is the whole of its step."""
        self._draws.check_thread()
        self._evaluation.check()
        terms = float(self._batch("backward()").weights.sum()) if weight is None else float(weight)
        kind = kind_of(weight, reduction)
        players = self._players if optimizer is None else [self._player(optimizer)]
        joined = players[0].deferred is not None
        if kind != "sum" and terms <= 0 and not joined:
            raise UserCodeError(f"step {self.steps_done + 1}: {NO_WEIGHT}")
        total, *_ = [player.joined(loss, leader=players[0], terms=terms) for player in players]
        if more:
            return
        others = [player.optimizer for player in self._players if player not in players]
        randomness = self._compute.randomness
        with randomness.beside_loop(), randomness.drawing(), one_pass(joined=joined), aside(others):
            total.backward(inputs=list(players[0].trained.values()) if others else None)
        for player in players:
            player.computed(float(total.detach()), self.steps_done + 1, kind=kind)
        if all(player.backwards and player.deferred is None for player in self._players):
            randomness.end_samples()

    @uncompiled
    def step(self, *, clip_norm: float | None = None, optimizer: torch.optim.Optimizer | None = None) -> Update | None:
        player = self._player(optimizer)
        if clip_norm is not None:
            self.clip_grad_norm_(clip_norm, optimizer=optimizer)
        player.optimizer.step()
        return Update(player.loss, player.norm, True)

    @uncompiled
    def clip_grad_norm_(self, max_norm: float, *, optimizer: torch.optim.Optimizer | None = None) -> float | None:
        return float(nn.utils.clip_grad_norm_(list(self._player(optimizer).trained.values()), max_norm))

    def save(self) -> None:
        """Nothing: a comparison keeps no checkpoints."""

    wait_for_save = save

    def export(self, file: str | Path) -> None:
        """Nothing: it writes no file of the script's."""

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Nothing, if `values` are numbers."""
        for value in values.values():
            as_number(value)

    def note(self, text: str) -> None:
        """Nothing."""

    def held_out(self) -> Iterator[Any]:
        source = self._work.data.held_out
        if source is None:
            raise UserCodeError("there is no held-out data; hand over data=(training, held_out)")
        run_file = self._run_file
        batches = evaluation_batches(
            source,
            replicas=1,
            replica=0,
            micro_samples=run_file.batch.global_samples,
            denominator="samples",
            limit=run_file.observe.evaluate_samples,
        )
        with self.evaluation(), self._evaluation.under_way():
            for batch in batches:
                yield self._given(self._compute.prepared(batch).batch)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        with torch.no_grad(), evaluating(self.model):
            yield

    def sum(self, value: float | Tensor) -> float:
        return as_number(value)

    def mean(self, value: float | Tensor, *, weight: float = 1.0) -> float:
        return as_number(value) if weight else math.nan

    def full_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        return self._work.precision.autocast(self.device)

    def divide_by(self, samples: int) -> None:
        """Nothing: a step is one microbatch."""

    def leave(self) -> None:
        self._end_step()

    end = leave

    def close(self) -> None:
        if not self._closed:
            self._end_step()
            self._leave()

    def _close_at_exit(self) -> None:
        if getattr(sys, "last_value", None) is None:  # the script has not failed
            with suppress(SystemExit):
                self.close()

    def __enter__(self) -> PlainTraining:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        self._closed = True

    @property
    def _epoch_samples(self) -> int:
        return epoch_samples(self._run_file.batch, len(self._work.data.train))

    @property
    def _seeing(self) -> list[SeesLayers]:
        return [player.optimizer for player in self._players if isinstance(player.optimizer, SeesLayers)]

    def _player(self, optimizer: torch.optim.Optimizer | None) -> _Player:
        if optimizer is None and len(self._players) == 1:
            return self._players[0]
        found = next((player for player in self._players if player.optimizer is optimizer), None)
        if found is None:
            raise UserCodeError("this run has several optimizers; say which one: step(optimizer=...)")
        return found

    def _batch(self, call: str) -> Batch:
        if self._open is None:
            raise UserCodeError(f"there is no batch: use {call} inside the loop over batches()")
        return self._open.batch

    def _until(self, position: int | None) -> Iterator[Any]:
        while position is None or self._position < position:
            yield self._next()

    def _next(self) -> Any:
        """The next step's batch; ends the step before it, and the process after the last."""
        if self._closed:  # the script has caught its end
            sys.exit(0)
        self._end_step()
        number = self.steps_done + 1
        fed = self._feed.next()
        (batch,) = fed.microbatches
        for player in self._players:
            player.begin()
        for seeing in self._seeing:
            seeing.begin(number)
        self._compute.randomness.step(number)
        self._position += len(fed.interval)
        self._open = self._compute.prepared(batch)
        self._compute.announce(self._open, lambda: 1.0)
        self._generators = self._generators_now()
        self._draws.enter_loop()
        return self._given(self._open.batch)

    def _generators_now(self) -> str:
        """The state of those that the script may draw from and that no sample's key decides."""
        draws = self._compute.randomness.draws
        unkeyed = torch.get_rng_state().numpy().tobytes() if draws is None or not self._keyed else sorted(draws.unkeyed)
        return repr((unkeyed, random.getstate(), np.random.get_state(legacy=False)))

    def _one_pass(self, given: Any) -> Iterator[Any]:
        """The step's only microbatch, of which each pass draws the same."""
        if self._open is not None:
            self._draws.leave_loop()
            self._compute.announce(self._open, lambda: 1.0)
            self._draws.enter_loop()
        yield given

    def _given(self, batch: Batch) -> Any:
        return (batch.inputs, batch.targets) if self._with_targets else batch.inputs

    def _end_step(self) -> None:
        """Leaves what the step came to, if one is open; the process ends after the last."""
        self._draws.leave_loop()
        if self._open is None:
            return
        self._open, self.steps_done = None, self.steps_done + 1
        if not any(player.backwards for player in self._players):
            raise UserCodeError(f"step {self.steps_done}: no backward() was called; call it for every batch")
        if (done := self.update) is None:
            raise UserCodeError(f"step {self.steps_done}: the optimizer's step() was not called")
        gradients = {f"gradient/{name}": each for player in self._players for name, each in player.taken.items()}
        state = {f"state/{name}": each for name, each in state_of(self.model).items()}
        drew = self._generators != self._generators_now()
        said = {"loss": repr(done.loss), "norm": repr(done.grad_norm), "drew": json.dumps(drew)}
        save_file(gradients | state, self._check.step(self.steps_done), said)
        if self.steps_done == self._steps:
            self._leave()

    def _leave(self) -> NoReturn:
        """The comparison ends here, whatever the script would do next."""
        self._closed = True
        self._draws.close()
        self._feed.close()
        sys.exit(0)


class _Player:
    """One optimizer of the loop. `taken` are copies of the gradients that it made its update from."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter], randomness: Randomness
    ) -> None:
        self.optimizer, self.trained = optimizer, trained
        self._randomness, self._stepping = randomness, ExitStack()
        self.deferred: Tensor | None = None
        self.loss = self.norm = self.terms = 0.0
        self.stepped, self.backwards, self.taken = False, False, dict[str, Tensor]()
        self.leader = self
        """The first of the optimizers whose gradients its backward computes."""
        StepHooks(optimizer, self._before, lambda *_: self._stepping.close())

    def begin(self) -> None:
        """A step begins, without gradients."""
        self.deferred, self.loss, self.norm, self.taken = None, 0.0, 0.0, {}
        self.stepped = self.backwards = False
        for parameter in self.trained.values():
            parameter.grad = None

    def joined(self, loss: Tensor, *, leader: _Player, terms: float) -> Tensor:
        """The sum of this batch's losses up to this one, the first of which has so many `terms`."""
        self.backwards, self.leader = True, leader
        self.terms = terms if self.deferred is None else self.terms
        self.deferred = loss if self.deferred is None else self.deferred + loss
        return self.deferred

    def computed(self, loss: float, step: int, *, kind: LossKind) -> None:
        """After a backward. Raises `UserCodeError` for a loss that is not finite."""
        self.deferred, self.loss = None, loss
        if isinstance(self.optimizer, SeesLayers):
            self.optimizer.agree(scale=1.0 if kind == "sum" else 1 / self.terms, terms=self.terms)
        if not math.isfinite(loss):
            raise UserCodeError(
                f"step {step}: the loss of plain PyTorch is {loss}: there is nothing to compare a layout with"
            )
        self.norm = math.hypot(
            *(float(two_norm(p.grad.to_dense())) for p in self.trained.values() if p.grad is not None)
        )

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.stepped = True
        self.taken = {name: stored(p.grad) for name, p in self.trained.items() if p.grad is not None}
        self._stepping.enter_context(self._randomness.updating(in_pieces=False))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of every parameter and buffer, tied ones once."""
    return {name: stored(each) for name, each in [*model.named_parameters(), *model.named_buffers()]}


def stored(tensor: Tensor) -> Tensor:
    """A copy in memory of its own, as safetensors keeps it: dense, on the host, complex numbers as pairs."""
    whole = tensor.detach()
    whole = whole.to_dense() if whole.layout != torch.strided else whole
    whole = torch.view_as_real(whole) if whole.is_complex() else whole
    return whole.cpu().clone(memory_format=torch.contiguous_format)


def _with_norms_of_pytorch(run_file: RunFile) -> RunFile:
    """Batch norms as the script has built them: one process has all samples that they are over."""
    model = run_file.model
    if getattr(model, "batch_norm", None) != "synchronised":
        return run_file
    return msgspec.structs.replace(run_file, model=msgspec.structs.replace(model, batch_norm=None))


def _samples_of(data: Dataset, run_file: RunFile) -> list[str]:
    """Lines for some of the samples. Raises `UserCodeError` where one is another at each reading."""
    lines = samples_of(data, first=run_file.batch.global_samples)
    if any(line.startswith("training") and line.endswith(f": {RANDOM}") for line in lines):
        raise UserCodeError(
            "the data set returns another sample when one is read again, so there is nothing to compare: draw by "
            "data.augment, which keys what it draws on the sample, or seed a generator by the index"
        )
    return lines


def _whole_steps(run_file: RunFile, source: Any, order: Any) -> Feed:
    """The global batches of the run, each in one piece."""
    epoch = short_epoch(run_file.batch, len(source))
    batch = run_file.batch
    share = StepShare(
        batch.global_samples,
        micro_samples=batch.global_samples,
        epoch=epoch,
        schedule=batch.schedule,
        epochs_apart=True,
    )
    return Feed(source, order, share, denominator=batch.denominator, prefetch_steps=1)
