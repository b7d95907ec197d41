"""Where a machine's calibration is kept, read and added to: `calibration.toml` in the cache folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from shoal.config.check import checked
from shoal.config.load import dumps, read
from shoal.data.corpora.cache import cache_folder
from shoal.topology.calibration import Calibration


def calibration_path(environ: Mapping[str, str]) -> Path:
    """`calibration.toml` in `SHOAL_CACHE`, else in ~/.cache/shoal."""
    return cache_folder(environ) / "calibration.toml"


def read_calibration(path: Path) -> Calibration | None:
    """What is known of this machine; None before anything was measured. Raises `ConfigError` for a damaged file."""
    return checked(read(path), Calibration, file=str(path)) if path.exists() else None


def add_calibration(path: Path, newer: Calibration) -> Calibration:
    """Joins `newer` with what the file holds, where it is of the same machine and PyTorch; what is written then."""
    older = read_calibration(path)
    same = older is not None and (older.machine, older.torch) == (newer.machine, newer.torch)
    whole = older.joined(newer) if older is not None and same else newer
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(dumps(whole), encoding="utf-8")
    part.replace(path)
    return whole
