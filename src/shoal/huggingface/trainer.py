"""`Trainer`: the constructor, callbacks and methods of transformers', and a `train()` on the engine of `shoal.start`.

    trainer = Trainer(model=model, args=TrainingArguments("output", ...), train_dataset=sentences)
    trainer.train()

A global batch has `per_device_train_batch_size` x `gradient_accumulation_steps` samples, what the script takes in one
process, on any number of ranks; or `batch.global_samples`. Its loss is the mean over all its labels that count, so a
microbatch weighs as many as it has (`loss_weight`):

    loss = sum over ranks and microbatches m of (n_m / N) loss_m,    n_m labels in m, N in the global batch

Of transformers' loop nothing is used; of its class what a subclass may override: `compute_loss`, `create_optimizer`,
`create_scheduler`, `prediction_step`, `evaluate`, `predict`, `log`, and the handler of callbacks.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from math import ceil, isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import TrainOutput, has_length, speed_metrics
from transformers.utils.import_utils import is_datasets_available

import shoal
from shoal.errors import UsageError, UserCodeError
from shoal.huggingface.arguments import (
    ORDERS,
    OVERRIDDEN,
    OfRun,
    Plan,
    TrainingArguments,
    Whereabouts,
    doubtful,
    plan_of,
    require_carried,
    require_methods,
    require_own_checkpoint,
    unused,
)
from shoal.huggingface.callbacks import looks_at_metric
from shoal.huggingface.evaluation import EvaluationLoop
from shoal.huggingface.labels import input_tokens, require_repeatable
from shoal.huggingface.run_accelerator import RunAccelerator
from shoal.launcher.environment import ALONE, place_from
from shoal.launcher.own_script import script_check
from shoal.own_loop.other_libraries import refusing

if TYPE_CHECKING:
    from shoal.own_loop.loop import Training


class RunKeys:
    """Takes what `shoal.start` is given beside objects, in front of a `Trainer`'s own arguments: `config`, a run file
    or its tables, and `overrides`, keys such as "layout.shard=2"; None: those of the command line.
    """

    def __init__(
        self,
        *given: Any,
        config: str | Path | Mapping[str, Any] | None = None,
        overrides: Sequence[str] | None = None,
        **named: Any,
    ) -> None:
        self._config, self._overrides = config, overrides
        super().__init__(*given, **named)


class OnShoal(EvaluationLoop):
    """See above. A refusal is a sentence on standard error, and exit code 2."""

    _config: str | Path | Mapping[str, Any] | None = None
    _overrides: Sequence[str] | None = None

    def __init__(self, model: Any = None, args: Any = None, *given: Any, **named: Any) -> None:
        with refusing():
            args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
            require_carried(args)
            require_methods(type(self), OnShoal)
        super().__init__(model, args, *given, **named)
        self.current_gradient_accumulation_steps = 1  # each microbatch has its own share of the loss
        self._weight, self._seen = 1.0, 0  # of the microbatch that is computed, and input tokens of the step

    def create_accelerator_and_postprocess(self) -> None:
        """For those who ask it to unwrap a model, or for what all ranks have measured."""
        self.accelerator = RunAccelerator()
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, or go on with the run of `output_dir` that was cut off, as the same command does.

        `resume_from_checkpoint`: True, `output_dir` or a folder inside of it keeps to the newest run there, where a
        finished one with other arguments would be followed by a new one. Raises what the loop of a run raises.
        """
        with refusing():
            if self._run is not None:
                raise UsageError("train() was called again, and a script has one run: set max_steps for all of it")
            require_own_checkpoint(resume_from_checkpoint, self.args.output_dir)
            if trial is not None:
                raise _would_not_be_called("train(trial=...)", "hyperparameter_search")
            plan, loader = self._planned()
            require_repeatable(loader.collate_fn, loader.dataset)
        run = self._started(plan, loader, resume=True if resume_from_checkpoint else None)
        started_s, first = time.time(), self.state.global_step
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if self.args.eval_on_start and first == 0:
            self._evaluated(ignore_keys_for_eval)
        for _number, microbatches in () if self._stopped else run.steps():
            self._take_step(run, plan, microbatches, ignore_keys_for_eval)
            if self.control.should_training_stop and self.state.global_step < plan.steps:
                self._stopped = True
                run.save()
                run.leave()  # a checkpoint holds the last model, and not the best one
                break
        return self._concluded(started_s, first, plan)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of a microbatch; returns its loss. One of a subclass calls this."""
        model.train()
        with self.compute_loss_context_manager():
            loss: Any = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        run, weight = self._run, self._weight
        assert run is not None, "train() has started the run"
        # a mean over no labels is 0/0, and counts for nothing
        run.backward(loss if weight else torch.nan_to_num(loss), weight=weight)
        return loss.detach()

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        """Of this rank's batches alone: the run knows what each counts in the batch of all."""
        count = sum(map(self.loss_weight, batch_samples))
        return torch.tensor(max(count, 1.0), device=device) if "labels" in batch_samples[0] else None

    def compute_loss_context_manager(self) -> ExitStack:
        """Computes in the type of `[precision]`."""
        around = super().compute_loss_context_manager()
        if self._run is not None:
            around.enter_context(self._run.autocast())
        return around

    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, every rank has every parameter whole, which ZeRO-3 otherwise divides: to read, to export, to generate
        with them. Every rank enters it.
        """
        return nullcontext() if self._run is None else self._run.full_parameters()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the whole model to a folder for `from_pretrained`. Every rank calls it."""
        if script_check(os.environ) is not None:
            return  # a comparison writes no file of the script's
        with self.full_parameters():
            super().save_model(output_dir, _internal_call=True)
        if self._run is not None:
            self._run.sum(0.0)  # nobody reads the folder before it is whole

    def push_to_hub(self, *given: Any, **named: Any) -> NoReturn:
        """Refused, as each other method of `OVERRIDDEN` is in a subclass."""
        with refusing():
            raise _would_not_be_called("push_to_hub()", "push_to_hub")
        raise AssertionError("a refusal ends the process")

    def hyperparameter_search(self, *given: Any, **named: Any) -> NoReturn:
        """Refused, before a search begins."""
        with refusing():
            raise _would_not_be_called("hyperparameter_search()", "hyperparameter_search")
        raise AssertionError("a refusal ends the process")

    def end(self) -> None:
        """Ends the run; nothing may follow that needs the other ranks. Without it, the end of the script does it."""
        if self._run is not None:
            self._run.close()

    def _planned(self) -> tuple[Plan, DataLoader]:
        """What to start. Raises `UsageError` where there is no data, or nobody knows how long the run is."""
        data = self.train_dataset
        if data is None:
            raise UsageError("train() needs a train_dataset")
        samples = len(data) if has_length(data) else None  # pyright: ignore[reportArgumentType]
        plan = plan_of(self.args, self._config, self._overrides, samples=samples)
        return plan, self._loader(data, plan.batch)

    def _loader(self, data: Any, batch: int) -> DataLoader:
        """The data set as transformers gives it to the collator, in global batches."""
        args, collate = self.args, self.data_collator
        if is_datasets_available() and isinstance(data, importlib.import_module("datasets").Dataset):
            data = self._remove_unused_columns(data, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        shuffle = ORDERS[getattr(args, "train_sampling_strategy", "random")]
        shuffle = None if isinstance(data, IterableDataset) else shuffle
        return DataLoader(data, batch, shuffle=shuffle, collate_fn=collate, drop_last=args.dataloader_drop_last)

    def _started(self, plan: Plan, loader: DataLoader, *, resume: bool | None) -> Training:
        """The run, with what an earlier start has left; `resume` as `shoal.start` takes it."""
        args = self.args
        if args.torch_compile:
            self.model.compile(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
        if args.activation_checkpointing if hasattr(args, "activation_checkpointing") else args.gradient_checkpointing:
            options = dict(args.gradient_checkpointing_kwargs or {})
            layers = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None, **layers)
        self.create_optimizer_and_scheduler(num_training_steps=plan.steps)
        self.state = TrainerState()
        run = self._run = shoal.start(
            plan.tables,
            plan.overrides,
            model=self.model,
            optimizer=self.optimizer,
            data=loader,
            batch_samples=plan.batch,
            steps=plan.steps,
            resume=resume,
            state={
                "scheduler": self.lr_scheduler,
                "trainer": SimpleNamespace(state_dict=self._kept, load_state_dict=self._go_on),
            },
        )
        if run.share[1] < run.world_size:
            raise UserCodeError(
                "layout.tensor with a Trainer, whose evaluation gives each rank other samples: use layout.replicate or "
                "layout.shard, or write the loop with shoal.start"
            )
        self.accelerator.join(run)
        self._introduce(run, plan)
        self.callback_handler.model, self.callback_handler.optimizer = self.model, self.optimizer
        self.callback_handler.lr_scheduler, self.callback_handler.train_dataloader = self.lr_scheduler, loader
        self.model.train()
        return run

    def _introduce(self, run: Training, plan: Plan) -> None:
        """Tells the arguments and the state which rank this is, and the log what there is to know."""
        args, state = self.args, self.state
        local_rank = (place_from(os.environ) or ALONE).local_rank
        args.whereabouts = Whereabouts(run.rank, local_rank, run.world_size, run.device)
        state.is_world_process_zero = self.is_world_process_zero()
        state.is_local_process_zero = self.is_local_process_zero()
        state.max_steps, state.num_train_epochs = plan.steps, ceil(plan.steps / plan.steps_per_epoch)
        state.compute_steps(args, plan.steps)
        state.train_batch_size = args.train_batch_size
        own = [type(each).__module__ for each in self.callback_handler.callbacks]
        (self._asks,) = self._of_any([not all(each.startswith("transformers.") for each in own)])
        run.note(
            f"a global batch has {plan.batch} samples on any number of ranks; per_device_train_batch_size x "
            f"gradient_accumulation_steps is {args.per_device_train_batch_size} x {args.gradient_accumulation_steps}; "
            "batch.global_samples says another size"
        )
        for sentence in [*unused(args), *doubtful(type(self), OnShoal)]:
            run.note(sentence)
        if self._stopped:
            stopped = f"a callback stopped this run at step {state.global_step}, and it trains no further"
            run.note(f"{stopped}: for a new one, give another output_dir")

    def _take_step(self, run: Training, plan: Plan, microbatches: Iterable[Any], ignore_keys: list[str] | None) -> None:
        args, handler, state = self.args, self.callback_handler, self.state
        done = state.global_step + 1
        if state.global_step % plan.steps_per_epoch == 0:
            self.control = handler.on_epoch_begin(args, state, self.control)
        self.control = handler.on_step_begin(args, state, self.control)
        for index, inputs in enumerate(microbatches):
            if index:
                self.control = handler.on_substep_end(args, state, self.control)
            self._backward(run, inputs)
        logs = self._update(run)
        state.global_step, state.epoch = done, done / plan.steps_per_epoch
        if args.include_num_input_tokens_seen not in ("no", False):
            state.num_input_tokens_seen += int(run.sum(self._seen))
            self._seen = 0
        self.control = handler.on_step_end(args, state, self.control)
        self._act(run, logs, ignore_keys)
        if done % plan.steps_per_epoch == 0 or done == plan.steps or self.control.should_training_stop:
            self.control = handler.on_epoch_end(args, state, self.control)
            self._act(run, logs, ignore_keys)
        if self.control.should_epoch_stop:
            raise UserCodeError(
                "a callback has set should_epoch_stop, and each sample of an epoch is used once: set "
                "should_training_stop, or give another data set"
            )

    def _update(self, run: Training) -> dict[str, float]:
        """Behind the step's last backward: the norm that the gradient had, and the rate of the update."""
        args, handler = self.args, self.callback_handler
        norm = run.clip_grad_norm_(args.max_grad_norm) if args.max_grad_norm > 0 else None
        self.control = handler.on_pre_optimizer_step(args, self.state, self.control)
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.control = handler.on_optimizer_step(args, self.state, self.control)
        update = run.update
        assert update is not None, "the step's last microbatch is taken"
        if isfinite(update.loss):  # also where only its scaled gradient is not, and the step is taken back
            self._loss_sum, self._losses = self._loss_sum + update.loss, self._losses + 1
        if update and not looks_at_metric(self.lr_scheduler):
            self.lr_scheduler.step()
        return {"grad_norm": update.grad_norm if norm is None else norm, "learning_rate": rate}

    def _backward(self, run: Training, inputs: dict[str, Any]) -> None:
        """Of one microbatch."""
        inputs = self._prepare_inputs(inputs)
        inputs = inputs if self.masking is None else self.masking(inputs)
        self.accelerator.counts = run.samples > 0
        self._weight = self.loss_weight(inputs)
        self._seen += self._input_tokens(inputs) if run.samples else 0
        items = torch.tensor(max(self._weight, 1.0), device=run.device) if "labels" in inputs else None
        self.training_step(self.model, inputs, items)

    def _input_tokens(self, inputs: Mapping[str, Any]) -> int:
        """What of a batch `include_num_input_tokens_seen` counts."""
        how = self.args.include_num_input_tokens_seen
        return 0 if how in ("no", False) else input_tokens(inputs, self.model, padding=how != "non_padding")

    def _concluded(self, started_s: float, first: int, plan: Plan) -> TrainOutput:
        """Behind the last step: the figures of the training, and the best model where it is asked for."""
        state, steps = self.state, self.state.global_step - first
        loss = (self._total_loss + self._loss_sum) / max(1, state.global_step)
        metrics = speed_metrics("train", started_s, num_samples=steps * plan.batch, num_steps=steps)
        if steps:  # a run that had ended has said it
            self.log({**metrics, "train_loss": loss})
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            with self.full_parameters():
                self._load_best_model()
        self.control = self.callback_handler.on_train_end(self.args, state, self.control)
        return TrainOutput(state.global_step, loss, {**metrics, "train_loss": loss})


class Trainer(RunKeys, OnShoal):
    """`transformers.Trainer` on Shoal: see above."""


class Seq2SeqTrainer(RunKeys, transformers.Seq2SeqTrainer, OnShoal):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`transformers.Seq2SeqTrainer` on Shoal: each rank generates for its part of the samples."""


def on_shoal(kind: type[Any]) -> type[Any]:
    """A subclass of transformers' `Trainer` or `TrainingArguments`, made by another library, on Shoal. Take both:

        SFTTrainer, SFTConfig = on_shoal(trl.SFTTrainer), on_shoal(trl.SFTConfig)

    Ends the process with a sentence and exit code 2 for a trainer that makes batches or takes steps itself.
    """
    if issubclass(kind, OfRun | OnShoal):
        return kind
    if issubclass(kind, transformers.TrainingArguments):
        return _mixed(kind, ArgumentsOnShoal, kind)
    with refusing():
        if not issubclass(kind, transformers.Trainer):
            raise UsageError(f"on_shoal({kind.__name__}): it is neither a Trainer nor a TrainingArguments")
        mixed = _mixed(kind, RunKeys, kind, OnShoal)
        require_methods(mixed, OnShoal)
    return mixed


class ArgumentsOnShoal(OfRun):
    """What `on_shoal` mixes into a class of arguments."""

    def __reduce__(self) -> Any:  # `training_args.bin` has them, and the class no name to be found by
        return _restored, (type(self).__bases__[1], vars(self))


@cache
def _mixed(kind: type[Any], *bases: type[Any]) -> type[Any]:
    return type(kind.__name__, bases, {"__module__": __name__, "__doc__": kind.__doc__})


def _restored(kind: type[Any], state: dict[str, Any]) -> Any:
    found = object.__new__(on_shoal(kind))
    vars(found).update(state)
    return found


def _would_not_be_called(what: str, name: str) -> UsageError:
    return UsageError(f"{what} is not for a run of Shoal: {OVERRIDDEN[name]}")
