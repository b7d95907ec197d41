"""Lightning's loops, which call its hooks, log, validate and step schedulers, with what a run does otherwise: a step
ends where the run says, a stop by a signal is the run's, and a resumed run goes on between two batches.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.lightning.package import part

if TYPE_CHECKING:
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
    from lightning.pytorch.loops.fit_loop import _FitLoop
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    from shoal.lightning.strategy import RunStrategy
else:
    loops = part("loops")
    _EvaluationLoop, _FitLoop, _TrainingEpochLoop = loops._EvaluationLoop, loops._FitLoop, loops._TrainingEpochLoop
    _LoggerConnector = part("trainer.connectors.logger_connector")._LoggerConnector
    _SignalConnector = part("trainer.connectors.signal_connector")._SignalConnector


class EpochLoop(_TrainingEpochLoop):
    """Goes over the batches of an epoch."""

    @property
    def _strategy(self) -> RunStrategy:
        return self.trainer.strategy  # pyright: ignore[reportReturnType]

    @property
    def batch_idx(self) -> int:
        """The number of the batch in the epoch; of those that are given at once, in a comparison, of the last."""
        return self.batch_progress.current.ready * self._strategy.joined - 1

    @property
    def total_batch_idx(self) -> int:
        """The same in all epochs."""
        return self.batch_progress.total.ready * self._strategy.joined - 1

    def reset(self) -> None:
        if self._restarting:  # a checkpoint is made where the next batch is asked for: the loop is there
            self._restarting = False
            return
        super().reset()

    @property
    def done(self) -> bool:
        """A step is never left in its middle."""
        return super().done and self._strategy.step_is_over

    def _should_accumulate(self) -> bool:
        return not self._strategy.step_is_over

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        found = super()._should_check_val_fx(data_fetcher)
        if getattr(self.trainer, "_val_check_time_interval", None) is None:
            return found
        return bool(self._strategy.broadcast(found))  # each rank has a clock of its own

    def _broadcast_sigterm_tensor(self) -> None:
        """Nothing: the run stops all ranks behind the same step."""


class FitLoop(_FitLoop):
    """Goes over the epochs."""

    def on_advance_start(self) -> None:
        if self.restarted_mid_epoch:
            self._begin_again()
        super().on_advance_start()
        self._restarting = False  # from here on the epoch is like any other

    def _begin_again(self) -> None:
        """The hooks of an epoch's start, in which modules make what they count in: this module is a new one. Schedulers
        and rates are those of the checkpoint, whatever the hooks do.
        """
        trainer, call = self.trainer, part("trainer.call")
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        states = [deepcopy(each.state_dict()) for each in schedulers]
        groups = [group for each in trainer.optimizers for group in each.param_groups]
        rates = [group["lr"] for group in groups]
        call._call_callback_hooks(trainer, "on_train_epoch_start")
        call._call_lightning_module_hook(trainer, "on_train_epoch_start")
        for scheduler, state in zip(schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def on_run_end(self) -> None:
        super().on_run_end()
        self.trainer.strategy.finish()  # pyright: ignore[reportAttributeAccessIssue]


class EvaluationLoop(_EvaluationLoop):
    """Validates or tests: inside, every rank has whole parameters."""

    def run(self) -> list[Any]:
        strategy: Any = self.trainer.strategy
        with strategy.evaluating():
            return super().run()

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        strategy: Any = self.trainer.strategy
        assert self._combined_loader is not None, "the loop has batches"
        with strategy.batch_of_evaluation(self._combined_loader.flattened[dataloader_idx]):
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)


class NoSignals(_SignalConnector):
    """A run listens to signals itself."""

    def register_signal_handlers(self) -> None:
        self.received_sigterm = False


class RunLog(_LoggerConnector):
    """What is logged is in the run's log and report, too."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        strategy: Any = self.trainer.strategy
        numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        if strategy.run is not None and numbers:
            strategy.run.log(numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
