"""`Forecast`: what a run is expected to take, stated before it starts and kept beside what it took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Forecast:
    """`facts` gives the prediction; `remember` keeps it beside the measurement of a finished run."""

    facts: Callable[..., dict[str, Any]]
    remember: Callable[[Path, Mapping[str, str]], None]
