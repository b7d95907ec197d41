"""How many GPUs a host has, found without importing torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """GPUs that this process may use: those that CUDA_VISIBLE_DEVICES lists, else those that the driver shows."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    there = sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    if visible is None:
        return there
    return min(there, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
