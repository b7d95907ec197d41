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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, speed_metrics
from transformers.utils.import_utils import is_datasets_available

import shoal
from shoal.engine.forward_backward import evaluating
from shoal.errors import UsageError, UserCodeError
from shoal.huggingface.arguments import (
    ORDERS,
    Plan,
    TrainingArguments,
    Whereabouts,
    plan_of,
    refusing,
    require_carried,
    require_methods,
    unused,
    without_launcher,
)
from shoal.huggingface.evaluation import evaluated
from shoal.huggingface.labels import label_count, require_repeatable, shifts_labels, without_masking
from shoal.launcher.environment import ALONE, place_from
from shoal.launcher.own_script import script_check

if TYPE_CHECKING:
    from shoal.own_loop.loop import Training

KEPT_BY_RANKS = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks")
"""What of a `TrainerState` is no part of a checkpoint, or is made anew for it."""
FLAGS = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save")
"""What callbacks ask for."""


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


class OnShoal(transformers.Trainer):
    """See above. A refusal is a sentence on standard error, and exit code 2."""

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    callback_handler: Any
    _config: str | Path | Mapping[str, Any] | None = None
    _overrides: Sequence[str] | None = None

    def __init__(self, model: Any = None, args: Any = None, *given: Any, **named: Any) -> None:
        with refusing():
            args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
            require_carried(args)
            require_methods(type(self))
        self._run: Training | None = None
        self._stopped = False  # by a callback, before the last step
        self._asks = False  # there are callbacks that may ask for something on one rank only
        self._loss_sum, self._losses, self._total_loss, self._logged_at = 0.0, 0, 0.0, 0
        super().__init__(model, args, *given, **named)
        self._loss_shifts_labels = shifts_labels(self.model)
        self.data_collator, self.masking = without_masking(self.data_collator)

    def create_accelerator_and_postprocess(self) -> None:
        """An accelerator that connects nothing and takes no device, for those who ask it to unwrap a model."""
        with without_launcher():
            self.accelerator = Accelerator(cpu=True)
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False

    def loss_weight(self, inputs: Mapping[str, Any]) -> float:
        """What the loss of these inputs is a mean over: their labels other than -100, or, without labels, their
        samples. Override it where `compute_loss` returns a mean over something else.
        """
        return label_count(inputs, self.model, shifted=self._loss_shifts_labels)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, or go on with the run of `output_dir` that was cut off, as the same command does.

        `resume_from_checkpoint`: True, False and None do the same. Raises what the loop of a run raises.
        """
        with refusing():
            if self._run is not None:
                raise UsageError("train() was called again, and a script has one run: set max_steps for all of it")
            if isinstance(resume_from_checkpoint, str | os.PathLike):
                raise UsageError(
                    f"resume_from_checkpoint = {os.fspath(resume_from_checkpoint)!r}: a run resumes from its own "
                    "newest checkpoint by itself; leave it out. To begin with weights of transformers', load the model "
                    "from that folder"
                )
            if trial is not None:
                raise UsageError("a trial of hyperparameter_search: shoal sweep mine.py tries the keys of a run")
            plan, loader = self._planned()
            require_repeatable(loader.collate_fn, loader.dataset)
        run = self._started(plan, loader)
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

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluates all samples once, divided among the ranks; every rank gets predictions, labels and metrics whole.

        The loss is the mean over all labels of the set, whatever the number of ranks and the size of batches.
        """
        self.callback_handler.eval_dataloader = dataloader
        with self._evaluation():
            return evaluated(
                self,
                dataloader,
                loss_only=self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only,
                ignore_keys=ignore_keys,
                prefix=metric_key_prefix,
            )

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

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As transformers', and records the measurements of an evaluation in the run."""
        super().log(logs, start_time)
        if self._run is not None:
            self._run.log({f"{n[5:]}/eval": v for n, v in logs.items() if n.startswith("eval_") and not _is_speed(n)})

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the whole model to a folder for `from_pretrained`. Every rank calls it."""
        if script_check(os.environ) is not None:
            return  # a comparison writes no file of the script's
        with self.full_parameters():
            super().save_model(output_dir, _internal_call=True)
        if self._run is not None:
            self._run.sum(0.0)  # nobody reads the folder before it is whole

    def end(self) -> None:
        """Ends the run; nothing may follow that needs the other ranks. Without it, the end of the script does it."""
        if self._run is not None:
            self._run.close()

    def _planned(self) -> tuple[Plan, DataLoader]:
        """What to start. Raises `UsageError` where there is no data, or nobody knows how long the run is."""
        data = self.train_dataset
        if data is None:
            raise UsageError("train() needs a train_dataset")
        samples = None if isinstance(data, IterableDataset) else len(data)  # pyright: ignore[reportArgumentType]
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

    def _started(self, plan: Plan, loader: DataLoader) -> Training:
        """The run, with what an earlier start has left."""
        args = self.args
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
        own = [type(each).__module__ for each in self.callback_handler.callbacks]
        (self._asks,) = self._of_any([not all(each.startswith("transformers.") for each in own)])
        run.note(
            f"a global batch has {plan.batch} samples on any number of ranks; per_device_train_batch_size x "
            f"gradient_accumulation_steps is {args.per_device_train_batch_size} x {args.gradient_accumulation_steps}; "
            "batch.global_samples says another size"
        )
        for sentence in unused(args):
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
        if update:
            self._loss_sum, self._losses = self._loss_sum + update.loss, self._losses + 1
            if not isinstance(self.lr_scheduler, ReduceLROnPlateau):
                self.lr_scheduler.step()
        return {"grad_norm": update.grad_norm if norm is None else norm, "learning_rate": rate}

    def _backward(self, run: Training, inputs: dict[str, Any]) -> None:
        """Of one microbatch."""
        inputs = self._prepare_inputs(inputs)
        inputs = inputs if self.masking is None else self.masking(inputs)
        weight = self.loss_weight(inputs)
        items = torch.tensor(max(weight, 1.0), device=run.device) if "labels" in inputs else None
        with self.compute_loss_context_manager():
            loss: Any = self.compute_loss(self.model, inputs, num_items_in_batch=items)
        # a mean over no labels is 0/0, and counts for nothing
        run.backward(loss if weight else torch.nan_to_num(loss), weight=weight)

    def _act(self, run: Training, logs: dict[str, float], ignore_keys: list[str] | None) -> None:
        """What the callbacks, or the strategies of the arguments, ask for: to log, to evaluate, to save."""
        self._agree()
        state, control = self.state, self.control
        if control.should_log and state.global_step > self._logged_at:
            mean = self._loss_sum / self._losses if self._losses else float("nan")
            self._total_loss += self._loss_sum
            self._loss_sum, self._losses, self._logged_at = 0.0, 0, state.global_step
            self.log({"loss": mean, **logs})
        if control.should_evaluate:
            is_best = self._is_best(self._evaluated(ignore_keys))
            if self.args.save_strategy == "best":
                self.control.should_save = is_best
        if self.control.should_save:
            run.save()
            if state.best_global_step == state.global_step and state.best_metric is not None:
                state.best_model_checkpoint = os.path.join(self.args.output_dir, "best")
                self.save_model(state.best_model_checkpoint)
            self.control = self.callback_handler.on_save(self.args, state, self.control)
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False
        self._agree()

    def _agree(self) -> None:
        """What a callback asks for on one rank is done by all; those of transformers ask alike everywhere."""
        if self._asks:
            for flag, asked in zip(FLAGS, self._of_any([getattr(self.control, flag) for flag in FLAGS]), strict=True):
                setattr(self.control, flag, asked)

    def _of_any(self, own: Sequence[bool]) -> list[bool]:
        """Which of these is true on any rank."""
        found = torch.tensor(own, dtype=torch.int32, device=self.args.device)
        if self.args.world_size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return [bool(each) for each in found.tolist()]

    def _evaluated(self, ignore_keys: list[str] | None) -> dict[str, float]:
        """The metrics of an evaluation during training; a scheduler that looks at one is stepped."""
        metrics = self.evaluate(ignore_keys=ignore_keys)
        if isinstance(self.lr_scheduler, ReduceLROnPlateau) and self.state.global_step:
            self.lr_scheduler.step(metrics[self._metric_in(metrics)])
        return metrics

    def _metric_in(self, metrics: Mapping[str, float]) -> str:
        """The name of `metric_for_best_model`. Raises `UserCodeError` where it was not measured."""
        name = self.args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise UserCodeError(f"metric_for_best_model: there is no {name!r} among {', '.join(sorted(metrics))}")
        return name

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether `metric_for_best_model` is better than ever before, which the state then holds."""
        if self.args.metric_for_best_model is None:
            return False
        found, best = metrics[self._metric_in(metrics)], self.state.best_metric
        if best is not None and not (found > best if self.args.greater_is_better else found < best):
            return False
        self.state.best_metric, self.state.best_global_step = found, self.state.global_step
        return True

    def _concluded(self, started_s: float, first: int, plan: Plan) -> TrainOutput:
        """Behind the last step: the figures of the training, and the best model where it is asked for."""
        state, steps = self.state, self.state.global_step - first
        loss = (self._total_loss + self._loss_sum) / max(1, state.global_step)
        metrics = speed_metrics("train", started_s, num_samples=steps * plan.batch, num_steps=steps)
        self.log({**metrics, "train_loss": loss})
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            with self.full_parameters():
                self._load_best_model()
        self.control = self.callback_handler.on_train_end(self.args, state, self.control)
        return TrainOutput(state.global_step, loss, {**metrics, "train_loss": loss})

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """Around an evaluation; before the run it is in this process alone."""
        if self._run is not None:
            with self._run.evaluation():
                yield
            return
        with torch.no_grad(), evaluating(self.model):
            yield

    def _kept(self) -> dict[str, Any]:
        """What a checkpoint holds of the training."""
        state = {name: value for name, value in asdict(self.state).items() if name not in KEPT_BY_RANKS}
        callbacks: dict[str, list[Any]] = {}
        for each in self._stateful():
            callbacks.setdefault(type(each).__name__, []).append(each.state()["attributes"])
        losses = [self._loss_sum, self._losses, self._total_loss, self._logged_at]
        return {"state": state, "callbacks": callbacks, "losses": losses, "stopped": self._stopped}

    def _go_on(self, kept: dict[str, Any]) -> None:
        """Restores what `_kept` gave."""
        for name, value in kept["state"].items():
            setattr(self.state, name, value)
        for name, states in kept["callbacks"].items():
            same = [each for each in self._stateful() if type(each).__name__ == name]
            for each, attributes in zip(same, states, strict=False):
                vars(each).update(attributes)
        self._loss_sum, self._losses, self._total_loss, self._logged_at = kept["losses"]
        self._stopped = kept["stopped"]

    def _stateful(self) -> list[Any]:
        return [each for each in self.callback_handler.callbacks if isinstance(each, ExportableState)]


class Trainer(RunKeys, OnShoal):
    """`transformers.Trainer` on Shoal: see above."""


class Seq2SeqTrainer(RunKeys, transformers.Seq2SeqTrainer, OnShoal):  # pyright: ignore[reportIncompatibleMethodOverride]
    """`transformers.Seq2SeqTrainer` on Shoal: each rank generates for its part of the samples."""


def _is_speed(name: str) -> bool:
    return name.endswith(("_runtime", "_per_second"))
