"""Repeating a run to the bit: `shoal train --replay RUN_DIR`.

A run whose replicas wait for each other repeats itself by its run file. One that is served asynchronously, or whose
shares of gossip are, also follows the order in which gradients or shares came, which each rank records in its run
directory (`sync.event_order`). The replay writes a directory of its own, and ends with a comparison of the two runs'
newest checkpoints. An elastic run is refused: which replicas take a step follows from when each of them came, answered
and died.
"""

from __future__ import annotations

from pathlib import Path

from shoal.checkpoint.inspect import compare
from shoal.errors import ConfigError, VerificationFailed
from shoal.runfile.run_file import RunFile
from shoal.sync.config import SyncConfig
from shoal.sync.event_order import EventFiles, Rounds, event_file


def replayed(run_file: RunFile) -> RunFile:
    """Raises `ConfigError` for a run that cannot be repeated."""
    if run_file.elastic is not None:
        raise ConfigError(
            "a run with [elastic] cannot be replayed: its members come and go by the clock, and no order of that is "
            "recorded; record a run without [elastic], and replay that"
        )
    if run_file.sync.events_are == "unordered":
        raise ConfigError(
            f'sync.kind = "{run_file.sync.variant}" cannot be replayed: processes write without locks, in no '
            'order that could be recorded; use sync.kind = "server"'
        )
    if run_file.batch.division == "by_speed":
        raise ConfigError(
            'batch.division = "by_speed" cannot be replayed: the division follows the clock; use "even" in the run '
            "that is to be repeated"
        )
    return run_file


def rounds_of(sync: SyncConfig, rank: int, directory: Path, replay: Path | None) -> Rounds | None:
    """What records the order of events of this rank in the run `directory`, or repeats that of `replay`.

    None where the order changes nothing.
    """
    if sync.events_are != "recorded":
        return None
    return Rounds(EventFiles(event_file(directory, rank), None if replay is None else event_file(replay, rank)))


def check_replay(recorded: Path, repeated: Path) -> str:
    """A sentence where the newest checkpoints of both runs are equal to the bit; else raises `VerificationFailed`."""
    found = compare(recorded, repeated)
    if found.first_step != found.second_step:
        return f"the replay ended at step {found.second_step}, the run at {found.first_step}: nothing to compare"
    if found.differences:
        first = found.differences[0].name
        raise VerificationFailed(
            f"the replay of {recorded} came to other values in {len(found.differences)} tensors, first in {first}: "
            "replay with the code, packages and processor of the run"
        )
    return f"the replay came to the state of {recorded}, bit for bit: {found.same} tensors"
