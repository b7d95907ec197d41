"""What the loops of an `Accelerator` go over, and what its ranks exchange.

    TrainingLoader      the training data: batches of the run, each divided among the ranks
    EvaluationLoader    any other DataLoader: the same, from its own data set, in order
    SkippedLoader       what `skip_first_batches` gives: where a resumed run goes on

An iteration is `batch_size` samples over all ranks, so a loop counts the same batches on any number of them. A run that
was cut off goes on where it stands: the epochs before are passed over, without a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from shoal.errors import UsageError, UserCodeError
from shoal.huggingface.labels import require_repeatable, without_masking

if TYPE_CHECKING:
    from shoal.huggingface.accelerate.accelerator import Accelerator
    from shoal.own_loop.loop import Training


class _Loader:
    """A prepared DataLoader: its attributes are those of `loader`."""

    def __init__(self, accelerator: Accelerator, loader: DataLoader) -> None:
        self.loader = loader
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def total_batch_size(self) -> int:
        """Samples of an iteration, over all ranks."""
        assert self.loader.batch_size is not None
        return self.loader.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Nothing: each epoch has an order of its own."""


class TrainingLoader(_Loader):
    """See above."""

    def __init__(self, accelerator: Accelerator, loader: DataLoader) -> None:
        super().__init__(accelerator, loader)
        self._epochs: Iterator[tuple[int, Iterator[Any]]] | None = None
        self._asked = 0  # epochs that the loop has asked for
        collate, self._masking = without_masking(loader.collate_fn)
        self.to_run = loader if self._masking is None else _collated(loader, collate)
        self._kind: Callable[[Any], Any] | None = None  # of batches that are more than a dict

    def __len__(self) -> int:
        return len(self.loader)

    def check(self) -> None:
        """Raises `UsageError` for batches that a run does not make, of a collator that draws, and where leaving out a
        short batch would leave out others of its step, too.
        """
        if self.loader.batch_size is None:
            raise UsageError("the DataLoader has a batch_sampler of its own: give it a batch_size and a sampler")
        batch = require_repeatable(self.to_run.collate_fn, self.loader.dataset)
        if isinstance(batch, Mapping) and hasattr(batch, "to"):  # a BatchEncoding of transformers
            self._kind = type(batch)
        if not self.loader.drop_last or isinstance(self.loader.dataset, IterableDataset):
            return
        batches = self._accelerator.gradient_accumulation_steps
        if over := len(self) % batches:
            raise UsageError(
                f"drop_last=True leaves {len(self)} batches in an epoch, which gradient_accumulation_steps = "
                f"{batches} does not divide: the run would leave out {over} more. Take drop_last=False, or "
                "a torch.utils.data.Subset of whole steps"
            )

    def __iter__(self) -> Iterator[Any]:
        return self.after(None)

    def after(self, skipped: int | None) -> Iterator[Any]:
        """The batches of the next epoch, or what a resumed run has left of it: `skipped` is how many the script takes
        for done; None: it does not say. Raises `UserCodeError` for a new run of which some are left out.
        """
        run, accelerator = self._accelerator.begun(), self._accelerator
        first = self._asked == 0
        if first and accelerator.resumed_by_script:
            self._asked = int(run.epoch)
        asked, self._asked = self._asked, self._asked + 1
        if accelerator.is_over or asked < int(run.epoch):
            return
        if skipped is not None:
            self._check_skipped(run, skipped)
        yield from accelerator.around(self._as_collated(self._batches(run)), size=self.total_batch_size)

    def _batches(self, run: Training) -> Iterator[Any]:
        if isinstance(self.loader.dataset, IterableDataset):
            yield from run.batches()
            return
        self._epochs = self._epochs or run.epochs()
        for _number, batches in self._epochs:
            yield from batches
            return

    def _as_collated(self, batches: Iterator[Any]) -> Iterator[Any]:
        """As the script's collator makes them: a run's are dicts, without masks."""
        for become in (self._masking, self._kind):
            batches = batches if become is None else map(become, batches)
        return batches

    def _check_skipped(self, run: Training, skipped: int) -> None:
        if skipped and not run.steps_done:
            raise UserCodeError(
                f"skip_first_batches({skipped}) in a run that has taken no step: each sample of an epoch is used. "
                "Leave it out, and train on fewer samples, such as a torch.utils.data.Subset"
            )
        done = ceil(round(run.epoch % 1 * self._epoch_samples) / self.total_batch_size)
        if skipped != done:
            run.note(
                f"skip_first_batches({skipped}): {done} batches of epoch {int(run.epoch)} are done, and the run goes "
                "on behind them, without leaving samples out"
            )

    @property
    def _epoch_samples(self) -> int:
        samples = len(self.loader.dataset)  # pyright: ignore[reportArgumentType]
        return len(self) * self.total_batch_size if self.loader.drop_last else samples


