"""`RunStrategy`: Lightning's strategy for a run of Shoal.

A strategy is Lightning's own place for what depends on devices and ranks: its loops call it for each step, backward and
update, and ask it for sums over all ranks. This one starts the run when the optimizers are there, gives the loops its
batches, and leaves gradients and updates to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.errors import UsageError, UserCodeError
from shoal.launcher.environment import ALONE, place_from
from shoal.launcher.own_script import script_check
from shoal.lightning import exchange
from shoal.lightning.data import Batches, EvaluationBatches, TrainingBatches, is_divisible, require_loader
from shoal.lightning.package import fabric, part
from shoal.lightning.precision import RunPrecision
from shoal.lightning.results import metrics_unchanged
from shoal.own_loop.other_libraries import refusing

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

    from shoal.lightning.arguments import Settings
    from shoal.lightning.trainer import Trainer
    from shoal.own_loop.loop import Training
else:
    Strategy = part("strategies").Strategy


class Launcher:
    """What Lightning calls the body of a fit, of a test and so on by; it starts no processes, as the run does that."""

    is_interactive_compatible = True

    def __init__(self, launch: Callable[..., Any]) -> None:
        self._launch = launch

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        return self._launch(function, *args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Nothing: signals are the run's."""


class RunStrategy(Strategy):
    """See above. `start` begins the run, when a fit has its optimizers and its batches."""

    def __init__(self, settings: Settings, start: Callable[[], Training]) -> None:
        super().__init__()
        self.run: Training | None = None
        self.batches: TrainingBatches | None = None
        self._settings, self._start = settings, start
        self._place = place_from(os.environ) or ALONE
        self._alone = torch.device("cpu")
        self._trained: Any = None
        self._samples: int | None = None  # of this rank's batch of an evaluation, within it
        self._fetched: int | None = None  # of the one that was fetched last
        self._weight: float | None = None
        self._inside = False  # a training step
        self._waiting: list[tuple[Tensor, float | None]] = []  # losses whose optimizer is not known yet
        self.precision = RunPrecision(
            settings.precision, backward=self._computed, autocast=self._autocast, flush=self.flush
        )

    # Which rank this is.

    @property
    def root_device(self) -> torch.device:
        """Where this rank computes; before the run begins, the host."""
        return self._alone if self.run is None else self.run.device

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        """This process's number."""
        return self._place.rank if self.run is None else self.run.rank

    @property
    def local_rank(self) -> int:
        """Its number on this host."""
        return (place_from(os.environ) or ALONE).local_rank

    @property
    def node_rank(self) -> int:
        """The number of its host."""
        return (place_from(os.environ) or ALONE).node_rank

    @property
    def world_size(self) -> int:
        """Ranks of the run; before it begins, the processes that the script is written for."""
        return self._settings.processes if self.run is None else self.run.world_size

    @property
    def is_distributed(self) -> bool:
        """Whether several ranks train together."""
        return self.run is not None and self.run.world_size > 1

    # The run.

    def leaves_by(self, launch: Callable[..., Any]) -> None:
        """`launch` calls what Lightning does, and sees how that ends."""
        self._launcher = Launcher(launch)  # pyright: ignore[reportAttributeAccessIssue]

    def setup_environment(self) -> None:
        """The run connects the ranks: until it is known whether this process is one, no logger opens its files."""
        trainer: Any = self.lightning_module.trainer  # pyright: ignore[reportOptionalMemberAccess]
        trainer.waits = trainer.state.fn == part("trainer.states").TrainerFn.FITTING and place_from(os.environ) is None

    def setup(self, trainer: Any) -> None:
        """Begins the run, for a fit. What is not trained computes where it is."""
        module: Any = self.lightning_module
        if trainer.state.fn != part("trainer.states").TrainerFn.FITTING:
            if self.run is None and not self._settings.cpu and torch.accelerator.is_available():
                self._alone = torch.device(str(torch.accelerator.current_accelerator()), self.local_rank)
            if self.run is None or module is not self._trained:
                self.model = self.precision.convert_module(module).to(self.root_device)
            return
        self.model = self._trained = self.precision.convert_module(module)
        self.run = self._start()
        self.precision.converts = any(each.dtype == torch.float64 for each in module.parameters())
        fabric("utilities.rank_zero").rank_zero_only.rank = self.run.rank
        fabric("utilities.device_dtype_mixin")._update_properties(self.lightning_module, device=self.run.device)

    def model_to_device(self) -> None:
        """Nothing: the run does it."""

    def finish(self) -> None:
        """The training is over: the run ends with a checkpoint, and goes on to evaluate."""
        if self.run is not None:
            self.run.end()

    def teardown(self) -> None:
        """Nothing: the model stays where it is, and the run ends with the script."""

    def process_dataloader(self, dataloader: object) -> object:
        """The run's batches, or this rank's part of an evaluation. Each rank predicts the whole, and evaluates what
        cannot be divided.
        """
        trainer: Trainer = self.lightning_module.trainer  # pyright: ignore
        if isinstance(dataloader, Batches) or trainer.predicting:
            return dataloader
        if not trainer.training:
            if self.run is None or not is_divisible(dataloader):
                return dataloader
            size = (dataloader.batch_size or 1) * self._settings.processes
            return EvaluationBatches(dataloader, size, self.begun, self._counts)
        with refusing():
            self.batches = trainer.training_batches(require_loader(dataloader, "train_dataloader"))
        return self.batches

    def begun(self) -> Training:
        """The run. Raises `UsageError` before it is."""
        if self.run is None:
            raise UsageError("the run has not begun: take no batch before fit() does")
        return self.run

    @property
    def joined(self) -> int:
        """How many batches of Lightning's the run gives at once."""
        return 1 if self.batches is None else self.batches.joined

    @property
    def step_is_over(self) -> bool:
        """Whether the step's update is made with this batch."""
        return self.run is None or self.run.last_of_step

    def samples(self) -> int | None:
        """Those of the batch that this rank is at; None: as many as the batch has."""
        if self._samples is not None:
            return self._samples
        return self.run.samples if self._inside and self.run is not None else None

    def _counts(self, samples: int) -> None:
        self._fetched = samples

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around an evaluation."""
        with nullcontext() if self.run is None else self.run.evaluation():
            yield

    @contextmanager
    def batch_of_evaluation(self, loader: object) -> Iterator[None]:
        """Around each batch of it. Of a `loader` that cannot be divided, every rank has all, and rank 0 counts."""
        if isinstance(loader, Batches):
            self._samples = self._fetched
        else:
            self._samples = None if exchange.ranks() == 1 or self.is_global_zero else 0
        try:
            with self._counted():
                yield
        finally:
            self._samples = None

    def _counted(self) -> AbstractContextManager[None]:
        """Metric objects count a batch, and no copy."""
        if self.samples() != 0:
            return nullcontext()
        module: Any = self.lightning_module
        return metrics_unchanged([module, *module.trainer.callbacks])

    # A step.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's."""
        module, run = self.lightning_module, self.begun()
        weigh = getattr(module, "loss_weight", None)
        self._weight = (
            None if weigh is None else float(weigh(*args[:1], **{k: kwargs[k] for k in ("batch",) if k in kwargs}))
        )
        self._inside = True
        try:
            with self._counted():
                output = super().training_step(*args, **kwargs)
        finally:
            self._inside = False
        if output is None and module is not None and module.automatic_optimization:
            raise UserCodeError(
                "training_step returned None, and the other ranks wait for its gradient: return the loss of what it "
                "has, and 0 as loss_weight(batch), a method of the module, for what shall not count"
            )
        self._look_at_waiting(run)
        return output

    def _look_at_waiting(self, run: Training) -> None:
        if self._waiting and len(self.optimizers) == 1:  # its update waits for the step's last batch
            self.flush(self.optimizers[0])
        if self._waiting:
            raise UserCodeError(
                "manual_backward() was called for a loss, and no optimizer made its step behind it: call the step() of "
                "the optimizer whose loss it is"
            )

    def _computed(self, loss: Tensor) -> None:
        """The gradient of a loss. Of one that a module computes by hand the optimizer is known when it steps."""
        module = self.lightning_module
        assert module is not None, "a module is trained"
        if module.automatic_optimization:
            many = module.trainer.accumulate_grad_batches  # by which Lightning has divided the loss
            self._backward(loss * many if many > 1 else loss, self._weight)
            return
        self._waiting.append((loss, self._weight))

    def flush(self, optimizer: Any) -> None:
        """Computes the gradients of the losses that wait, for this optimizer."""
        waiting, self._waiting = self._waiting, []
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Lightning's wrapper, or itself
        several = {"optimizer": optimizer} if len(self.optimizers) > 1 else {}
        for number, (loss, weight) in enumerate(waiting, start=1):
            self._backward(loss, weight, more=number < len(waiting), **several)

    def _backward(self, loss: Tensor, weight: float | None, **named: Any) -> None:
        reduction = getattr(self.lightning_module, "loss_reduction", "mean")
        loss = torch.nan_to_num(loss) if weight == 0 else loss  # a mean over nothing is 0/0, and counts for nothing
        self.begun().backward(loss, weight=weight, reduction=reduction, **named)

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.run is None else self.run.autocast()

    # Weights.

    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, every rank has every parameter whole."""
        return nullcontext() if self.run is None else self.run.full_parameters()

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        with self.full_parameters():
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a file of Lightning's: tensors and plain values, unless the caller trusts it."""
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only is not False)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: it is in the run's checkpoints, which know how it is divided."""
        return {}

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if script_check(os.environ) is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        if script_check(os.environ) is None:
            super().remove_checkpoint(filepath)

    # What is asked of all ranks.

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over all ranks. A mean of a step weighs the samples of each rank."""
        return exchange.reduced(tensor, reduce_op, group, weight=self.samples())

    def barrier(self, name: str | None = None) -> None:
        if name == "pre_setup":
            self.lightning_module.trainer.waits = False  # pyright: ignore
        if exchange.ranks() > 1:
            torch.distributed.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return exchange.broadcast(obj, src, self.root_device)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return exchange.all_gathered(tensor, group, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return exchange.decided(decision, by_all=all, device=self.root_device)
