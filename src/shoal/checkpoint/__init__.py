"""Checkpoints: saved in the background, verified before use, loaded into any layout.

    Saver                            copies what a rank holds, and saves it while training goes on
    newest_verified, checkpoint_in   the newest whole checkpoint of a run; a checkpoint that is named
    read_manifest                    what a checkpoint says it contains
    read_into, read_all              its tensors, into memory of any layout, or whole

The names are imported when they are first used: `shoal.checkpoint.config` is read where torch is not.
The format and its guarantees: docs/checkpoints.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.checkpoint.agreement import LocalExchange, MessageExchange
    from shoal.checkpoint.commit import checkpoint_in, checkpoints, newest_verified, read_manifest
    from shoal.checkpoint.load import read_all, read_into
    from shoal.checkpoint.manifest import Manifest
    from shoal.checkpoint.save import Saver, SaveReport

__all__ = [
    "LocalExchange",
    "Manifest",
    "MessageExchange",
    "SaveReport",
    "Saver",
    "checkpoint_in",
    "checkpoints",
    "newest_verified",
    "read_all",
    "read_into",
    "read_manifest",
]

_MODULES = {
    "agreement": ("MessageExchange", "LocalExchange"),
    "load": ("read_all", "read_into"),
    "manifest": ("Manifest",),
    "save": ("SaveReport", "Saver"),
    "commit": ("checkpoint_in", "checkpoints", "newest_verified", "read_manifest"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
