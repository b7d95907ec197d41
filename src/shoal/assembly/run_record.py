"""What rank 0 records of a run once, beside its measurements: the resolved run file, which data it names, the facts."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import torch

from shoal.assembly.coding import follows_links
from shoal.assembly.data_record import record_data
from shoal.assembly.run import Run
from shoal.checkpoint.inspect import compare
from shoal.codec.config import AutoConfig
from shoal.config.load import dumps, parse
from shoal.config.load import read as read_tables
from shoal.errors import ConfigError, VerificationFailed
from shoal.files import cache_folder
from shoal.observe.facts import differing_keys, replace_file
from shoal.observe.provenance import provenance
from shoal.observe.sink import Sinks
from shoal.runfile.run_file import RunFile
from shoal.sync.event_order import EventFiles, Rounds, event_file


def run_facts(run: Run, *, made_of: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Data, model, layout and machine, as JSON-able values under the names that the report reads. `made_of`: the
    provenance, where it is known already.
    """
    layout, data = run.mesh.layout, dict(run.workload.data.facts)
    return {
        "name": run.run_file.run.name,
        "state": "",
        "steps": run.run_file.run.steps,
        "generation": run.mesh.generation,
        "data": data,
        "parameters": sum(prod(shape) for shape in run.generation.parts.split.shapes.values()),
        "world": layout.world_size,
        "layout": layout.to_dict(),
        "device": run.device.type,
        "wire": run.mesh.world.wire,
        "host": socket.gethostname(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "allocator": run.process.allocator,
        "provenance": provenance(run.process.environ) if made_of is None else dict(made_of),
        **_text_facts(run, data),
    }


def _text_facts(run: Run, data: dict[str, Any]) -> dict[str, Any]:
    """The corpus and the loss's unit, where the data is text read as bytes."""
    if "hash" not in data:
        return {}
    corpus = {
        "name": run.run_file.data.variant,
        "hash": data["hash"],
        "bytes": data["train/bytes"] + data["held_out/bytes"],
    }
    baseline = data.get("baseline/bigram_nats_per_byte")
    facts: dict[str, Any] = {"corpus": corpus, "loss_unit": "nats/byte"}
    return facts | ({"baseline": {"name": "bigram", "loss": baseline}} if baseline is not None else {})


def write_run_file(run: Run, directory: Path, sinks: Sinks) -> None:
    """Writes the resolved run file, and the hashes of the data that it names. If keys have changed since the start
    before, says which, and keeps the file of that start as `run-<generation>.toml`.
    """
    path, written = directory / "run.toml", dumps(run.run_file).encode()
    if path.is_file() and path.read_bytes() != written:
        with suppress(ConfigError):
            changed = differing_keys([read_tables(path), parse(written.decode())], left_out=frozenset())
            for key, (old, new) in changed.items():
                sinks.note(f"since the start before, {key} has changed from {old!r} to {new!r}")
        path.rename(directory / f"run-{run.mesh.generation - 1}.toml")
    replace_file(path, written)
    record_data(run.run_file.data, Path.cwd(), directory, cache=cache_folder(run.process.environ))


# Repeating a run to the bit: `shoal train --replay RUN_DIR`.
#
# A run whose replicas wait for each other repeats itself by its run file. One that is served asynchronously, or whose
# shares of gossip are, also follows the order in which gradients or shares came, which each rank records in its run
# directory (`sync.event_order`). The replay writes a directory of its own, and ends with a comparison of the two runs'
# newest checkpoints. An elastic run is refused: which replicas take a step follows from when each of them came,
# answered and died.


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


def rounds_of(run_file: RunFile, rank: int, directory: Path, replay: Path | None) -> Rounds | None:
    """What records the order of events of this rank in the run `directory`, or repeats that of `replay`.

    None where the order changes nothing.
    """
    chooses = isinstance(run_file.codec, AutoConfig) or follows_links(run_file)
    if run_file.sync.events_are != "recorded" and not chooses:
        return None
    rounds = Rounds(EventFiles(event_file(directory, rank), None if replay is None else event_file(replay, rank)))
    if chooses:
        rounds.keep_record()
    return rounds


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
