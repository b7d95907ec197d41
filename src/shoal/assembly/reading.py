"""What a rank reads its batches with: its own threads, or processes that open the run file's data anew."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.assembly.epoch_end import order_of
from shoal.assembly.objects import UserObjects, data_of
from shoal.assembly.user_code import GIVEN
from shoal.comm.config import WireConfig
from shoal.config.load import dumps, parse
from shoal.data.augment import Augmentation, augmentation_of
from shoal.data.batches import BatchReader, PinnedReader, SourceReader
from shoal.data.config import PythonData
from shoal.data.dataset import Dataset
from shoal.data.feed import SlowReads
from shoal.data.labelled import NEXT_TOKEN, with_labels
from shoal.data.reader_process import Opening, ReaderProcess
from shoal.errors import ConfigError
from shoal.launch.own_script import data_given, own_command
from shoal.launch.supervision import say
from shoal.runfile.load import run_file_of
from shoal.runfile.run_file import RunFile, run_directory

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


def reader_opener(run_file: RunFile, data: Dataset, *, pinned: bool = False) -> Callable[[], BatchReader]:
    """What each reading thread of a feed calls for its reader. `pinned`: its batches lie in pinned memory.

    Raises `UsageError` where processes would have to run a script that is not there.
    """
    if pinned:
        opener = reader_opener(run_file, data)
        return lambda: PinnedReader(opener())  # pyright: ignore[reportReturnType]  # `where` is a property of it
    if run_file.data.reader_kind == "processes":
        handed_over = isinstance(run_file.data, PythonData) and run_file.data.build == GIVEN
        script = own_command() if handed_over else []
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
