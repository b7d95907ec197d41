"""Logistic regression on generated sparse samples by `sync.kind = "hogwild"`, beside the same run under a lock.

A sample has PER_SAMPLE features that are 1, few of them often; its label is the sign of the sum of their true weights.
The weights are a `shoal.EmbeddingTable` of one column, so that a step reads and writes the rows of its samples alone.
The peer holds a lock from its forward to the end of its update: then no process computes on weights that another one
is writing.
"""

from __future__ import annotations

import fcntl
import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store

import shoal
from shoal.bench.groups import gathered
from shoal.bench.training_job import Training, start_training
from shoal.data.config import BatchConfig, PythonData
from shoal.engine.config import PythonLoss
from shoal.engine.rank_context import RankContext
from shoal.engine.updates import Outcome, UpdatePolicy, Work
from shoal.gradients.gradients import Gradients
from shoal.launcher.environment import Place
from shoal.models.config import PythonModel
from shoal.observe.config import ObserveConfig
from shoal.optim.config import SGD, Schedule
from shoal.runfile.run_file import RunConfig, RunFile
from shoal.sync.config import HogwildConfig

FEATURES, PER_SAMPLE, SAMPLES, HELD_OUT = 20_000, 20, 1 << 17, 4_000
BATCH, RATE = 256, 0.05
"""Samples of a process's update, and what each of them moves its weights by, times its error."""
LOSS, CHUNK, MOST_UPDATES = 0.45, 50, 2_000
"""A run ends at the held-out loss LOSS, which is taken after every CHUNK updates of a process."""


class Clicks:
    """Samples [count, PER_SAMPLE] with their labels [count]."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        truth = torch.randn(FEATURES, generator=torch.Generator().manual_seed(1))
        self.features = (FEATURES * torch.rand(count, PER_SAMPLE, generator=draw).square()).long()
        self.labels = (truth[self.features].sum(1) > 0).float()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.labels[index]


class Regression(nn.Module):
    """The sum of the weights of a sample's features."""

    def __init__(self) -> None:
        super().__init__()
        self.table = shoal.EmbeddingTable(FEATURES, 1)
        nn.init.zeros_(self.table.weight)

    def forward(self, features: Tensor) -> Tensor:
        """Features [batch, PER_SAMPLE] to logits [batch]."""
        return self.table(features).sum((1, 2))


def samples() -> tuple[Clicks, Clicks]:
    """Training and held-out samples."""
    return Clicks(SAMPLES, 100), Clicks(HELD_OUT, 2)


def logistic_loss() -> nn.Module:
    """One value for each sample."""
    return nn.BCEWithLogitsLoss(reduction="none")


class Found(NamedTuple):
    """Seconds to LOSS (None: MOST_UPDATES did not suffice), updates of each process, and the loss there."""

    seconds: float | None
    updates: int
    loss: float


def regression(place: Place, store: Store, folder: Path, *, locked: bool, name: str) -> Found:
    """One run. The clock stands still while samples are read and the loss is taken. `name`: of the run in `store`."""
    with ExitStack() as stack:
        training = start_training(run_file(place, folder), place, stack, store=PrefixStore(name, store))
        run, seconds, updates, loss = training.run, 0.0, 0, math.inf
        if locked:
            run.step.policy = stack.enter_context(UnderLock(run.step.policy, folder / "lock"))
        while loss > LOSS and updates < MOST_UPDATES:
            batches = [training.feed.next().microbatches for _ in range(CHUNK)]
            run.mesh.world.barrier().wait()
            begin_s = time.perf_counter()
            for number, microbatches in enumerate(batches, updates + 1):
                run.step(number, microbatches, lr=rate(place))
            took_s = time.perf_counter() - begin_s
            seconds += max(own_s for (own_s,) in gathered(run.mesh.world, [took_s]))
            updates, loss = updates + CHUNK, held_out_loss(training)
        return Found(seconds if loss <= LOSS else None, updates, loss)


def rate(place: Place) -> float:
    """At which a process moves each weight by RATE times the error of a sample: its gradient is a mean over its BATCH,
    and it moves weights by its share of the step of all.
    """
    return RATE * BATCH * place.world_size


def held_out_loss(training: Training) -> float:
    """The same on all ranks."""
    return training.run.evaluate()["loss/eval"]


def run_file(place: Place, folder: Path) -> RunFile:
    """The run, which agrees after every CHUNK steps of a process."""
    here = "benchmarks.sparse_regression"
    return RunFile(
        run=RunConfig(
            name="sparse", steps=MOST_UPDATES, processes=place.world_size, directory=str(folder), device="cpu"
        ),
        model=PythonModel(build=f"{here}:Regression"),
        data=PythonData(build=f"{here}:samples"),
        batch=BatchConfig(global_samples=BATCH * place.world_size, denominator="samples"),
        loss=PythonLoss(build=f"{here}:logistic_loss"),
        optimizer=SGD(lr=1.0, clip_norm=None, weight_decay=0.0),
        schedule=Schedule(kind="constant", warmup_steps=0),
        sync=HogwildConfig(period=CHUNK),
        observe=ObserveConfig(report=False, compare_every_steps=0),
    )


class UnderLock:
    """`policy`, of which one process at a time makes an update, by a lock on the file `path`."""

    def __init__(self, policy: UpdatePolicy, path: Path) -> None:
        self.overlaps_steps, self._policy, self._path = policy.overlaps_steps, policy, path

    @property
    def gradients(self) -> Gradients:
        """Those of the policy."""
        return self._policy.gradients

    def __enter__(self) -> UnderLock:
        self._file = self._path.open("w")
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __call__(self, context: RankContext, work: Work) -> Outcome:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            return self._policy(context, work)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
