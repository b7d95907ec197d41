"""`Accelerator`: the calls of Hugging Face's, on the engine of `shoal.start`.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

The model that is trained is the one of one process of the script. A batch has the DataLoader's `batch_size` samples
over all ranks, a step `gradient_accumulation_steps` of them, so whatever the script counts (batches, steps, epochs, the
length of a schedule) is the same on any number of ranks.

`prepare` only notes what it is given; the run begins where the script first asks for a batch. So any number of calls
prepare one run, and what is restored is known by then. Until then this process counts as one of one.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

import shoal
from shoal.errors import Stopped, UsageError, UserCodeError
from shoal.huggingface.accelerate.arguments import ANSWERS, BACKWARD, METHODS_REFUSED, plan_of, settings_of
from shoal.huggingface.accelerate.data import EvaluationLoader, SkippedLoader, TrainingLoader
from shoal.huggingface.accelerate.state import ModelLosses, StepScheduler, compute_in
from shoal.huggingface.accelerate.writing import Writing
from shoal.own_loop.objects import data_of_script
from shoal.own_loop.other_libraries import refusing

if TYPE_CHECKING:
    from shoal.own_loop.loop import Training

BY_HAND = (
    "To accumulate by hand, say Accelerator(gradient_accumulation_steps=n), and step the optimizer behind the last "
    "batch: if (step + 1) % n == 0 or step == len(loader) - 1"
)
SKIPS = (
    "Behind load_state the loader begins where the run stands: leave out what passes over the batches before, as by "
    "`if step < resume_step: continue`"
)
FORGETS = "what the loop itself counts begins at 0; load_state(folder), or accelerator.run.steps_done, says where it is"


class Accelerator(Writing):
    """See above, and `accelerate.Accelerator` for what each argument and call means; docs/migration/accelerate.md says
    what becomes of each. `config` is a run file or its tables, `overrides` are keys such as "layout.shard=2"; None:
    those of the command line. A refusal is a sentence on standard error, and exit code 2.
    """

    def __init__(
        self,
        device_placement: bool | None = None,
        *,
        config: str | Path | Mapping[str, Any] | None = None,
        overrides: Sequence[str] | None = None,
        **given: Any,
    ) -> None:
        with refusing():
            self._settings = settings_of({"device_placement": device_placement, **given})
        super().__init__(self._settings, given.get("log_with"))
        self._config, self._overrides = config, overrides
        self.native_amp = self._settings.precision is not None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._schedulers: list[StepScheduler] = []
        self._objects: list[Any] = []
        self._loader: TrainingLoader | None = None
        self._trained: list[nn.Module] = []
        self._losses = ModelLosses()
        self._has_trained = False
        self._evaluations = 0  # loops over their DataLoaders that are open

    def __getattr__(self, name: str) -> Any:
        if name in ANSWERS:
            return ANSWERS[name]
        if name in METHODS_REFUSED:
            raise UserCodeError(f"Accelerator.{name}: {METHODS_REFUSED[name]}")
        raise AttributeError(f"'Accelerator' object has no attribute '{name}'")

    @property
    def state(self) -> Any:
        """accelerate's own state: that of one process until the run begins, then that of this rank."""
        return self._accelerate.state

    @property
    def mixed_precision(self) -> str:
        """no, fp16 or bf16, as it was given."""
        return self._settings.mixed_precision

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches of a step."""
        return self._settings.accumulation

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        with refusing():
            self._require_unbegun("a new gradient_accumulation_steps")
        self._settings = replace(self._settings, accumulation=steps)

    @property
    def project_dir(self) -> str | None:
        """As it was given; the run is in its folder `shoal`."""
        return self._settings.project.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Where trackers write."""
        return self._settings.project.logging_dir

    @property
    def project_configuration(self) -> Any:
        """As it was given."""
        return self._settings.project

    @property
    def sync_gradients(self) -> bool:
        """Whether the step's update is made with this batch."""
        return self.run is None or self.run.last_of_step

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the step's update was left out, as its gradient was not finite."""
        return self.run is not None and self.run.update is not None and not self.run.update

    # What is prepared, and the start of the run.

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Models, optimizers and other objects stay the same; DataLoaders and schedulers come back as loops need them.
        The first DataLoader is that of the training; others are for evaluations. `device_placement` changes nothing.
        """
        with refusing():
            prepared = tuple(self._prepared(each) for each in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> nn.Module:
        return self.prepare(model)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: Any = None
    ) -> torch.optim.Optimizer:
        return self.prepare(optimizer)

    def prepare_data_loader(self, data_loader: DataLoader, device_placement: Any = None) -> Any:
        return self.prepare(data_loader)

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        return self.prepare(scheduler)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Saves and restores them with the run: objects with `state_dict` and `load_state_dict`."""
        self._require_unbegun("register_for_checkpointing()")
        self._objects += objects

    def _prepared(self, each: Any) -> Any:
        if isinstance(each, DataLoader) and self._loader is not None:
            return EvaluationLoader.of(each, self)
        if not isinstance(each, DataLoader | nn.Module | torch.optim.Optimizer | LRScheduler | ReduceLROnPlateau):
            return each
        if self.run is not None and isinstance(each, nn.Module) and not any(p.requires_grad for p in each.parameters()):
            return each.to(self.device)
        self._require_unbegun("prepare()")
        if isinstance(each, nn.Module):
            self._models.append(each)
        elif isinstance(each, torch.optim.Optimizer):
            self._optimizers.append(each)
        elif isinstance(each, DataLoader):
            self._loader = each = TrainingLoader(self, each)
        else:
            each = StepScheduler(each, self, follows=self._settings.steps_scheduler)
            self._schedulers.append(each)
        return each

    def _require_unbegun(self, call: str) -> None:
        if self.run is not None:
            raise UsageError(
                f"{call} behind the first batch: a script has one run, which is begun there. For several, as of a "
                "cross-validation, start the script for each; for one that needs less memory, take a smaller "
                "batch_size and more gradient_accumulation_steps at the start"
            )

    def free_memory(self, *objects: Any) -> list[None]:
        """None for each of `objects`, and the device's unused memory back to it. What was prepared is forgotten, unless
        the run has begun, which goes on.
        """
        if self.run is None:
            self._loader = None
            for prepared in (self._models, self._optimizers, self._schedulers):
                prepared.clear()
        return super().free_memory(*objects)

    clear = free_memory

    def begun(self, *, resume: bool | None = None) -> Training:
        """The run, which begins with the first call."""
        if self.run is None:
            with refusing():
                loader, kwargs = self._planned()
            self.run = self._started(loader, kwargs, resume)
        return self.run

    def _planned(self) -> tuple[TrainingLoader, dict[str, Any]]:
        """What to start. Raises `UsageError` for what is missing."""
        loader = self._loader
        trained = {id(p) for each in self._optimizers for group in each.param_groups for p in group["params"]}
        self._trained = [m for m in self._models if any(id(p) in trained for p in m.parameters())]
        if loader is None or not self._trained:
            raise UsageError(
                "there is nothing to train: prepare() needs the DataLoader of the training, an optimizer, and the "
                "model of its parameters. A script that only evaluates needs no run"
            )
        loader.check()
        endless = isinstance(loader.loader.dataset, IterableDataset)
        data, _ = data_of_script(loader.to_run)
        plan = plan_of(
            self._settings, self._config, self._overrides, batch=loader.total_batch_size, data=data, endless=endless
        )
        self._in_step = plan.in_step
        return loader, {
            "config": plan.tables,
            "overrides": plan.keys,
            "model": tuple(self._trained) if len(self._trained) > 1 else self._trained[0],
            "optimizer": tuple(self._optimizers) if len(self._optimizers) > 1 else self._optimizers[0],
            "data": loader.to_run,
            "batch_samples": plan.step_samples,
            "steps": plan.steps,
            "state": self._state(),
        }

    def _state(self) -> dict[str, Any]:
        kept = SimpleNamespace(state_dict=lambda: {"over": self.is_over}, load_state_dict=self._go_on)
        schedulers = {f"scheduler_{n}": each.scheduler for n, each in enumerate(self._schedulers)}
        return {"accelerator": kept, **schedulers, **{f"object_{n}": each for n, each in enumerate(self._objects)}}

    def _go_on(self, kept: Mapping[str, Any]) -> None:
        self.is_over = bool(kept["over"])

    def _started(self, loader: TrainingLoader, given: dict[str, Any], resume: bool | None) -> Training:
        if self._settings.precision is not None:
            for model in self._trained:
                compute_in(model, self.autocast)
        for model in self._trained:
            self._losses.watch(model)
        run = shoal.start(given.pop("config"), given.pop("overrides"), resume=resume, **given)
        run.divide_by(loader.total_batch_size)
        for model in self._models:
            if model not in self._trained:
                model.to(run.device)
        self._accelerate.be_rank(run, self.local_process_index)
        if run.steps_done:
            self.passes_over = True
            self._saved.go_on()
        batch, steps = loader.total_batch_size, self._settings.accumulation
        run.note(
            f"a step has {batch * steps} samples on any number of ranks: batch_size x gradient_accumulation_steps is "
            f"{batch} x {steps}"
        )
        for sentence in [*self._settings.notes, *self._unprepared_scheduler()]:
            run.note(sentence)
        if run.steps_done and resume is None:
            run.note(f"batches up to step {run.steps_done} are passed over: {FORGETS}")
        atexit.register(self._close_at_exit)
        return run

    def _unprepared_scheduler(self) -> list[str]:
        """A sentence where a scheduler moves the rates, and no checkpoint will have it."""
        moved = any("initial_lr" in group for each in self._optimizers for group in each.param_groups)
        if not moved or self._schedulers or self._objects:
            return []
        return ["a scheduler moves the optimizer's rates and was not prepared: a run that is resumed begins it anew"]

    # The loop.

    def around(self, batches: Iterator[Any], *, size: int) -> Iterator[Any]:
        """The batches, of `size` samples over all ranks, of a part of the training."""
        run = self.begun()
        while (batch := self._next_of(batches, run)) is not None:
            self.passes_over, self._given = False, run.steps_done + 1
            self._losses.clear()
            self._saved.settle(run, wait=True)
            with self.counting(run.samples, size):
                yield batch

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around a loop over the DataLoader of an evaluation."""
        self._evaluations += 1
        try:
            yield
        finally:
            self._evaluations -= 1

    def _next_of(self, batches: Iterator[Any], run: Training) -> Any:
        """None behind the last. Raises what a loop over a run's batches raises, with what it means in a script."""
        self._agree_on_save(run)
        try:
            return next(batches, None)
        except Stopped:
            self._saved.settle(run, wait=False)
            raise
        except UserCodeError as error:
            if self.resumed_by_script and not self._has_trained:
                raise UserCodeError(f"{error}. {SKIPS}") from error
            if "step() was not called" in str(error):
                raise UserCodeError(f"{error}. {BY_HAND}") from error
            raise

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Nothing: the run knows with which batch a step ends."""
        return nullcontext()

    def no_sync(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Nothing, as `accumulate`."""
        return nullcontext()

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> AbstractContextManager[None]:
        """Nothing: all ranks have as many batches."""
        return nullcontext()

    def autocast(self, autocast_handler: None = None) -> AbstractContextManager[Any]:
        """Computes in the type of the run, as calls of prepared models do by themselves."""
        if autocast_handler is not None:
            raise UserCodeError("autocast(autocast_handler=...): set precision.kind")
        return nullcontext() if self.run is None else self.run.autocast()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Accumulates the gradient of `loss`, a mean over the samples of the batch or, where a model of transformers
        has returned it, over its labels. Else `weight` says over how many; see `Training.backward` for all keywords.
        """
        if unknown := [name for name in kwargs if name not in BACKWARD]:
            raise UserCodeError(f"backward({unknown[0]}=...): a run takes {', '.join(BACKWARD)}")
        if self._evaluations:
            raise UserCodeError(
                "backward() was called in a loop over a DataLoader that is one of an evaluation: the training is over "
                "the one that prepare() was given first. Or such a loop is still open, as by next(iter(loader))"
            )
        run = self.begun()
        if kwargs.get("weight") is None and kwargs.get("reduction") is None:
            kwargs["weight"] = self._losses.weight_of(loss, batches=self._settings.accumulation)
        # a mean over no labels is 0/0, and counts for nothing
        run.backward(torch.nan_to_num(loss) if kwargs.get("weight") == 0 else loss, **kwargs)
        self._has_trained = True

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """As PyTorch's, of the gradient of the step; it has no effect before the step's last batch."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """As PyTorch's, of the gradient of the step."""
        nn.utils.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing: gradients are never scaled where a script sees them."""

    def profile(self, profile_handler: Any = None) -> AbstractContextManager[Any]:
        """PyTorch's profiler around what is inside, as the handler says, and its trace of each rank."""
        return self._accelerate.profile(profile_handler or self._settings.profile)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The rest of the epoch at which a resumed run stands, which knows itself where that is."""
        if not isinstance(dataloader, TrainingLoader):
            raise UserCodeError("skip_first_batches() is for the DataLoader of the training, behind prepare()")
        return SkippedLoader(dataloader, num_batches)

    def end_training(self) -> None:
        """Ends trackers and run: it is finished, whatever step it has come to."""
        self._accelerate.finish_trackers()
        if self.run is not None:
            self.is_over = True
            self.run.end()
            self.run.close()
            self._accelerate.be_alone()
            self._saved.settle(self.run, wait=False)

    def _close_at_exit(self) -> None:
        """A script without `end_training` comes to its end, unless by an error."""
        if getattr(sys, "last_value", None) is None:
            with suppress(SystemExit):  # of a comparison, which ends the process
                self.end_training()
