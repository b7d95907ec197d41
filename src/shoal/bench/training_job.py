"""The training runs that benchmarks measure, and the one place where benchmarks open a run.

`start_training` opens one rank's run (`assembly.run`) with its feed; every benchmark that trains calls it.
`training_job` adds what the loop of `shoal train` has around them: events, saves, the guard against losses that are not
finite. The model is a GPT of five million parameters, its data are random bytes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from shoal.assembly.metering import read_beside_steps
from shoal.assembly.objects import UserObjects
from shoal.assembly.run import Run, open_run
from shoal.checkpoint.agreement import LocalExchange
from shoal.checkpoint.config import CheckpointConfig
from shoal.checkpoint.save import Saver
from shoal.comm.board import Board
from shoal.comm.config import WireConfig
from shoal.data.config import BatchConfig, Tokens
from shoal.data.feed import Feed
from shoal.data.sample import Batch
from shoal.engine.compute import Compute
from shoal.engine.forward_backward import Evaluated, ForwardBackward
from shoal.engine.loop import Cadence, Job
from shoal.engine.recovery import NonfiniteGuard
from shoal.engine.tally import StepResult
from shoal.gradients.gradients import Gradients
from shoal.launcher.environment import Place
from shoal.models.config import GPTConfig, ModelConfig
from shoal.observe.events import EventSink
from shoal.observe.sink import RunStart, Sinks
from shoal.runfile.run_file import RunConfig, RunFile

SEQUENCE = 128
MODEL = GPTConfig(layers=6, width=256, heads=8, feed_forward="gelu", feed_forward_width=1024)
CORPUS_BYTES = 1 << 20
LR = 3e-4
ENDLESS = 10**6
"""More steps than a benchmark takes."""
SAVE_S = 60.0
"""The default of `wire.timeout_s`, which bounds the saves of a run."""


@dataclass(frozen=True)
class Training:
    """One rank of a run that has taken no step yet, and the samples of its steps."""

    run: Run
    feed: Feed
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def take_step(self, *, lr: float = LR) -> StepResult:
        """The next step, its data included, without the loop around it."""
        return self.run.step(next(self.numbers), self.feed.next().microbatches, lr=lr)


def start_training(
    run_file: RunFile,
    place: Place,
    stack: ExitStack,
    *,
    store: Store | None = None,
    objects: UserObjects = UserObjects(),
) -> Training:
    """Connects this rank to the others and builds what it trains with. Blocks until all ranks are here.

    Args:
        run_file: The run.
        place: This rank among the ranks of the run.
        stack: Closes what is opened here.
        store: Where the ranks meet; None: the store that the launcher named.
        objects: What is used instead of what the run file names.
    """
    run = open_run(run_file, place, objects, store=store)
    stack.callback(run.generation.gradients.close)
    return Training(run, stack.enter_context(run.feed()))


def start_alone(run_file: RunFile, stack: ExitStack) -> Training:
    """The run on this rank alone, whatever ranks there are beside it."""
    place = Place(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, launcher="shoal")
    return start_training(run_file, place, stack, store=HashStore())


def training_job(training: Training, folder: Path, stack: ExitStack, *, shared_saves: bool = False) -> Job:
    """The run as the loop of `shoal train` takes it: constant rate, no evaluation, no save on its own.

    Args:
        training: The run and its feed.
        folder: Where events and checkpoints go.
        stack: Closes what is opened here.
        shared_saves: Whether all ranks write one checkpoint together; otherwise each saves as if alone.
    """
    run = training.run
    read_beside_steps(run, training.feed)
    place = run.process.place
    saver = Saver(
        folder,
        rank=place.rank if shared_saves else 0,
        world_size=place.world_size if shared_saves else 1,
        exchange=Board(run.process.store, timeout_s=SAVE_S).clone() if shared_saves else LocalExchange(),
        config=CheckpointConfig(keep=1),
        timeout_s=SAVE_S,
    )
    stack.callback(saver.close)
    sinks = stack.enter_context(Sinks(EventSink(folder, rank=place.rank)))
    sinks.start(RunStart(name=run.run_file.run.name, total_steps=ENDLESS))
    return Job(
        state=run.state,
        step=run.step,
        feed=training.feed,
        guard=NonfiniteGuard(5, run.step.context),
        saver=saver,
        sinks=sinks,
        cadence=Cadence(ENDLESS),
        rate=lambda number: LR,
        evaluate=dict,
        stop_requested=lambda: False,
        origin={"layout": run.mesh.layout.to_dict(), "generation": 0},
        world=run.mesh.world,
    )


def corpus_file(folder: Path) -> Path:
    """A file of random printable bytes in `folder`, the same on every rank and machine."""
    path = folder / "tokens.bin"
    path.write_bytes(np.random.default_rng(0).integers(32, 127, CORPUS_BYTES, dtype=np.uint8).tobytes())
    return path


def gpt_run_file(folder: Path, corpus: Path, tokens: int, *, model: ModelConfig = MODEL) -> RunFile:
    """The run of `model` on `corpus`, with `tokens` of all ranks together in each step."""
    return RunFile(
        run=RunConfig(name="bench", steps=ENDLESS, directory=str(folder)),
        model=model,
        data=Tokens(path=str(corpus), dtype="uint8"),
        batch=BatchConfig(global_samples=tokens // SEQUENCE, sequence=SEQUENCE),
        wire=WireConfig(timeout_s=600.0),
        checkpoint=CheckpointConfig(every_steps=0),
    )


def small_gpt_run_file(folder: Path, corpus: Path, model: GPTConfig, batch: BatchConfig) -> RunFile:
    """A run of another GPT, in one process on the CPU, which is measured step by step."""
    return RunFile(
        run=RunConfig(name="bench", steps=ENDLESS, directory=str(folder), processes=1, device="cpu"),
        model=model,
        data=Tokens(path=str(corpus), dtype="uint8"),
        batch=batch,
    )


# A rank that computes as slowly as it is told: its samples take so many seconds each, whatever the processor does.
#
# Benchmarks and tests of uneven machines need ranks of known speed, also where ranks share cores. A paced rank waits
# first and then computes, so that its gradients leave as late as those of a slow processor.


@dataclass
class PacedForwardBackward:
    """`inner`, of which a sample takes `sample_s` seconds, if the processor can do it in that time.

    `sample_s` may be changed between two steps. An evaluation is not paced.
    """

    inner: ForwardBackward
    sample_s: float
    _work_s: float = field(default=0.0, init=False)

    @property
    def compute(self) -> Compute:
        return self.inner.compute

    def __call__(
        self,
        batches: Sequence[Batch],
        *,
        gradients: Gradients,
        factor: Callable[[], float],
        on_loss: Callable[[Tensor], None],
    ) -> None:
        begin_s = time.perf_counter()
        wanted_s = self.sample_s * sum(map(len, batches))
        time.sleep(max(0.0, wanted_s - self._work_s))
        work_s = time.thread_time()
        self.inner(batches, gradients=gradients, factor=factor, on_loss=on_loss)
        self._work_s = time.thread_time() - work_s
        time.sleep(max(0.0, begin_s + wanted_s - time.perf_counter()))

    def evaluate(self, batch: Batch) -> Evaluated | None:
        return self.inner.evaluate(batch)


def pace(context: Any, sample_s: float) -> PacedForwardBackward:
    """Paces the steps of a `RankContext` from here on."""
    context.forward_backward = PacedForwardBackward(context.forward_backward, sample_s)
    return context.forward_backward
