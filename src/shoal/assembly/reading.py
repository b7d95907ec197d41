"""What a rank reads its batches with: its own threads, or processes that open the run file's data anew."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.assembly.objects import UserObjects, data_of
from shoal.comm.config import WireConfig
from shoal.config.load import dumps, parse
from shoal.config.named import GIVEN
from shoal.data.augment import Augmentation, augmentation_of
from shoal.data.batches import BatchReader, OrderOfSamples, PinnedReader, SlowReads, SourceReader
from shoal.data.config import BatchConfig, PythonData
from shoal.data.dataset import Dataset
from shoal.data.labelled import NEXT_TOKEN, with_labels
from shoal.data.order import Order, WholeSteps
from shoal.data.reader_process import Opening, ReaderProcess
from shoal.data.sampling import DrawnOrder, LengthOrder, StratifiedOrder
from shoal.errors import ConfigError
from shoal.launcher.own_script import data_given, own_command
from shoal.launcher.supervision import say
from shoal.runfile.load import run_file_of
from shoal.runfile.run_file import RunFile, run_directory, statistics_group
from shoal.topology.layout import Layout

# The end of an epoch whose samples fill no whole step: `batch.epoch_end`.
#
# With n samples and steps of B, an epoch has n // B whole steps and n % B samples beside them. Positions count what is
# used: n an epoch, or under "drop" the n - n % B of whole steps (`data.order.WholeSteps`).


def order_of(run_file: RunFile, data: Dataset) -> OrderOfSamples:
    """Which sample of `data` stands at which position of this run."""
    config = run_file.data
    order = data.order(
        run_file.run.seed,
        shuffle=config.shuffle,
        step=run_file.batch.global_samples,
        straddle=run_file.batch.epoch_end == "straddle",
        window=config.shuffle_window,
    )
    kept = epoch_samples(run_file.batch, order.samples)
    return (
        WholeSteps(order, kept)
        if isinstance(order, Order | StratifiedOrder | DrawnOrder | LengthOrder) and kept != order.samples
        else order
    )


def chosen_samples(run_file: RunFile, data: Dataset) -> dict[str, str]:
    """What decides which samples are used in which order, beside seed and shuffling: a run keeps it."""
    found: dict[str, str] = {} if run_file.data.stratify is None else {"data.stratify": run_file.data.stratify}
    if data.drawn is not None:
        found["the weights of the samples"] = data.drawn.digest
    if data.subset is not None:
        found["data.subset"] = data.subset.digest
    order = order_of(run_file, data) if data.lengths is not None else None
    inner = order.order if isinstance(order, WholeSteps) else order
    if isinstance(inner, LengthOrder):
        found["the lengths, or the samples of a step by length,"] = inner.digest
    return found


def epoch_samples(batch: BatchConfig, samples: int) -> int:
    """Positions of one epoch over `samples` samples. Raises `ConfigError` where dropping leaves none."""
    size = batch.global_samples
    if batch.epoch_end != "drop":
        return samples
    if samples < size:
        raise ConfigError(
            f'batch.epoch_end = "drop" with {samples} samples for steps of {size}: no step would be left; lower '
            'batch.global_samples, or set epoch_end to "short"'
        )
    return samples - samples % size


def epoch_steps(batch: BatchConfig, samples: int, epochs: int) -> int:
    """Steps in so many `epochs` over `samples` samples. Raises `ConfigError` where the noise decides how many."""
    if batch.adaptive is not None:
        raise ConfigError("epochs with batch.adaptive: the noise decides how many steps an epoch has; pass steps")
    positions, size = epoch_samples(batch, samples), batch.global_samples
    return epochs * -(-positions // size) if batch.epoch_end == "short" else batch.steps_to(epochs * positions)


def short_epoch(batch: BatchConfig, samples: int) -> int | None:
    """The epoch that no step goes beyond; None: steps go on into the next one."""
    return samples if batch.epoch_end == "short" else None


def check_short_step(run_file: RunFile, samples: int, layout: Layout) -> None:
    """Raises `ConfigError` where the short step at the end of an epoch cannot be computed as the others are."""
    last = samples % run_file.batch.global_samples
    if run_file.batch.epoch_end != "short" or not last:
        return
    group, shares = statistics_group(run_file.model), layout.replicate * layout.shard - run_file.sync.serving_only
    refusal = None
    if last % group:
        refusal = f"they are no whole groups of {group} (model.group_samples)"
    elif group > 1 and (layout.replica_size > 1 or last < group * shares):
        refusal = f"groups of {group} (model.group_samples) leave some of {shares} ranks without samples"
    elif last < shares and run_file.sync.replicas_are != "lockstep":
        refusal = f"{shares} replicas update by themselves, and some would have no samples"
    if refusal is not None:
        raise ConfigError(
            f'batch.epoch_end = "short": the last step of an epoch has {last} samples, and {refusal}; set it to '
            '"drop" or "straddle"'
        )


BEFORE_TIMEOUT = 0.8
"""A rank gives up a read this early, as a share of `wire.timeout_s`: before the others give up the rank."""


def check_reading(run_file: RunFile, data: Dataset) -> None:
    """Raises `ConfigError` for keys that need more of the data than an iterable can do."""
    config = run_file.data
    asked = {
        f"data.readers = {config.readers}": config.readers > 1,
        'data.reader_kind = "processes"': config.reader_kind == "processes",
        f"data.shuffle_window = {config.shuffle_window}": config.shuffle_window is not None,
        f'batch.epoch_end = "{run_file.batch.epoch_end}"': run_file.batch.epoch_end != "straddle",
    }
    wrong = next((key for key, is_asked in asked.items() if is_asked), None)
    if data.iterable is not None and wrong is not None:
        raise ConfigError(
            f"{wrong}, and {data.iterable.name} is an iterable: one thread of each rank takes its items in the order "
            "in which they come, and its end is not known beforehand; leave the key out, or give a data set with "
            "len(d) and d[i]"
        )


def slow_reads(wire: WireConfig, *, rank: int, ranks: int) -> SlowReads:
    """A rank alone says which read it waits for, for ever; one that others wait for gives up before they do."""
    give_up_s = BEFORE_TIMEOUT * wire.timeout_s if ranks > 1 else math.inf
    return SlowReads(lambda text: say(f"rank {rank}: {text}"), give_up_s=give_up_s)


def is_handed_over(run_file: RunFile) -> bool:
    """Is the data an object of a script's, which may change it while the run goes on?"""
    return isinstance(run_file.data, PythonData) and run_file.data.build == GIVEN


