"""From a run file to a model that can be traced: its own data, loss and precision, on tensors without storage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from shoal.assembly.masked_layers import masked_layers
from shoal.assembly.objects import UserObjects, data_of, loss_of, users_model
from shoal.assembly.trainable import partly_trained
from shoal.cost.footprint import Overheads
from shoal.data.collate import collate
from shoal.data.sample import Batch, leaves, map_tree
from shoal.engine.compute import Compute, split_loss
from shoal.engine.loss import Loss, in_chunks, weighted_sum
from shoal.engine.precision import precision_of
from shoal.engine.randomness import Randomness
from shoal.errors import UserCodeError
from shoal.models.build import build as build_model
from shoal.models.config import ForeignModel
from shoal.models.roles import tables_in
from shoal.parallel.split import Unsplit
from shoal.parallel.tensor.vocabulary import VocabularySplit
from shoal.planner.predict.measured import Measured
from shoal.planner.predict.stack import Stack
from shoal.planner.predict.workload import Constants
from shoal.planner.trace.operator import TracedGroup
from shoal.planner.trace.predictor import TracedPredictor
from shoal.planner.trace.subject import Step, Subject, TracedJob, without_storage
from shoal.runfile.run_file import RunFile
from shoal.topology.cluster import Cluster

CPU = torch.device("cpu")
LOOKED_AT = 8
"""Samples whose longest stands for all, where they are of several lengths."""


def subject_of(run_file: RunFile, environ: Mapping[str, str] = os.environ) -> tuple[Subject, Batch]:
    """The run file's model, and samples in whose shapes it is traced. Raises `UserCodeError`, `DataError`."""
    data = data_of(run_file, UserObjects(), environ).train
    few = [data[index] for index in range(min(LOOKED_AT, len(data)))]
    sample = collate(few, np.arange(len(few)), denominator=run_file.batch.denominator)
    precision = precision_of(run_file.precision)
    steps = _Steps(run_file, sample, loss_of(run_file.loss, UserObjects(), precision))
    dtype = precision.parameters if precision.mixed is None else precision.mixed.param_dtype
    subject = Subject.built(partial(model_of, run_file), steps, dtype=dtype)
    if tables_in(subject.model):
        raise UserCodeError(
            "the model has an EmbeddingTable, and plans have no price for its sparse gradients: choose the layout "
            "by hand"
        )
    return subject, sample


def traced_predictor(
    run_file: RunFile,
    where: Cluster,
    *,
    stack: Stack,
    overheads: Overheads,
    constants: Constants | None = None,
    measured: Measured | None = None,
) -> TracedPredictor:
    """What prices plans of the run file's model on a cluster; `measured` where it is of this machine.

    Raises `UserCodeError`, `DataError`.
    """
    subject, batch = subject_of(run_file)
    job = TracedJob(subject=subject, global_samples=run_file.batch.global_samples, sequence=batch.weights[0].numel())
    return TracedPredictor(job, where, stack=stack, constants=constants, overheads=overheads, measured=measured)


class _Traced(Compute):
    """Computes what has no numbers."""

    def counted(self, batch: Batch) -> None:
        """All samples: a trace has no padding."""


@dataclass(frozen=True)
class _Steps:
    """Microbatches in the shapes of a sample."""

    run_file: RunFile
    sample: Batch
    loss: Loss

    def __call__(
        self,
        model: nn.Module,
        samples: int,
        *,
        vocabulary: VocabularySplit | None,
        group: TracedGroup,
        loss_chunks: int = 1,
    ) -> Step:
        precision, randomness = precision_of(self.run_file.precision), Randomness(model, seed=0, replica=0)
        loss = self.loss if vocabulary is None else split_loss(self.loss, vocabulary, group)
        loss = loss if loss_chunks == 1 else in_chunks(model, loss, loss_chunks)
        compute = _Traced(model, loss, precision, CPU, randomness)
        microbatch = compute.prepared(_of_size(self.sample, samples))
        batch = microbatch.batch

        def value() -> Tensor:
            compute.announce(microbatch, lambda: 1.0)
            return weighted_sum(compute.losses(batch)[1], microbatch.weights)

        return Step(value, (*leaves(batch.inputs, batch.targets), microbatch.weights))


def model_of(run_file: RunFile) -> nn.Module:
    """The run file's model. Raises `UserCodeError`."""
    if isinstance(run_file.model, ForeignModel):  # whose first values, and so whose base, are of no matter
        model = msgspec.structs.replace(run_file.model, base={})
        return users_model(msgspec.structs.replace(run_file, model=model), UserObjects())
    return build_model(run_file.model)


def traced_masked_share(run_file: RunFile) -> float:
    """The share of the model's parameters that `[sparsity]` masks. Raises `UserCodeError`, `ConfigError`."""
    model = without_storage(partial(model_of, run_file))
    unsplit = Unsplit.of(partly_trained(model, run_file))
    masked = sum(prod(shape) for shape in masked_layers(run_file, unsplit).values())
    return masked / sum(parameter.numel() for parameter in model.parameters())


def _of_size(batch: Batch, samples: int) -> Batch:
    """Shapes and dtypes of `batch`, with `samples` samples and no numbers."""

    def alike(leaf: Tensor) -> Tensor:
        return torch.empty((samples, *leaf.shape[1:]), dtype=leaf.dtype)

    inputs, targets = map_tree(alike, batch.inputs), map_tree(alike, batch.targets)
    return Batch(inputs, targets, weights=alike(batch.weights), positions=alike(batch.positions))
