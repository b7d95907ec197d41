"""When the forward first uses each parameter: hooks before the modules that own it.

A parameter may be used without calling its module (`linear.weight` instead of `linear(x)`). No hook announces that use,
but the parameter gets a gradient. While `learning`, such parameters are found, and from then on they count as used as
soon as the model itself is called. A gradient of a parameter that was used unannounced later on is refused: it was
computed with a weight that may not have been updated yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from shoal.errors import UserCodeError


class FirstUse:
    """Calls `ask` with the indices of those `parameters` that belong to the module that is about to run."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[tuple[str, Parameter]],
        ask: Callable[[Collection[int]], None],
    ) -> None:
        self.learning = True
        self._ask, self._unannounced = ask, set[int]()
        self._used: dict[int, None] = {}
        index_of = {id(parameter): index for index, (_, parameter) in enumerate(parameters)}
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(self._before(self._unannounced))]
        for module in model.modules():
            own = [index_of[id(p)] for p in module.parameters(recurse=False) if id(p) in index_of]
            if own:
                self._handles.append(module.register_forward_pre_hook(self._before(own)))
        self._handles += [p.register_hook(self._guard(index, name)) for index, (name, p) in enumerate(parameters)]

    @property
    def order(self) -> Sequence[int]:
        """The parameters used in this step, in the order of their first use."""
        return list(self._used)

    def start(self) -> None:
        """A step begins."""
        self._used.clear()

    def close(self) -> None:
        """Takes the hooks off, and forgets whom it asks, who holds this."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._ask = lambda parameters: None

    def _before(self, own: Collection[int]) -> Callable[[nn.Module, Any], None]:
        def about_to_run(module: nn.Module, inputs: Any) -> None:
            self._used.update(dict.fromkeys(own))
            self._ask(own)

        return about_to_run

    def _guard(self, index: int, name: str) -> Callable[[Tensor], None]:
        watching = weakref.ref(self)  # whoever has it has the parameter: see `Reducer`

        def arrived(gradient: Tensor) -> None:
            alive = watching()
            if alive is None or index in alive._used:
                return
            if not alive.learning:
                raise UserCodeError(
                    f"the parameter {name} was used without calling the module that has it, and was not in the first "
                    'steps: under gradients.schedule = "priority" it may be older than the others. Call the module, '
                    'or set gradients.schedule to "order"'
                )
            alive._unannounced.add(index)

        return arrived