def _collated(loader: DataLoader, collate: Callable[[list[Any]], Any]) -> DataLoader:
    """The same batches, which `collate` puts together."""
    return DataLoader(
        loader.dataset, loader.batch_size, sampler=loader.sampler, collate_fn=collate, drop_last=loader.drop_last
    )


class SkippedLoader:
    """See above."""

    def __init__(self, loader: TrainingLoader, batches: int) -> None:
        self._loader, self._batches = loader, batches

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader) - self._batches

    def __iter__(self) -> Iterator[Any]:
        return self._loader.after(self._batches)


class EvaluationLoader(_Loader):
    """See above. A rank for which a batch has no sample gets a copy of its first, which `gather_for_metrics` leaves
    out.
    """

    @classmethod
    def of(cls, loader: DataLoader, accelerator: Accelerator) -> EvaluationLoader:
        """Raises `UsageError` for one whose samples cannot be divided."""
        if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
            raise UsageError(
                "the DataLoader of an evaluation needs a data set with len(d) and d[i], and a batch_size: loop over "
                "another one without prepare(), on every rank alike"
            )
        return cls(accelerator, loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        run, accelerator = self._accelerator.begun(), self._accelerator
        data, size = self.loader.dataset, self.total_batch_size
        samples = len(data)  # pyright: ignore[reportArgumentType]
        end = samples // size * size if self.loader.drop_last else samples
        own = [_share(first, min(first + size, end), run) for first in range(0, end, size)]
        rows = [list(range(*each)) or [first * size] for first, each in enumerate(own)]
        collate, masking = without_masking(self.loader.collate_fn)
        loader = DataLoader(data, batch_sampler=rows, collate_fn=collate)
        with run.evaluation(), accelerator.evaluating():
            for (first, behind), batch in zip(own, loader, strict=True):
                given = on_device(batch if masking is None else masking(batch, seed=first), run.device)
                with accelerator.counting(behind - first, size):
                    yield given


def _share(first: int, behind: int, run: Training) -> tuple[int, int]:
    """This rank's part of the samples from `first` up to `behind`: ranks with more come first."""
    share, shares = run.share
    count, more = divmod(behind - first, shares)
    start = first + share * count + min(share, more)
    return start, start + count + (share < more)


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch of any structure, its tensors on `device`."""
    if isinstance(batch, Mapping) and hasattr(batch, "to"):  # a BatchEncoding of transformers
        return batch.to(device)  # pyright: ignore[reportAttributeAccessIssue]
    return tree_map(lambda each: each.to(device) if isinstance(each, Tensor) else each, batch)


# Exchanges, on PyTorch's default group: under `layout.tensor` that of ranks which have all samples between them. `run`
# None: the run is not begun, and this process is alone.


def gathered(tree: Any, run: Training | None) -> Any:
    """Tensors [rows, ...] of all ranks, one behind the other, in rank order; scalars as [ranks]. Ranks may have other
    numbers of rows. Tensors of one process stay as they are.
    """
    if run is None or run.share[1] == 1:
        return tree
    return tree_map(lambda each: _gathered(each, run) if isinstance(each, Tensor) else each, tree)


def _gathered(own: Tensor, run: Training) -> Tensor:
    own = own.detach()
    whole = (own.reshape(1) if own.dim() == 0 else own).to(run.device).contiguous()
    counts = [torch.zeros(1, dtype=torch.int64, device=run.device) for _ in range(run.share[1])]
    dist.all_gather(counts, torch.tensor([len(whole)], device=run.device))
    most = int(max(counts))
    shapes: list[Any] = [None] * run.share[1]
    dist.all_gather_object(shapes, tuple(whole.shape[1:]))
    if len(set(shapes)) > 1:
        raise UserCodeError(
            f"gather() of tensors whose dims behind the first differ between ranks: {sorted(set(shapes))}; bring them "
            "to one shape first, by pad_across_processes(tensor, dim=1)"
        )
    sent = pad(whole, [*[0, 0] * (whole.dim() - 1), 0, most - len(whole)])
    received = [torch.empty_like(sent) for _ in range(run.share[1])]
    dist.all_gather(received, sent)
    return torch.cat([rows[: int(count)] for rows, count in zip(received, counts, strict=True)])


def gathered_objects(own: Any, run: Training | None) -> list[Any]:
    """The lists of all ranks, one behind the other, or a list of their objects."""
    each = own if isinstance(own, list) else [own]
    if run is None or run.share[1] == 1:
        return each
    found: list[Any] = [None] * run.share[1]
    dist.all_gather_object(found, each)
    return [one for part in found for one in part]


def counted_rows(tree: Any, *, rows: int, size: int) -> Any:
    """What of `tree` counts for metrics, of a batch in which this rank has so many `rows` of `size`: nothing of a copy,
    and as many numbers as rows of a loss that was repeated `size` times.
    """

    def counted(each: Any) -> Any:
        if isinstance(each, Tensor) and each.dim() == 0:
            return each.expand(rows)
        if isinstance(each, Tensor | list) and (rows == 0 or _is_repeated(each, size)):
            return each[:rows]
        return each

    return counted(tree) if isinstance(tree, list) and not _has_tensors(tree) else tree_map(counted, tree)


def once_repeated(tree: Any, *, rows: int, size: int) -> Any:
    """`tree` with a loss that was repeated `size` times repeated for this rank's `rows` alone, or the copy of one."""
    return tree_map(lambda each: each[: max(rows, 1)] if _is_repeated(each, size) else each, tree)


def _is_repeated(each: Any, size: int) -> bool:
    """Whether it is one number, repeated so many times. A loss is no truth value, as those of a batch's tokens are."""
    if not isinstance(each, Tensor) or each.dim() != 1 or len(each) != size or not each.is_floating_point():
        return False
    return bool((each == each[0]).all() or each.isnan().all())


def _has_tensors(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(tree))


def reduced(tree: Any, run: Training | None, *, reduction: str, scale: float) -> Any:
    """Tensors summed over the ranks, or their mean ("none": as they are), times `scale`."""
    if reduction not in ("sum", "mean", "none"):
        raise UserCodeError(f"reduce(reduction={reduction!r}): it is sum, mean or none")

    def reduce(own: Any) -> Any:
        if not isinstance(own, Tensor) or run is None or run.share[1] == 1 or reduction == "none":
            return own
        total = own.detach().clone().to(run.device)
        dist.all_reduce(total)
        return (total / run.share[1] if reduction == "mean" else total) * scale

    return tree_map(reduce, tree)


def padded(tree: Any, run: Training | None, *, dim: int, value: float, first: bool) -> Any:
    """Tensors filled up with `value` along `dim` to the longest of any rank, at the end or, if `first`, in front."""

    def fill(own: Any) -> Any:
        if not isinstance(own, Tensor) or run is None or run.share[1] == 1 or not -own.dim() <= dim < own.dim():
            return own
        longest = torch.tensor([own.shape[dim]], device=run.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        missing = int(longest) - own.shape[dim]
        behind = own.dim() - 1 - dim % own.dim()
        return pad(own, [0, 0] * behind + ([missing, 0] if first else [0, missing]), value=value)

    return tree_map(fill, tree)


def part_of(inputs: Any, *, rank: int, ranks: int, fills: bool) -> Any:
    """The part of a list, a tuple, a tensor, or a dict of these, that rank has; ranks with one more come first.
    `fills`: the last is repeated where one is missing, so that all have as many.
    """
    if isinstance(inputs, Mapping):
        return {key: part_of(value, rank=rank, ranks=ranks, fills=fills) for key, value in inputs.items()}
    count, more = divmod(len(inputs), ranks)
    start = rank * count + min(rank, more)
    part = inputs[start : start + count + (rank < more)]
    if not fills or not more or rank < more or not len(inputs):
        return part
    last = inputs[-1:]
    return torch.cat([part, last]) if isinstance(part, Tensor) else part + last
