"""`OfRanks`: which rank an `Accelerator` is one of, and what it does with the others.

Until the run begins, this process is one of one: exchanges give back what they were given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from shoal.huggingface.accelerate.data import (
    counted_rows,
    gathered,
    gathered_objects,
    once_repeated,
    padded,
    part_of,
    reduced,
)
from shoal.launcher.environment import ALONE, place_from

if TYPE_CHECKING:
    from shoal.own_loop.loop import Training

Function = Callable[..., Any]


class OfRanks:
    """See above. `cpu`: it computes there whatever the host has."""

    def __init__(self, *, cpu: bool) -> None:
        self.run: Training | None = None
        self._counted: tuple[int, int] | None = None  # this rank's samples of the batch at hand, and its size
        self._cpu, self._flagged = cpu, False
        self._place = place_from(os.environ) or ALONE

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        if self.run is not None:
            return self.run.device
        if self._cpu or not torch.accelerator.is_available():
            return torch.device("cpu")
        # Slurm may show each task its own GPU alone, and ranks may share one.
        index = self._place.local_rank % torch.accelerator.device_count()
        return torch.device(str(torch.accelerator.current_accelerator()), index)

    @property
    def num_processes(self) -> int:
        """Ranks of the run, of which those of one group of `layout.tensor` count as one; 1 until it is begun, so that
        what a script plans is the plan of one process.
        """
        return 1 if self.run is None else self.run.share[1]

    @property
    def process_index(self) -> int:
        """Which of `num_processes` this is: the rank, but for `layout.tensor`, whose groups have one number."""
        return self._place.rank if self.run is None else self.run.share[0]

    @property
    def local_process_index(self) -> int:
        """Its number on this host."""
        return (place_from(os.environ) or ALONE).local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank, or the first of the last group of `layout.tensor`."""
        if self.run is None:
            return self._rank == 0
        return self._rank == self.run.world_size - self.run.world_size // self.run.share[1]

    @property
    def _rank(self) -> int:
        return self._place.rank if self.run is None else self.run.rank

    @property
    def use_distributed(self) -> bool:
        """Whether several ranks train together."""
        return self.num_processes > 1

    @property
    def should_save_model(self) -> bool:
        """Whether this rank writes files."""
        return self.is_main_process

    @property
    def multi_device(self) -> bool:
        """Whether several ranks train on accelerators."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def distributed_type(self) -> DistributedType:
        """NO for one rank, else MULTI_GPU or MULTI_CPU, however the model is divided."""
        if not self.use_distributed:
            return DistributedType.NO
        return DistributedType.MULTI_CPU if self.device.type == "cpu" else DistributedType.MULTI_GPU

    # Exchanges.

    def gather(self, tensor: Any) -> Any:
        """The tensors [rows, ...] of all ranks, one behind the other, and numbers as [ranks]; ranks may have other
        numbers of rows. A loss that was repeated `batch_size` times counts as in `gather_for_metrics`, so that there is
        one of it for each sample.
        """
        if self._counted is not None and self.num_processes > 1:
            rows, size = self._counted
            tensor = once_repeated(tensor, rows=rows, size=size)
        return gathered(tensor, self.run)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The same without what stands for no sample; in an evaluation the rows are in the order of the data set. A
        loss that was repeated `batch_size` times counts as often as this rank has samples.
        """
        counted = input_data
        if self._counted is not None:
            rows, size = self._counted
            counted = counted_rows(input_data, rows=rows, size=size)
        objects = isinstance(input_data, list) and not any(isinstance(each, Tensor) for each in input_data)
        if use_gather_object or objects:
            return gathered_objects(counted, self.run)
        return gathered(counted, self.run)

    @contextmanager
    def counting(self, rows: int, size: int) -> Iterator[None]:
        """Around a batch of `size` samples, of which this rank has `rows`."""
        outside, self._counted = self._counted, (rows, size)
        try:
            yield
        finally:
            self._counted = outside

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum over the ranks, or their mean, times `scale`."""
        return reduced(tensor, self.run, reduction=reduction, scale=scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Filled up along `dim` to the longest of any rank."""
        return padded(tensor, self.run, dim=dim, value=pad_index, first=pad_first)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's part of a list, tuple or tensor, or of each in a dict."""
        yield part_of(inputs, rank=self.process_index, ranks=self.num_processes, fills=apply_padding)

    def wait_for_everyone(self) -> None:
        """Until every rank has come here."""
        if self.run is not None:
            self.run.sum(0.0)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The others wait until rank 0 is through; before the run begins, nobody waits."""
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The others of a host wait until its first rank is through."""
        if not self.is_local_main_process:
            self.wait_for_everyone()
        yield
        if self.is_local_main_process:
            self.wait_for_everyone()

    def set_trigger(self) -> None:
        """For `check_trigger`."""
        self._flagged = True

    def check_trigger(self) -> bool:
        """Whether a rank has called `set_trigger` since the last call; every rank calls it."""
        flagged, self._flagged = self._flagged, False
        return flagged if self.run is None else self.run.sum(float(flagged)) > 0

    # What one rank does by itself.

    def free_memory(self, *objects: Any) -> list[None]:
        """None for each of `objects`, and the device's unused memory back to it; the run goes on."""
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        return [None for _ in objects]

    clear = free_memory

    def print(self, *args: Any, **kwargs: Any) -> None:
        """On the first rank of each host."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def on_main_process(self, function: Function | None = None) -> Function:
        """A function that rank 0 alone carries out."""
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Function | None = None) -> Function:
        """A function that the first rank of each host carries out."""
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Function) -> Function:
        """A function that the last rank carries out."""
        return self._only(function, lambda: self.is_last_process)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """A function that this rank carries out."""
        return self._only(function, lambda: self.process_index == process_index)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Function:
        """A function that this rank of each host carries out."""
        return self._only(function, lambda: self.local_process_index == local_process_index)

    def _only(self, function: Function | None, is_one: Callable[[], bool]) -> Function:
        if function is None:
            return partial(self._only, is_one=is_one)

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if is_one() else None

        return called
