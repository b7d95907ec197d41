"""Random numbers of a model that a script calls itself: keyed on the samples, as under `shoal train`.

Hooks around the models' forwards enter the keyed draws (`shoal.models.keyed_draws`) and leave them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn


class DrawsBySample:
    """Keys what `models` draw while they train, where `inside` says that a step is open. `draws`: None for models that
    draw nothing. Call `close` to give the models back.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        draws: AbstractContextManager[Any] | None,
        *,
        inside: Callable[[], bool],
    ) -> None:
        self._draws, self._inside = draws, inside
        self._entered: list[AbstractContextManager[Any]] = []
        self._hooks = ExitStack()
        if draws is None:
            return
        for model in models:
            for handle in (
                model.register_forward_pre_hook(self._before),
                model.register_forward_hook(self._after, always_call=True),
            ):
                self._hooks.callback(handle.remove)

    def close(self) -> None:
        """Takes the hooks off the models."""
        self._hooks.close()

    def _before(self, module: nn.Module, inputs: object) -> None:
        if self._draws is not None and module.training and self._inside():
            self._draws.__enter__()
            self._entered.append(self._draws)

    def _after(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)
