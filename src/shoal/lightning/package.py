"""Which of Lightning's two packages this process uses: classes of one are not those of the other."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

_OLD = find_spec("lightning") is None or ("pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules)
NAME = "pytorch_lightning" if _OLD else "lightning.pytorch"
"""The package that the script has imported, or the one that is there."""
FABRIC = "lightning_fabric" if _OLD else "lightning.fabric"


def part(name: str = "") -> Any:
    """A module of it."""
    return importlib.import_module(f"{NAME}.{name}" if name else NAME)


def fabric(name: str) -> Any:
    """A module of the package below it."""
    return importlib.import_module(f"{FABRIC}.{name}")
