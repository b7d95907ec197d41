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

from shoal.assembly.data_record import record_data
from shoal.assembly.run import Run
from shoal.config.load import dumps, parse
from shoal.config.load import read as read_tables
from shoal.data.corpora import cache_folder
from shoal.errors import ConfigError
from shoal.observe.facts import replace_file
from shoal.observe.provenance import provenance
from shoal.observe.settings import differing_keys
from shoal.observe.sink import Sinks


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
