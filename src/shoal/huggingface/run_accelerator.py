"""The accelerator of a `Trainer` on Shoal: it connects nothing and takes no device, and answers for the run.

Trainers of other libraries (TRL) ask it for what all ranks have measured, and for the device:

    all_rewards = self.accelerator.gather(rewards)         # [samples of all ranks, ...]

Until the run is started, a process is alone. `num_processes` stays 1: who asks for it multiplies a loss by it, to undo
a mean over ranks that is not taken here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from shoal.errors import UserCodeError
from shoal.huggingface.labels import IGNORED
from shoal.own_loop.other_libraries import without_launcher

if TYPE_CHECKING:
    from shoal.own_loop.loop import Training


class RunAccelerator(Accelerator):
    """See above."""

    counts = True
    """Whether the samples of this rank's batch count, or are a copy, given so that all ranks do the same."""

    def __init__(self) -> None:
        self._run: Training | None = None
        self._prepared: list[nn.Module] = []
        with without_launcher():
            super().__init__(cpu=True)

    def join(self, run: Training) -> None:
        """The run is started: models that were prepared before go to its device."""
        self._run = run
        for model in self._prepared:
            model.to(run.device)

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Where the run computes."""
        return torch.device("cpu") if self._run is None else self._run.device

    @property
    def process_index(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """This process's rank."""
        return 0 if self._run is None else self._run.rank

    @property
    def is_main_process(self) -> bool:
        """Whether it is rank 0. Until the run is started, each process does what there is to do."""
        return self.process_index == 0

    def wait_for_everyone(self) -> None:
        """Returns when every rank has called it."""
        if self._run is not None:
            self._run.sum(0.0)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:  # pyright: ignore
        """Computes in the type of `[precision]`."""
        return super().autocast(autocast_handler) if self._run is None else self._run.autocast()

    def prepare_model(self, model: nn.Module, *given: Any, **named: Any) -> nn.Module:
        """A model beside the one that is trained, such as DPO's reference: whole on every rank."""
        self._prepared.append(model)
        return model.to(self.device)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Raises `UserCodeError`: what a loss counts is not known here."""
        raise UserCodeError(
            "a training_step called accelerator.backward(), which does not know what the loss is a mean over: override "
            "compute_loss, or let training_step call super().training_step()"
        )

    def gather(self, tensor: Any) -> Any:
        """Tensors [samples, ...] of all ranks, one behind the other; numbers as [ranks]. Every rank calls it. Ranks
        whose batch does not count leave theirs out.
        """
        return tensor if self._run is None else tree_map_only(Tensor, self._gathered, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`."""
        if use_gather_object:
            raise UserCodeError("accelerator.gather_for_metrics(use_gather_object=True): gather tensors")
        return self.gather(input_data)

    def _gathered(self, own: Tensor) -> Tensor:
        assert self._run is not None, "a process alone has all there is"
        rows = own.detach().reshape(-1, *own.shape[1:])
        rows = rows if self.counts else rows[:0]
        everyone = gathered([rows], self._run.world_size, self.device)
        return torch.from_numpy(everyone).to(self.device, own.dtype)


def gathered(parts: list[Tensor], ranks: int, device: torch.device) -> np.ndarray:
    """The rows of `parts` [samples, ...] of all ranks, rank by rank, padded with -100 to one shape."""
    shape = torch.tensor([list(part.shape[1:]) for part in parts]).max(0).values.to(device)
    if ranks > 1:
        dist.all_reduce(shape, dist.ReduceOp.MAX)
    own = torch.cat([_padded(part, shape.tolist()) for part in parts])
    own = own.float() if own.dtype == torch.bfloat16 else own
    if ranks == 1:
        return own.numpy()
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(counts, torch.tensor([len(own)], device=device))
    most = int(max(counts))
    sent = pad(own, [*[0, 0] * (own.dim() - 1), 0, most - len(own)]).contiguous().to(device)
    received = [torch.empty_like(sent) for _ in range(ranks)]
    dist.all_gather(received, sent)
    return torch.cat([rows[: int(count)] for rows, count in zip(received, counts, strict=True)]).cpu().numpy()


def _padded(part: Tensor, shape: list[int]) -> Tensor:
    """`part` [samples, ...] with dims behind the first of that shape."""
    missing = [size - own for size, own in zip(shape, part.shape[1:], strict=True)]
    return pad(part, [each for behind in reversed(missing) for each in (0, behind)], value=IGNORED)