def reader_opener(run_file: RunFile, data: Dataset, *, pinned: bool = False) -> Callable[[], BatchReader]:
    """What each reading thread of a feed calls for its reader. `pinned`: its batches lie in pinned memory.

    Raises `UsageError` where processes would have to run a script that is not there.
    """
    if pinned:
        opener = reader_opener(run_file, data)
        return lambda: PinnedReader(opener())  # pyright: ignore[reportReturnType]  # `where` is a property of it
    if run_file.data.reader_kind == "processes":
        script = own_command() if is_handed_over(run_file) else []
        keywords = {"text": dumps(run_file), "script": script, "next_token": data.said_of_targets == NEXT_TOKEN}
        opening = Opening("shoal.assembly.reading:reader_of", keywords)
        return lambda: ReaderProcess(opening)
    return lambda: _reader(run_file, data, augmentation_of(run_file.data, run_file.run.seed))


def reader_of(text: str, script: Sequence[str], *, next_token: bool = False) -> BatchReader:
    """The reader of a resolved run file, in a process that has nothing else of the run. `script` is the command of the
    script that hands the data over, if one does; `next_token`: the model predicts the next token (`Labelled`).

    Raises:
        UserCodeError: the script does not come to the call that hands it over; or see `data_of`.
    """
    run_file = run_file_of(parse(text), file="the run file")
    given = data_given(script, run_directory(run_file), os.environ) if script else None
    data = with_labels(data_of(run_file, UserObjects(data=given), os.environ), next_token=next_token)
    augmentation = augmentation_of(run_file.data, run_file.run.seed) or Augmentation([], run_file.run.seed)
    return _reader(run_file, data, replace(augmentation, seeds_process=True))


def _reader(run_file: RunFile, data: Dataset, augmentation: Augmentation | None) -> BatchReader:
    return SourceReader(
        data.train, order_of(run_file, data), denominator=run_file.batch.denominator, augmentation=augmentation
    )
