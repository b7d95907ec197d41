"""`Trainer`: Lightning's, on the engine of `shoal.start`.

    trainer = Trainer(max_epochs=3, devices=2)
    trainer.fit(module, train_loader, val_loader)

Lightning's loops call the module's hooks, log, validate and step schedulers; the run gives them batches, sums
gradients over all ranks, makes the updates and keeps the checkpoints. A step has `batch_size` x `devices` x `num_nodes`
x `accumulate_grad_batches` samples on any number of ranks, what the script takes in as many processes as it is written
for; or `batch.global_samples`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

import shoal
from shoal.errors import Stopped, UsageError, UserCodeError
from shoal.launcher.own_script import script_check
from shoal.lightning.arguments import (
    Plan,
    has_progress_bar,
    plan_of,
    require_module,
    require_optimizers,
    settings_of,
    steps_of,
)
from shoal.lightning.data import TrainingBatches, require_one
from shoal.lightning.kept import Kept
from shoal.lightning.loops import EpochLoop, EvaluationLoop, FitLoop, NoSignals, RunLog
from shoal.lightning.package import NAME, part
from shoal.lightning.results import Results
from shoal.lightning.strategy import RunStrategy
from shoal.own_loop.objects import data_of_script
from shoal.own_loop.other_libraries import refusing, without_launcher

if TYPE_CHECKING:
    import lightning.pytorch as lightning

    from shoal.own_loop.loop import Training
else:
    lightning = part()


class Trainer(lightning.Trainer):
    """See above, and Lightning's for what each argument and call means; docs/migration/lightning.md says what becomes
    of each. `config` is a run file or its tables, `overrides` are keys such as "layout.shard=2"; None: those of the
    command line. A refusal is a sentence on standard error, and exit code 2.
    """

    def __init__(
        self,
        *,
        config: str | Path | Mapping[str, Any] | None = None,
        overrides: Sequence[str] | None = None,
        **given: Any,
    ) -> None:
        with refusing():
            self._settings = settings_of(given)
        self._config, self._overrides = config, overrides
        self._ended: BaseException | None = None
        self._resume: bool | None = None
        self._checking = script_check(os.environ)
        strategy = RunStrategy(self._settings, self._started)
        own = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": strategy, "precision": None}
        alone = part("plugins.environments").LightningEnvironment()  # looks for no launcher, and for no MPI
        own |= {"plugins": [strategy.precision, alone], "sync_batchnorm": False}
        own["use_distributed_sampler"] = False  # the run divides samples
        own |= {"enable_progress_bar": given.get("enable_progress_bar") or has_progress_bar(given.get("callbacks"))}
        if self._checking is not None:  # a comparison writes no file of the script's
            own |= {"logger": part("loggers.logger").DummyLogger()}
        with without_launcher():
            given.update(own)
            super().__init__(**given)  # as it stands here, LightningCLI finds Lightning's arguments
        strategy.leaves_by(self._leave_quietly)
        self._take_loops(strategy)

    _plan: Plan
    waits = False
    """Whether loggers are not asked for what they write to: a process that starts ranks would begin a version of it."""

    @property
    def loggers(self) -> list[Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As Lightning's."""
        return [] if self.waits else self._loggers

    @loggers.setter
    def loggers(self, loggers: list[Any] | None) -> None:
        self._loggers = loggers or []

    @property
    def run(self) -> Training | None:
        """The `Training` of `shoal.start`, once it is begun."""
        return self._of_run.run

    @property
    def _of_run(self) -> RunStrategy:
        return self.strategy  # pyright: ignore[reportReturnType]

    def fit(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        **named: Any,
    ) -> None:
        """Trains, or goes on with the run that was cut off, as the same command does. `ckpt_path`: "last" keeps to the
        newest run of the directory, where a finished one with other arguments would be followed by a new one.
        """
        with refusing():
            if self.run is not None:
                raise UsageError("fit() was called again, and a script has one run: set max_epochs for all of it")
            if not isinstance(model, lightning.LightningModule):
                raise UsageError(
                    f"fit() was given a {type(model).__name__}, which is no LightningModule of {NAME}: import that "
                    "package, and no other of Lightning's, before shoal.lightning"
                )
            if ckpt_path not in (None, "last"):
                raise UsageError(
                    f"fit(ckpt_path={os.fspath(ckpt_path)!r}): a run goes on from its own newest checkpoint, by the "
                    "same command; to begin with weights of a file, load them by load_from_checkpoint"
                )
            require_module(model)
        self._resume = True if ckpt_path == "last" else None
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, **named)
        if self._ended is not None:
            raise self._ended

    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, every rank has every parameter whole, which ZeRO-3 otherwise divides: to read, to export, for an
        average of them. Every rank enters it.
        """
        return self._of_run.full_parameters()

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Writes the module's whole weights and what a callback keeps to a file of Lightning's, and asks for a
        checkpoint of the run behind this step. Every rank calls it.
        """
        run = self.run
        if self._checking is not None:
            return
        with self._of_run.full_parameters():
            checkpoint = self._checkpoint_connector.dump_checkpoint(weights_only)
            for name in ("optimizer_states", "lr_schedulers"):  # the run's checkpoints have them
                checkpoint.pop(name, None)
            self.strategy.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            self.strategy.barrier()
        if run is not None and self.state.fn == part("trainer.states").TrainerFn.FITTING and self.global_step:
            run.save()

    def training_batches(self, loader: DataLoader) -> TrainingBatches:
        """What the loops of a fit go over. Raises `UsageError` where nobody knows how long an iterable is."""
        size = (loader.batch_size or 0) * self._settings.processes
        plan = self._plan = plan_of(
            self._settings,
            self._config,
            self._overrides,
            batch=size,
            accumulation=self.accumulate_grad_batches,
            data=data_of_script(loader)[0],
        )
        batches = None
        if isinstance(loader.dataset, IterableDataset):
            if self.max_steps < 0:
                raise UsageError("the train_dataloader's data set is an iterable, which has no epochs: set max_steps")
            batches = self.max_steps * plan.accumulation
        joined = plan.accumulation if self._checking is not None and self._checking.side == "plain" else 1
        if self.lightning_module.automatic_optimization:
            self.accumulate_grad_batches = plan.accumulation // joined
        if joined > 1 and isinstance(self.val_check_interval, int):
            self.val_check_interval = ceil(self.val_check_interval / joined)
        return TrainingBatches(loader, size, self._of_run.begun, batches=batches, joined=joined)

    def _take_loops(self, strategy: RunStrategy) -> None:
        """Puts a run's loops in the place of Lightning's, before anything is attached to them."""
        fit, epochs = self.fit_loop, FitLoop(self, min_epochs=self.min_epochs, max_epochs=self.max_epochs)
        epochs.epoch_loop = EpochLoop(self, min_steps=fit.min_steps, max_steps=fit.max_steps)
        states = part("trainer.states")
        fn, stage = states.TrainerFn, states.RunningStage
        validates = {"inference_mode": False, "verbose": False}
        inference = {"inference_mode": self.validate_loop.inference_mode}
        epochs.epoch_loop.val_loop = EvaluationLoop(self, fn.FITTING, stage.VALIDATING, **validates)
        self.fit_loop = epochs
        self.validate_loop = EvaluationLoop(self, fn.VALIDATING, stage.VALIDATING, **inference)
        self.test_loop = EvaluationLoop(self, fn.TESTING, stage.TESTING, **inference)
        epochs.epoch_loop._results = Results(training=True, samples=strategy.samples)
        for loop in (epochs.epoch_loop.val_loop, self.validate_loop, self.test_loop):
            loop._results = Results(training=False, samples=strategy.samples)
        self._signal_connector, self._logger_connector = NoSignals(self), RunLog(self)

    def _leave_quietly(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A process that only starts ranks, and one that a signal stops, ends without the hooks of a failure."""
        states = part("trainer.states")
        try:
            return function(*args, **kwargs)
        except (SystemExit, Stopped) as ended:
            if self.state.fn != states.TrainerFn.FITTING:
                raise
            self._ended = ended
            self.state.stage = None
            self.state.status = states.TrainerStatus.INTERRUPTED
            return None

    def _started(self) -> Training:
        """The run, with what an earlier start has left."""
        strategy, settings, module = self._of_run, self._settings, self.lightning_module
        with refusing():
            self.fit_loop.setup_data()
            loader, batches = self.fit_loop._combined_loader, strategy.batches
            if loader is None or batches is None:
                raise UsageError("fit() needs a train_dataloader, and limit_train_batches above 0")
            require_one(loader.flattened)
            if isinstance(self.val_check_batch, int):
                self.val_check_batch *= batches.joined
            limit = self.num_training_batches
            data = batches.loader if limit in (inf, len(batches)) else batches.limited(int(limit))
            strategy.setup_optimizers(self)
            require_optimizers(strategy.optimizers)
        plan, optimizers = self._plan, strategy.optimizers
        endless = isinstance(data.dataset, IterableDataset)
        schedulers = {f"scheduler_{n}": each.scheduler for n, each in enumerate(self.lr_scheduler_configs)}
        run = shoal.start(
            plan.tables,
            plan.keys,
            model=module,
            optimizer=tuple(optimizers) if len(optimizers) > 1 else optimizers[0],
            data=data,
            batch_samples=plan.step_samples,
            steps=steps_of(
                batches=int(min(limit, len(batches))) * batches.joined,
                accumulation=plan.accumulation,
                max_epochs=None if endless else self.max_epochs,
                max_steps=self.max_steps,
                optimizers=len(optimizers),
            ),
            resume=self._resume,
            state={"lightning": Kept(self), **schedulers},
        )
        if run.share[1] < run.world_size:
            raise UserCodeError(
                "layout.tensor with Lightning, whose evaluation gives each rank other samples: use layout.replicate or "
                "layout.shard, or write the loop with shoal.start"
            )
        run.divide_by(batches.size)
        size = f"{batches.loader.batch_size} x {settings.processes} x {plan.accumulation}"
        run.note(
            f"a step has {plan.step_samples} samples on any number of ranks: batch_size x devices x "
            f"accumulate_grad_batches is {size}; batch.global_samples says another size"
        )
        for sentence in settings.notes:
            run.note(sentence)
        return run
