"""What rank 0 writes into the run directory at the start: the resolved run file, and which data it names."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from shoal.assembly.data_record import record_data
from shoal.assembly.run import Run
from shoal.config.load import dumps, parse
from shoal.config.load import read as read_tables
from shoal.data.corpora import cache_folder
from shoal.errors import ConfigError
from shoal.observe.facts import replace_file
from shoal.observe.settings import differing_keys
from shoal.observe.sink import Sinks


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
