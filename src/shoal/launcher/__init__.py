"""Starting ranks, finding each other, and dying well. None of these names imports torch; each is
imported when it is first used.

What needs torch is in `rendezvous` (`open_store`, `Rendezvous`); hosts and slow links on one machine are in `lab`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.launcher.children import die_with_parent
    from shoal.launcher.devices import MemoryLimit, gpus, memory_limit
    from shoal.launcher.environment import Place, place_from
    from shoal.launcher.failure import ExitCode, failure_of, report_failure
    from shoal.launcher.lock import RunLock
    from shoal.launcher.signals import StopRequest, end_at_once
    from shoal.launcher.spawn import run_ranks
    from shoal.launcher.versions import check_torch_version

__all__ = [
    "ExitCode",
    "MemoryLimit",
    "Place",
    "RunLock",
    "StopRequest",
    "check_torch_version",
    "die_with_parent",
    "end_at_once",
    "failure_of",
    "gpus",
    "memory_limit",
    "place_from",
    "report_failure",
    "run_ranks",
]

_MODULES = {
    "devices": (
        "MemoryLimit",
        "gpus",
        "memory_limit",
    ),
    "environment": (
        "Place",
        "place_from",
    ),
    "failure": (
        "failure_of",
        "report_failure",
        "ExitCode",
    ),
    "lock": ("RunLock",),
    "children": ("die_with_parent",),
    "signals": (
        "StopRequest",
        "end_at_once",
    ),
    "spawn": ("run_ranks",),
    "versions": ("check_torch_version",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
