"""An evaluation over all ranks: each computes its share of the batches, and every rank gets all rows in their order.

Batch b of the set is that of rank b mod N. Predictions of other lengths are padded with -100, as transformers does it,
to the longest on any rank. Every rank computes as many batches, so that a loss may ask all ranks for a sum: where there
are too few, some compute the first one again, of which no row counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from shoal.errors import UsageError, UserCodeError
from shoal.huggingface.labels import IGNORED

if TYPE_CHECKING:
    from shoal.huggingface.trainer import OnShoal


class Share(NamedTuple):
    """A batch of this rank's, and the numbers of its samples in the set; -1: it counts for nothing."""

    batch: Any
    numbers: Tensor


def evaluated(
    trainer: OnShoal, loader: DataLoader, *, loss_only: bool, ignore_keys: list[str] | None, prefix: str
) -> EvalLoopOutput:
    """What `evaluation_loop` returns. Raises `UsageError` for a set without samples."""
    args, reduced = trainer.args, trainer.preprocess_logits_for_metrics
    numbers, rows = [], _Rows()
    sums = torch.zeros(2, dtype=torch.float64, device=args.device)
    for share in shares(loader, rank=args.process_index, ranks=args.world_size):
        inputs = trainer._prepare_inputs(share.batch)
        if trainer.masking is not None:
            inputs = trainer.masking(inputs, seed=args.seed + max(0, int(share.numbers[0])))
        trainer.accelerator.counts = int(share.numbers[0]) >= 0
        weight = trainer.loss_weight(inputs) if trainer.accelerator.counts else 0.0
        loss, logits, labels = trainer.prediction_step(trainer.model, inputs, loss_only, ignore_keys=ignore_keys)
        if logits is not None and reduced is not None:
            logits = reduced(logits, labels)  # pyright: ignore[reportArgumentType]
        if loss is not None and weight:
            sums += torch.tensor([weight * float(loss), weight], dtype=torch.float64, device=args.device)
        numbers.append(share.numbers)
        rows.add((logits, labels, *_asked_for(trainer, inputs, loss, len(share.numbers))), len(share.numbers))
        trainer.control = trainer.callback_handler.on_prediction_step(args, trainer.state, trainer.control)
    if not numbers:
        raise UsageError("the evaluation set has no samples")
    if args.world_size > 1:
        dist.all_reduce(sums)
    everyone = gathered(numbers, args.world_size, args.device)
    order = np.argsort(everyone, kind="stable")[(everyone < 0).sum() :]
    predictions, label_ids, *asked = rows.whole(order, args.world_size, args.device)
    metrics: dict[str, Any] = {}
    if trainer.compute_metrics is not None and predictions is not None and label_ids is not None:
        kept = dict(zip(("inputs", "losses"), asked, strict=True))
        measured = trainer.compute_metrics(EvalPrediction(predictions, label_ids, **kept))
        metrics = cast(dict[str, Any], denumpify_detensorize({**measured}))
    if float(sums[1]):
        metrics["loss"] = float(sums[0] / sums[1])
    named = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}
    return EvalLoopOutput(predictions, label_ids, named, len(order))  # pyright: ignore[reportArgumentType]


def _asked_for(trainer: OnShoal, inputs: Mapping[str, Any], loss: Any, samples: int) -> tuple[Any, Any]:
    """What `include_for_metrics` names: the model's main input, and for each sample the loss of its batch."""
    names = trainer.args.include_for_metrics
    found = inputs.get(getattr(trainer.model, "main_input_name", "input_ids")) if "inputs" in names else None
    return found, loss.detach().reshape(1).repeat(samples) if "loss" in names and loss is not None else None


def shares(loader: DataLoader, *, rank: int, ranks: int) -> Iterator[Share]:
    """The batches of this rank, as many as any other has."""
    data = loader.dataset
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 1)  # accelerate's loaders have none
    if isinstance(data, IterableDataset):
        yield from _shares_of_stream(loader, size, rank=rank, ranks=ranks)
        return
    samples = len(data)  # pyright: ignore[reportArgumentType]
    count = ceil(samples / size)
    mine = range(rank, ceil(count / ranks) * ranks, ranks)
    parts = [torch.arange(n * size, min((n + 1) * size, samples)) for n in (n if n < count else 0 for n in mine)]
    batches = DataLoader(data, batch_sampler=[p.tolist() for p in parts], collate_fn=loader.collate_fn)
    for number, part, batch in zip(mine, parts, batches, strict=True):
        yield Share(batch, part if number < count else torch.full_like(part, -1))


def _shares_of_stream(loader: DataLoader, size: int, *, rank: int, ranks: int) -> Iterator[Share]:
    """As `shares`, of samples that have no numbers: every rank reads all of them."""
    first, number = None, -1
    for number, batch in enumerate(loader):
        first = batch if first is None else first
        if number % ranks == rank:
            yield Share(batch, torch.arange(number * size, number * size + _samples(batch)))
    if first is not None and rank > number % ranks:
        yield Share(first, torch.full((_samples(first),), -1))


def _samples(batch: Any) -> int:
    return len(next(value for value in batch.values() if isinstance(value, Tensor)))


class _Rows:
    """Trees of tensors [samples, ...] of some batches, all of one structure; on the host."""

    def __init__(self) -> None:
        self._leaves: list[list[Tensor]] = []
        self._structure: Any = None

    def add(self, tree: Any, samples: int) -> None:
        """Raises `UserCodeError` for a prediction that has no row for each sample."""
        leaves, self._structure = tree_flatten(tree)
        for leaf in leaves:
            if leaf is not None and (not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != samples):
                what = f"of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
                raise UserCodeError(
                    f"a prediction is {what}, not [{samples}, ...], a row for each sample: name it in ignore_keys, or "
                    "return what compute_metrics needs from preprocess_logits_for_metrics"
                )
        self._leaves = self._leaves or [[] for _ in leaves]
        for kept, leaf in zip(self._leaves, leaves, strict=True):
            if leaf is not None:
                kept.append(leaf.detach().cpu())

    def whole(self, order: np.ndarray, ranks: int, device: torch.device) -> Any:
        """The tree of arrays of all ranks, in that order of their rows."""
        arrays = [gathered(kept, ranks, device)[order] if kept else None for kept in self._leaves]
        return tree_unflatten(arrays, self._structure)


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
