"""Shoal: distributed deep-learning training on PyTorch.

    import shoal
    try:
        shoal.train("run.toml", model=my_module, data=(train_set, held_out_set))
    except shoal.RunFailed as failure:
        print(failure.rank, failure.exit_code, failure.sentence)

`train` runs the loop for you; `start` gives a loop of your own its batches, gradients and checkpoints; `verify` proves
either against one process, `plan` says which layouts fit, `launch` starts a script on several ranks, `federate` trains
with data that stays where it is.

Importing the package imports nothing heavy; a name does when it is first used.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, Any

from shoal.errors import RunFailed, RunStopped, ShoalError, UsageError
from shoal.installation import hidden_package

if TYPE_CHECKING:
    from shoal.api import load_checkpoint, open_data, plan, start, train, verify
    from shoal.api.federated import FederatedClient, FederatedServer, federate
    from shoal.engine.microbatches import gather_samples
    from shoal.launcher.script import launch
    from shoal.models.roles import EmbeddingTable

    __version__: str

__all__ = [
    "EmbeddingTable",
    "FederatedClient",
    "FederatedServer",
    "RunFailed",
    "RunStopped",
    "ShoalError",
    "__version__",
    "federate",
    "gather_samples",
    "launch",
    "load_checkpoint",
    "open_data",
    "plan",
    "start",
    "train",
    "verify",
]


if "SHOAL_EXPECTS_CALL" in os.environ:  # of a script that `shoal train` has started
    from shoal.launcher.own_script import say_unless_called

    atexit.register(say_unless_called, os.environ)


def __dir__() -> list[str]:
    """For completion and `help`: names that have not been used yet, too."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in __all__ and (hidden := hidden_package(sys.path)) is not None:
        raise UsageError(hidden)
    if name in ("load_checkpoint", "open_data", "plan", "start", "train", "verify"):
        from shoal import api

        return getattr(api, name)
    if name in ("FederatedClient", "FederatedServer", "federate"):
        from shoal.api import federated

        return getattr(federated, name)
    if name == "launch":
        from shoal.launcher.script import launch

        return launch
    if name == "gather_samples":
        from shoal.engine.microbatches import gather_samples

        return gather_samples
    if name == "EmbeddingTable":
        from shoal.models.roles import EmbeddingTable

        return EmbeddingTable
    if name == "__version__":
        from importlib.metadata import version

        return version("shoal")
    raise AttributeError(f"module 'shoal' has no attribute '{name}'")
