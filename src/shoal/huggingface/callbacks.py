"""What callbacks and the strategies of the arguments ask for between two steps (to log, to evaluate, to save), and what
of it a checkpoint keeps.

A callback may ask on one rank only, as by a clock: then every rank does it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from transformers.trainer_callback import ExportableState

from shoal.errors import UserCodeError

if TYPE_CHECKING:
    from shoal.own_loop.loop import Training

KEPT_BY_RANKS = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks")
"""What of a `TrainerState` is no part of a checkpoint, or is made anew for it."""
FLAGS = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save")
"""What callbacks ask for."""


class BetweenSteps(transformers.Trainer):
    """The part of a `Trainer` that does it."""

    args: Any
    optimizer: Any
    lr_scheduler: Any
    callback_handler: Any

    def __init__(self, *given: Any, **named: Any) -> None:
        self._run: Training | None = None
        self._stopped = False  # by a callback, before the last step
        self._asks = False  # there are callbacks that may ask for something on one rank only
        self._loss_sum, self._losses, self._total_loss, self._logged_at = 0.0, 0, 0.0, 0
        super().__init__(*given, **named)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As transformers', and records the measurements of an evaluation in the run."""
        super().log(logs, start_time)
        if self._run is not None:
            self._run.log({f"{n[5:]}/eval": v for n, v in logs.items() if n.startswith("eval_") and not _is_speed(n)})

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
        if self.state.global_step and looks_at_metric(self.lr_scheduler):
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


def looks_at_metric(scheduler: Any) -> bool:
    """Whether the scheduler's `step` follows an evaluation and takes a metric of it, as that of `ReduceLROnPlateau`."""
    return "metrics" in signature(scheduler.step).parameters


def _is_speed(name: str) -> bool:
    return name.endswith(("_runtime", "_per_second"))
