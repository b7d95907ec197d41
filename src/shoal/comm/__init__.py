"""Communication between ranks: groups of processes, the collectives they call, and what goes over the wire.

    Mesh, build_mesh      a layout bound to groups of ranks
    Collective, Handle    what code calls: all_reduce, broadcast, send, ...; a call under way
    Alone                 the group of one rank
    Ledger, Entry         calls, bytes and seconds of every collective
    Conditions, Fault     faults and rates that tests and labs impose on a wire
    Board                 small messages through the run's store, each bounded in time
    gather_named          named tensors of all ranks on rank 0

The names are imported when they are first used: `shoal.comm.config` is read where torch is not.
How a backend is chosen, and what each does: docs/transports.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.comm.board import Board
    from shoal.comm.collective import Alone, Collective, Handle, Reduction, gather_named, gather_texts
    from shoal.comm.conditions import Conditions, Fault
    from shoal.comm.ledger import Entry, Ledger
    from shoal.comm.mesh import Mesh, build_mesh

__all__ = [
    "Alone",
    "Board",
    "Collective",
    "Conditions",
    "Entry",
    "Fault",
    "Handle",
    "Ledger",
    "Mesh",
    "Reduction",
    "build_mesh",
    "gather_named",
    "gather_texts",
]

_MODULES = {
    "board": ("Board",),
    "collective": (
        "Alone",
        "Collective",
        "Handle",
        "Reduction",
        "gather_named",
        "gather_texts",
    ),
    "conditions": (
        "Conditions",
        "Fault",
    ),
    "ledger": (
        "Entry",
        "Ledger",
    ),
    "mesh": (
        "Mesh",
        "build_mesh",
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
