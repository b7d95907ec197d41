"""What a run was trained on: `data.json` in the run directory, the hash of every file that `[data]` names.

    {"files": {"corpus/a.txt": "6f2c...", ...}}      or {"error": "why they could not be read"}

Rank 0 writes it. Up to `AT_ONCE_BYTES` are hashed before the first step, more in a thread beside the training. A run
that ends before that thread leaves no `data.json`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shoal.data.config import DataConfig
from shoal.data.named_files import bytes_to_hash, hashes, patterns_of
from shoal.data.remote import is_remote
from shoal.errors import DataError, ShoalError
from shoal.files import read_json
from shoal.observe.facts import replace_file

FILE_NAME = "data.json"
MOST_BYTES = 64 << 20
"""A file of the data takes some hundred bytes."""
AT_ONCE_BYTES = 1 << 30


def record_data(config: DataConfig, folder: Path, directory: Path, *, cache: Path) -> threading.Thread | None:
    """Writes what `[data]` names, relative to `folder`, into the run directory; the thread that does so where there is
    much to read."""
    names = [name for found in patterns_of(config).values() for name in found]
    (directory / FILE_NAME).unlink(missing_ok=True)
    if not names:
        return None

    def write() -> None:
        replace_file(directory / FILE_NAME, msgspec.json.encode(data_hashes(config, folder, cache=cache)) + b"\n")

    if not any(map(is_remote, names)) and bytes_to_hash(config, folder) <= AT_ONCE_BYTES:
        write()
        return None
    thread = threading.Thread(target=write, name="data-hashes", daemon=True)
    thread.start()
    return thread


def data_hashes(config: DataConfig, folder: Path, *, cache: Path) -> dict[str, Any]:
    """What `data.json` holds of a run that starts now."""
    try:
        return {"files": hashes(config, folder, cache=cache)}
    except (OSError, ShoalError) as error:
        return {"error": str(error)}


def recorded_data(directory: Path) -> Mapping[str, Any]:
    """What `data.json` of a run holds; empty where there is none."""
    try:
        return read_json(directory / FILE_NAME, dict[str, Any], limit_bytes=MOST_BYTES, error=DataError, repair="")
    except DataError:
        return {}
