"""The strategy that a run file asks for."""

from __future__ import annotations

from shoal.comm.mesh import Mesh
from shoal.config.table import implementation_of
from shoal.sync.config import SyncConfig
from shoal.sync.strategy import Sync


def build_sync(config: SyncConfig, mesh: Mesh) -> Sync:
    """On this rank of `mesh`. Every rank calls it at the same point: it may open groups."""
    return implementation_of(config)(config, mesh)
