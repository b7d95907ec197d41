"""Keys of `[model]` that say how a module is split which does not say it itself; `shoal split` proposes them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shoal.config.table import Table, says


class SplitKeys(Table, frozen=True, kw_only=True):
    """Roles and counts for `tensor`, parts for `pipeline`."""

    roles: Annotated[
        dict[str, Literal["column", "row", "packed", "embedding", "head", "replicated"]],
        says(
            "Names of weights, or patterns of them, to what tensor parallelism does with them, for a module that "
            "declares no roles; `shoal split` proposes them."
        ),
    ] = msgspec.field(default_factory=dict)
    counts: Annotated[
        list[str],
        says(
            "Integer attributes of modules, such as a number of heads, of which each rank of `layout.tensor` has its "
            "share; `shoal split` proposes them."
        ),
    ] = msgspec.field(default_factory=list)
    parts: Annotated[
        Literal["declared", "traced"] | list[list[str]],
        says(
            "Where a pipeline is cut: between the parts that the module declares or that tracing its forward finds, or "
            "lists of modules, one a part, in the order in which the forward calls them; `shoal split` proposes them."
        ),
    ] = "declared"
