"""What a checkpoint of the run holds of Lightning: where its loops are, its callbacks' state, what was logged.

Tensors of one number, such as a best score, come and go with the training, and are held as numbers; others, such as a
moving average of the weights, are there before a run is resumed. Of values that were summed up over a part of an epoch
it has each rank's, and a run goes on with another number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.lightning.package import part

if TYPE_CHECKING:
    from shoal.lightning.trainer import Trainer

_SCALAR = "number of type"


class Kept:
    """See above. It has `state_dict` and `load_state_dict`, as a run takes it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer, call = self._trainer, part("trainer.call")
        weights = _shapes(trainer.lightning_module)
        hooks, own = self._checkpoint(weights), self._checkpoint(dict(weights))
        call._call_callbacks_on_save_checkpoint(trainer, hooks)
        call._call_lightning_module_hook(trainer, "on_save_checkpoint", own)
        del own["state_dict"]
        of_run = [name for name, each in hooks.items() if each is weights]  # the run itself has them
        data = trainer.datamodule
        connector = trainer._logger_connector
        return {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": plain(call._call_callbacks_state_dict(trainer)),
            "hooks": plain({name: each for name, each in hooks.items() if name not in of_run}),
            "weights": of_run,
            "module": plain(own),
            "data": plain({} if data is None else data.state_dict()),
            "metrics": {
                kind: plain(getattr(connector, f"_{kind}_metrics")) for kind in ("callback", "logged", "progress_bar")
            },
            "logged": plain(trainer.fit_loop.epoch_loop._results.kept()),
            "logged_in": connector._current_fx,
            "stopped": bool(trainer.should_stop),
        }

    def _checkpoint(self, weights: dict[str, Any]) -> dict[str, Any]:
        """What the hooks of a checkpoint are given."""
        trainer = self._trainer
        return {
            "state_dict": weights,
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": part().__version__,
        }

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        trainer, call = self._trainer, part("trainer.call")
        hooks = {**restored(kept["hooks"]), "callbacks": restored(kept["callbacks"])}
        for name in kept["weights"]:  # where it was left, no weight is read
            module = trainer.lightning_module
            hooks[name] = _shapes(module) if name == "state_dict" else module.state_dict()
        own = {"state_dict": _shapes(trainer.lightning_module), **restored(kept["module"])}
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", own)
        call._call_callbacks_on_load_checkpoint(trainer, hooks)
        call._call_callbacks_load_state_dict(trainer, hooks)
        if trainer.datamodule is not None and kept["data"]:
            trainer.datamodule.load_state_dict(restored(kept["data"]))
        loop = trainer.fit_loop
        loop.load_state_dict(kept["loops"])
        progress = loop.epoch_progress.current
        if progress.processed == progress.started:  # the epoch is over, and the next one begins anew
            loop.epoch_loop._restarting = False
        for kind, values in kept["metrics"].items():
            setattr(trainer._logger_connector, f"_{kind}_metrics", restored(values))
        trainer.should_stop = kept["stopped"]
        self._go_on_logging(kept)

    def _go_on_logging(self, kept: Mapping[str, Any]) -> None:
        trainer = self._trainer
        loop, connector, logged = trainer.fit_loop.epoch_loop, trainer._logger_connector, restored(kept["logged"])
        loop._results.restore(logged, trainer.strategy.reduce)
        if loop.batch_progress.current.ready and logged:  # of an epoch that is open
            connector._current_fx, connector._first_loop_iter = kept["logged_in"], False


def _shapes(module: nn.Module) -> dict[str, Tensor]:
    """A state of the module for hooks that take names out of it; weights are the run's."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in named}


def plain(value: Any) -> Any:
    """With numbers in the place of tensors of one number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return {_SCALAR: str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "value": value.item()}
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([plain(each) for each in value])
    return value


def restored(value: Any) -> Any:
    """What `plain` was given."""
    if isinstance(value, Mapping):
        if _SCALAR in value:
            return torch.tensor(value["value"], dtype=getattr(torch, value[_SCALAR])).reshape(value["shape"])
        return {key: restored(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([restored(each) for each in value])
    return value
