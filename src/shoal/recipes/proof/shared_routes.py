"""The reference's routes on every rank: which experts each token of a step went to in one process.

Two orders of summation may rank two nearly equal scores differently, and a token that goes elsewhere changes everything
behind it. So the layout takes the reference's routes, and is only judged for those that it would have chosen otherwise
by more than a near-tie.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from shoal.models.mixture_routes import UNKNOWN, Routes
from shoal.recipes.setting import Setting


def share_routes(setting: Setting, routes: Routes | None, *, key: str) -> Routes:
    """Rank 0's `routes` (None on the others), the same on all. `key` is one that was not used before."""
    said = json.loads(setting.announce(key, lambda: json.dumps(_forms(routes or Routes()))))
    shared = Routes()
    for layer, samples, places, top_k in said:
        table = torch.full((len(samples), places, top_k), UNKNOWN)
        if routes is not None:
            for row, sample in enumerate(samples):
                own = routes.tables[layer][sample]
                table[row, : len(own)] = own
        table = table.to(setting.device)
        setting.mesh.world.broadcast(table, root=0).wait()
        shared.tables[layer] = dict(zip(samples, table.unbind(), strict=True))
    return shared


def _forms(routes: Routes) -> list[list[object]]:
    return [[layer, list(table), *_largest(table)] for layer, table in sorted(routes.tables.items())]


def _largest(table: dict[int, Tensor]) -> tuple[int, int]:
    return max(len(rows) for rows in table.values()), next(iter(table.values())).shape[-1]
