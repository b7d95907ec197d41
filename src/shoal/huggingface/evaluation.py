"""An evaluation over all ranks: each computes its share of the batches, and every rank gets all rows in their order.

Batch b of the set is that of rank b mod N. Predictions of other lengths are padded with -100, as transformers does it,
to the longest on any rank. Every rank computes as many batches, so that a loss may ask all ranks for a sum: where there
are too few, some compute the first one again, of which no row counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from shoal.engine.forward_backward import evaluating
from shoal.errors import UsageError, UserCodeError
from shoal.huggingface.callbacks import BetweenSteps
from shoal.huggingface.labels import label_count, shifts_labels, without_masking
from shoal.huggingface.run_accelerator import RunAccelerator, gathered


class Share(NamedTuple):
    """A batch of this rank's, and the numbers of its samples in the set; -1: it counts for nothing."""

    batch: Any
    numbers: Tensor


class EvaluationLoop(BetweenSteps):
    """The part of a `Trainer` that evaluates, and weighs losses as its training does."""

    model: Any
    accelerator: RunAccelerator

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._loss_shifts_labels = shifts_labels(self.model)
        self.data_collator, self.masking = without_masking(self.data_collator)

    def loss_weight(self, inputs: Mapping[str, Any]) -> float:
        """What the loss of these inputs is a mean over: their labels other than -100, or, without labels, their
        samples. Override it where `compute_loss` returns a mean over something else.
        """
        return label_count(inputs, self.model, shifted=self._loss_shifts_labels)

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
        Raises `UsageError` for a set without samples.
        """
        self.callback_handler.eval_dataloader = dataloader
        with self._evaluation():
            found = self._evaluated_rows(
                dataloader,
                loss_only=self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only,
                ignore_keys=ignore_keys,
                prefix=metric_key_prefix,
            )
        self.model.eval()  # until the next training_step; subclasses ask it whether they log an evaluation
        return found

    def _evaluated_rows(
        self, loader: DataLoader, *, loss_only: bool, ignore_keys: list[str] | None, prefix: str
    ) -> EvalLoopOutput:
        args, reduced = self.args, self.preprocess_logits_for_metrics
        numbers, rows = [], _Rows()
        sums = torch.zeros(2, dtype=torch.float64, device=args.device)
        for share in shares(loader, rank=args.process_index, ranks=args.world_size):
            inputs = self._prepare_inputs(share.batch)
            if self.masking is not None:
                inputs = self.masking(inputs, seed=args.seed + max(0, int(share.numbers[0])))
            self.accelerator.counts = int(share.numbers[0]) >= 0
            weight = self.loss_weight(inputs) if self.accelerator.counts else 0.0
            loss, logits, labels = self.prediction_step(self.model, inputs, loss_only, ignore_keys=ignore_keys)
            if logits is not None and reduced is not None:
                logits = reduced(logits, labels)  # pyright: ignore[reportArgumentType]
            if loss is not None and weight:
                sums += torch.tensor([weight * float(loss), weight], dtype=torch.float64, device=args.device)
            numbers.append(share.numbers)
            rows.add((logits, labels, *self._asked_for(inputs, loss, len(share.numbers))), len(share.numbers))
            self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)
        if not numbers:
            raise UsageError("the evaluation set has no samples")
        if args.world_size > 1:
            dist.all_reduce(sums)
        everyone = gathered(numbers, args.world_size, args.device)
        order = np.argsort(everyone, kind="stable")[(everyone < 0).sum() :]
        predictions, label_ids, *asked = rows.whole(order, args.world_size, args.device)
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None and predictions is not None and label_ids is not None:
            kept = dict(zip(("inputs", "losses"), asked, strict=True))
            measured = self.compute_metrics(EvalPrediction(predictions, label_ids, **kept))
            metrics = cast(dict[str, Any], denumpify_detensorize({**measured}))
        if float(sums[1]):
            metrics["loss"] = float(sums[0] / sums[1])
        named = {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}
        return EvalLoopOutput(predictions, label_ids, named, len(order))  # pyright: ignore[reportArgumentType]

    def _asked_for(self, inputs: Mapping[str, Any], loss: Any, samples: int) -> tuple[Any, Any]:
        """What `include_for_metrics` names: the model's main input, and for each sample the loss of its batch."""
        names = self.args.include_for_metrics
        found = inputs.get(getattr(self.model, "main_input_name", "input_ids")) if "inputs" in names else None
        return found, loss.detach().reshape(1).repeat(samples) if "loss" in names and loss is not None else None

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """Around an evaluation; before the run it is in this process alone."""
        if self._run is not None:
            with self._run.evaluation():
                yield
            return
        with torch.no_grad(), evaluating(self.model):
            yield


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
