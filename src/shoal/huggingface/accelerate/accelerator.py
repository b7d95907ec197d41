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
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle

import shoal
from shoal.errors import Stopped, UsageError, UserCodeError
from shoal.huggingface.accelerate.arguments import ANSWERS, BACKWARD, METHODS_REFUSED, plan_of, settings_of
from shoal.huggingface.accelerate.data import EvaluationLoader, SkippedLoader, TrainingLoader
from shoal.huggingface.accelerate.ranks import Function, OfRanks
from shoal.huggingface.accelerate.state import (
    Beside,
    Hooks,
    ModelLosses,
    Saved,
    StepScheduler,
    compute_in,
    go_back,
    require_state_of,
)
from shoal.launcher.own_script import script_check
from shoal.own_loop.objects import data_of_script
from shoal.own_loop.other_libraries import refusing, without_launcher

if TYPE_CHECKING:
    from shoal.own_loop.loop import Training

FORGETS = "what the loop itself counts begins at 0; load_state(folder), or accelerator.run.steps_done, says where it is"


class Accelerator(OfRanks):
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
        self._config, self._overrides = config, overrides
        project = self._settings.project
        with without_launcher():
            self._accelerate = Beside(
                cpu=True, mixed_precision="no", log_with=given.get("log_with"), project_config=project
            )
        super().__init__(cpu=self._settings.cpu)
        self.resumed_by_script = self.passes_over = self.is_over = False
        self._models: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._schedulers: list[StepScheduler] = []
        self._objects: list[Any] = []
        self._loader: TrainingLoader | None = None
        self._trained: list[nn.Module] = []
        self._losses, self._saved = ModelLosses(), Saved(project)
        self._before_save, self._before_load = Hooks(), Hooks()
        self._given = 0  # the number of the step that the loop is at

    def __getattr__(self, name: str) -> Any:
        if name in ANSWERS:
            return ANSWERS[name]
        if name in METHODS_REFUSED:
            raise UserCodeError(f"Accelerator.{name}: {METHODS_REFUSED[name]}")
        raise AttributeError(f"'Accelerator' object has no attribute '{name}'")

    @property
    def state(self) -> Any:
        """accelerate's own state, of a process without others."""
        return self._accelerate.state

    @property
    def mixed_precision(self) -> str:
        """no, fp16 or bf16, as it was given."""
        return self._settings.mixed_precision

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches of a step."""
        return self._settings.accumulation

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
    def save_iteration(self) -> int:
        """The number of the next folder that `save_state` names itself."""
        return self._settings.project.iteration

    @property
    def trackers(self) -> list[Any]:
        """Those of `init_trackers`, on rank 0."""
        return self._accelerate.trackers

    @property
    def sync_gradients(self) -> bool:
        """Whether the step's update is made with this batch."""
        return self.run is None or self.run.last_of_step

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the step's update was left out, as its gradient was not finite."""
        return self.run is not None and self.run.update is not None and not self.run.update

    # What is prepared, and the start of the run.

    def prepare(self, *objects: Any) -> Any:
        """Models, optimizers and other objects stay the same; DataLoaders and schedulers come back as loops need them.
        The first DataLoader is that of the training; others are for evaluations.
        """
        with refusing():
            prepared = tuple(self._prepared(each) for each in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_model(self, model: nn.Module) -> nn.Module:
        return self.prepare(model)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return self.prepare(optimizer)

    def prepare_data_loader(self, data_loader: DataLoader) -> Any:
        return self.prepare(data_loader)

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        return self.prepare(scheduler)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Saves and restores them with the run: objects with `state_dict` and `load_state_dict`."""
        self._require_unbegun("register_for_checkpointing")
        self._objects += objects

    def _prepared(self, each: Any) -> Any:
        if isinstance(each, DataLoader) and self._loader is not None:
            return EvaluationLoader.of(each, self)
        if not isinstance(each, DataLoader | nn.Module | torch.optim.Optimizer | LRScheduler | ReduceLROnPlateau):
            return each
        if self.run is not None and isinstance(each, nn.Module) and not any(p.requires_grad for p in each.parameters()):
            return each.to(self.device)
        self._require_unbegun("prepare")
        if isinstance(each, nn.Module):
            self._models.append(each)
        elif isinstance(each, torch.optim.Optimizer):
            self._optimizers.append(each)
        elif isinstance(each, DataLoader):
            self._loader = each = TrainingLoader(self, each, accumulation=self._settings.accumulation)
        else:
            each = StepScheduler(each, self, follows=self._settings.steps_scheduler)
            self._schedulers.append(each)
        return each

    def _require_unbegun(self, call: str) -> None:
        if self.run is not None:
            raise UsageError(f"{call}() was called behind the first batch: a script has one run, which is begun there")

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
        self._accelerate.be_rank(run.rank, self.local_process_index)
        self.passes_over = run.steps_done > 0
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
        try:
            for batch in batches:
                self.passes_over, self._given = False, run.steps_done + 1
                self._losses.clear()
                self._saved.settle(run, wait=True)
                with self.counting(run.samples, size):
                    yield batch
        except Stopped:
            self._saved.settle(run, wait=False)
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
        run = self.begun()
        if kwargs.get("weight") is None and kwargs.get("reduction") is None:
            kwargs["weight"] = self._losses.weight_of(loss)
        # a mean over no labels is 0/0, and counts for nothing
        run.backward(torch.nan_to_num(loss) if kwargs.get("weight") == 0 else loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """As PyTorch's, of the gradient of the step; it has no effect before the step's last batch."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """As PyTorch's, of the gradient of the step."""
        nn.utils.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing: gradients are never scaled where a script sees them."""

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The rest of the epoch at which a resumed run stands, which knows itself where that is."""
        if not isinstance(dataloader, TrainingLoader):
            raise UserCodeError("skip_first_batches() is for the DataLoader of the training, behind prepare()")
        return SkippedLoader(dataloader, num_batches)

    # Models, and what is saved.

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether the model is spread over several devices."""
        return self._accelerate.verify_device_map(model)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The model: nothing is wrapped around it. That inside of a compiled one, unless it is to be kept."""
        return model if keep_torch_compile else getattr(model, "_orig_mod", model)

    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, every rank has every parameter whole, which ZeRO-3 otherwise divides: to read, to export, to generate
        with them, and for a moving average of them. Every rank enters it.
        """
        return nullcontext() if self.run is None else self.run.full_parameters()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Copies of the model's whole weights. Every rank calls it."""
        with self.full_parameters():
            return self._accelerate.get_state_dict(model)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes the model's whole weights to a folder. Every rank calls it."""
        if script_check(os.environ) is None:
            with self.full_parameters():
                self._accelerate.save_model(model, save_directory, max_shard_size, safe_serialization)
            self.wait_for_everyone()  # nobody reads the folder before it is whole

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Writes an object to a file, on rank 0."""
        if script_check(os.environ) is None and self.is_main_process:
            self._accelerate.save(obj, f, safe_serialization)

    def register_save_state_pre_hook(self, hook: Function) -> RemovableHandle:
        """`hook(models, weights, folder)` is called before each `save_state`, on every rank."""
        return self._before_save.add(hook)

    def register_load_state_pre_hook(self, hook: Function) -> RemovableHandle:
        """`hook(models, folder)` is called in `load_state`, behind the run's own resume."""
        return self._before_load.add(hook)

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True) -> None:
        """Saves the run behind this step, for which the folder then stands. Every rank calls it, behind an update."""
        if self.passes_over or script_check(os.environ) is not None:
            return
        run, given = self.begun(), self._given
        if not given or run.update is None:
            raise UserCodeError(
                "save_state() was called in the middle of a step, of which a part would be lost: call it behind an "
                "update, if accelerator.sync_gradients"
            )
        folder = self._saved.folder(output_dir)
        if self._before_save:
            folder.mkdir(parents=True, exist_ok=True)
            with run.full_parameters():
                self._before_save.saving(self._models, folder)
        run.save()
        self._saved.begin(folder, given)

    def load_state(self, input_dir: str | os.PathLike[str] | None = None) -> None:
        """Goes on from the run's newest checkpoint, for which the folder stands, or had a signal not stopped the run
        behind it: before the first batch, behind `prepare`. The loop then begins with the rest of the open epoch.
        """
        with refusing():
            folder = self._saved.to_load(input_dir)
            self._require_unbegun("load_state")
            go_back(folder)
        run = self.begun(resume=True)
        require_state_of(folder, run)
        self.resumed_by_script, self.passes_over, self.is_over = True, False, False
        if self._before_load:
            with run.full_parameters():
                self._before_load.loading(self._models, folder)

    def init_trackers(self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: Any = None) -> None:
        """Starts the trackers of `log_with`, on rank 0."""
        if self.is_main_process and script_check(os.environ) is None:
            self._accelerate.init_trackers(project_name, config, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """One of the trackers."""
        return self._accelerate.get_tracker(name, unwrap)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """To the trackers, on rank 0; numbers are recorded in the run, too."""
        if self.is_main_process and not self.passes_over:
            self._accelerate.log(dict(values), step, log_kwargs or {})
        if self.run is not None and self._given:
            self.run.log({name: value for name, value in values.items() if isinstance(value, int | float)})

    def end_training(self) -> None:
        """Ends trackers and run: it is finished, whatever step it has come to."""
        if self.is_main_process:
            self._accelerate.end_training()
        if self.run is not None:
            self.is_over = True
            self.run.end()
            self.run.close()
            self._saved.settle(self.run, wait=False)

    def _close_at_exit(self) -> None:
        """A script without `end_training` comes to its end, unless by an error."""
        if getattr(sys, "last_value", None) is None:
            with suppress(SystemExit):  # of a comparison, which ends the process
                self.end_training()
