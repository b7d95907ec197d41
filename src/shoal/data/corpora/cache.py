"""Where prepared corpora are kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str]) -> Path:
    """`SHOAL_CACHE` of `environ` where it is set, else ~/.cache/shoal. Nothing is created."""
    if chosen := environ.get("SHOAL_CACHE"):
        return Path(chosen).expanduser()
    return Path.home() / ".cache" / "shoal"
