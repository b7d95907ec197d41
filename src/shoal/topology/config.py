"""The table `[layout]` of the run file: one key for each axis that runs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.config.table import Table, says
from shoal.topology.refusal import MOST_RANKS


class LayoutConfig(Table, frozen=True):
    """How the ranks are arranged."""

    replicate: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)] | None,
        says("Copies of the model; default: as many as the processes make."),
    ] = None
