"""What an `Accelerator` does beside its loop: schedulers that follow the updates, losses of transformers' models, and
the type that models compute in.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from math import isclose
from typing import TYPE_CHECKING, Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from shoal.errors import UserCodeError
from shoal.huggingface.labels import innermost, label_count, shifts_labels
from shoal.own_loop.losses import factor_of

if TYPE_CHECKING:
    from shoal.huggingface.accelerate.accelerator import Accelerator
    from shoal.own_loop.loop import Training


class StepScheduler:
    """A prepared scheduler: it steps once for an update, wherever the loop calls `step`; or, unless `follows`, whenever
    it does. Its other attributes are those of `scheduler`.
    """

    def __init__(self, scheduler: Any, accelerator: Accelerator, *, follows: bool) -> None:
        self.scheduler = scheduler
        self._accelerator, self._follows = accelerator, follows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """As the scheduler's, in the last batch of a step whose update was made."""
        accelerator = self._accelerator
        if accelerator.passes_over or (
            self._follows and not (accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped)
        ):
            return
        self.scheduler.step(*args, **kwargs)


class ModelLosses:
    """The losses that transformers' models have computed for the batch at hand, and over how many labels each is a
    mean: a loop that passes on such a loss need not say its weight.
    """

    def __init__(self) -> None:
        self._own: list[tuple[Tensor, float]] = []  # not of a loss that has no gradient

    def watch(self, model: nn.Module) -> None:
        """From now on. A copy of the model takes the hook along."""
        inside, own = innermost(model), self._own
        if not isinstance(inside, PreTrainedModel):
            return
        shifted = shifts_labels(model)

        def returned(module: nn.Module, args: Any, inputs: dict[str, Any], output: Any) -> None:
            loss = getattr(output, "loss", None)
            if not isinstance(loss, Tensor) or inputs.get("labels") is None or loss.grad_fn is None:
                return
            if inputs.get("num_items_in_batch") is not None:
                raise UserCodeError(
                    "the model was given num_items_in_batch, by which it divides a sum over labels: a run weighs each "
                    "batch by its labels itself. Leave it out, and with it the factors that undo means over batches "
                    "and ranks (gradient_accumulation_steps, num_processes)"
                )
            own.append((loss, label_count(inputs, module, shifted=shifted)))

        model.register_forward_hook(returned, with_kwargs=True)

    def clear(self) -> None:
        """Another batch begins."""
        self._own.clear()

    def weight_of(self, loss: Tensor, *, batches: int) -> float | None:
        """What `loss` is a mean over; None where no model has returned it, as it is or to be divided by the `batches`
        of a step.
        """
        for own, count in self._own:
            factor = factor_of(loss, own.grad_fn)
            if factor is not None and any(isclose(factor, 1 / each, rel_tol=1e-6) for each in (1, batches)):
                return count
        return None


def compute_in(model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
    """Calls of `model` compute in the type of the run, and return float32, as those of a model that was prepared."""
    entered: list[AbstractContextManager[Any]] = []

    def before(module: nn.Module, args: Any) -> None:
        around = autocast()
        around.__enter__()
        entered.append(around)

    def behind(module: nn.Module, args: Any, output: Any) -> Any:
        entered.pop().__exit__(None, None, None)
        return tree_map(_in_float32, output)

    model.register_forward_pre_hook(before, prepend=True)
    model.register_forward_hook(behind, always_call=True)


def _in_float32(each: Any) -> Any:
    narrow = isinstance(each, Tensor) and each.dtype in (torch.bfloat16, torch.float16)
    return each.float() if narrow else each


class Beside(accelerate.Accelerator):
    """Accelerate's own, which connects nothing: it writes models, and has the trackers."""

    def be_place(self, rank: int, local_rank: int) -> None:
        """Says which rank this is to `get_logger` and to trackers, which look there."""
        self._say(process_index=rank, local_process_index=local_rank)

    def be_rank(self, run: Training, local_rank: int) -> None:
        """Says which rank of how many this is: `accelerate.utils` and `accelerator.state` answer for the run."""
        self.be_place(run.rank, local_rank)
        self._say(device=run.device, num_processes=run.share[1])
        if run.share[1] > 1:
            on_cpu = run.device.type == "cpu"
            kind = DistributedType.MULTI_CPU if on_cpu else DistributedType.MULTI_GPU
            self._say(distributed_type=kind, backend=dist.get_backend())

    def be_alone(self) -> None:
        """The run is over: there are no others to exchange anything with."""
        self._say(num_processes=1, distributed_type=DistributedType.NO)

    def _say(self, **known: Any) -> None:
        for state in (accelerate.PartialState(), self.state):
            vars(state).update(known)

    def finish_trackers(self) -> None:
        """Ends the trackers, of which only rank 0 has any. Nothing else of `end_training`, which takes down process
        groups.
        """
        while self.trackers:
            self.trackers.pop().finish()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Copies in memory of their own, of which tied weights share one."""
        state, copies = model.state_dict(), dict[Any, Tensor]()
        for value in state.values():
            copies.setdefault((value.data_ptr(), value.shape), value.detach().clone())
        return {name: copies[value.data_ptr(), value.shape] for name, value in state.items()}
