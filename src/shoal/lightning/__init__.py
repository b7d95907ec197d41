"""Lightning's `Trainer` on Shoal: a script changes one import.

    from shoal.lightning import Trainer     # instead of: from lightning import Trainer

The module, its hooks, callbacks, loggers and data modules stay Lightning's; what trains is the engine of `shoal.start`,
with its layouts, order of samples, checkpoints, resume and report. Lightning is imported when the name is first used:
`pytorch_lightning` where the script has imported that, else `lightning`.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shoal.errors import MissingExtra

if TYPE_CHECKING:
    from shoal.lightning.trainer import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shoal.lightning' has no attribute '{name}'")
    if find_spec("lightning") is None and find_spec("pytorch_lightning") is None:
        raise MissingExtra("lightning", extra="lightning", purpose=f"shoal.lightning.{name}")
    return getattr(importlib.import_module("shoal.lightning.trainer"), name)
